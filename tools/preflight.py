"""Tells what a run will take, and whether its network is well, before it starts.

    torchrun --nproc-per-node 8 tools/preflight.py …                             # on every node
    WORLD_SIZE=64 LOCAL_WORLD_SIZE=8 python tools/preflight.py --preflight-predict-only …   # anywhere, without torch

It takes the flags of pretrain_gpt.py, and a few of its own. First it prints the step's time, memory and bubble as
`helixpipe simulate` would, for exactly these flags. Then the ranks that exchange messages in the schedule's program
send to each other, over the backend of the run: all pairs of a round at once, as in training, both directions in turn.
Links slower than their peers are named, and so is one that carries nothing, within --preflight-timeout and the time of
its round. The exit status is 0 when all links carry messages, 1 when one does not, 2 for flags that are wrong.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere, installed or not

from helixpipe.cli.model import ModelOnCluster
from helixpipe.cli.model_report import report as step_report
from helixpipe.cli.model_report import step_text
from helixpipe.cli.profile import simulation_text
from helixpipe.common.command import run_command
from helixpipe.common.errors import UserError
from helixpipe.common.flags import FlagParser, add_dataclass_arguments, dataclass_from_namespace, option
from helixpipe.common.output import complain, say
from helixpipe.costs.hardware import DEFAULT_HARDWARE, GIGA, Hardware, find_hardware
from helixpipe.costs.profile_costs import ProfileCosts
from helixpipe.draw.style import count
from helixpipe.lowering.project import LoweredProgram
from helixpipe.planning.plan import Plans
from helixpipe.simulate.simulator import simulate
from megatron.pretrain.arguments import parse_and_plan
from megatron.pretrain.config import Config
from megatron.pretrain.config.parallel import whole_variable
from megatron.pretrain.launch import saved_arguments
from megatron.pretrain.plan.costs import explicit_limit, training_costs
from megatron.pretrain.plan.programs import full_batch, make_planner
from megatron.pretrain.process.once import tell
from megatron.pretrain.process.slurm import adopt_task
from megatron.pretrain.validation import check_device

if TYPE_CHECKING:  # the prediction does without torch
    import torch

    from tools.links import Check, Pair, Store


class Network(NamedTuple):
    """The measured network of a node. gbps: Gb/s over all its adapters; adapters: None for one a GPU."""

    gbps: float
    adapters: int | None = None

    def of(self, hardware: Hardware) -> Hardware:
        """Return the hardware with this network, all of whose bandwidth is reached; NVLink is unchanged."""
        reached = hardware.efficiency.network
        return dataclasses.replace(
            hardware,
            nvlink=hardware.nvlink * reached,
            network=self.gbps / 8 * GIGA,
            adapters=self.adapters or hardware.gpus_per_node,
            efficiency=dataclasses.replace(hardware.efficiency, network=1.0),
        )


@dataclass(frozen=True)
class PreflightOptions:
    """The flags that are not pretrain_gpt.py's."""

    preflight_seconds: float = option(30.0, "Seconds of sending, over all rounds and both directions.")
    preflight_timeout: float = option(60.0, "Seconds a link has to come up, and ranks to meet, before they are dead.")
    preflight_slow: float = option(0.5, "Name links that carry less than this share of the median.")
    preflight_fail_on_slow: bool = option(False, "Exit with 1 when a link is slow, too.")
    preflight_predict_only: bool = option(False, "Print the prediction and end.")
    preflight_network_bandwidth: float | None = option(
        None,
        "Gb/s that a node really sends to other nodes, over all its adapters, for the prediction (default: as "
        "--hardware has).",
        metavar="GBPS",
    )
    preflight_network_adapters: int | None = option(
        None, "Adapters that share that evenly (default: one a GPU).", at_least=1, at_most=1024
    )
    preflight_network: float | None = option(None, "Refused: it was in GB/s of a GPU.", metavar="X")
    preflight_compare: tuple[str, ...] = option(
        (), "Simulate these schedules too, with the same flags.", nargs="+", metavar="NAME"
    )

    preflight_fastest: bool = option(
        False, "Print the name alone of the fastest of --preflight-compare that fits into the memory, and end."
    )

    def __post_init__(self) -> None:
        if self.preflight_network is not None:
            raise UserError(
                f"--preflight-network {self.preflight_network:g} was in GB/s of a GPU: give "
                f"--preflight-network-bandwidth in Gb/s of a node, {8 * self.preflight_network:g} for each of its GPUs."
            )
        if self.preflight_network_adapters is not None and self.preflight_network_bandwidth is None:
            raise UserError("--preflight-network-adapters needs --preflight-network-bandwidth.")
        for name in ("preflight_seconds", "preflight_timeout", "preflight_network_bandwidth"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UserError(f"--{name.replace('_', '-')} must be a number above 0, not {value:g}.")
        if not 0 <= self.preflight_slow < 1:
            raise UserError(f"--preflight-slow {self.preflight_slow:g} must be at least 0 and below 1.")

    @property
    def network(self) -> Network | None:
        """The network that is given."""
        if self.preflight_network_bandwidth is None:
            return None
        return Network(self.preflight_network_bandwidth, self.preflight_network_adapters)


# ----------------------------------------------------------------------------------------------------------- prediction


@dataclass(frozen=True)
class Prediction:
    """A step on paper. step_time: seconds; text: what `helixpipe simulate` says of it. fits: into the memory, where it
    is known how much there is."""

    lowered: LoweredProgram
    step_time: float
    text: str
    fits: bool = True


def predict(config: Config, plans: Plans[int], gpus_per_node: int, network: Network | None) -> Prediction:
    """Predict the configured step, which is among the plans. gpus_per_node: 0 for as many as --hardware has. network:
    in place of the hardware's.
    """
    lowered, costs = plans.plan(full_batch(config)).lowered, training_costs(config)  # as training does
    if isinstance(costs, ProfileCosts):
        simulation = simulate(lowered, costs, unit="s")
        return Prediction(lowered, simulation.makespan, simulation_text(simulation, costs))
    per_node = max(gpus_per_node or costs.hardware.gpus_per_node, costs.layout.tensor_parallel)
    hardware = dataclasses.replace(costs.hardware, gpus_per_node=per_node)
    if network is not None:
        hardware = network.of(hardware)
    costs = dataclasses.replace(costs, hardware=hardware)
    program, nodes = lowered.program, max(1, config.launch.world_size // per_node)
    plan = ModelOnCluster(
        costs, program.num_ranks, program.num_microbatches, costs.model.layers, nodes, explicit_limit(config)
    )
    step = step_report(simulate(lowered, costs, unit="s"), plan)
    return Prediction(lowered, step.step_time, step_text(step), step.fits)


def planned(flags: Sequence[str]) -> tuple[Config, Plans[int]]:
    """Return the configuration and plans of the training program, which knows the model of a checkpoint
    that is loaded.
    """
    try:
        return parse_and_plan(flags, load_checkpoint_args=saved_arguments)
    except ModuleNotFoundError as error:
        raise UserError(f"--load needs {error.name}, which is not installed here: leave --load out.") from None


def compare(flags: Sequence[str], schedules: Sequence[str], gpus_per_node: int, network: Network | None) -> str:
    """Return a line for each schedule: seconds of its step with these flags, or why it cannot run with them."""
    lines = []
    for name in schedules:
        try:
            chosen = planned([*flags, "--pipeline-schedule", name])
            step_time = predict(*chosen, gpus_per_node, network).step_time
            lines.append(f"  {name:<20} {step_time:8.4g} s a step, simulated")
        except UserError as error:
            lines.append(f"  {name:<20} {error}")
    return "\n".join(lines)


def fastest(flags: Sequence[str], schedules: Sequence[str], gpus_per_node: int, network: Network | None) -> str:
    """Return the schedule whose step is predicted to be the fastest of those that fit, or of all if none does. Raises
    UserError if none can run with these flags, or none is named.
    """
    ranked: list[tuple[bool, float, str]] = []
    refused = UserError("--preflight-fastest needs --preflight-compare, the schedules to choose among.")
    for name in schedules:
        try:
            predicted = predict(*planned([*flags, "--pipeline-schedule", name]), gpus_per_node, network)
        except UserError as error:
            refused = error
        else:
            ranked.append((not predicted.fits, predicted.step_time, name))
    if not ranked:
        raise refused
    return min(ranked)[2]


# -------------------------------------------------------------------------------------------------------------- command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    return run_command("preflight.py", lambda: _run(arguments), tell)


def _run(arguments: Sequence[str] | None) -> int:
    parser = FlagParser(
        prog="preflight.py",
        description=f"{(__doc__ or '').splitlines()[0]} All other flags are those of pretrain_gpt.py.",
    )
    add_dataclass_arguments(parser, PreflightOptions)
    adopt_task(os.environ)
    namespace, flags = parser.parse_known_args(arguments)
    options = dataclass_from_namespace(PreflightOptions, namespace)
    per_node, network = whole_variable(os.environ, "LOCAL_WORLD_SIZE", 0), options.network
    if options.preflight_fastest:
        say(fastest(flags, options.preflight_compare, per_node, network))
        return 0
    config, plans = planned(flags)
    predicted = predict(config, plans, per_node, network)
    if os.environ.get("RANK", "0") == "0":
        say(predicted.text)
        if options.preflight_compare:
            say(f"\n{compare(flags, options.preflight_compare, per_node, network)}")
    pairs = {(message.source, message.target) for message in predicted.lowered.messages}
    if options.preflight_predict_only or not pairs:
        return 0
    return check_links(config, options, pairs)


def check_links(config: Config, options: PreflightOptions, pairs: set[tuple[int, int]]) -> int:
    """Try the links between these pipeline ranks, in every pipeline. Returns the exit status, alike on all ranks."""
    import torch
    from torch.distributed.rendezvous import rendezvous

    from tools.links import GRACE, Check, first_line, on_all_pipelines, rounds

    check_device(config, gpus=torch.cuda.device_count())
    launch, timeout = config.launch, options.preflight_timeout
    order = on_all_pipelines(rounds(pairs), config.parallel.pipeline_model_parallel_size, launch.world_size)
    try:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
        device, connect = _network(config, store, timeout)
        _announce(store, config, device)
        check = Check(store, launch.rank, connect, device, options.preflight_seconds / (2 * len(order)), timeout)
        if launch.rank == 0:
            return _judge(check, order, store, config, options)
        check.run(order)
        store.wait(["verdict"], timedelta(seconds=timeout + GRACE))
        status = int(store.get("verdict"))
        store.add("heard", 1)
    except RuntimeError as error:
        complain(f"[Rank {launch.rank}] preflight.py: lost rank 0 or the launcher's store: {first_line(error)}")
        return 1
    return status


def _network(config: Config, store: Store, timeout: float) -> tuple[torch.device, Callable[[str, int, bool], Pair]]:
    """Return the device of tensors, and how this rank gets its end of a link, over the backend of the run."""
    import torch
    import torch.distributed as dist

    from tools.links import GlooPair, NcclPair

    if (config.parallel.distributed_backend or ("nccl" if torch.cuda.is_available() else "gloo")) == "gloo":
        limit = timedelta(seconds=timeout)
        return torch.device("cpu"), lambda name, peer, first: GlooPair(store, name, first, limit)
    device = torch.device("cuda", config.launch.local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")  # with torch's long time limit: this program's own comes first
    return device, lambda name, peer, first: NcclPair(peer, device)


def _announce(store: Store, config: Config, device: torch.device) -> None:
    """Tell rank 0 where this rank runs."""
    from tools.links import RankLocation

    kind = "gpu" if device.type == "cuda" else "process"
    place = RankLocation(
        socket.gethostname(), whole_variable(os.environ, "GROUP_RANK", 0), kind, config.launch.local_rank
    )
    store.set(f"place {config.launch.rank}", json.dumps(dataclasses.asdict(place)))


def _judge(
    check: Check,
    order: list[list[tuple[int, int]]],
    store: Store,
    config: Config,
    options: PreflightOptions,
) -> int:
    """Rank 0: meet the others, try the links, print what came of it, and tell the others the exit status."""
    from tools.link_report import report, slow_links, slowest_between_nodes
    from tools.links import GRACE, RankLocation

    deadline = time.monotonic() + options.preflight_timeout
    places, missing = list[RankLocation](), list[int]()
    for rank in range(config.launch.world_size):
        try:
            store.wait([f"place {rank}"], timedelta(seconds=max(deadline - time.monotonic(), 0.01)))
            places.append(RankLocation(**json.loads(store.get(f"place {rank}"))))
        except RuntimeError:
            places.append(RankLocation("missing", -1, "process", rank))
            missing.append(rank)
    started = time.monotonic()
    links = check.run(order, missing)
    seconds = time.monotonic() - started
    slow = slow_links(links, places, options.preflight_slow)
    dead = [link for link in links if link.failure]
    say(f"\nLinks between pipeline ranks ({count(len(order), 'round')}, {seconds:.0f} s):")
    say("\n".join(report(links, places, options.preflight_slow)))
    if missing:
        say(f"  not here within {options.preflight_timeout:g} s: rank {', '.join(map(str, missing))}")
    if (network := slowest_between_nodes(links, places)) is not None and config.parallel.hardware is not None:
        per_node = whole_variable(os.environ, "LOCAL_WORLD_SIZE", 0)
        gpus = per_node or find_hardware(config.parallel.hardware or DEFAULT_HARDWARE).gpus_per_node
        measured = Network(8 * network * gpus / GIGA)
        step_time = predict(config, make_planner(config), per_node, measured).step_time
        speed = f"{measured.gbps:.3g} Gb/s a node over {count(gpus, 'adapter')}, as the slowest link has"
        say(f"  with {speed}, a step takes {step_time:.4g} s (simulated)")
    say(f"preflight: {count(len(links), 'link')}, {len(dead)} dead, {len(slow)} slow")
    status = 1 if dead or (slow and options.preflight_fail_on_slow) else 0
    store.set("verdict", str(status))
    deadline = time.monotonic() + GRACE
    while store.add("heard", 0) < len(places) - 1 and time.monotonic() < deadline:
        time.sleep(0.02)  # the store may live in this process
    return status


if __name__ == "__main__":
    exit_status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_status)  # a thread that waits on a dead link, and its communicator, must not hold this up
