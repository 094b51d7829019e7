"""The text form of a program without loss: JSON that a person can read and edit.

A line a stage, a rank, a microbatch whose chunks are its own, and a set of units whose activations are their own:

    {
      "format": "helixpipe program",
      "version": 1,
      "schedule": "1f1b",
      "stages": [
        {"pieces": "embed layers 0-1"},
        {"pieces": "layers 2-3 head", "recompute": ["norm[2] qkv[2]", "layer 3"]}
      ],
      "workload": {"microbatches": 2, "chunks": 1},
      "ranks": [
        "0F0 0F1 0B0 0B1",
        "1F0 1R0 1B0 1F1 1B1"
      ],
      "activations": [
        {"units": "1F1", "recompute": ["layer 3"], "offload": [{"pieces": "attn[2]", "share": 0.5}], "ahead": 2}
      ]
    }

Pieces are named as they print, whole layers by their numbers; of layers that are not plain ones the kinds of their
pieces follow, as in `layers 0-2 (norm qkv attn.window proj mlp)`. Ops are the cells of the CSV form; in `activations`
the cell of its forward stands for a unit, and `ahead` is 1 if it is not there. A stage may have a `placement` (else
`resident`) and an `owner`; a program `forward_only`, a `ring` (`slots`, `gradient_bytes`),
`min_offloaded_bytes`, `sharded`, `gathered_once`, `kv_blocks`, `pairs`, the forwards beside which the next op of their
rank runs, and `turns`, for each the last op of every rank that has ops in it. A workload is cut alike in every
microbatch, into `chunks` of equal length or into `lengths` in tokens; or it lists for each microbatch its chunks, each
as slices: `0[0:512] 1[0:64]` is tokens 0 to 511 of document 0, then 0 to 63 of document 1; `proportional` beside either
says that these are not tokens but proportions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from helixpipe.common.errors import ProgramError
from helixpipe.program.json_fields import Fields, file_content
from helixpipe.program.program import Op, Program, Unit
from helixpipe.program.stages import LAYER_PIECES, Activations, LayerKinds, Piece, RingOptions, Stage, layer_pieces
from helixpipe.program.text import parse_cell
from helixpipe.program.workload import Chunk, Workload, uniform

FORMAT, VERSION = "helixpipe program", 1

_KEYS = (
    *("format", "version", "schedule", "forward_only", "ring", "stages"),
    *(
        "workload",
        "ranks",
        "activations",
        "min_offloaded_bytes",
        "sharded",
        "gathered_once",
        "kv_blocks",
        "pairs",
        "turns",
    ),
)

# ------------------------------------------------------------------------------------------------------------- writing


def to_json(program: Program, path: str | Path) -> None:
    Path(path).write_text(json_text(program), encoding="utf-8")


def json_text(program: Program) -> str:
    """The content of the file."""
    entries = {
        "format": _line(FORMAT),
        "version": _line(VERSION),
        "schedule": _line(program.schedule),
        "stages": _lines(map(_stage_entry, program.stages)),
        "workload": _workload_text(program.workload),
        "ranks": _lines(" ".join(map(str, ops)) for ops in program.ranks),
    }
    if program.forward_only:
        entries["forward_only"] = _line(True)
    if program.ring != RingOptions() or any(stage.placement == "ring" for stage in program.stages):
        entries["ring"] = _line(asdict(program.ring))
    if program.activations:
        entries["activations"] = _lines(_activation_entries(program.activations))
    if program.min_offloaded_bytes:
        entries["min_offloaded_bytes"] = _line(program.min_offloaded_bytes)
    if program.sharded > 1:
        entries["sharded"] = _line(program.sharded)
    if program.gathered_once:
        entries["gathered_once"] = _line(True)
    if program.kv_blocks:
        entries["kv_blocks"] = _line(True)
    if program.pairs:
        entries["pairs"] = _lines(" ".join(str(op) for op in ops if op in program.pairs) for ops in program.ranks)
    if program.turns:
        entries["turns"] = _lines(" ".join(map(str, ends)) for ends in program.turns)
    body = ",\n".join(f"  {_line(key)}: {entries[key]}" for key in _KEYS if key in entries)
    return f"{{\n{body}\n}}\n"


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _lines(values: Iterable[Any], indent: str = "  ") -> str:
    """A list with a line for each of its values."""
    lines = [f"{indent}  {_line(value)}" for value in values]
    return "[\n" + ",\n".join(lines) + f"\n{indent}]" if lines else "[]"


def _stage_entry(stage: Stage) -> dict[str, Any]:
    entry: dict[str, Any] = {"pieces": pieces_text(stage.pieces)}
    if stage.placement != "resident":
        entry["placement"] = stage.placement
    if stage.owner is not None:
        entry["owner"] = stage.owner
    if stage.recompute:
        entry["recompute"] = [pieces_text(run) for run in stage.recompute]
    return entry


def pieces_text(pieces: tuple[Piece, ...]) -> str:
    """`embed layers 0-3 norm[4] qkv[4]`: as they print, whole layers by their numbers."""
    parts: list[str] = []
    at = 0
    while at < len(pieces):
        kinds = _whole_layer(pieces[at : at + len(LAYER_PIECES)])
        if kinds is None:
            parts.append(str(pieces[at]))
            at += 1
            continue
        first, whole, size = pieces[at].layer, 1, len(kinds)
        while pieces[at + whole * size : at + (whole + 1) * size] == layer_pieces((kinds,), first + whole):
            whole += 1
        named = f" ({' '.join(kinds)})" if kinds != LAYER_PIECES else ""
        parts.append((f"layer {first}" if whole == 1 else f"layers {first}-{first + whole - 1}") + named)
        at += whole * size
    return " ".join(parts)


def _whole_layer(pieces: tuple[Piece, ...]) -> LayerKinds | None:
    """The kinds of what is one whole layer; None for anything else."""
    one = len({piece.layer for piece in pieces}) == 1
    return tuple(piece.kind for piece in pieces) if one and tuple(p.role for p in pieces) == LAYER_PIECES else None


def _workload_text(workload: Workload) -> str:
    lengths = workload.lengths
    if lengths is not None:
        number, count = len(workload), len(lengths)
        if workload == uniform(number, count):
            return _line({"microbatches": number, "chunks": count})
        if workload == uniform(number, count, lengths, workload.proportional):
            unit = {"proportional": True} if workload.proportional else {}
            return _line({"microbatches": number, "lengths": lengths, **unit})
    shown = _lines(([_chunk_text(chunk) for chunk in chunks] for chunks in workload.microbatches), "    ")
    start = f'\n    "proportional": {_line(True)},' if workload.proportional else ""
    return f'{{{start}\n    "microbatches": {shown}\n  }}'


def _chunk_text(chunk: Chunk) -> str:
    return " ".join(f"{part.document}[{part.start}:{part.start + part.length}]" for part in chunk)


def _activation_entries(activations: Mapping[Unit, Activations]) -> Iterator[dict[str, Any]]:
    """Return one entry for all units of a stage whose activations are treated alike."""

    def key(item: tuple[Unit, Activations]) -> tuple[int, str]:
        return item[0].stage, repr(item[1])

    for _, items in groupby(sorted(activations.items(), key=lambda item: (key(item), item[0])), key):
        units, (own, *_) = zip(*items, strict=True)
        entry: dict[str, Any] = {"units": " ".join(str(Op("F", *unit)) for unit in units)}
        if own.recompute:
            entry["recompute"] = [pieces_text(run) for run in own.recompute]
        if own.offload:
            entry["offload"] = [{"pieces": pieces_text(run), "share": share} for run, share in own.offload]
            if own.ahead != 1:
                entry["ahead"] = own.ahead
        yield entry


# ------------------------------------------------------------------------------------------------------------- reading


def from_json(path: str | Path) -> Program:
    """Read what `to_json` wrote. Only the text is checked here: `validate.validate` says whether the program can run.

    Raises ProgramError with the file and the place in it for what cannot be read: a file that is missing, is no JSON or
    of another kind; a key that is missing, unknown or there twice; a value of a wrong type; a name of an op, a piece or
    a slice that is none.
    """
    path = Path(path)
    top = Fields(file_content(path), path.name, path.name)
    if not isinstance(top.value, dict) or top.value.get("format") != FORMAT:
        raise ProgramError(f'{path.name} is no program: it must be an object whose "format" is "{FORMAT}".')
    version = top["version"].whole()
    if version != VERSION:
        raise ProgramError(f"{path.name} has version {version} of the format, and {VERSION} is known here.")
    top.only(_KEYS)
    ranks = tuple(_ops(line) for line in top["ranks"].each())
    num_ops = sum(map(len, ranks))
    if not num_ops:
        raise ProgramError(f"{path.name} contains no ops.")
    return Program(
        schedule=top["schedule"].text(),
        stages=_stages(top["stages"]),
        ranks=ranks,
        workload=_workload(top["workload"], num_ops),
        forward_only=top["forward_only"].truth() if "forward_only" in top else False,
        ring=_ring(top["ring"]) if "ring" in top else RingOptions(),
        activations=_activations(top["activations"]) if "activations" in top else {},
        min_offloaded_bytes=top["min_offloaded_bytes"].whole() if "min_offloaded_bytes" in top else 0,
        sharded=top["sharded"].whole() if "sharded" in top else 1,
        gathered_once=top["gathered_once"].truth() if "gathered_once" in top else False,
        kv_blocks=top["kv_blocks"].truth() if "kv_blocks" in top else False,
        pairs=frozenset(op for line in top["pairs"].each() for op in _ops(line)) if "pairs" in top else frozenset(),
        turns=tuple(_ops(line) for line in top["turns"].each()) if "turns" in top else (),
    )


def _ops(line: Fields) -> tuple[Op, ...]:
    ops: list[Op] = []
    cells = line.text().split()
    line.parts.add(len(cells))
    for number, cell in enumerate(cells, start=1):
        try:
            (op,) = parse_cell(cell)
        except ProgramError as error:
            raise ProgramError(f"{line.place}, op {number}: {error}") from None
        except ValueError:  # none or two: a cell of torch's that is derived here
            raise ProgramError(f"{line.place}, op {number}: cell {cell[:40]!r} is not one op, such as 2F5.") from None
        ops.append(op)
    return tuple(ops)


def _stages(listed: Fields) -> tuple[Stage, ...]:
    stages = []
    for entry in listed.each():
        entry.only(("pieces", "placement", "owner", "recompute"))
        stages.append(
            Stage(
                entry["pieces"].pieces(),
                entry["placement"].text() if "placement" in entry else "resident",
                _runs(entry),
                entry["owner"].whole() if "owner" in entry else None,
            )
        )
    if not stages:
        raise ProgramError(f"{listed.place} must list at least one stage.")
    return tuple(stages)


def _runs(entry: Fields) -> tuple[tuple[Piece, ...], ...]:
    """Return what an entry says is recomputed."""
    return tuple(run.pieces() for run in entry["recompute"].each()) if "recompute" in entry else ()


def _ring(entry: Fields) -> RingOptions:
    entry.only(("slots", "gradient_bytes"))
    size = entry["gradient_bytes"].whole()
    if size not in (2, 4):
        raise ProgramError(f"{entry.place}.gradient_bytes must be 2 or 4, not {size}.")
    return RingOptions(entry["slots"].whole(), size)


def _workload(entry: Fields, num_ops: int) -> Workload:
    """num_ops: of the program, which has as many units at most, whatever number the file says."""
    entry.only(("microbatches", "chunks", "lengths", "proportional"))
    microbatches = entry["microbatches"]
    proportional = entry["proportional"].truth() if "proportional" in entry else False
    if isinstance(microbatches.value, list):
        if other := next((key for key in ("chunks", "lengths") if key in entry), None):
            raise ProgramError(f"{entry.place}: {other} has nothing to say where each microbatch lists its chunks.")
        chunks = tuple(tuple(chunk.slices() for chunk in each.each()) for each in microbatches.each())
        return Workload(chunks, proportional)
    if ("chunks" in entry) == ("lengths" in entry):
        raise ProgramError(f"{entry.place} must have microbatches and either chunks or lengths, or a list of chunks.")
    if "proportional" in entry and "chunks" in entry:
        raise ProgramError(f"{entry.place}: chunks are equally long; proportional belongs to lengths.")
    lengths = tuple(length.whole() for length in entry["lengths"].each()) if "lengths" in entry else None
    count, number = entry["chunks"].whole() if lengths is None else len(lengths), microbatches.whole()
    if number * count > num_ops:
        raise ProgramError(f"{entry.place}: {number} microbatches of {count} chunks are more than the {num_ops} ops.")
    try:
        return uniform(number, count, lengths, proportional)
    except ProgramError as error:
        raise ProgramError(f"{entry.place}: {error}") from None


def _activations(listed: Fields) -> dict[Unit, Activations]:
    units: dict[Unit, Activations] = {}
    for entry in listed.each():
        entry.only(("units", "recompute", "offload", "ahead"))
        offload = entry["offload"].each() if "offload" in entry else ()
        ahead = entry["ahead"].whole() if "ahead" in entry else 1
        own = Activations(_runs(entry), tuple(_offloaded(each) for each in offload), ahead)
        for op in _ops(entry["units"]):
            if op.kind != "F":
                raise ProgramError(f"{entry.place}.units: {op} is no forward, whose cell stands for its unit.")
            if op.unit in units:
                raise ProgramError(f"{entry.place}.units: {op} is there twice.")
            units[op.unit] = own
    return units


def _offloaded(entry: Fields) -> tuple[tuple[Piece, ...], float]:
    entry.only(("pieces", "share"))
    return entry["pieces"].pieces(), entry["share"].number()
