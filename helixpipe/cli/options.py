"""Flags of the `helixpipe` command that several of its subcommands share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from helixpipe.common.flags import option
from helixpipe.common.ranges import MOST_CHUNKS, MOST_LAYERS, MOST_MICROBATCHES, MOST_RANKS


@dataclass(frozen=True)
class ShapeOptions:
    """The size of the problem; what is not given is the file's, or chosen so that every schedule fits."""

    ranks: int | None = option(
        None, "Pipeline ranks p (default: 4, or the file's).", flags=("--ranks", "-p"), at_least=1, at_most=MOST_RANKS
    )
    microbatches: int | None = option(
        None,
        "Microbatches m a step (default: 2p, or the file's).",
        flags=("--microbatches", "-m"),
        at_least=1,
        at_most=MOST_MICROBATCHES,
    )
    layers: int | None = option(
        None,
        "Layers L of the model (default: the fewest that every named schedule can divide, two a rank or more).",
        flags=("--layers", "-L", "--num-layers"),
        at_least=1,
        at_most=MOST_LAYERS,
    )
    chunks: int | None = option(
        None,
        "Chunks k each microbatch's sequence is cut into (default: 1, or the file's).",
        flags=("--chunks", "-k"),
        at_least=1,
        at_most=MOST_CHUNKS,
    )
    virtual_stages: int | None = option(
        None,
        "Stages v a rank, for schedules that interleave (default: the schedule's).",
        flags=("--virtual-stages", "-v"),
        at_least=1,
        at_most=MOST_LAYERS,
    )


@dataclass(frozen=True)
class CostOptions:
    """Options of the times of ops and messages."""

    piece_times: str = option(
        "pre=1,attn=3,post=2",
        "Forward time of pieces for a whole microbatch: embed, head, and in each layer norm, qkv, attn, proj, mlp; "
        "pre means qkv and post mlp; pieces not given take no time.",
        metavar="NAME=TIME,...",
    )
    backward_ratio: float = option(2.0, "Time of a full backward over its forward, at least 1.", at_least=1)
    message_time: float = option(0.0, "Time of any message between ranks.", at_least=0)
    copy_time: float = option(
        0.0, "Time of copying what one layer keeps of one microbatch to host memory, or back (0: free).", at_least=0
    )
    memory_limit: float | None = option(
        None,
        "What a rank may keep, for schedules that choose by it: in microbatch-layers, or with --model or --profile in "
        "GiB of tensors (default: no limit; with --model as many as fit into the GPU, which is also the most).",
        metavar="X",
        more_than=0,
    )
    ignore_memory_limit: bool = option(
        False, "Let schedules that search choose as if there were no limit; what then does not fit is said."
    )
    op_overhead: float = option(
        0.0,
        "Time that every op takes beside its pieces, whatever its size: launching kernels, a step of the executor.",
        at_least=0,
    )
    p2p: Literal["overlapped", "blocking"] = option(
        "overlapped",
        "blocking: no rank computes while it sends or receives, as in Megatron-LM's own engine.",
    )
    profile: str | None = option(
        None, "Take costs from this file of `helixpipe profile`, in seconds and bytes.", metavar="FILE.json"
    )
    forward_only: bool = option(False, "The schedule's evaluation form: its forwards alone.", flags=("--forward-only",))


@dataclass(frozen=True)
class OutputOptions:
    """Options of how the result is printed."""

    json: bool = option(False, "Print one JSON object.", flags=("--json",))


@dataclass(frozen=True)
class SimulateOptions:
    """Options that only `simulate` has."""

    device_queues: Literal["many", "one"] = option(
        "many",
        "Hardware queues of a GPU: one, as with CUDA_DEVICE_MAX_CONNECTIONS=1, starts work in the order it was issued "
        "in, so what has to wait holds up what follows; many, a queue for each stream.",
    )
    order: bool = option(False, "Also print the program: a row a rank, a cell an op.", flags=("--order",))
    save_program: str | None = option(
        None,
        "Write the program to this file, to edit and to run: .json, with all there is to it, or .csv, its ops alone.",
        metavar="FILE",
    )

    @property
    def one_queue(self) -> bool:
        return self.device_queues == "one"
