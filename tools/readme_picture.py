"""Draw README's picture: the same step under four schedules, simulated (`python tools/readme_picture.py`).

Four ranks, eight microbatches, eight layers whose pieces take 1 (norm, QKV), 3 (attention) and 2 (projection, MLP) in
the forward and twice that in the backward; messages take no time. The figures are of that setting, not of a GPU.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from helixpipe.common.files import whole_file
from helixpipe.costs.by_hand import PieceTimes, parse_piece_times
from helixpipe.draw.style import IDLE_COLOUR, KIND_STYLES
from helixpipe.lowering.lower import lower
from helixpipe.planning.order.chunk_lengths import balanced_lengths
from helixpipe.planning.setup import Setup
from helixpipe.program.stages import even_stages
from helixpipe.simulate.simulator import Simulation, simulate
from schedules import CATALOGUE

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "schedules.svg"
RANKS, MICROBATCHES, LAYERS = 4, 8, 8
COSTS = PieceTimes(parse_piece_times("pre=1,attn=3,post=2"))
DRAWN = (("1f1b", 1), ("helix", 1), ("zbv", 1), ("seq1f1b", 4))
"""Each schedule with its chunks of a sequence."""

INCHES, DPI = (12.0, 5.4), 100
STYLE: Mapping[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "schedules",
    "font.family": "sans-serif",
    "font.size": 11,
}
"""Text stays text in an SVG file, and the same picture is the same file."""


def simulated(schedule: str, chunks: int) -> Simulation:
    """Return a step of a schedule, cut into chunks that take equally long."""
    lengths = balanced_lengths(COSTS, even_stages(LAYERS, num_stages=RANKS), 4096, chunks)
    shape = Setup(RANKS, LAYERS, COSTS).shape(MICROBATCHES, chunks, lengths if chunks > 1 else None)
    return simulate(lower(CATALOGUE.build(schedule, shape), COSTS), COSTS)


def title(schedule: str, chunks: int, simulation: Simulation) -> str:
    cut = f", each sequence in {chunks} chunks" if chunks > 1 else ""
    kept = max(simulation.peak_activation) / (LAYERS / RANKS)
    idle = f"{100 * simulation.timeline.bubble:.0f} %"
    return f"{schedule}{cut}: time {simulation.makespan:.0f}, idle {idle}, activations of {kept:.1f} microbatches"


def panel(axes: Axes, simulation: Simulation, longest: float, text: str) -> None:
    """Draw a row a rank: what is grey is idle."""
    axes.barh(range(RANKS), simulation.makespan, height=0.86, color=IDLE_COLOUR)
    line = 0.0006 * longest  # between two ops
    boxes: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for event in simulation.timeline.ops:
        boxes[event.rank, event.op.kind].append((event.start, event.end - event.start - line))
    for (rank, kind), spans in boxes.items():
        axes.broken_barh(spans, (rank - 0.43, 0.86), color=KIND_STYLES[kind].colour, linewidth=0)
    axes.set_xlim(0, longest)
    axes.set_ylim(RANKS - 0.5, -0.5)
    axes.set_title(text, loc="left", pad=3, fontsize=12)
    axes.set_yticks(range(RANKS), [f"rank {rank}" for rank in range(RANKS)], fontsize=9)
    axes.tick_params(length=0)
    axes.set_xticks([])
    axes.set_frame_on(False)


def figure() -> Figure:
    """Return the picture, a panel a schedule on one time scale, on white so that it can be read in a dark theme."""
    steps = [simulated(*drawn) for drawn in DRAWN]
    longest = max(step.makespan for step in steps)
    drawing = Figure(figsize=INCHES, dpi=DPI, facecolor="white")
    drawing.subplots_adjust(left=0.06, right=0.985, top=0.89, bottom=0.02, hspace=0.42)
    for place, (drawn, step) in enumerate(zip(DRAWN, steps, strict=True)):
        panel(drawing.add_subplot(len(DRAWN), 1, place + 1), step, longest, title(*drawn, step))
    kinds = {event.op.kind for step in steps for event in step.timeline.ops}
    legend = [Patch(color=style.colour, label=style.name) for kind, style in KIND_STYLES.items() if kind in kinds]
    legend.append(Patch(color=IDLE_COLOUR, label="idle"))
    drawing.legend(handles=legend, loc="upper left", bbox_to_anchor=(0.052, 1.0), ncols=len(legend), frameon=False)
    return drawing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=PICTURE, help="where to; .svg or .png")
    path = parser.parse_args().output
    with matplotlib.rc_context(dict(STYLE)), whole_file(path) as temporary:
        figure().savefig(temporary, format=path.suffix[1:], metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
