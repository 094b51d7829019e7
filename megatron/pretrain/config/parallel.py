"""Flags that distribute the model over ranks, and the facts about the launch they are checked against."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from helixpipe.common.errors import UserError
from helixpipe.common.flags import option, setting
from helixpipe.common.ranges import MOST_RANKS
from helixpipe.costs.hardware import HARDWARE
from helixpipe.costs.models import IN_PARTS, OFF, OPTIM_GRADS, P2P, context_parts, shared_unit

PIPELINE = "pipeline schedule"
"""Heading of the flags, of any group, that Megatron-LM does not have and whoever chooses a schedule looks for."""


@dataclass(frozen=True)
class ParallelConfig:
    """Tensor, pipeline and data parallelism. Validation fills in `pipeline_schedule` and the derived sizes."""

    tensor_model_parallel_size: int = option(
        1, "Ranks each layer's weights are split over.", at_least=1, at_most=MOST_RANKS
    )
    pipeline_model_parallel_size: int = option(1, "Pipeline ranks.", at_least=1, at_most=MOST_RANKS)
    pipeline_schedule: str | None = option(
        None,
        "Pipeline schedule: a name from `helixpipe list`, or the path of a .json or .csv file with a schedule of one's "
        "own; auto: what is found to be best for --hardware, with its chunks, stages and recomputation (default: none "
        "with one pipeline rank, interleaved-1f1b with virtual stages, else 1f1b).",
        metavar="NAME|FILE|auto",
        heading=PIPELINE,
    )
    search_schedule_anew: bool = option(
        False,
        "With --pipeline-schedule auto: search again instead of going on with what the checkpoint's run had found.",
        heading=PIPELINE,
    )
    hardware: str | None = option(
        None,
        "GPUs whose cost model schedules are found from, and whose memory they keep to: "
        f"{', '.join(HARDWARE)} (default: h100, and no memory limit).",
        metavar="NAME",
        heading=PIPELINE,
    )
    cost_profile: str | None = option(
        None,
        "Find schedules from the costs in this file of `helixpipe profile` instead of --hardware's.",
        metavar="FILE",
        heading=PIPELINE,
    )
    memory_limit: float | None = option(
        None,
        "GiB of tensors that a GPU may hold (default, and with --hardware at most: as many as fit into it).",
        metavar="GIB",
        more_than=0,
        unit=" GiB",
        heading=PIPELINE,
    )
    host_memory: float | None = option(
        None,
        "GiB of host memory of a node that offloaded activations may take, instead of what --hardware has.",
        metavar="GIB",
        more_than=0,
        unit=" GiB",
        heading=PIPELINE,
    )
    context_parallel_size: int = option(
        1, "Ranks that share the tokens of every sequence, or of every chunk of it.", at_least=1, at_most=MOST_RANKS
    )
    expert_model_parallel_size: int = option(
        1, "Ranks that the experts of every layer are shared out over.", at_least=1, at_most=MOST_RANKS
    )
    expert_tensor_parallel_size: int | None = option(
        None, "Ranks each expert's weights are split over (default: --tensor-model-parallel-size).", at_least=1
    )
    cp_comm_type: tuple[str, ...] = option(
        (P2P,),
        "What context-parallel ranks exchange for core attention: p2p (keys and values round a ring) or a2a (rows for "
        "heads, as Ulysses does), the same for all layers.",
        nargs="+",
    )
    overlap_tp_comm: Literal["off", "halves", "pairs", "auto"] = option(
        OFF,
        "Hide tensor-parallel and context-parallel communication beyond what every op hides, and the exchange of "
        "tokens with experts: halves runs ops over two halves of their tokens, one of which computes while the other's "
        "ranks communicate; pairs runs forwards beside backwards of other units; auto does what --hardware's cost "
        "model finds fastest (Megatron-LM's --tp-comm-overlap means auto, --overlap-moe-expert-parallel-comm pairs).",
        heading=PIPELINE,
    )
    num_layers_per_virtual_pipeline_stage: int | None = option(
        None, "Layers of one stage when a rank holds several stages (interleaved-1f1b).", at_least=1
    )
    num_virtual_stages_per_pipeline_rank: int | None = option(
        None,
        "Stages each pipeline rank holds (interleaved-1f1b); instead of --num-layers-per-virtual-pipeline-stage.",
        at_least=1,
    )
    plan_ahead: int = option(
        2,
        "--variable-seq-lengths: steps that are planned, in a process beside training, before they are needed.",
        at_least=0,
        heading=PIPELINE,
    )
    kv_grad_fp32: bool = option(
        False, "Sum the gradients of keys and values over the chunks of a sequence in float32.", heading=PIPELINE
    )
    sequence_parallel: bool = option(
        False,
        "Split norms and dropout over the tensor-parallel ranks along the sequence; off when there is one such rank.",
    )
    use_distributed_optimizer: bool = option(False, "Split the optimizer state over the data-parallel ranks.")
    data_parallel_sharding_strategy: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] | None = option(
        None,
        "What data-parallel ranks share out: nothing; optimizer state (as --use-distributed-optimizer does); that and "
        "gradients; that and weights, which are gathered around each op that needs them (default: no_shard).",
    )
    use_torch_fsdp2: bool = option(False, "The same as --data-parallel-sharding-strategy optim_grads_params.")
    use_megatron_fsdp: bool = option(
        False,
        "Share out what --data-parallel-sharding-strategy says, by default optim_grads_params.",
    )
    ddp_bucket_size: int | None = option(
        None, "Elements in a bucket of the data-parallel gradient reduction.", at_least=1
    )
    ddp_average_in_collective: bool = option(False, "Average gradients inside the data-parallel collective.")
    distributed_backend: Literal["nccl", "gloo"] | None = option(
        None, "torch.distributed backend; by default nccl where there are GPUs, else gloo."
    )
    distributed_timeout_minutes: float | None = option(
        None,
        "How long a collective or a message may wait for a rank that is alive but stuck (fractions allowed; default: "
        "10, or three times the step that --cost-profile or --hardware predicts, if that is longer). A rank that died "
        "is noticed at once: its connections close and torchrun ends the other ranks.",
        more_than=0,
    )
    stall_timeout_seconds: float | None = option(
        None,
        "When no rank has got any further in a training step for so long, say which ranks wait for what from whom, and "
        "end the job; 0 never does (default: half of --distributed-timeout-minutes, which would end it without that).",
        heading=PIPELINE,
        at_least=0,
    )
    nccl_communicator_config_path: str | None = option(
        None,
        "YAML file of NCCL's settings for process groups, as Megatron-LM reads it (docs/cluster.md); those of pp are "
        "the pipeline's messages'.",
        metavar="FILE",
    )
    high_priority_stream_groups: tuple[str, ...] | None = option(
        None, "Process groups whose collectives run on streams of high priority, such as dp or tp.", nargs="*"
    )
    stage_layers: tuple[int, ...] | None = setting(None, "Layers of each stage; None for equally many.")
    virtual_pipeline_model_parallel_size: int | None = setting(None, "Stages a pipeline rank holds; None for one.")
    auto_schedule: str | None = setting(None, "The flags that --pipeline-schedule auto has found.")
    auto_schedule_why: str | None = setting(None, "Why these.")
    data_parallel_size: int = setting(1, "Model copies: world size / (tensor x pipeline x context).")

    @property
    def schedule(self) -> str:
        """--pipeline-schedule, which validation has settled."""
        assert self.pipeline_schedule is not None
        return self.pipeline_schedule

    @property
    def parts(self) -> int:
        """Equal runs of tokens that context-parallel ranks make of a chunk."""
        return context_parts(self.context_parallel_size, self.cp_comm_type[0])

    @property
    def unit(self) -> int:
        """Tokens that the length of a chunk must be a multiple of, so that ranks can share it."""
        tp = self.tensor_model_parallel_size if self.sequence_parallel else 1
        return shared_unit(tp, self.context_parallel_size, self.parts)

    @property
    def shards_weights(self) -> bool:
        """Whether each weight is sharded over data-parallel ranks."""
        return self.data_parallel_sharding_strategy in IN_PARTS

    @property
    def gathered_once(self) -> bool:
        """Whether weights in parts are gathered once a step, not for each op."""
        return self.data_parallel_sharding_strategy == OPTIM_GRADS

    @property
    def weight_parts(self) -> int:
        """Data-parallel times context-parallel ranks, which have a part of each weight; 1 where weights are whole."""
        return self.data_parallel_size * self.context_parallel_size if self.shards_weights else 1

    @property
    def timeout_seconds(self) -> float:
        """--distributed-timeout-minutes, which validation has settled."""
        assert self.distributed_timeout_minutes is not None
        return 60.0 * self.distributed_timeout_minutes


def whole_variable(environ: Mapping[str, str], name: str, default: int) -> int:
    """Read a whole number from an environment variable. Raises UserError if it is not one."""
    try:
        return int(environ.get(name, default))
    except ValueError:
        raise UserError(f"the environment variable {name}={environ[name]!r} is not a whole number.") from None


@dataclass(frozen=True)
class LaunchConfig:
    """The rank of this process in the job and on its machine, from the environment that torchrun sets."""

    rank: int = setting(0, "Rank of this process in the job.")
    world_size: int = setting(1, "Processes in the job.")
    local_rank: int = setting(0, "Rank of this process on its machine.")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> LaunchConfig:
        """Read RANK, WORLD_SIZE and LOCAL_RANK (absent: a single process). Raises UserError when one is no number."""
        environ = os.environ if environ is None else environ
        defaults = (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
        values = {name.lower(): whole_variable(environ, name, default) for name, default in defaults}
        if not 0 <= values["rank"] < values["world_size"]:
            raise UserError(
                f"RANK={values['rank']} must lie between 0 and WORLD_SIZE={values['world_size']} (excluded)."
            )
        return cls(**values)
