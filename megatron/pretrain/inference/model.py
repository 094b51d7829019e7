"""A trained model on its ranks, which runs rows of tokens forward chunk by chunk.

`commands.run_with_model` opens one as a command line says.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from helixpipe.common.errors import UserError
from helixpipe.model import Microbatch, PipelineModel, UnitContext
from helixpipe.model.attention.kv_store import KeyValueStore
from helixpipe.model.device import prepare
from helixpipe.program.stages import LAYER_PIECES, Piece, even_stages
from megatron.pretrain.config import Config, core
from megatron.pretrain.plan.costs import model_shape
from megatron.pretrain.validation import check_device


class ForwardModel:
    """The model's layers over the ranks of a pipeline, as many on each, and tensor-parallel ranks.

    tokenizer: of the training run.
    """

    def __init__(self, config: Config, parallel: Any, model: PipelineModel, tokenizer: Any):
        self.config, self.parallel, self.tokenizer = config, parallel, tokenizer
        self.model = model
        self._pieces = tuple(piece for piece in model.pieces if piece.role != "head")
        self._before = model.pieces[0]
        self.is_last = parallel.pp_rank == parallel.pp_size - 1

    @property
    def device(self) -> torch.device:
        return self.parallel.device

    @property
    def longest(self) -> int | None:
        """The most tokens of a row; None where positions have no end."""
        model = self.config.model
        return model.max_position_embeddings if model.position_embedding_type == "learned_absolute" else None

    @torch.no_grad()
    def hidden(self, tokens: Tensor, offset: int, length: int, store: KeyValueStore) -> Tensor | None:
        """Run tokens offset to offset + length - 1 of rows [b, s] int64, whose earlier ones have run with this store.

        Returns the last layer's hidden states, [length, b, hidden], on the last rank of the pipeline, else None.
        Collective over the ranks of a pipeline.
        """
        parallel, rows = self.parallel, tokens.size(0)
        batch = Microbatch(tokens, tokens, torch.zeros_like(tokens, dtype=torch.float32))
        chunk = store.unit(0, offset, length, tokens.size(1))
        context = UnitContext(0, 0, offset=offset, length=length, training=False, keys_values=chunk)
        state: tuple[Tensor, ...] = ()
        if parallel.pp_rank > 0:
            state = self._receive(rows, length)
        state = self.model.run(self._pieces, state, batch, context)
        if self.is_last:
            return state[0]
        target = dist.get_global_rank(parallel.pp_group, parallel.pp_rank + 1)
        for tensor in state:
            dist.send(tensor.contiguous(), target, parallel.pp_group)
        return None

    def logits(self, hidden: Tensor) -> Tensor:
        """Gather logits [s, b, tokens of the tokenizer], float32, of all tensor-parallel ranks from hidden states [s,
        b, hidden]. On the last rank of the pipeline.
        """
        from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

        with torch.no_grad():
            own = self.model.logits(hidden)
            whole: Tensor = gather_from_tensor_model_parallel_region(own, group=self.parallel.tp_group)
        return whole[..., : self.tokenizer.vocab_size].float()

    def _receive(self, rows: int, length: int) -> tuple[Tensor, ...]:
        source = dist.get_global_rank(self.parallel.pp_group, self.parallel.pp_rank - 1)
        state = []
        for shape in self.model.payload_shapes(_piece_before(self._before), rows, length):
            tensor = torch.empty(shape, dtype=self.model.payload_dtype, device=self.device)
            dist.recv(tensor, source, self.parallel.pp_group)
            state.append(tensor)
        return tuple(state)


def open_model(config: Config, parallel: Any = None) -> ForwardModel:
    """Load the model and tokenizer of --load, its layers over all ranks of this job. Collective.

    parallel: process groups that already exist; None: they are created.

    Raises UserError if the ranks are not those of one copy of the model.
    """
    prepare()
    from megatron.pretrain.checkpoint.checkpointing import Checkpointer
    from megatron.pretrain.checkpoint.options import CheckpointOptions
    from megatron.pretrain.data.tokenizer import tokenizer_of
    from megatron.pretrain.process.parallel import initialize

    for flag, size in (
        ("data-parallel", config.parallel.data_parallel_size),
        ("context-parallel", config.parallel.context_parallel_size),
    ):
        if size > 1:
            raise UserError(f"{size} {flag} ranks: only tensor and pipeline parallelism share a model here.")
    tensor = config.parallel.tensor_model_parallel_size
    if config.model.num_experts and tensor > 1:
        raise UserError(
            f"--tensor-model-parallel-size {tensor}: a model with experts is shared here by "
            "--pipeline-model-parallel-size alone, since tensor-parallel ranks would divide single tokens."
        )
    check_device(config, gpus=torch.cuda.device_count())
    config = config.replace("parallel", sequence_parallel=False).replace("model", mtp_num_layers=None)
    parallel = parallel or initialize(config)
    tokenizer = tokenizer_of(config.data)
    stages = even_stages(model_shape(config).kinds_of(config.model.num_layers or 0), parallel.pp_size)
    transformer, gpt = core.transformer_config(config), core.gpt_options(config)
    model = PipelineModel(transformer, gpt, stages[parallel.pp_rank].pieces, seed=config.training.seed)
    Checkpointer(CheckpointOptions.from_config(config)).load(model, None, None)
    return ForwardModel(config, parallel, model, tokenizer)


def _piece_before(piece: Piece) -> Piece:
    """Return the piece with which the previous rank ends, if this one begins with a layer's norm."""
    return Piece(LAYER_PIECES[-1], piece.layer - 1)
