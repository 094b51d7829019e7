"""Formats text output of the `helixpipe` command: a summary, a timeline in letters, a table."""

from __future__ import annotations

import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from helixpipe.costs.hardware import GIB
from helixpipe.draw.style import KIND_STYLES, LANES, copying_ranks, count, duration_text, is_chunked, lane_of, text_of
from helixpipe.draw.table import figure_lines
from helixpipe.program.program import Op, Program
from helixpipe.program.stages import LAYER_PIECES, Stage
from helixpipe.program.timeline import OpEvent, Timeline
from helixpipe.simulate.simulator import Simulation
from helixpipe.simulate.transfer_costs import hidden_share

MAX_TEXT_OPS = 2000
MAX_RANK_LINES = 16
MAX_STAGES_APART = 4
MAX_WIDTH = 118


NAMES_OF_RUNS = {
    LAYER_PIECES: "whole",
    ("norm", "qkv", "mlp"): "all but attention",
    ("norm", "qkv", "proj", "mlp"): "all but core attention",
    ("attn",): "core attention",
}
"""Kinds of pieces of a layer that are recomputed, as people call them."""


def shape_line(simulation: Simulation) -> str:
    """Return the schedule and its size; below, the stages if they differ or recompute, or how much single chunks do."""
    program = simulation.lowered.program
    return "\n".join([_shape(simulation), *(_chunk_lines(program) or stage_lines(program.stages))])


def _chunk_lines(program: Program) -> list[str]:
    """Return `layers recomputed: 31 % over all chunks, some in 40 of 88 chunks`; empty where stages say what is."""
    found = {unit: program.activations_of(unit).recompute for unit in program.units()}
    if all(runs == program.stages[unit.stage].recompute for unit, runs in found.items()):
        return []
    layers = [len({piece.layer for piece in stage.pieces} - {-1}) for stage in program.stages]
    dropped = sum(len({piece.layer for run in runs for piece in run} - {-1}) for runs in found.values())
    chunks = {unit[1:] for unit in found}
    some = {unit[1:] for unit, runs in found.items() if runs}
    share = dropped / sum(layers[unit.stage] for unit in found)
    return [
        f"layers recomputed: {100 * share:.3g} % over all chunks, some in {len(some)} of {count(len(chunks), 'chunk')}"
    ]


def stage_count(stages: Sequence[Stage]) -> str:
    """Return `4 stages of 2 layers`, with the number of those without layers, or `8 layers cut into 18 stages`."""
    layers = [{piece.layer for piece in stage.pieces if piece.layer >= 0} for stage in stages]
    held, total = [len(each) for each in layers if each], len(set().union(*layers))
    number = count(len(stages), "stage")
    if sum(held) > total:
        return f"{count(total, 'layer')} cut into {number}"
    size = count(held[0], "layer") if min(held) == max(held) else f"{min(held)} to {max(held)} layers"
    apart = len(stages) - len(held)
    return f"{number} of {size}{f', {apart} of them with none' if apart else ''}"


def stage_lines(stages: Sequence[Stage]) -> list[str]:
    """Return `stages: 2 3 layers; layers recomputed: 2 whole, none`; empty for equal stages that recompute nothing, or
    if stages do not consist of whole layers. Stages of embed or head alone are left out beside whole layers.
    """
    sizes = [sum(piece.role == LAYER_PIECES[0] for piece in stage.pieces) for stage in stages]
    whole = all(
        len({piece for piece in stage.pieces if piece.layer >= 0}) == size * len(LAYER_PIECES)
        for stage, size in zip(stages, sizes, strict=True)
    )
    if whole:
        stages = [stage for stage, size in zip(stages, sizes, strict=True) if size]
        sizes = [size for size in sizes if size]
    recomputed = [_recomputed(stage) for stage in stages]
    parts = []
    if whole and len(set(sizes)) > 1:
        parts.append(f"stages: {' '.join(_repeated([str(size) for size in sizes]))} layers")
    if any(stage.recompute for stage in stages):
        parts.append(f"layers recomputed: {', '.join(_repeated(recomputed))}")
    return textwrap.wrap("; ".join(parts), MAX_WIDTH, subsequent_indent="  ")


