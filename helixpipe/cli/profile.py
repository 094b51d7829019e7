"""The tables of `helixpipe profile`; and what `simulate --profile` prints."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from helixpipe.cli.model import ModelOptions
from helixpipe.cli.options import CostOptions
from helixpipe.cli.profile_options import ProfileOptions
from helixpipe.common.errors import UserError
from helixpipe.costs.efficiency import fitted, reached
from helixpipe.costs.hardware import TERA, Hardware, find_device, find_hardware
from helixpipe.costs.profile_costs import Profile, ProfileCosts
from helixpipe.draw.table import figure_lines, table
from helixpipe.draw.text import MAX_RANK_LINES, shape_line
from helixpipe.program.stages import VARIANTS, LayerKinds
from helixpipe.simulate.simulator import Simulation

MIB = 2**20
_KINDS = ("F", "I", "W", "B")


def hardware_measured(options: ProfileOptions, measured: Profile) -> Hardware | None:
    """Return the hardware to which the measured shares refer: --hardware, or the machine's. Raises UserError."""
    if options.hardware is not None:
        return find_hardware(options.hardware)
    return find_device(str(measured.machine.get("device")))


def efficiency_table(measured: Profile, hardware: Hardware) -> str:
    """Percent of the peak FLOP/s by piece and op kind, and the shares that `simulate --efficiency-from` takes."""
    shares = reached(measured, hardware)
    cells = [
        (piece, [f"{100 * by_kind[kind]:.1f}" if kind in by_kind else "-" for kind in _KINDS])
        for piece, by_kind in shares.items()
    ]
    fit = fitted(measured, hardware).efficiency
    return "\n".join(
        [
            f"Percent of the {hardware.flops / TERA:.0f} TFLOP/s (bfloat16) of {hardware.name}, as executed:",
            _by_kind(cells),
            f"As simulate --efficiency-from takes it: matrix products {100 * fit.matmul:.3g} %, attention "
            f"{100 * fit.attention:.3g} %, memory {100 * fit.memory:.3g} %",
        ]
    )


