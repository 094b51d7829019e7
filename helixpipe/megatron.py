"""NVIDIA's Megatron-LM, its script unmodified, with a schedule of the catalogue:

    torchrun --nproc-per-node 8 -m helixpipe.megatron pretrain_gpt.py … --pipeline-schedule zb1p

All flags but ours go to the script, which finds our engine where it asks megatron-core for `get_forward_backward_func`.
Where a schedule places its stages otherwise than megatron-core (V shapes: two virtual stages a rank, the head on the
first), megatron-core's `is_pipeline_first_stage` and `is_pipeline_last_stage` say so of a virtual stage, by which
Megatron-LM builds its model's chunks and reads data.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from helixpipe.common.command import run_command
from helixpipe.common.errors import ScheduleError, UserError
from helixpipe.common.flags import add_dataclass_arguments, dataclass_from_namespace
from helixpipe.program.files import is_file, load_program
from helixpipe.program.program import Program
from schedules import CATALOGUE, Shape, build

_USAGE = "python -m helixpipe.megatron pretrain_gpt.py (its flags) --pipeline-schedule NAME_OR_FILE"


def main(arguments: Sequence[str]) -> int:
    """Run a script of Megatron-LM's as `python SCRIPT` would, in this process; returns the exit status."""
    return run_command("helixpipe", lambda: _run(list(arguments)))


def _run(arguments: list[str]) -> int:
    script, schedule, options, theirs = split_arguments(arguments)
    sys.path.insert(0, str(script.resolve().parent))  # as python does for a script, before megatron-core is imported
    from helixpipe.model.device import prepare

    prepare()  # megatron-core must be imported quietly and, without CUDA, made to run on the CPU
    _install(schedule, options)
    sys.argv = [str(script), *theirs]
    runpy.run_path(str(script), run_name="__main__")
    return 0


def split_arguments(arguments: Sequence[str]) -> tuple[Path, str, Any, list[str]]:
    """Return the script, the schedule, its own options and the flags that are the script's.

    Raises UserError for a command without a script or schedule, ScheduleError for one that Megatron-LM's model cannot
    run.
    """
    if not arguments or arguments[0].startswith("-"):
        raise UserError(f"the script must come first: {_USAGE}.")
    script = Path(arguments[0])
    if not script.is_file():
        raise UserError(f"there is no script {script}; start in Megatron-LM's checkout: {_USAGE}.")
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--pipeline-schedule")
    given, theirs = parser.parse_known_args(arguments[1:])
    name = given.pipeline_schedule
    if name is None:
        raise UserError(f"give --pipeline-schedule: {_USAGE}.")
    if is_file(name):
        return script, name, None, theirs
    schedule = CATALOGUE.find(name)
    if schedule.chunks or schedule.spread:
        why = "cuts sequences into chunks" if schedule.chunks else "has stages on several ranks"
        raise ScheduleError(
            f"schedule {name} {why}, which Megatron-LM's model cannot do; train with this project's: torchrun "
            f"pretrain_gpt.py of helixpipe's checkout, with the same flags and --pipeline-schedule {name}."
        )
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_dataclass_arguments(options, schedule.options)
    own, theirs = options.parse_known_args(theirs)
    return script, name, dataclass_from_namespace(schedule.options, own), theirs


def _install(name: str, options: Any) -> None:
    """Put the engine in place of megatron-core's, for all that is imported from now on."""
    import megatron.core.pipeline_parallel as pipeline_parallel
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import schedules

    from schedules.drop_in import get_forward_backward_func

    own = {} if options is None else vars(options)
    engine = get_forward_backward_func(name, **own)

    def get_engine(*sizes: Any, **named_sizes: Any) -> Any:
        """Return the one engine, which keeps communicators and lowered programs, whatever sizes are asked for."""
        return engine

    pipeline_parallel.get_forward_backward_func = schedules.get_forward_backward_func = get_engine
    parallel_state.is_pipeline_first_stage = _placed(parallel_state.is_pipeline_first_stage, name, options, last=False)
    parallel_state.is_pipeline_last_stage = _placed(parallel_state.is_pipeline_last_stage, name, options, last=True)


def _placed(original: Callable[..., bool], name: str, options: Any, last: bool) -> Callable[..., bool]:
    """Return megatron-core's question anew: of a virtual stage, whether the schedule has the first or last there."""
    from megatron.core import parallel_state

    @lru_cache
    def program(ranks: int, virtual: int) -> Program:
        return _program(name, options, ranks, virtual)

    def is_pipeline_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
        virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
        if ignore_virtual or vp_stage is None or virtual is None:
            return original(ignore_virtual, vp_stage)
        placed = program(parallel_state.get_pipeline_model_parallel_world_size(), virtual)
        here = sorted({op.stage for op in placed.ranks[parallel_state.get_pipeline_model_parallel_rank()]})
        if len(here) != virtual:
            raise UserError(
                f"schedule {name} has {len(here)} stages a rank; give --num-virtual-stages-per-pipeline-rank "
                f"{len(here)}."
            )
        return here[vp_stage] == (len(placed.stages) - 1 if last else 0)

    return is_pipeline_stage


def _program(name: str, options: Any, ranks: int, virtual: int) -> Program:
    """A program whose placement is that of every step."""
    if is_file(name):
        return load_program(name)
    schedule = CATALOGUE[name]
    interleaved = virtual if schedule.virtual_stages else None
    layers = ranks * schedule.stages_of(interleaved)
    return build(name, Shape(ranks, 2 * ranks, layers, virtual_stages=interleaved), options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
