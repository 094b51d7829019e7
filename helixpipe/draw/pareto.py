"""The picture of plans: time against memory, with matplotlib. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from helixpipe.common.errors import UserError


def draw_pareto(
    plans: Sequence[tuple[float, float]],
    front: Sequence[tuple[float, float, str]],
    limit: float,
    path: str | Path,
) -> None:
    """Write a PNG, SVG or PDF, by the suffix. plans: seconds of a step and GiB of each; front: those that no other
    beats, and their names. limit: GiB. Raises UserError for another suffix and for a file that cannot be written."""
    from matplotlib.figure import Figure

    if Path(path).suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--pareto {path} must end in .png, .svg or .pdf.")
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
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise UserError(f"--pareto {path} cannot be written: {error.strerror}.") from None
