"""Shows what the place of the head is worth under each schedule, simulated: the tables of docs/vocabulary.md.

    make bench-vocabulary ARGS="[--jobs 8] [--output docs/vocabulary.md]"

Each setup of benchmarks/data/vocabulary.toml is one pipeline over all its GPUs. A schedule is simulated with each value
of `--pipeline-vocab-parallel`, as fast as it gets without regard to memory, and with `auto` in the memory there is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args, get_type_hints

from benchmarks import data
from benchmarks.report import Outcome, Page, markdown
from benchmarks.simulated import Jobs, Result, Scenario, Setting, in_processes, result_of, simulated
from helixpipe.common.collector import collector_paused
from helixpipe.common.errors import UserError
from helixpipe.planning.vocabulary.choice import VocabularyOptions
from schedules import CATALOGUE

ROWS = data.rows("vocabulary.toml", "row", Scenario)

MODES: tuple[Any, ...] = get_args(get_type_hints(VocabularyOptions)["pipeline_vocab_parallel"])

CHUNKS = 4
"""Of schedules that are about chunks."""
ON_PAGE = ("1f1b", "interleaved-1f1b", "chimera", "zb1p", "zbv", "v-half", "seq1f1b", "seq1f1b-interleaved", "sppo")
"""Schedules whose steps the page has; standard output has all."""


@dataclass(frozen=True)
class Options(Jobs, Page):
    """Options of this benchmark."""


@dataclass(frozen=True)
class Compared:
    """A schedule in one setup. by_mode: the step with each value of the flag; bound: seconds in which the busiest rank
    of evenly shared work is done."""

    by_mode: dict[str, Result]
    bound: float


def settings() -> list[Setting]:
    """The schedules that leave the head to the last ranks."""
    return [
        Setting(name, chunks=CHUNKS if each.chunks else 1, virtual_stages=2 if each.virtual_stages else None)
        for name, each in CATALOGUE.items()
        if not each.one_rank and (not each.spread or name == "chimera")
    ]


@collector_paused()
def compared(job: tuple[Setting, Scenario]) -> Compared | None:
    """None where the schedule refuses the shape."""
    setting, row = job
    plan = row.plan()
    by_mode, bound = {}, 0.0
    for mode in MODES:
        each = replace(setting, vocabulary=mode)
        try:
            step = simulated(plan, each.program(plan, limited=mode == "auto"))
        except UserError:
            return None
        by_mode[mode] = result_of(each, step)
        if mode == "ends":
            bound = sum(step.simulation.busy) / plan.ranks
    return Compared(by_mode, bound)


def run(options: Options) -> Outcome:
    """A table a setup; one of all, with the first mode and the last, for the page."""
    jobs = [(setting, row) for row in ROWS for setting in settings()]
    found = dict(zip(jobs, in_processes(compared, jobs, options), strict=True))
    heads = ("schedule", *(f"`{mode}`, s" for mode in MODES), "gain", "work / p")
    tables = []
    for row in ROWS:
        lines = [line(setting, own) for setting in settings() if (own := found[setting, row]) is not None]
        tables.append(markdown(heads, lines, "l" + "r" * (len(heads) - 1)))
    return Outcome("\n\n".join("\n".join(table) for table in tables), {"setups": together(found)})


def line(setting: Setting, own: Compared) -> Sequence[str]:
    times = [f"{each.step:.3g} ({each.gib})" for each in own.by_mode.values()]
    gain = own.by_mode["ends"].step / min(each.step for each in own.by_mode.values())
    return [marked(setting), *times, f"{gain:.2f}", f"{own.bound:.3g}"]


def marked(setting: Setting) -> str:
    marks = f", k = {setting.chunks}" * (setting.chunks > 1) + ", v = 2" * (setting.virtual_stages is not None)
    return f"`{setting.schedule}`{marks}"


def together(found: Mapping[tuple[Setting, Scenario], Compared | None]) -> list[str]:
    """A line a schedule, with its step in each setup under the first mode and the last."""
    names = [f"{row.model.rpartition('-')[2].upper()}, {row.plan().gpus} GPUs" for row in ROWS]
    heads = ["schedule", *(head for name in names for head in (f"{name}: `{MODES[0]}`", f"`{MODES[-1]}`"))]
    lines = []
    for setting in dict.fromkeys(setting for setting, _ in found if setting.schedule in ON_PAGE):
        cells = [marked(setting)]
        for row in ROWS:
            own = found[setting, row]
            shown = [] if own is None else [own.by_mode[mode] for mode in (MODES[0], MODES[-1])]
            cells += [f"{each.step:.3g}{'' if each.fits else '!'}" for each in shown] or ["–", "–"]
        if set(cells[1:]) != {"–"}:
            lines.append(cells)
    return markdown(heads, lines, "l" + "r" * (len(heads) - 1))
