"""NVIDIA's Megatron-LM, its script unmodified, with a schedule of the catalogue:

    torchrun --nproc-per-node 8 -m helixpipe.megatron pretrain_gpt.py … --pipeline-schedule zb1p

All flags but ours go to the script, which finds our engine where it asks megatron-core for `get_forward_backward_func`.
Ours are `--pipeline-schedule` with the schedule's own, those that cut sequences into chunks (`--pipe-sp-splits`,
`--pipe-sp-strategy`, `--chunk-lengths`, `--chunk-alignment`) and those of offloading (`--offload-activations` with a
share, and `--min-offloaded-tensor-size` beside it).
Where a schedule places its stages otherwise than megatron-core (V shapes: two virtual stages a rank, the head on the
first), `helixpipe.drop_in.placement` lets megatron-core build and number the model's chunks there.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from helixpipe.common.command import run_command
from helixpipe.common.errors import ScheduleError, UserError
from helixpipe.common.flags import FlagParser, add_dataclass_arguments, dataclass_from_namespace
from helixpipe.common.output import complain
from helixpipe.costs.by_hand import PieceTimes
from helixpipe.planning.memory.offload import OffloadOptions
from helixpipe.planning.order.chunk_options import ChunkOptions
from helixpipe.program.files import is_file, load_program
from helixpipe.program.program import Program
from schedules import CATALOGUE

_USAGE = "python -m helixpipe.megatron pretrain_gpt.py (its flags) --pipeline-schedule NAME_OR_FILE"


_OF_BOTH = ("--microbatch-group-size-per-virtual-pipeline-stage",)
"""Flags of schedules that Megatron-LM has as well."""


class Command(NamedTuple):
    """What a command line asks for. settings: arguments of `schedules.drop_in.get_forward_backward_func`, beside the
    schedule's name. script_flags: those that are the script's.
    """

    script: Path
    schedule: str
    settings: dict[str, Any]
    script_flags: list[str]


def main(arguments: Sequence[str]) -> int:
    """Run a script of Megatron-LM's as `python SCRIPT` would, in this process; returns the exit status."""
    return run_command("helixpipe", lambda: _run(list(arguments)))


def _run(arguments: list[str]) -> int:
    command = parse(arguments)
    folder = str(command.script.resolve().parent)
    sys.path.insert(0, folder)  # as python does for a script, before megatron-core is imported
    from helixpipe.model.device import prepare
    from helixpipe.model.releases import untested

    prepare()  # megatron-core must be imported quietly and, without CUDA, made to run on the CPU
    from megatron.core import __version__

    for sentence in untested(__version__) if os.environ.get("RANK", "0") == "0" else ():
        complain(f"WARNING: {sentence}")
    _install(command)
    sys.argv = [str(command.script), *command.script_flags]
    runpy.run_path(str(command.script), run_name="__main__")
    return 0


def parse(arguments: Sequence[str]) -> Command:
    """Take our flags out of a command line.

    Raises UserError for a command without a script or schedule, or with flags of ours that cannot be; ScheduleError for
    a schedule that Megatron-LM's model cannot run.
    """
    if not arguments or arguments[0].startswith("-"):
        raise UserError(f"the script must come first: {_USAGE}.")
    script = Path(arguments[0])
    if not script.is_file():
        raise UserError(f"there is no script {script}; start in Megatron-LM's checkout: {_USAGE}.")
    parser = FlagParser(add_help=False)
    parser.add_argument("--pipeline-schedule")
    add_dataclass_arguments(parser, ChunkOptions)
    parser.add_argument("--offload-activations", metavar="SHARE")
    given, theirs = parser.parse_known_args(arguments[1:])
    name = given.pipeline_schedule
    if name is None:
        raise UserError(f"give --pipeline-schedule: {_USAGE}.")
    made_for_chunks = not is_file(name) and CATALOGUE.find(name).chunks
    settings = _cutting(dataclass_from_namespace(ChunkOptions, given).finding(made_for_chunks), theirs)
    if given.offload_activations is not None:
        settings["offload"], theirs = _offloading(given.offload_activations, theirs)
    if is_file(name):
        load_program(name)  # whether it can be read is told before the model is built
    else:
        schedule = CATALOGUE.find(name)
        if schedule.spread:
            raise ScheduleError(
                f"schedule {name} has stages on several ranks, which Megatron-LM's model cannot do; train with this "
                "project's: torchrun pretrain_gpt.py of helixpipe's checkout, with the same flags and "
                f"--pipeline-schedule {name}."
            )
        options = FlagParser(add_help=False)
        add_dataclass_arguments(options, schedule.options)
        own, theirs = options.parse_known_args(theirs)
        settings |= vars(dataclass_from_namespace(schedule.options, own))
    _check_foreign(theirs, name)
    return Command(script, name, settings, theirs)