def _recomputed(stage: Stage) -> str:
    """Return `2 whole + 1 mlp`, or `none`."""
    pieces = [piece for run in stage.recompute for piece in run if piece.layer >= 0]
    kinds = [tuple(piece.role for piece in layer) for _, layer in groupby(pieces, key=lambda piece: piece.layer)]
    counts = {kind: kinds.count(kind) for kind in kinds}
    return " + ".join(f"{n} {NAMES_OF_RUNS.get(kind, '+'.join(kind))}" for kind, n in counts.items()) or "none"


def _repeated(values: Sequence[str]) -> list[str]:
    """Return the values; of many, equal neighbours together: `4 (x12)`; of very many, all that are equal."""
    groups = [(value, len(list(group))) for value, group in groupby(values)]
    if len(values) <= MAX_STAGES_APART:
        return list(values)
    if len(groups) > 2 * MAX_STAGES_APART:
        groups = list(Counter(values).items())
    return [value if number == 1 else f"{value} (x{number})" for value, number in groups]


def _shape(simulation: Simulation) -> str:
    program = simulation.lowered.program
    shape = [
        count(program.num_ranks, "rank"),
        count(program.num_microbatches, "microbatch", "microbatches"),
        count(program.num_layers, "layer"),
        count(len(program.stages), "stage"),
    ]
    if program.num_chunks > 1:
        shape.append(f"{program.num_chunks} chunks")
    if program.forward_only:
        shape.append("forward only")
    return f"{program.schedule}: {', '.join(shape)}"


def summary(simulation: Simulation) -> str:
    """Return the figures of one simulated step, one a line, then a line a rank."""
    messages = simulation.lowered.graph.count(lambda row: row.resource == "link")
    free = ", which take no time: give --message-time" if messages and simulation.free_messages else ""
    figures = [
        ("makespan", f"{simulation.makespan:.6g}", "in the unit of --piece-times" if not simulation.unit else ""),
        ("ideal", f"{simulation.ideal:.6g}", "total work / ranks"),
        ("bubble", f"{simulation.bubble_time:.6g}", f"{100 * simulation.bubble_ratio:.1f} % of the makespan"),
        ("messages", str(messages), f"between ranks{free}"),
    ]
    if (shifted := simulation.shifted_bubble_time) < (1 - 1e-6) * simulation.bubble_time:
        note = "the bubble of steps without a flush (--enable-optimizer-post-validation)"
        figures.insert(3, ("no flush", f"{shifted:.6g}", note))
    return "\n".join([shape_line(simulation), "", *figure_lines(figures, 9), "", *_ranks(simulation)])


def _ranks(simulation: Simulation) -> list[str]:
    makespan = simulation.makespan or 1.0
    busy = [100 * value / makespan for value in simulation.busy]
    peaks = simulation.peak_activation
    if len(busy) > MAX_RANK_LINES:
        return [
            f"each rank is busy {min(busy):.1f} to {max(busy):.1f} % of the makespan",
            f"peak activation {min(peaks):.4g} (rank {peaks.index(min(peaks))}) to "
            f"{max(peaks):.4g} (rank {peaks.index(max(peaks))}) microbatch-layers",
        ]
    rows = [f"{rank:>4}  {busy[rank]:>6.1f} %  {peaks[rank]:>15.4g}" for rank in range(len(busy))]
    return ["rank      busy  peak activation (microbatch-layers)", *rows]


def chunk_times(simulation: Simulation) -> list[float]:
    """Time of each chunk of a microbatch in all the stages together, forward and backward."""
    times = [0.0] * simulation.lowered.program.num_chunks
    start, end = simulation.times.start, simulation.times.end
    for task, op in enumerate(simulation.lowered.graph.ops):
        if op.microbatch == 0:
            times[op.chunk] += end[task] - start[task]
    return times


def chunk_shares(simulation: Simulation) -> list[float] | None:
    """Return each chunk's share of a sequence; None if microbatches are not cut, or not all alike."""
    lengths = simulation.lowered.program.workload.lengths
    return None if lengths is None or len(lengths) == 1 else [length / sum(lengths) for length in lengths]


