"""One rank of a job on a GPU that computes nothing: `python -m megatron.pretrain.dry_run OUTPUT LOAD FLAG …`.

RANK and WORLD_SIZE say which rank of what job, as torchrun does. The training program itself runs, for two steps; it
neither reads nor writes checkpoints and metrics. OUTPUT gets what was counted (`helixpipe.fake_cuda.report`).
LOAD says how experts are used, as the flag --moe-load of `helixpipe simulate` does.
`helixpipe dry-run` starts some ranks so and compares them.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

from helixpipe.costs.expert_loads import ALIKE, ExpertLoads, parse_loads
from helixpipe.costs.hardware import DEFAULT_HARDWARE, HARDWARE
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.fake_cuda.device import FakeDevice, install
from helixpipe.fake_cuda.report import RankReport, StepCount
from helixpipe.fake_cuda.waits import Wait
from helixpipe.program.stages import Piece
from helixpipe.simulate.memory import rank_memory
from megatron.pretrain import launch
from megatron.pretrain.config import Config
from megatron.pretrain.plan.costs import model_shape

STEPS = 2
"""The optimizer's state is there from the second on."""

_EXPERTS = "megatron.core.transformer.moe"

EXPECTED_WAITS = {
    ("an event", "helixpipe.runtime.run_ahead.wait"): "the host is at most four ops ahead of the GPU",
    ("the device", "helixpipe.model.graphs.capture"): "a graph is captured, by torch, when the GPU is idle",
    ("an event", "helixpipe.runtime.recording.begin"): "a step that is watched begins when the GPU is idle",
    ("an event", "helixpipe.runtime.recording.seconds"): "its ops are timed when it has ended",
    ("a copy to the host", "megatron.pretrain.train._finish_step"): "loss, tokens and wishes to stop, once a step",
    ("a number", "megatron.pretrain.train._finish_step"): "the loss scale, for the log, once a step",
    ("a number", "megatron.core.optimizer.clip_grads.get_grad_norm_fp32"): "the norm of the gradients, once a step",
    ("a number", "megatron.core.optimizer.optimizer._unscale_main_grads_and_check_for_nan"): "fp16: is one infinite?",
    ("a copy to the host", "megatron.pretrain.log.log.loads_by_layer"): "the tokens of each expert, once a step",
    (
        "what a mask selects",
        f"{_EXPERTS}.moe_utils.permute",
    ): "megatron-core's permutation of tokens, without TE's kernel",
    ("what a mask selects", f"{_EXPERTS}.token_dispatcher.dispatch_postprocess"): "the same",
    ("an event", f"{_EXPERTS}.token_dispatcher._maybe_dtoh_and_synchronize"): "how many tokens travel to experts",
    ("a copy to the host", f"{_EXPERTS}.token_dispatcher.dispatch_postprocess"): "the same, where all ranks have all",
    ("a copy to the device", "megatron.pretrain.process.signals.agree"): "whether to stop, or to clip, once a step",
    ("a number", "megatron.pretrain.process.signals.agree"): "the same",
}
"""What a step may wait for the GPU with, by what and innermost function, and why."""


def run_rank(
    device: FakeDevice, flags: Sequence[str], report: RankReport, steps: int = STEPS, load: str = ALIKE
) -> int:
    """Train for some steps on the fake device, and fill the report. load: how experts are used, as --moe-load says.
    Returns the exit status; after a failure the process ends, as it does in training."""

    def work(config: Config, plans: Any, started: float) -> None:
        config = _without_files(config, steps)
        loads = _loads(config, load)
        device.join(config.launch.rank, config.launch.world_size, _others(device, config, plans))
        from helixpipe.model.device import prepare

        prepare()  # before what is replaced imports megatron-core
        from helixpipe.fake_cuda.experts import routed
        from helixpipe.model.experts.layer import ExpertLayer

        choosing = routed(device.module, model_shape(config), loads, ExpertLayer)
        with _alone(), _counted(device, report), choosing:
            from megatron.pretrain.pretrain import pretrain

            pretrain(config, plans, started)
        _predict(config, plans, report, loads)

    return launch.run(time.monotonic(), flags, work)


def _loads(config: Config, load: str) -> ExpertLoads:
    """Return how experts are used. Raises UserError, where it is said, for a model without any or with others."""
    loads = parse_loads(load)
    if load != ALIKE:
        loads.check(model_shape(config), load)
    return loads


def _without_files(config: Config, steps: int) -> Config:
    """Return the configuration of a run that ends after so many steps and leaves nothing behind."""
    config = config.replace("checkpoint", save=None, load=None, save_interval=None, in_memory_checkpoint_interval=None)
    config = config.replace(
        "logging", tensorboard_dir=None, wandb_project=None, record_timeline=None, timeline_png=None, eval_interval=None
    )
    return config.replace("data", num_workers=0).replace("training", exit_interval=steps)


def _others(device: FakeDevice, config: Config, plans: Any) -> Callable[[Any, int], Any]:
    """Return what another rank gives where this one gives its group, or its pieces; all else is alike on all ranks."""

    def others(value: Any, rank: int) -> Any:
        if not isinstance(value, tuple) or not value:
            return value
        if all(isinstance(each, int) for each in value):
            return device.groups.beside(value, rank) or value
        if all(isinstance(each, Piece) for each in value):
            from megatron.core import parallel_state

            from megatron.pretrain.plan.programs import full_batch

            pipeline = list(parallel_state._PIPELINE_GLOBAL_RANKS)
            return plans.program(full_batch(config)).pieces_of_rank(pipeline.index(rank))
        return value

    return others