def _check_foreign(theirs: Sequence[str], name: str) -> None:
    """Raise ScheduleError for an option of another schedule, which the script would not know."""
    parser = FlagParser(add_help=False)
    for schedule in CATALOGUE.values():
        add_dataclass_arguments(parser, schedule.options)
    chosen = [] if is_file(name) else [CATALOGUE[name]]
    given = {option: flag for option, flag in parser.given(theirs).items() if flag not in _OF_BOTH}
    for sentence in CATALOGUE.foreign_options(given, chosen):
        raise ScheduleError(sentence)


def _cutting(options: ChunkOptions, theirs: Sequence[str]) -> dict[str, Any]:
    """Return the number of chunks and their lengths, as equal in time as the script's flags say how. Raises UserError.

    With no --seq-length and --hidden-size among the flags (they may be in a file) chunks are equally long.
    """
    if options.auto:
        raise UserError(
            "--pipe-sp-splits must be a number here, such as 4: auto needs this project's trainer, which knows how "
            "long chunks take."
        )
    chunks = options.count()
    if chunks is None or chunks == 1:
        return {} if chunks is None else {"chunks": 1}
    parser = FlagParser(add_help=False)
    for flag in ("seq_length", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels"):
        parser.add_argument("--" + flag.replace("_", "-"), type=int)
    for flag in ("num_query_groups", "tensor_model_parallel_size"):
        parser.add_argument("--" + flag.replace("_", "-"), type=int, default=0)
    parser.add_argument("--swiglu", action="store_true")
    parser.add_argument("--sequence-parallel", action="store_true")
    sizes, _ = parser.parse_known_args(list(theirs))
    lengths = options.lengths
    if lengths is None and sizes.seq_length is not None:
        unit = max(sizes.tensor_model_parallel_size, 1) if sizes.sequence_parallel else 1
        lengths = options.resolve(chunks, _times(sizes), 1, sizes.seq_length, unit)
    elif lengths is None and options.pipe_sp_strategy == "uniform_comp":
        raise UserError(
            "--pipe-sp-strategy uniform_comp needs --seq-length and --hidden-size among the script's flags."
        )
    return {"chunks": chunks} if lengths is None else {"chunks": chunks, "chunk_lengths": lengths}


def _times(sizes: argparse.Namespace) -> PieceTimes:
    """Return the times of a layer of these sizes in operations: linear ones by tokens, attention by pairs of tokens."""
    if sizes.hidden_size is None:
        return PieceTimes(forward={"mlp": 1.0})
    hidden, heads, tokens = sizes.hidden_size, sizes.num_attention_heads or 1, sizes.seq_length
    channels = (sizes.kv_channels or hidden // heads) * heads
    keys = channels // heads * (sizes.num_query_groups or heads)
    ffn = (sizes.ffn_hidden_size or 4 * hidden) * (3 if sizes.swiglu else 2)
    linear = 2 * hidden * (2 * channels + 2 * keys + ffn)
    return PieceTimes(forward={"mlp": float(tokens * linear), "attn": float(2 * tokens * tokens * channels)})


def _offloading(share: str, theirs: Sequence[str]) -> tuple[OffloadOptions, list[str]]:
    """Return the options of offloading and the flags that are left. Raises UserError."""
    parser = FlagParser(add_help=False)
    parser.add_argument("--min-offloaded-tensor-size", type=int, default=OffloadOptions.min_offloaded_tensor_size)
    sizes, left = parser.parse_known_args(list(theirs))
    options = OffloadOptions(share, min_offloaded_tensor_size=sizes.min_offloaded_tensor_size)
    options.check()
    if options.auto:
        raise UserError(
            "--offload-activations auto needs this project's trainer, which knows the model's memory; give a share "
            "from 0 to 1."
        )
    return options, left


def _install(command: Command) -> None:
    """Put the engine in place of megatron-core's, for all that is imported from now on."""
    import megatron.core.pipeline_parallel as pipeline_parallel
    from megatron.core.pipeline_parallel import schedules

    from helixpipe.drop_in import placement
    from schedules.drop_in import get_forward_backward_func

    engine = get_forward_backward_func(command.schedule, **command.settings)

    @lru_cache
    def placed(ranks: int, virtual: int) -> Program:
        """Return a program whose placement is that of every step."""
        name = command.schedule
        return load_program(name) if is_file(name) else engine.program(ranks, 2 * ranks, virtual)

    def get_engine(*sizes: Any, **named_sizes: Any) -> Any:
        """Return the one engine, which keeps communicators and lowered programs, whatever sizes are asked for."""
        return engine

    pipeline_parallel.get_forward_backward_func = schedules.get_forward_backward_func = get_engine
    placement.install(placement.stages_of_rank(placed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