def _by_kind(rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Return a table with a column for each kind of op."""
    named = [("piece", _KINDS), *rows]
    headers, *cells = [(name, *(cell.rjust(9) for cell in values)) for name, values in named]
    return table(headers, cells)


def _layer_name(layer: LayerKinds) -> str:
    """Return `a layer`, or `a layer of attn.window` with the pieces that a plain layer does not have."""
    return " ".join(["a layer", *(["of", *own] if (own := [each for each in layer if each in VARIANTS]) else [])])


def profile_table(measured: Profile) -> str:
    """Return the milliseconds of every piece and op kind, of a layer and of an op beside its pieces; messages."""
    (times, *_) = measured.chunks
    rows = [(piece, [times.pieces[piece][kind] for kind in _KINDS]) for piece in measured.model.kinds]
    for layer in dict.fromkeys(measured.model.kinds_of(measured.model.layers)):
        rows.append((_layer_name(layer), [sum(times.pieces[piece][kind] for piece in layer) for kind in _KINDS]))
    rows += [("beside pieces", [times.overhead[kind] for kind in _KINDS])]
    cells = [(name, [f"{1000 * value:.3f}" for value in values]) for name, values in rows]
    messages = measured.messages
    return "\n".join(
        [
            _measured_line(measured),
            "",
            "Milliseconds of a microbatch: forward F, gradient of inputs I, of weights W, both at once B",
            _by_kind(cells),
            f"message over {messages.backend}: {1e6 * messages.latency:.0f} µs and its bytes at "
            f"{messages.bandwidth / 1e9:.2f} GB/s; of its ranks' time {_exchange(messages.send)} to send, "
            f"{_exchange(messages.receive)} to receive",
            *_copies_line(measured),
        ]
    )


def _copies_line(measured: Profile) -> list[str]:
    copies = measured.copies
    if copies is None:
        return []
    (out, out_both), (inward, inward_both) = (
        [f"{value / 1e9:.2f}" for value in way] for way in (copies.out, copies.inward)
    )
    return [
        f"copy to the host: {1e6 * copies.latency:.0f} µs and its bytes at {out} GB/s, back at {inward}; both at once "
        f"{out_both} and {inward_both}"
    ]


def _exchange(cost: tuple[float, float]) -> str:
    return f"{1e6 * cost[0]:.0f} µs + {1e12 * cost[1]:.0f} µs/MB"


def _measured_line(measured: Profile) -> str:
    model, layout, assumed = measured.model, measured.layout, measured.assumed
    return (
        f"{model.name}: hidden {model.hidden}, {model.heads} heads, {model.groups} groups, ffn {model.ffn}, "
        f"vocabulary {model.vocab}; {measured.seq_length} tokens,\n"
        f"micro batch {layout.micro_batch_size}, {measured.dtype}; measured on {measured.machine.get('device', '?')}, "
        f"processes at once {assumed.get('processes', '?')}, threads {assumed.get('threads', '?')}, "
        f"torch {measured.torch}"
    )


def profile_costs(namespace: argparse.Namespace) -> ProfileCosts | None:
    """Return the costs of --profile, None when it is not given. Raises UserError beside flags that give costs
    otherwise.
    """
    if getattr(namespace, "profile", None) is None:
        return None
    for cls in (ModelOptions, CostOptions):
        for field in dataclasses.fields(cls):
            if field.name in ("profile", "forward_only"):
                continue
            if getattr(namespace, field.name, field.default) != field.default:
                flag = field.metadata["flags"][0] if field.metadata["flags"] else "--" + field.name.replace("_", "-")
                raise UserError(f"{flag} cannot be given beside --profile, whose file has a model and its costs.")
    return ProfileCosts(Profile.load(namespace.profile))


def simulation_text(simulation: Simulation, costs: ProfileCosts) -> str:
    """Return the text that `simulate --profile` prints."""
    measured, program = costs.profile, simulation.lowered.program
    tokens = program.num_microbatches * measured.layout.micro_batch_size * measured.seq_length
    scope = "forward only" if program.forward_only else "forward and backward, without reduction and optimizer"
    figures = [
        ("step time", _milliseconds(simulation.makespan), scope),
        ("throughput", f"{tokens / simulation.makespan:.0f}", "tokens a second"),
        ("ideal", _milliseconds(simulation.ideal), "total work / ranks"),
        ("bubble", _milliseconds(simulation.bubble_time), f"{100 * simulation.bubble_ratio:.1f} % of the makespan"),
        ("messages", str(len(simulation.lowered.messages)), "between ranks"),
    ]
    lines = figure_lines(figures)
    return "\n".join(
        [
            shape_line(simulation),
            _measured_line(measured),
            "",
            "Simulated from measured pieces:",
            *lines,
            "",
            *_rank_lines(simulation, costs),
        ]
    )


def _rank_lines(simulation: Simulation, costs: ProfileCosts) -> list[str]:
    """Return a line for each rank; of many ranks, only those that keep least and most."""
    program = simulation.lowered.program
    ranks = list(range(program.num_ranks))
    if len(ranks) > MAX_RANK_LINES:
        ranks.sort(key=lambda rank: simulation.peak_activation[rank])
        ranks = [ranks[0], ranks[-1]]
    lines = ["rank     busy   kept for backward   weights, gradients, Adam   (MiB)"]
    for rank in ranks:
        busy = 100 * simulation.busy[rank] / (simulation.makespan or 1.0)
        kept = simulation.peak_activation[rank] / MIB
        fixed = costs.static_memory(program.pieces_of_rank(rank)) / MIB
        lines.append(f"{rank:>4}  {busy:>5.1f} %  {kept:>18.1f}  {fixed:>25.1f}")
    return lines


def simulation_json(costs: ProfileCosts, path: str) -> dict[str, Any]:
    """Return the entries that `simulate --profile --json` adds."""
    measured = costs.profile
    return {
        "unit": "s",
        "profile": {
            "file": path,
            "model": measured.model.name,
            "seq_length": measured.seq_length,
            "micro_batch_size": measured.layout.micro_batch_size,
            "dtype": measured.dtype,
        },
    }


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.4g} ms"