@contextmanager
def _alone() -> Iterator[None]:
    """Without the other ranks: what the first one does for all, this one does for itself."""
    from megatron.pretrain.data.together import AllRanks
    from megatron.pretrain.plan import plan_stream
    from megatron.pretrain.process.signals import all_ranks_max

    def own_maximum(device: Any, group: Any = None) -> Callable[[int], int]:
        """As `all_ranks_max`, which still asks all ranks: the device would have lost the number."""
        ask = all_ranks_max(device, group)
        return lambda number: max(number, ask(number))

    class OwnPlans:
        plans_here = True

        def __init__(self, parallel: Any, together: bool):
            pass

        def send(self, plan: Any) -> Any:
            return plan

    replaced = (
        ("megatron.pretrain.process.parallel.check_master", lambda **wait: None),
        ("megatron.pretrain.checkpoint.ranks.on_first", lambda action, where: action()),
        ("megatron.pretrain.process.signals.all_ranks_max", own_maximum),
    )
    with ExitStack() as stack:
        for name, value in replaced:
            stack.enter_context(mock.patch(name, value))
        stack.enter_context(mock.patch.object(AllRanks, "of_job", classmethod(lambda cls: cls(None, 0, 1))))
        stack.enter_context(mock.patch.object(plan_stream, "_Groups", OwnPlans))
        yield


@contextmanager
def _counted(device: FakeDevice, report: RankReport) -> Iterator[None]:
    """Count what each step allocates, asks process groups for and waits for."""
    from helixpipe.runtime.receive_buffers import ReceiveBuffers
    from megatron.pretrain.train import Trainer

    fake, iteration = device.module, Trainer._iteration
    take, end_step = ReceiveBuffers.take, ReceiveBuffers.end_step
    for_messages = at_once = 0

    def counted_take(buffers: ReceiveBuffers, *arguments: Any) -> Any:
        nonlocal for_messages, at_once
        before = fake.allocations()
        tensor = take(buffers, *arguments)
        for_messages += fake.allocations() - before
        at_once = max(at_once, buffers.used)
        return tensor

    def counted_end(buffers: ReceiveBuffers) -> None:
        nonlocal for_messages
        before = fake.allocations()
        end_step(buffers)
        for_messages += fake.allocations() - before

    def counted(trainer: Trainer, record: bool) -> Any:
        if report.start is None:
            report.pipeline_rank = trainer.parallel.pp_rank
            report.start, report.before = device.take_calls(), fake.allocated()
        nonlocal at_once
        device.take_waits()
        fake.reset_peak()
        at_once = 0
        before = fake.allocations(), for_messages
        result = iteration(trainer, record)
        made = fake.allocations() - before[0], for_messages - before[1]
        count = StepCount(fake.peak(), fake.allocated(), *made, at_once, device.take_calls())
        for wait, number in device.take_waits().items():
            if unexpected(wait):
                count.waits[str(wait)] += number
        report.steps.append(count)
        return result

    with (
        mock.patch.object(Trainer, "_iteration", counted),
        mock.patch.object(ReceiveBuffers, "take", counted_take),
        mock.patch.object(ReceiveBuffers, "end_step", counted_end),
    ):
        yield


def unexpected(wait: Wait) -> bool:
    """Whether a step should not wait so. What threads beside the main one do holds nobody up."""
    return wait.main and (wait.what, wait.where) not in EXPECTED_WAITS


def _predict(config: Config, plans: Any, report: RankReport, loads: ExpertLoads) -> None:
    """Report whether the step fits, and the predicted memory with what this rank's own experts get."""
    from megatron.core import parallel_state

    from megatron.pretrain.plan.programs import full_batch, step_verdict

    report.gpu = HARDWARE[config.parallel.hardware or DEFAULT_HARDWARE].memory
    plan, report.verdict = plans.plan(full_batch(config)), step_verdict(config, plans)
    if isinstance(plan.costs, ModelCosts):
        group = parallel_state.get_expert_model_parallel_group()
        model = plan.costs.model
        load = loads.share(model.experts, model.topk, group.size(), group.rank())
        costs = replace(plan.costs, layout=replace(plan.costs.layout, expert_load=load))
        report.predicted = rank_memory(plan.lowered, costs, report.pipeline_rank)


def gpu_of(flags: Sequence[str]) -> dict[str, Any]:
    """Return the fields of `cuda.Gpu` for the GPU that --hardware names, which reading the flags will check."""
    named = [after for word, after in pairwise(flags) if word == "--hardware"]
    named += [word.partition("=")[2] for word in flags if word.startswith("--hardware=")]
    hardware = HARDWARE.get(named[-1] if named else DEFAULT_HARDWARE) or HARDWARE[DEFAULT_HARDWARE]
    ampere = hardware.generation == "ampere"
    return {
        "name": hardware.device,
        "memory": int(hardware.memory),
        "processors": {"ampere": 108, "h20": 78}.get(hardware.generation, 132),
        "capability": (8, 0) if ampere else (9, 0),
    }


def main(arguments: Sequence[str]) -> int:
    """Run a rank and write its report. Returns the exit status."""
    started = time.monotonic()
    output, load, *flags = arguments
    report = RankReport(launch_rank())
    device = install(**gpu_of(flags))
    logging.getLogger("torch.utils.flop_counter").setLevel(logging.ERROR)  # no triton for GPUs that compute nothing
    status = run_rank(device, flags, report, load=load)
    report.seconds = time.monotonic() - started
    if report.steps:
        report.save(Path(output))
    return status


def launch_rank() -> int:
    from megatron.pretrain.config.parallel import LaunchConfig

    return LaunchConfig.from_environment().rank


if __name__ == "__main__":
    from helixpipe.common.command import run_command

    sys.exit(run_command("helixpipe", lambda: main(sys.argv[1:])))
