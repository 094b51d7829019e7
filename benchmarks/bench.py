"""Speed and memory of the engine beside megatron-core's and torch's, on this machine's CPU, p = 2.

    make bench ARGS="[--rows zero-bubble] [--sizes wide long] [--pairs 15] [--json out.json]
                     [--output docs/schedules.md]"

Rows:
  empty         our 1f1b beside the same two with a model that computes next to nothing: what an F and a B cost the
                engine, messages included
  1f1b          our 1f1b beside megatron-core's 1F1B and torch's Schedule1F1B
  stages        our gpipe beside torch's ScheduleGPipe and our interleaved-1f1b beside torch's ScheduleInterleaved1F1B,
                and with our hanayo, chimera and adapipe beside our 1f1b and megatron-core's 1F1B
  zero-bubble   our zbv, zb1p, zb-interleaved, zb2p, v-half and v-min, found from measured times, beside our 1f1b,
                megatron-core's 1F1B, torch's ScheduleZBVZeroBubble and ScheduleInterleavedZeroBubble; and torch's
                orders under our engine
  weights       our weipipe-naive, weipipe, wzb1 and wzb2 beside our 1f1b and megatron-core's 1F1B
  memory        peak activations of our schedules, as the cost model has them and as measured
  seq1f1b       our seq1f1b, seq1f1b-zb and seq1f1b-interleaved beside our 1f1b and megatron-core's 1F1B: one long
                sequence in chunks that take equally long here, and in equally long ones
  chunks        our terapipe, infinipipe and sppo beside our seq1f1b and 1f1b and megatron-core's 1F1B: one long
                sequence in four chunks
  helix         our helix, with each of its cuts, beside our 1f1b and zb1p and megatron-core's 1F1B: long sequences, so
                that most is attention; more than (m+p-1)/m over 1f1b is not to be had

Same weights, same data, same kernels, same process: each round runs one step under every engine in turn, so that what
else the machine does hits all alike. What is compared is forward and backward of one step (no optimizer): tokens per
second of ours over the other's, median over rounds. All gradients are compared too. Of ours a step is also predicted:
its program simulated with what its ops took just before, then the sum of gradients over copies of weights. `kept` is
what is kept for the backward at most.

--json: rows that are in the file already and are not measured now stay. --output: a Markdown file with places for two
tables, of the last of each row's sizes: our schedules beside our 1f1b, and engines that run the same schedule.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from benchmarks.ranks import on_ranks
from benchmarks.report import Figures, Outcome, Page, markdown, read_figures, write_figures
from helixpipe.common.flags import option
from helixpipe.draw.table import table

SIZES = MappingProxyType(
    {
        "empty": (2, 16, 1, 1, 16, 16, 1, 64),
        "small": (4, 128, 4, 2, 344, 128, 1, 8),
        "wide": (4, 512, 8, 4, 1376, 128, 1, 8),
        "long": (4, 256, 8, 2, 688, 1024, 1, 4),
        "2k": (4, 256, 8, 2, 688, 2048, 1, 2),
        "middle": (4, 256, 8, 2, 688, 512, 1, 8),
    }
)
"""By name (layers, hidden, heads, groups, ffn, sequence, micro batch, microbatches)."""

ROWS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "empty": ("empty",),
        "1f1b": ("small", "wide", "long"),
        "stages": ("small", "middle"),
        "zero-bubble": ("small", "wide", "long"),
        "weights": ("middle",),
        "memory": ("small", "wide", "long"),
        "seq1f1b": ("2k",),
        "chunks": ("2k",),
        "helix": ("2k",),
    }
)
"""With the sizes that they are made for."""


FIRST, CORE = "ours, 1f1b", "megatron-core 1F1B, its GPTModel"
"""Beside which every schedule is set."""

ALIKE = (
    (FIRST, CORE, "1f1b", "megatron-core"),
    (FIRST, "torch Schedule1F1B", "1f1b", "torch"),
    ("ours, gpipe", "torch ScheduleGPipe", "gpipe", "torch"),
    ("ours, interleaved-1f1b", "torch ScheduleInterleaved1F1B", "interleaved-1f1b", "torch"),
    ("ours, torch's ZBV order", "torch ScheduleZBVZeroBubble", "ZBV, torch's order", "torch"),
    (
        "ours, torch's InterleavedZeroBubble order",
        "torch ScheduleInterleavedZeroBubble",
        "interleaved zero bubble, torch's order",
        "torch",
    ),
)
"""Of one schedule: ours, another engine, and what the page calls both."""


@dataclass(frozen=True)
class Options(Figures, Page):
    rows: tuple[str, ...] = option(tuple(ROWS), "Which rows (default: all).", choices=tuple(ROWS))
    sizes: tuple[str, ...] = option((), "Of which sizes (default: those made for the rows).", choices=tuple(SIZES))
    pairs: int = option(15, "Rounds that count.", at_least=5)


def run(options: Options) -> Outcome:
    known = read_figures(options.json)
    for name in options.sizes or SIZES:
        rows = [row for row in options.rows if options.sizes or name in ROWS[row]]
        if rows:
            measured = on_ranks("benchmarks.measure:measure", SIZES[name], options.pairs, rows)
            report(name, SIZES[name], measured)
            known[name] = {**known.get(name, {}), **measured}
            if options.json:
                write_figures(options.json, known)
    return Outcome(tables={"measured": measured_table(known), "engines": engines_table(known)}, figures=known)


def shown(known: Mapping[str, Any]) -> dict[str, tuple[str, dict[tuple[str, str], Mapping[str, Any]]]]:
    """Of each row that a page can show: (its size, the ratios of its pairs)."""
    pairs = {}
    for row, sizes in ROWS.items():
        result = known.get(sizes[-1], {}).get(row, {})
        if row not in ("empty", "memory") and result:
            pairs[row] = sizes[-1], {(each["ours"], each["over"]): each for each in result["ratios"]}
    return pairs


def measured_table(known: Mapping[str, Any]) -> list[str]:
    """A line a schedule, of the first row that has it."""
    lines: dict[str, list[str]] = {}
    for size, pairs in shown(known).values():
        for ours, over in pairs:
            if over != FIRST or (ours, CORE) not in pairs:
                continue
            ratio, core = pairs[ours, over], pairs[ours, CORE]
            name, _, rest = ours.removeprefix("ours, ").replace(", 1 folds", "").partition(" ")
            if "equal" in rest or "recomputed" in rest:
                continue
            shape = [f"`{name.rstrip(',')}` {rest.replace(' = ', '=')}".strip(), f"{SIZES[size][5]}"]
            speeds = (ratio["ratio"], ratio["predicted"], core["ratio"])
            lines.setdefault(ours, [*shape, *(f"{each:.2f}" for each in speeds)])
    heads = ["", "tokens", "over our 1f1b", "predicted", "over megatron-core's 1F1B"]
    return markdown(heads, list(lines.values()), "lrrrr")


def engines_table(known: Mapping[str, Any]) -> list[str]:
    """A line a schedule and engine that has it."""
    every = {pair: ratio for _, pairs in shown(known).values() for pair, ratio in pairs.items()}
    lines = [
        [schedule, engine, f"{ratio['ratio']:.3f}", "–".join(f"{each:.3f}" for each in ratio["quartiles"])]
        for ours, over, schedule, engine in ALIKE
        if (ratio := every.get((ours, over)))
    ]
    return markdown(["schedule", "engine", "our speed over its", "quartiles"], lines, "llrr")


def report(name: str, size: Sequence[int], result: Mapping[str, Any]) -> None:
    layers, hidden, heads, groups, ffn, sequence, micro, microbatches = size
    print(
        f"\n{name}: Llama style, {layers} layers, hidden {hidden}, {heads} heads, {groups} groups, ffn {ffn}, "
        f"{sequence} tokens, micro batch {micro}, {microbatches} microbatches, p = 2"
    )
    for row, found in result.items():
        print(f"\n{row}\n")
        if row == "memory":
            print(memory_table(found))
            continue
        print(empty_table(found["engines"], microbatches) if row == "empty" else speed_table(found["engines"]))
        if row != "empty":
            print(f"\n{our_table(found['engines'])}", *chunk_lines(found["engines"]), sep="\n")
        print(f"\n{ratio_table(found['ratios'])}", flush=True)


def in_mb(values: Iterable[float], digits: int = 1) -> str:
    return " ".join(f"{value / 1e6:.{digits}f}" for value in values)


def empty_table(engines: Mapping[str, Any], microbatches: int) -> str:
    rows = [(name, f"{1e6 * statistics.median(row['seconds']) / microbatches:.0f}") for name, row in engines.items()]
    return table(("empty model", "us for each F and B"), rows)


def speed_table(engines: Mapping[str, Any]) -> str:
    rows = [
        (name, f"{row['tokens_per_second']:.0f}", in_mb(row["peak_bytes"]), f"{row['gradient_difference']:.1e}")
        for name, row in engines.items()
    ]
    return table(("engine", "tokens/s", "peak MB by rank", "gradients differ"), rows)


def ratio_table(speeds: Iterable[Mapping[str, Any]]) -> str:
    rows = [
        (
            row["ours"],
            row["over"],
            f"{row['ratio']:.3f}",
            "–".join(f"{each:.3f}" for each in row["quartiles"]),
            f"{row['predicted']:.3f}" if "predicted" in row else "",
        )
        for row in speeds
    ]
    return table(("speed of", "over", "ratio", "quartiles", "predicted"), rows)


def our_table(engines: Mapping[str, Any]) -> str:
    """Return what was predicted of our engines beside what was measured; what is kept also over what the first
    keeps.
    """
    ours = {name: row for name, row in engines.items() if row["ours"]}
    first = next(iter(ours))
    rows = []
    for name, row in ours.items():
        own = row["ours"]
        shares = [
            " ".join(f"{value / most:.3f}" for value, most in zip(own[key], ours[first]["ours"][key], strict=True))
            for key in ("kept_bytes", "kept_layers")
        ]
        seconds = (statistics.median(row["seconds"]), own["predicted_seconds"])
        sizes = (in_mb(own["kept_bytes"]), in_mb(own["keys_values_bytes"]))
        rows.append((name, *(f"{each:.3f}" for each in seconds), *sizes, *shares))
    over = f"kept over {first}"
    heads = ("", "s a step", "predicted", "kept MB by rank", "keys, values", over, "predicted")
    return table(heads, rows)


def chunk_lines(engines: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}: chunks of {' '.join(map(str, own['chunk_lengths']))} tokens take "
        f"{' '.join(f'{seconds:.3f}' for seconds in own['chunk_seconds'])} s"
        for name, row in engines.items()
        if (own := row["ours"]) and own["chunk_lengths"]
    ]


def memory_table(result: Mapping[str, Any]) -> str:
    rows = [
        (
            schedule,
            in_mb(row["simulated"], 2),
            in_mb(row["measured"], 2),
            " ".join(f"{m / s:.3f}" for m, s in zip(row["measured"], row["simulated"], strict=True)),
        )
        for schedule, row in result.items()
    ]
    return table(("peak activations", "simulated MB", "measured MB", "measured/simulated"), rows)
