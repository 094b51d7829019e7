"""The picture of plans: time against memory, with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from helixpipe.common.errors import UserError
from helixpipe.common.files import try_file, whole_file


def check_picture(flag: str, path: str | Path) -> None:
    """Check that a picture can be written. Raises UserError for a suffix that is not supported and for
    other failures.
    """
    if Path(path).suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"{flag} {path} must end in .png, .svg or .pdf.")
    try_file(flag, path)


def draw_pareto(
    plans: Sequence[tuple[float, float]],
    front: Sequence[tuple[float, float, str]],
    limit: float,
    path: str | Path,
) -> None:
    """Write a PNG, SVG or PDF, by the suffix. plans: seconds of a step and GiB of each; front: those that no other
    beats, and their names. limit: GiB. Raises UserError for a file that cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 5.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([gib for _, gib in plans], [seconds for seconds, _ in plans], ".", color="#8cc5ec", label="tried")
    axes.plot([gib for _, gib, _ in front], [seconds for seconds, _, _ in front], "o-", color="#9b3412", label="best")
    for seconds, gib, name in front:
        axes.annotate(name, (gib, seconds), textcoords="offset points", xytext=(4, 4), fontsize=8)
    axes.axvline(limit, color="#777777", linestyle="--", label="limit")
    axes.set_xlabel("GiB of the fullest GPU")
    axes.set_ylabel("seconds a step, predicted")
    axes.legend()
    with whole_file(path) as temporary:
        figure.savefig(temporary, format=Path(path).suffix[1:], dpi=120)
