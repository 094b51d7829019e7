"""The model as one pipeline rank holds it: one module with the weights of exactly the rank's pieces."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from types import MappingProxyType
from typing import Any, cast

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch import Tensor

from helixpipe.common.alternate import finished
from helixpipe.costs.models import HALVES, PAIRS
from helixpipe.model import boundaries
from helixpipe.model.attention.context_parallel import ContextParallel
from helixpipe.model.backends import Kernels, Machine, choose
from helixpipe.model.chunked_loss import ChunkedLoss
from helixpipe.model.collectives import ForwardBeside
from helixpipe.model.decoder import Decoder
from helixpipe.model.device import device
from helixpipe.model.ends import Embedding, Targets, loss_sum, mark_ends
from helixpipe.model.experts.checks import check_experts
from helixpipe.model.experts.counts import Routing
from helixpipe.model.further_tokens import FurtherLosses, FurtherToken, FurtherTokens, cut, further
from helixpipe.model.graphs import make_graphs
from helixpipe.model.halves import HalvedRun
from helixpipe.model.halving import Halving, in_gathered_order
from helixpipe.model.latent import check_latent, make_rotary
from helixpipe.model.layers import Layer, emptied, part_of_head, plain_piece_of
from helixpipe.model.linear import WeightGradients, defer_weight_gradients, leave_out_mappings
from helixpipe.model.norms import make_norm
from helixpipe.model.options import (
    GPTOptions,
    Microbatch,
    RunPiece,
    State,
    UnitContext,
    check_pieces,
    check_supported,
    further_tokens,
    layers_of,
)
from helixpipe.model.randomness import DropoutSeeds, initial_weights
from helixpipe.model.slices import Slices
from helixpipe.model.split_head import SlicedSums, VocabularyRows, part_loss, part_of_weight, part_sums, shard_rows
from helixpipe.model.steps import SteppedRun, Steps
from helixpipe.program.stages import HEAD_MTP, HEAD_NORM, HEAD_PART, Piece, layer_pieces

_WORD_EMBEDDING = "embedding.word_embeddings.weight"
_OUTPUT_LAYER = "output_layer.weight"


class PipelineModel(MegatronModule):
    """A GPT's pieces on one rank.

    config: megatron-core's; `params_dtype` is the type of weights and hidden states.
    pieces: those this rank runs, in model order; each once. All of `model_pieces(layers)` makes the whole model.
    pg_collection: needs `tp`, and `cp` where context-parallel ranks share every chunk; None takes megatron-core's
        parallel state, which must be initialised in any case: the loss uses its tensor-parallel group.
    seed: of initial weights and dropout.
    copies: those of the pieces that other ranks hold as well, with the number of the copy here (`Program.copies`).
        Copies start out equal; only the first, 0, counts in the gradients' norm and is written to checkpoints.
    empty: let go of every weight's data as soon as it is made; see `shell`.
    kernels: what it runs on; None: those for this machine.
    routing: counts and biases of experts, of another model of this rank; None: its own.

    Parameter names are GPTModel's with global layer indices. A tied head away from the embedding has its own copy of
    the weight, `output_layer.weight`, which starts out equal; `replicated_parameters` names such copies. A part of a
    head that is divided always has a copy of its own rows there.
    Raises UserError for a model that cannot be cut into these pieces.
    """

    def __init__(
        self,
        config: TransformerConfig,
        gpt: GPTOptions,
        pieces: Sequence[Piece],
        pg_collection: ProcessGroupCollection | None = None,
        seed: int = 1234,
        copies: Mapping[Piece, int] = MappingProxyType({}),
        empty: bool = False,
        kernels: Kernels | None = None,
        routing: Routing | None = None,
    ):
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        self.context = context = ContextParallel(getattr(pg_collection, "cp", None), gpt.cp_comm_type)
        tp = pg_collection.tp.size()
        if gpt.overlap_tp_comm == HALVES and (max(tp, config.expert_model_parallel_size) > 1 or context.swaps):
            self.context = context = replace(context, ranks_of_half=tp if config.sequence_parallel else 1)
        check_supported(config, gpt, context.size, pg_collection.tp)
        check_latent(config, gpt, context.size)
        check_experts(config, gpt)
        check_pieces(config, pieces)
        super().__init__(config)
        self.gpt = gpt
        self.pieces = tuple(pieces)
        self._own_pieces = {Piece(piece.role, piece.layer): piece for piece in pieces}
        self._own_pieces |= {Piece(piece.kind): piece for piece in pieces if piece.kind in (HEAD_NORM, HEAD_PART)}
        self.copies = dict(copies)
        self.kernels = kernels if kernels is not None else choose(config, Machine.here(), context.size)
        self.pg_collection = pg_collection
        self.tp_group = pg_collection.tp
        self.payload_dtype: torch.dtype = config.params_dtype
        self.share_embeddings_and_output_weights = gpt.share_embeddings_and_output_weights
        self._dropout = DropoutSeeds(seed, self.tp_group.rank(), context.rank if context.size > 1 else None)
        self._seed = seed
        self._weight_gradients: WeightGradients | None = None
        self._known_calls: dict[tuple[Piece, ...], Sequence[tuple[Piece, RunPiece | None]]] = {}
        self.beside = ForwardBeside(leads=max(tp, context.size) > 1)
        self._build(pieces, seed, empty)
        leave_out_mappings(self)
        # Learned positions are made by torch in float32 on the CPU; all else has its type and device already.
        self.to(device=device(), dtype=config.params_dtype)
        for _, parameter, number in self._copied_parameters():
            if number > 0:
                parameter.shared = True  # counted in norms on the first rank that has it only
        for parameter in self.embedding.parameters() if self.copies_embedding else ():
            parameter.shared = True  # as is the model's own
        tied, here = gpt.share_embeddings_and_output_weights, hasattr(self, "output_layer")
        mark_ends(*self._end_weights(), tied=tied, here=here)
        self.routing = routing if routing is not None else Routing(config)
        self.routing.bind(self.modules(), own=routing is None)
        self.further_losses = FurtherLosses(further_tokens(config))
        self.graphs = None if empty else make_graphs(config, gpt, tp * context.size, self.weights_of)
        if context.ranks_of_half or self.in_pairs:
            self.weight_gradients()  # before the first forward

    def _build(self, pieces: Sequence[Piece], seed: int, empty: bool) -> None:
        """Make the weights of the pieces, each part from its own seed."""
        config, gpt, group = self.config, self.gpt, self.tp_group
        kinds_of_layer: dict[int, dict[str, str]] = {}
        for piece in pieces:
            if piece.layer >= 0:
                kinds_of_layer.setdefault(piece.layer, {})[piece.role] = piece.kind
        ends = {piece.kind: piece for piece in pieces if piece.layer < 0}
        draw = partial(initial_weights, seed, tp_rank=group.rank())
        self._rotary = rotary = make_rotary(config, gpt, self.kernels.rope)
        self.decoder = Decoder(config, group)
        if "embed" in ends or HEAD_MTP in ends:
            with draw("embedding"):
                self.embedding = Embedding(config, gpt, group)

        def make_layer(index: int, kinds: Mapping[str, str]) -> Layer:
            return Layer(config, index, kinds, rotary, group, draw, self.kernels, gpt.chunk_size, self.context)

        for index in sorted(kinds_of_layer):
            layer = make_layer(index, kinds_of_layer[index])
            self.decoder.layers[str(index)] = emptied(layer) if empty else layer
        if HEAD_MTP in ends:
            self.mtp = FurtherTokens(config, self.kernels.norm, group, draw, make_layer)
        whole_head = "head" in ends or HEAD_MTP in ends
        if whole_head or HEAD_NORM in ends:
            self.decoder.final_layernorm = make_norm(config, self.kernels.norm)
        self.head_part = ends.get(HEAD_PART)
        if whole_head or self.head_part is not None:
            tied = gpt.share_embeddings_and_output_weights
            # A tied copy away from the embedding repeats the embedding's draw.
            with draw("embedding" if tied else "output_layer"):
                self.output_layer = ColumnParallelLinear(
                    config.hidden_size,
                    gpt.vocab_size,
                    config=config,
                    init_method=config.embedding_init_method if tied else config.init_method,
                    bias=False,
                    gather_output=False,
                    skip_bias_add=False,
                    skip_weight_param_allocation=tied and hasattr(self, "embedding") and whole_head,
                    tp_group=group,
                )
            if self.head_part is not None:
                self.output_layer.weight = part_of_weight(self.output_layer.weight, self._rows_of_head)
            if self.output_layer.weight is None:
                # The embedding's gradient comes from autograd, which DDP adds only to what no kernel has added to.
                self.output_layer.gradient_accumulation_fusion = False

    @property
    def _rows_of_head(self) -> slice:
        """The rows of its tensor-parallel rank's share of the vocabulary that this rank's part of the head has."""
        assert self.head_part is not None
        return self.head_part.rows(self.gpt.vocab_size // self.tp_group.size())

    @property
    def _first_row(self) -> int:
        """The first of them in the whole vocabulary."""
        return self.gpt.vocab_size // self.tp_group.size() * self.tp_group.rank() + self._rows_of_head.start

    def run(
        self, pieces: Sequence[Piece], inputs: tuple[Tensor, ...], batch: Microbatch, context: UnitContext
    ) -> tuple[Tensor, ...]:
        """Run consecutive pieces on one chunk in one autograd graph.

        inputs: () when the first piece is embed, else what crosses the cut before pieces[0] (see `payload_shapes`).
        Returns what crosses the cut after pieces[-1]; after head (loss_sum,), a float32 scalar: the sum over the chunk
        of token losses times loss mask. Over slices (`GPTOptions.loss_chunk_size`) that has its value once its backward
        has run. A residual may come back as the very tensor that was given.
        """
        return finished(self.steps(pieces, inputs, batch, context))

    forward = run

    def steps(
        self, pieces: Sequence[Piece], inputs: tuple[Tensor, ...], batch: Microbatch, context: UnitContext
    ) -> Steps:
        """Run pieces as `run` does, but pause where a collective has been started, for a backward of another unit; in
        its own backward `beside` takes steps. In halves, or where nothing is communicated, there are no pauses."""
        state = inputs
        for of_layers, run in groupby(pieces, key=lambda piece: piece.layer >= 0):
            consecutive = tuple(run)
            halving = self._halving(consecutive[0], state) if of_layers and self.context.ranks_of_half else None
            if halving is not None and halving.possible:
                halved = HalvedRun(
                    self.decoder.layers, batch, context, halving, self.weight_gradients(), self._seed_half
                )
                state = halved.run(consecutive, state)
                continue
            if of_layers and self.in_pairs:
                layers, store = self.decoder.layers, self.weight_gradients()
                stepped = SteppedRun(layers, batch, context, store, self._seed_half, self.beside)
                state = yield from stepped.through(consecutive, state)
                continue
            some = partial(self._run_in_turn, batch, context)
            graphs = self.graphs if context.in_graphs and batch.documents is None else None
            state = some(consecutive, state) if graphs is None else graphs.run(consecutive, state, context.offset, some)
        return state

    def _run_in_turn(self, batch: Microbatch, context: UnitContext, pieces: Sequence[Piece], state: State) -> State:
        for piece, call in self._calls(tuple(pieces)):
            state = self._run_end(piece, state, batch, context) if call is None else call(state, batch, context)
        return state

    def _calls(self, pieces: tuple[Piece, ...]) -> Sequence[tuple[Piece, RunPiece | None]]:
        """Each piece with what runs it, None: not in a layer. Known after the first time: looking them up takes the
        host as long as small kernels. They hold no reference to this model, which goes when it is let go of."""
        known = self._known_calls.get(pieces)
        if known is None:
            calls = (self._call(piece) if piece.layer >= 0 else None for piece in pieces)
            known = self._known_calls[pieces] = tuple(zip(pieces, calls, strict=True))
        return known

    def _call(self, piece: Piece) -> RunPiece:
        """What runs a piece of a layer, of this model or of its head's further tokens, whose numbers follow."""
        number, config = piece.layer - self.config.num_layers, self.config
        layer: Any = self.decoder.layers[str(piece.layer)] if number < 0 else self.mtp.layers[number].transformer_layer
        call: RunPiece = layer.piece(piece.role)
        if piece.role == "attn" and config.attention_dropout:
            return partial(self._dropout.run, piece, True, call)
        if piece.role in ("proj", "mlp") and config.hidden_dropout:
            return partial(self._dropout.run, piece, config.sequence_parallel, call)
        return call

    def _run_end(self, piece: Piece, state: State, batch: Microbatch, context: UnitContext) -> State:
        if piece.kind == "embed":
            self._seed_dropout(piece, context)
            return (self.embedding(*self._own_tokens(batch, context)),)
        return (self._run_head(piece, state[0], batch, context),)

    def attention_layers(self, pieces: Sequence[Piece], training: bool) -> list[int]:
        """The numbers of the layers whose attention runs with these pieces."""
        own = [piece.layer for piece in pieces if piece.role == "attn"]
        further = further_tokens(self.config) if training and pieces[-1].kind == HEAD_MTP else 0
        return own + [self.config.num_layers + number for number in range(further)]

    def _own_tokens(self, batch: Microbatch, context: UnitContext) -> tuple[Microbatch, UnitContext]:
        """Return what of a chunk is this context-parallel rank's, in the order in which tensor-parallel ranks gather
        it."""
        return in_gathered_order(*self.context.share(batch, context), self._ranks_in_halves)

    @property
    def in_pairs(self) -> bool:
        """Whether forwards run beside backwards, to hide what ranks communicate inside them."""
        sizes = self.tp_group.size(), self.context.size, self.config.expert_model_parallel_size
        return self.gpt.overlap_tp_comm == PAIRS and max(sizes) > 1

    @property
    def _ranks_in_halves(self) -> int:
        """Tensor-parallel ranks that share the rows of each half; 1 where they do not, or there are no halves."""
        return self.context.ranks_of_half or 1

    def _halving(self, first: Piece, state: tuple[Tensor, ...]) -> Halving:
        """Of a chunk, from what crosses the cut before a piece of it."""
        ranks = self._ranks_in_halves
        return Halving(state[0].size(0) * (ranks if first.role in ("norm", "qkv", "mlp") else 1), ranks)

    def _seed_half(self, piece: Piece, context: UnitContext, half: int | None) -> None:
        on_rows = piece.role != "attn"
        probability = self.config.hidden_dropout if on_rows else self.config.attention_dropout
        if probability > 0.0 and context.training:
            self._dropout.begin(piece, context, self.config.sequence_parallel or not on_rows, half)

    def _seed_dropout(self, piece: Piece, context: UnitContext) -> None:
        """Of hidden states."""
        if self.config.hidden_dropout and context.training:
            self._dropout.begin(piece, context, self.config.sequence_parallel)

    def logits(self, hidden: Tensor) -> Tensor:
        """The last layer's hidden states to logits, [s, b, vocabulary / tp]; needs the head."""
        gathered = self._gathered_logits(hidden)
        order = Halving(gathered.size(0), self._ranks_in_halves).gathered_order(gathered.device)
        return gathered if order is None else gathered[order.argsort()]

    def _gathered_logits(self, hidden: Tensor) -> Tensor:
        """The logits in the order in which the ranks' rows are gathered."""
        logits: Tensor = self.output_layer(self.decoder.final_layernorm(hidden), weight=self._tied_weight)[0]
        return logits

    def _run_head(self, piece: Piece, hidden: Tensor, batch: Microbatch, context: UnitContext) -> Tensor:
        """The loss sum; of a head that is divided, the normed hidden states or the sums of this rank's part."""
        if piece.kind == HEAD_NORM:
            normed: Tensor = self.decoder.final_layernorm(hidden)
            return normed
        targets = Targets.read(*self._own_tokens(batch, context))
        if piece.kind == HEAD_MTP:
            return self._losses(hidden, targets, batch, context)
        return self._loss_sum(hidden, targets) if piece.kind == "head" else self._part_sums(hidden, targets.labels)

    def _losses(self, hidden: Tensor, targets: Targets, batch: Microbatch, context: UnitContext) -> Tensor:
        """The loss sum of the next token, which in training takes a gradient of those of further tokens along."""
        hidden = self.decoder.final_layernorm(hidden)
        loss = loss_sum(self.output_layer(hidden, weight=self._tied_weight)[0], targets)
        others, learned = list[tuple[Tensor, Microbatch]](), self.embedding.position_embeddings is not None
        for number, layer in enumerate(self.mtp.layers if context.training else ()):
            further_layer, moved = cast(FurtherToken, layer), further(batch, number + 1, learned)
            first = self.config.num_layers + number
            own = cut(*self._own_tokens(moved, context))
            self._seed_dropout(Piece("embed", first), context)
            state: State = (further_layer.join(hidden, self.embedding(*own)),)
            state = self._run_in_turn(batch, context, layer_pieces((layers_of(self.config)[-1],), first), state)
            hidden = further_layer.final_layernorm(state[0])
            logits = self.output_layer(hidden, weight=self._tied_weight)[0]
            others.append((loss_sum(logits, Targets.read(*own)), moved))
        return self.further_losses.beside(loss, others, self.config, batch, context) if others else loss

    def _part_sums(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """[3, s, b], of the normed hidden states."""
        head, rows = self.output_layer, VocabularyRows(self._first_row, self.tp_group)
        if not self.gpt.loss_chunk_size:
            return part_sums(head(hidden)[0], labels, rows)
        slices = Slices(self.gpt.loss_chunk_size, head.sequence_parallel, self.tp_group)
        return SlicedSums(slices, head.weight, rows, head.gradient_accumulation_fusion).sums(hidden, labels)

    def part_loss(self, sums: Tensor, own: int, batch: Microbatch, context: UnitContext) -> tuple[Tensor, Tensor]:
        """(a chunk's loss sum; the gradient of sums[own], [3, s, b], where that of the loss sum is 1). sums:
        [parts, 3, s, b], of all parts of the head in any order."""
        return part_loss(sums, own, Targets.read(*self._own_tokens(batch, context)))

    def _loss_sum(self, hidden: Tensor, targets: Targets) -> Tensor:
        """Of the last layer's hidden states; over slices, where they are asked for, NaN until its backward has run."""
        if not self.gpt.loss_chunk_size:
            return loss_sum(self._gathered_logits(hidden), targets)
        head = self.output_layer
        slices = Slices(self.gpt.loss_chunk_size, head.sequence_parallel, self.tp_group)
        weight = head.weight if self._tied_weight is None else self._tied_weight
        loss = ChunkedLoss(slices, weight, head.gradient_accumulation_fusion)
        return loss.sum(self.decoder.final_layernorm(hidden), targets)

    @property
    def _tied_weight(self) -> torch.nn.Parameter | None:
        """The word embedding's, where the output layer has none of its own."""
        return self.embedding.word_embeddings.weight if self.output_layer.weight is None else None

    def weight_gradients(self) -> WeightGradients:
        """Where linear layers leave weight gradients that are computed later; one store for all who run this model."""
        if self._weight_gradients is None:
            self._weight_gradients = defer_weight_gradients(self)
        return self._weight_gradients

    def piece_of(self, parameter: str) -> Piece:
        """The piece of this model that a parameter belongs to, by its name."""
        divided = self._own_pieces.get(part_of_head(parameter))
        plain = plain_piece_of(parameter)
        if plain == Piece("embed") and plain not in self._own_pieces:
            plain = Piece("head")  # which has a copy, for further tokens
        return self._own_pieces[plain] if divided is None else divided

    def weights_of(self, pieces: Sequence[Piece]) -> list[torch.nn.Parameter]:
        """The weights of some of this model's pieces, in an order that is the same on every rank."""
        wanted = set(pieces)
        return [parameter for name, parameter in self.named_parameters() if self.piece_of(name) in wanted]

    def shell(self, pieces: Sequence[Piece]) -> PipelineModel:
        """The same model's modules for pieces of layers whose weights are elsewhere: they run once weights are put in.

        Each weight has a `whole_shape`, and no data.
        """
        config = copy.copy(self.config)
        config.perform_initialization = False
        config.gradient_accumulation_fusion = False  # its kernel adds to the sum that was bound in the forward
        kernels, routing = self.kernels, self.routing
        return PipelineModel(
            config, self.gpt, pieces, self.pg_collection, self._seed, empty=True, kernels=kernels, routing=routing
        )

    def constants(self) -> Iterator[Tensor]:
        """Tensors beside weights that stay on the device from step to step, and that units save."""
        if self._rotary is not None:
            yield from self._rotary.constants()

    def payload_shapes(self, after: Piece, micro_batch_size: int, length: int) -> tuple[torch.Size, ...]:
        """Shapes on this rank of the tensors that cross the cut after a piece, for a chunk of `length` tokens.

        Their type is `payload_dtype`, except the loss sum's, which is float32.
        """
        return boundaries.payload_shapes(self.config, after, micro_batch_size, length, self.context.size)

    @property
    def rows_apart(self) -> int:
        """Over how many ranks the rows of stored keys and values are spread: those of a ring."""
        return self.context.size if self.context.rings else 1

    # ---------------------------------------------------------------------------------------- copies on several ranks

    @property
    def copies_embedding(self) -> bool:
        """Whether the embedding here is a copy, for further tokens, of the one that other ranks have."""
        return hasattr(self, "embedding") and Piece("embed") not in self._own_pieces

    def _end_weights(self) -> tuple[Any, Any]:
        """(word embedding weight, output layer's own weight); None for one this rank does not hold."""
        embedding = self.embedding.word_embeddings.weight if hasattr(self, "embedding") else None
        head = self.output_layer.weight if hasattr(self, "output_layer") else None
        return embedding, head

    def replicated_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Parameters of which other pipeline ranks hold copies, by a key equal on all of these ranks.

        Their gradients must be summed over these ranks before the optimizer's step: those of `copies`, and the tied
        embedding; of one tied to a head that is divided see `tied_rows`.
        """
        replicated = {name: parameter for name, parameter, _ in self._copied_parameters()}
        embedding, head = self._end_weights()
        own = self._own_pieces
        whole = Piece("embed") in own and Piece("head") in own and own[Piece("head")] not in self.copies
        if further_tokens(self.config) and embedding is not None and not whole:
            replicated |= {f"embedding.{name}": each for name, each in self.embedding.named_parameters()}
        if self.share_embeddings_and_output_weights and self.head_part is None:
            replicated.pop(_OUTPUT_LAYER, None)
            weight = embedding if head is None else head
            if weight is not None and not whole:
                replicated[_WORD_EMBEDDING] = weight
        return replicated

    def tied_rows(self, part: Piece) -> list[tuple[torch.nn.Parameter, slice]]:
        """The weights of this rank, with their rows, that are those of a part of a head tied to the embedding: of the
        embedding, and the part's own. All start out equal, and their gradients must be summed."""
        embedding, head = self._end_weights()
        found = [] if embedding is None else [(embedding, part.rows(self.gpt.vocab_size // self.tp_group.size()))]
        return [*found, (head, slice(None))] if part == self.head_part else found

    def _copied_parameters(self) -> Iterator[tuple[str, Any, int]]:
        """Name and number of the copy of the parameters of `copies`."""
        for name, parameter in self.named_parameters():
            number = self.copies.get(self.piece_of(name))
            if number is not None:
                yield name, parameter, number

    # ------------------------------------------------------------------------------------------------------ checkpoints

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return what this rank holds of the checkpoint, under the keys, shapes and offsets of megatron-core's
        GPTModel."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        state.pop(f"{prefix}output_layer._extra_state", None)  # GPTModel leaves this empty object out
        _, head = self._end_weights()
        if self.head_part is not None:
            shard_rows(self, state, prefix, self._first_row)
        elif head is not None and self.share_embeddings_and_output_weights:
            dp_cp_group = metadata["dp_cp_group"]
            state[prefix + _OUTPUT_LAYER] = make_tp_sharded_tensor_for_checkpoint(
                tensor=head,
                key=prefix + _WORD_EMBEDDING,
                replica_id=(1, 0, dp_cp_group.rank()),  # copy 1; the embedding's rank writes copy 0
                allow_shape_mismatch=True,
                tp_group=self.tp_group,
                dp_cp_group=dp_cp_group,
            )
        elif head is not None:
            state[prefix + _OUTPUT_LAYER].allow_shape_mismatch = True  # vocabulary padding, as for the embedding
        for name, entry in state.items():  # parameters, and the `_extra_state` of their modules
            number = self.copies.get(self.piece_of(name.removeprefix(prefix)), 0)
            number += self.copies_embedding and name.startswith(f"{prefix}embedding.")
            if number > 0:
                entry.replica_id = (number, *entry.replica_id[1:])
        return state
