"""Flags of `helixpipe profile`, and the model they come to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from helixpipe.cli.model_shape import ShapeFlags, described
from helixpipe.common.errors import UserError
from helixpipe.common.flags import check_ranges, option
from helixpipe.common.ranges import MOST_LAYERS, MOST_STEPS, MOST_TOKENS
from helixpipe.costs.hardware import HARDWARE
from helixpipe.costs.models import MODELS, ModelShape

MOST_THREADS = 10_000


@dataclass(frozen=True)
class ProfileOptions(ShapeFlags):
    """Options of what to measure. Sizes that are not given are those of --model. None: not given."""

    output: str = option("profile.json", "The file to write.", flags=("-o", "--output"), metavar="FILE")
    model: str | None = option(
        None, f"A model to start from: {', '.join(MODELS)}; or a Hugging Face folder.", metavar="NAME|FOLDER"
    )
    num_layers: int | None = option(
        None, "Layers that simulate takes unless told; their number is not measured.", at_least=1, at_most=MOST_LAYERS
    )
    seq_length: int | None = option(
        None, "Tokens of a sequence (default: the model's).", at_least=1, at_most=MOST_TOKENS
    )
    micro_batch_size: int = option(1, "Sequences in a microbatch.", at_least=1)
    chunk_size: int | None = option(
        None, "Tokens of a slice of the MLP (default: whole).", at_least=1, at_most=MOST_TOKENS
    )
    loss_chunk_size: int | None = option(
        None, "Tokens of a slice of head and loss (default: whole).", at_least=1, at_most=MOST_TOKENS
    )
    dtype: Literal["float32", "bfloat16"] = option("float32", "Type of weights and activations.")
    processes: int | None = option(
        None,
        "Processes that measure at the same time: as many as ranks will run on this machine, which share its memory's "
        "bandwidth (default: 2, or 1 where there is one GPU).",
        at_least=1,
        at_most=MOST_THREADS,
    )
    threads: int = option(1, "Threads of a process, as OMP_NUM_THREADS in training.", at_least=1, at_most=MOST_THREADS)
    repeats: int = option(15, "Rounds that count; figures are medians over them.", at_least=1, at_most=MOST_STEPS)
    hardware: str | None = option(
        None,
        f"Also print the shares of the peaks of this hardware that were reached: {', '.join(HARDWARE)} (default: the "
        "machine's, if it is among them).",
        metavar="NAME",
    )


def model_shape(options: ProfileOptions) -> ModelShape:
    """Return the model of the flags. Raises UserError for sizes that are missing or do not fit each other."""
    check_ranges(options)
    sizes = {"layers": options.num_layers, "seq_length": options.seq_length}
    shape = described(options.model, options, **sizes)
    if shape.further:
        raise UserError(
            f"profile measures no head that predicts further tokens, of which {options.model or 'the model'} has "
            f"{shape.further}: give --mtp-num-layers 0."
        )
    return replace(shape, others=())