def chunks_text(simulation: Simulation) -> str | None:
    """Return a line a chunk with its length and time; None if chunks do not differ."""
    shares, lengths = chunk_shares(simulation), simulation.lowered.program.chunk_lengths
    if shares is None:
        return None
    unit = f" ({simulation.unit})" if simulation.unit else ""
    sizes = [f"{100 * share:.4g} %" for share in shares] if lengths is None else map(str, lengths)
    rows = [
        f"{chunk:>5}  {size:>8}  {time:>8.4g}"
        for chunk, (size, time) in enumerate(zip(sizes, chunk_times(simulation), strict=True))
    ]
    return "\n".join(
        [f"chunk  {'share' if lengths is None else 'tokens':>8}  time in all stages together{unit}", *rows]
    )


def copies_text(simulation: Simulation) -> str | None:
    """Return the time of copies to the host and back, how much of it is hidden, and a line a rank; None
    without copies.
    """
    if not simulation.copies:
        return None
    unit, total = simulation.unit, sum(simulation.copy_time)
    said = "no time"
    if total:
        said = (
            f"{duration_text(total, unit)} on all ranks together, {100 * simulation.hidden:.1f} % of it hidden; "
            f"ops wait {duration_text(sum(simulation.held_up), unit)} for them"
        )
    bytes_known = simulation.costs.memory_unit == "bytes"
    scale, memory = (GIB, "GiB") if bytes_known else (1.0, simulation.costs.memory_unit)
    left, most = simulation.offloaded, simulation.peak_host
    first = f"Copies to the host and back: {said}."
    if len(left) > MAX_RANK_LINES:
        return (
            f"{first}\neach rank copies {min(left) / scale:.4g} to {max(left) / scale:.4g} {memory} out in a step, "
            f"and has {min(most) / scale:.4g} to {max(most) / scale:.4g} at most on its host"
        )
    rows = [
        f"{rank:>4}  {left[rank] / scale:>10.4g}  {most[rank] / scale:>12.4g}  {shares}"
        for rank, shares in enumerate(_offloading(simulation.lowered.program))
    ]
    return "\n".join([first, f"rank  copied out  most on host  ({memory})  units that offload", *rows])


def sharing_text(simulation: Simulation) -> str | None:
    """Return the time of gathers of weights and scatters of gradients, and how much of it is hidden; None if weights
    are whole.
    """
    if not simulation.shares:
        return None
    took, held_up = simulation.sharing_time, simulation.held_up_by_sharing
    unit, hidden = simulation.unit, hidden_share(took, held_up)
    return (
        f"Weights in parts over {simulation.lowered.program.sharded} data-parallel ranks: gathers and scatters take "
        f"{duration_text(max(took), unit)} of a rank's network at most,\n"
        f"{100 * hidden:.1f} % of all of it hidden; a rank waits {duration_text(max(held_up), unit)} for them at most."
    )


def _offloading(program: Program) -> Iterator[str]:
    """Yield, for each rank, how many of its units offload, and what share."""
    for ops in program.ranks:
        units = [op.unit for op in ops if op.kind == "F"]
        runs = [program.activations_of(unit).offload for unit in units]
        shares = [100 * share for offload in runs for share in {share for _, share in offload}]
        count = f"{sum(map(bool, runs))} of {len(units)}"
        if not shares:
            yield count
        elif max(shares) - min(shares) < 0.5:
            yield f"{count}, {max(shares):.0f} %"
        else:
            yield f"{count}, {min(shares):.0f} to {max(shares):.0f} %"


def drawn_in_text(simulation: Simulation, width: int) -> str | None:
    """Return the timeline of a simulation, for a terminal in `bars` and for a pipe as `text_timeline`; None where it
    has too many ops or ranks.
    """
    ranks = simulation.lowered.program.ranks
    if len(ranks) > MAX_RANK_LINES or sum(map(len, ranks)) > MAX_TEXT_OPS:
        return None
    return (bars if sys.stdout.isatty() else text_timeline)(simulation.timeline, width)


