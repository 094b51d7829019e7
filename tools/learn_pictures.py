"""Draw the pictures of the tutorial in docs/learn: `python tools/learn_pictures.py` writes them anew.

Each shows steps of four ranks on one time axis, simulated: eight layers whose pieces take 1 (norm, QKV), 3 (attention)
and 2 (projection, MLP) in the forward and twice that in the backward; messages take no time.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from helixpipe.common.files import whole_file
from helixpipe.costs.by_hand import PieceTimes, parse_piece_times
from helixpipe.draw.style import KIND_STYLES
from helixpipe.lowering.lower import lower
from helixpipe.planning.order.chunk_lengths import balanced_lengths
from helixpipe.planning.setup import Setup
from helixpipe.program.stages import even_stages
from helixpipe.simulate.simulator import Simulation, simulate
from schedules import CATALOGUE

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "learn"
RANKS, LAYERS = 4, 8
COSTS = PieceTimes(parse_piece_times("pre=1,attn=3,post=2"))


class Step(NamedTuple):
    """A schedule with so many microbatches, each sequence in so many chunks that take equally long."""

    schedule: str
    microbatches: int
    chunks: int = 1


PICTURES: dict[str, tuple[Step, ...]] = {
    "bubble.svg": (Step("gpipe", 1), Step("gpipe", 4), Step("gpipe", 8)),
    "memory.svg": (Step("gpipe", 8), Step("1f1b", 8)),
    "stages.svg": (Step("1f1b", 8), Step("interleaved-1f1b", 8)),
    "halves.svg": (Step("1f1b", 8), Step("zb1p", 8), Step("zbv", 8)),
    "chunks.svg": (Step("1f1b", 4), Step("seq1f1b", 4, 4)),
    "helix.svg": (Step("1f1b", 8), Step("helix", 8)),
}

WIDTH, LEFT, ROW, GAP, TITLE, SPACE = 900, 56, 22, 3, 24, 14
INK = "#7b8490"
"""Of text: legible on white and on black."""


def simulated(step: Step) -> Simulation:
    """Return the simulation of a step."""
    lengths = None
    if step.chunks > 1:
        lengths = balanced_lengths(COSTS, even_stages(LAYERS, num_stages=RANKS), 4096, step.chunks)
    shape = Setup(RANKS, LAYERS, COSTS).shape(step.microbatches, step.chunks, lengths)
    return simulate(lower(CATALOGUE.build(step.schedule, shape), COSTS), COSTS)


def title(step: Step, simulation: Simulation) -> str:
    """Return what stands above a step."""
    cut = f", sequences in {step.chunks} chunks" if step.chunks > 1 else ""
    kept = max(simulation.peak_activation) / (LAYERS / RANKS)
    idle = f"{100 * simulation.bubble_ratio:.0f} % idle"
    count = f"{step.microbatches} microbatch{'es' if step.microbatches > 1 else ''}"
    return f"{step.schedule}, {count}{cut}: time {simulation.makespan:.0f}, {idle}, keeps {kept:.2g}"


def picture(steps: Sequence[Step]) -> str:
    """Return the picture of steps, as SVG."""
    simulations = [simulated(step) for step in steps]
    scale = (WIDTH - LEFT - 2) / max(simulation.makespan for simulation in simulations)
    tall = TITLE + RANKS * (ROW + GAP) + SPACE
    parts = [
        part
        for number, (step, simulation) in enumerate(zip(steps, simulations, strict=True))
        for part in _panel(simulation, title(step, simulation), number * tall, scale)
    ]
    size = f'width="{WIDTH}" height="{tall * len(steps)}" viewBox="0 0 {WIDTH} {tall * len(steps)}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">', *parts, "</svg>\n"])


def _panel(simulation: Simulation, text: str, top: float, scale: float) -> Iterator[str]:
    yield f'<text x="{LEFT}" y="{top + 16}" font-size="14" font-weight="600" fill="{INK}">{html.escape(text)}</text>'
    rows = [top + TITLE + rank * (ROW + GAP) for rank in range(RANKS)]
    for rank, y in enumerate(rows):
        yield f'<text x="0" y="{y + 15}" font-size="12" fill="{INK}">rank {rank}</text>'
        wide = simulation.makespan * scale
        yield f'<rect x="{LEFT}" y="{y}" width="{wide:.1f}" height="{ROW}" fill="#9aa3ad" fill-opacity="0.22"/>'
    for rank, op, start, end in simulation.timeline.ops:
        x, wide, y = LEFT + start * scale, (end - start) * scale, rows[rank]
        colour = KIND_STYLES[op.kind].colour
        yield f'<rect x="{x:.1f}" y="{y}" width="{max(wide - 0.7, 0.4):.1f}" height="{ROW}" fill="{colour}"/>'
        if wide >= 12:
            ink = "#fff" if op.kind in "BW" else "#16191f"
            place = f'x="{x + wide / 2:.1f}" y="{y + 15}"'
            yield f'<text {place} font-size="11" text-anchor="middle" fill="{ink}">{op.microbatch}</text>'


def main() -> None:
    for name, steps in PICTURES.items():
        with whole_file(FOLDER / name) as temporary:
            temporary.write_text(picture(steps), encoding="utf-8")
        print(f"wrote {FOLDER / name}")


if __name__ == "__main__":
    main()
