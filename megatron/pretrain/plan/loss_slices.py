"""Chooses whether output layer and loss run over slices if no flag says so: if memory requires it."""

from __future__ import annotations

from math import inf

from helixpipe.common.errors import ScheduleError
from helixpipe.costs.hardware import GIB
from helixpipe.costs.models import Layout
from helixpipe.costs.profile_costs import Profile
from helixpipe.planning.plan import Plans
from megatron.pretrain.config import Config
from megatron.pretrain.plan.costs import memory_limit
from megatron.pretrain.plan.programs import full_batch, make_planner


def settle(config: Config) -> tuple[Config, Plans[int]]:
    """Return the configuration with `--loss-chunk-size` decided, and its plans.

    Where the flag is not given: what a --cost-profile was measured with; else slices, if it is known what a GPU may
    use, a step of the full batch needs more, and less with slices; or fits only because it offloads, and is faster with
    slices. Raises UserError for a profile that does not fit.
    """
    if config.model.loss_chunk_size is not None:
        return config, make_planner(config)
    if config.parallel.cost_profile is not None:
        measured = Profile.load(config.parallel.cost_profile, flag="--cost-profile").layout.loss_chunk
        config = _with(config, measured, "--cost-profile was measured so" if measured else "")
        return config, make_planner(config)
    whole, limit = _with(config, 0, ""), memory_limit(config)
    plans = make_planner(whole)
    size = Layout(micro_batch_size=config.training.micro_batch_size or 1).with_loss_slices().loss_chunk
    if limit is None or size >= (config.model.seq_length or 1) / config.parallel.context_parallel_size:
        return whole, plans
    needed, time = _figures(whole, plans)
    if needed <= limit and not _makes_room(whole, plans, limit):
        return whole, plans
    sliced = _with(config, size, "")
    others = make_planner(sliced)
    less, slower = _figures(sliced, others)
    better = less <= limit and slower < time if needed <= limit else less < needed
    if not better:
        return whole, plans
    there, change = f"{limit / GIB:.1f} GiB", f"a step takes {100 * (slower / time - 1):+.1f} % on paper"
    if needed <= limit:
        why = f"with slices there is more room in {there}, and {change}"
    elif needed == inf:
        why = f"without slices nothing fits into {there}, with them a rank needs {less / GIB:.1f}"
    else:
        why = f"without slices a rank needs {needed / GIB:.1f} of {there}, with them {less / GIB:.1f}, and {change}"
    return _with(config, size, why), others


def _with(config: Config, size: int, why: str) -> Config:
    return config.replace("model", loss_chunk_size=size, loss_slices_why=why)


def _figures(config: Config, plans: Plans[int]) -> tuple[float, float]:
    """Return the bytes of the rank that needs most and the seconds of a step of the full batch; infinite if no schedule
    fits.
    """
    try:
        simulation = plans.plan(full_batch(config)).simulation
    except ScheduleError:
        return inf, inf
    return max(simulation.device_needs), simulation.makespan


def _makes_room(config: Config, plans: Plans[int], limit: float) -> bool:
    """Whether a step fits only because --offload-activations has activations offloaded or recomputed."""
    program = plans.program(full_batch(config))
    every = [*program.activations.values(), *(stage.activations for stage in program.stages)]
    if not config.offload.auto and not any(activations.offload for activations in every):
        return False
    plain = config.replace("offload", offload_activations="off")
    return _figures(plain, make_planner(plain))[0] > limit