def text_timeline(timeline: Timeline, width: int) -> str | None:
    """Return the timeline in letters, a line a rank: `F0` then dashes while it runs, spaces while the rank is idle; for
    a rank that copies two more, `out` with the copies to the host after their op, `F0>>`, and `in` with those back
    before theirs, `B0<<`.

    The scale is the smallest that has room for every op's name, or fills `width`; an op without room for its name shows
    its kind alone, and copies have a name where there is room. None when an op would be too short to be seen, or with
    too many ops or ranks.
    """
    if not timeline.makespan or len(timeline.ops) > MAX_TEXT_OPS or timeline.num_ranks > MAX_RANK_LINES:
        return None
    chunked = is_chunked(timeline)
    names = {event: _name(event.op, chunked) for event in timeline.ops}
    drawn = [event for event in timeline.ops if event.end > event.start]
    prefix = len(f"rank {timeline.num_ranks - 1} ")
    room = width - prefix - 2
    needed = max(len(names[event]) / (event.end - event.start) for event in drawn) * timeline.makespan
    for columns in range(min(int(needed + 0.999), room), room + 1):
        scale = columns / timeline.makespan
        spans = [(round(event.start * scale), round(event.end * scale)) for event in drawn]
        if all(end - start >= len(names[event]) for event, (start, end) in zip(drawn, spans, strict=True)):
            break
    if any(end == start for start, end in spans):
        return None
    lines = {(rank, ""): [" "] * columns for rank in range(timeline.num_ranks)}
    for event, (start, end) in zip(drawn, spans, strict=True):
        name = names[event] if len(names[event]) <= end - start else event.op.kind
        lines[event.rank, ""][start:end] = name.ljust(end - start, "-")
    for rank in copying_ranks(timeline):
        lines |= {(rank, lane): [" "] * columns for lane in LANES}
    for copy in timeline.copies:
        start = min(round(copy.start * scale), columns - 1)
        end = min(max(round(copy.end * scale), start + 1), columns)
        name, lane = _name(copy.op, chunked), lane_of(copy)
        name = name if len(name) <= end - start else ""
        lines[copy.source, lane][start:end] = name.ljust(end - start, "<" if lane == "in" else ">")
    rows = sorted(lines, key=lambda row: (row[0], ("", *LANES).index(row[1])))
    return "\n".join(
        f"{lane.rjust(prefix - 1) if lane else f'rank {rank}':<{prefix}}|{''.join(lines[rank, lane])}|"
        for rank, lane in rows
    )


def _name(op: Op, chunked: bool) -> str:
    return f"{op.kind}{op.microbatch}.{op.chunk}" if chunked else f"{op.kind}{op.microbatch}"


def bars(timeline: Timeline, width: int) -> str | None:
    """Return the timeline in `width` columns with escape sequences for colours, which `NO_COLOR` turns off; below, a
    line that says which colour is what. A box has its microbatch's number where there is room for it. None for a step
    that takes no time.
    """
    from rich.console import Console  # a tenth of a second to import: only terminals wait for it
    from rich.text import Text

    if not timeline.makespan:
        return None
    prefix = len(f"rank {timeline.num_ranks - 1} ")
    columns = max(width - prefix, 1)
    by_rank: dict[int, list[OpEvent]] = {rank: [] for rank in range(timeline.num_ranks)}
    for event in timeline.ops:
        by_rank[event.rank].append(event)
    console = Console(width=width)
    with console.capture() as capture:
        for rank, events in by_rank.items():
            line = Text(f"rank {rank}".ljust(prefix))
            for shown, room in _spans(events, columns, timeline.makespan):
                name = "" if shown is None else text_of(shown.op, is_chunked(timeline))
                name = name if len(name) < room else ""
                line.append(name.ljust(room), style="" if shown is None else _style(shown.op.kind))
            console.print(line, no_wrap=True, crop=True)
        kinds = {event.op.kind for event in timeline.ops}
        legend = Text(" " * prefix)
        for kind, style in KIND_STYLES.items():
            if kind in kinds:
                legend.append(f" {kind} ", style=_style(kind)).append(f" {style.name}   ")
        console.print(legend, no_wrap=True, crop=True)
    return capture.get().rstrip("\n")


def _spans(events: list[OpEvent], columns: int, makespan: float) -> Iterator[tuple[OpEvent | None, int]]:
    """Yield each op of a rank, None for idle time, with the columns it has."""
    at = 0
    for event in sorted(events, key=lambda event: event.start):
        first, last = (round(time / makespan * columns) for time in (event.start, event.end))
        yield None, first - at
        yield event, last - first
        at = last
    yield None, columns - at


def _style(kind: str) -> str:
    """Return the colour of a kind behind letters that can be read on it."""
    colour = KIND_STYLES[kind].colour
    light = sum(int(colour[place : place + 2], 16) for place in (1, 3, 5)) > 3 * 128
    return f"{'black' if light else 'white'} on {colour}"
