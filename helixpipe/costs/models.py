"""Models as data: the shapes of published GPTs, by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from helixpipe.common.errors import UserError
from helixpipe.common.flags import nearest_name
from helixpipe.costs.layer_patterns import kinds_of_layers
from helixpipe.program.stages import HEAD_MTP, PIECE_KINDS, VARIANTS, LayerKinds, Piece, model_pieces
from helixpipe.program.workload import Extent, Extents, attention_pairs

Others = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class ModelShape:
    """A GPT. Words of megatron-core's configuration in brackets.

    groups: key and value heads [num_query_groups]. ffn: inner size of the MLP, of each half when gated. vocab: before
    it is padded to a multiple of `vocab_multiple` for each tensor-parallel rank. tied: the head uses the embedding's
    weights. norm: `LayerNorm` or `RMSNorm`. positions: `learned_absolute` (seq_length of them), `rope` or `none`. bias:
    in the linear layers [add_bias_linear]. head_channels: of a head [kv_channels]; 0: hidden / heads. qkv_bias: in the
    QKV layer, whatever the others have [add_qkv_bias]. qk_norm: norms of each head's query and key [qk_layernorm].
    centered: weights of norms are less 1 [layernorm_zero_centered_gamma]. window: tokens that one sees in layers of a
    window, its own among them [one more than window_size's left]; 0: there are none. windowed, unrotated: which layers
    have one, and which no RoPE (`kinds_of_layers`). experts: of each layer that has some [num_moe_experts], 0: there
    are none; mixed: which layers have them; topk: how many a token goes to [moe_router_topk]; expert_ffn: their inner
    size [moe_ffn_hidden_size]; shared_ffn: that of the experts which all tokens go to
    [moe_shared_expert_intermediate_size]. further: tokens after the next that the head predicts as well, each by a
    layer such as the last [mtp_num_layers]. Of multi-latent attention: kv_rank: channels of a latent [kv_lora_rank], 0:
    there is none; q_rank: of what queries are made of [q_lora_rank], 0: of the hidden states; own_channels,
    shared_channels, value_channels: of a head's key its own, of that which all heads share, of a head's value
    [qk_head_dim, qk_pos_emb_head_dim, v_head_dim]. qk_norm is then of what queries are made of, and of latents.
    output_gate: each channel of attention's output is multiplied by the sigmoid of a channel that the QKV layer gives
    [attention_output_gate]. sinks: attention's softmax has a learned logit of each head [softmax_type learnable].
    others: training's further flags about the model, by field and off their defaults, on which no cost depends
    (`training_flags.shape_of_flags`).
    """

    name: str
    layers: int
    hidden: int
    heads: int
    groups: int
    ffn: int
    gated: bool
    vocab: int
    tied: bool
    norm: str
    positions: str
    bias: bool
    seq_length: int
    head_channels: int = 0
    qkv_bias: bool = False
    qk_norm: bool = False
    centered: bool = False
    vocab_multiple: int = 128
    window: int = 0
    windowed: tuple[int, ...] = ()
    unrotated: tuple[int, ...] = ()
    experts: int = 0
    mixed: tuple[int, ...] = ()
    topk: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    further: int = 0
    kv_rank: int = 0
    q_rank: int = 0
    own_channels: int = 0
    shared_channels: int = 0
    value_channels: int = 0
    output_gate: bool = False
    sinks: bool = False
    others: Others = ()

    @classmethod
    def from_json(cls, **content: Any) -> ModelShape:
        """Return the shape of a file's fields, whose lists are tuples here. Raises TypeError for missing or unknown."""

        def frozen(value: Any) -> Any:
            return tuple(map(frozen, value)) if isinstance(value, list) else value

        fields: dict[str, Any] = {name: frozen(value) for name, value in content.items()}
        return cls(**fields)

    @cached_property
    def channels(self) -> int:
        """Of a head's query and key."""
        if self.kv_rank:
            return self.own_channels + self.shared_channels
        return self.head_channels or self.hidden // self.heads

    @cached_property
    def query_hidden(self) -> int:
        """Elements of a token's queries."""
        return self.heads * self.channels

    @cached_property
    def attention_hidden(self) -> int:
        """Elements of a token's attention output."""
        return self.heads * self.value_channels if self.kv_rank else self.query_hidden

    @cached_property
    def mixed_hidden(self) -> int:
        """Elements that the QKV layer gives of a token: queries, their gates, keys and values."""
        return self.query_hidden * (1 + self.output_gate) + 2 * self.kv_hidden

    @property
    def biased_qkv(self) -> bool:
        return self.bias or self.qkv_bias

    @cached_property
    def kv_hidden(self) -> int:
        """Elements of a token's keys, and as many of its values."""
        return self.groups * self.channels

    @property
    def norm_parameters(self) -> int:
        return self.hidden * self.norm_vectors

    @property
    def norm_vectors(self) -> int:
        """A weight, and a bias where it has one."""
        return 2 if self.norm == "LayerNorm" else 1

    def kinds_of(self, layers: int) -> tuple[LayerKinds, ...]:
        """The kinds of the pieces of each layer, had it so many."""
        return kinds_of_layers(layers, self.windowed, self.unrotated, self.mixed, self.kv_rank > 0, self.sinks)

    @property
    def head_kind(self) -> str:
        return HEAD_MTP if self.further else "head"

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The whole model as a chain."""
        return (*model_pieces(self.kinds_of(self.layers))[:-1], Piece(self.head_kind))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of piece that it has, in the order of the chain."""
        found = {piece.kind for piece in self.pieces}
        return tuple(kind for kind in (*PIECE_KINDS, *VARIANTS) if kind in found)

    def padded_vocab(self, tensor_parallel: int) -> int:
        """Rows of the embedding as Megatron pads them."""
        unit = self.vocab_multiple * tensor_parallel
        return -(-self.vocab // unit) * unit

    def position_rows(self, tensor_parallel: int) -> int:
        """Learned positions on one tensor-parallel rank: its share, or all that cannot be shared evenly."""
        if self.positions != "learned_absolute":
            return 0
        return self.seq_length if self.seq_length % tensor_parallel else self.seq_length // tensor_parallel


def _gpt(
    name: str, layers: int, heads: int, hidden: int, seq_length: int, positions: str = "learned_absolute"
) -> ModelShape:
    """GPT-3's form: LayerNorm, biases, GELU, MLP of 4h, GPT-2's vocabulary tied to the head."""
    return ModelShape(
        name, layers, hidden, heads, heads, 4 * hidden, False, 50257, True, "LayerNorm", positions, True, seq_length
    )


def _with(shape: ModelShape, **others: Any) -> ModelShape:
    """Return the shape with further flags of training, by field (`ModelShape.others`)."""
    return replace(shape, others=tuple(sorted({**dict(shape.others), **others}.items())))


def _llama(
    name: str, layers: int, heads: int, hidden: int, seq_length: int, groups: int, ffn: int, vocab: int, base: int = 0
) -> ModelShape:
    """Llama's form: RoPE, RMSNorm, no bias, SwiGLU, head of its own. base: of RoPE, where it is not 10,000."""
    shape = ModelShape(
        name, layers, hidden, heads, groups, ffn, True, vocab, False, "RMSNorm", "rope", False, seq_length
    )
    return _with(shape, rotary_base=base) if base else shape


def _qwen3(name: str, layers: int, heads: int, hidden: int, ffn: int, tied: bool = False) -> ModelShape:
    """Qwen3's dense form: Llama's, with 8 query groups, heads of 128 channels, and norms of queries and keys."""
    shape = _llama(name, layers, heads, hidden, 32 * _K, groups=8, ffn=ffn, vocab=151936, base=1_000_000)
    shape = _with(shape, norm_epsilon=1e-6)
    return replace(shape, head_channels=0 if hidden == 128 * heads else 128, qk_norm=True, tied=tied)


def _with_experts(name: str, shape: ModelShape, experts: int, topk: int, expert_ffn: int) -> ModelShape:
    """The same with experts in every layer in place of its MLP."""
    return replace(shape, name=name, experts=experts, mixed=(1,), topk=topk, expert_ffn=expert_ffn)


def _deepseek(shape: ModelShape, dense: int, shared_ffn: int, q_rank: int = 0, further: int = 0) -> ModelShape:
    """The same with latents of 512 channels, shared experts, and no experts in the first `dense` layers."""
    mixed = (0,) * dense + (1,) * (2 * shape.layers)  # also where flags say that there are more layers
    shape = replace(shape, mixed=mixed, shared_ffn=shared_ffn, further=further, qk_norm=True, q_rank=q_rank)
    shape = replace(shape, kv_rank=512, own_channels=128, shared_channels=64, value_channels=128)
    return _with(shape, norm_epsilon=1e-6, rope_type="rope")


_K = 1024
_V3 = _llama("", 61, 128, 7168, 4 * _K, groups=128, ffn=18432, vocab=129280)
_V3_ROUTER: Mapping[str, Any] = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_num_groups": 8,
    "moe_router_group_topk": 4,
    "moe_router_topk_scaling_factor": 2.5,
}
_MIXTRAL = _llama("", 32, 32, 4096, 32 * _K, groups=8, ffn=14336, vocab=32000, base=1_000_000)
_LITE = _llama("", 27, 16, 2048, 4 * _K, groups=16, ffn=10944, vocab=102400)
MODELS: Mapping[str, ModelShape] = MappingProxyType(
    {
        model.name: model
        for model in (
            # Touvron et al., Llama 2, 2023; Llama 3: Grattafiori et al., 2024
            _llama("llama2-7b", 32, 32, 4096, 4 * _K, groups=32, ffn=11008, vocab=32000),
            _llama("llama2-13b", 40, 40, 5120, 4 * _K, groups=40, ffn=13824, vocab=32000),
            _llama("llama2-70b", 80, 64, 8192, 4 * _K, groups=8, ffn=28672, vocab=32000),
            _llama("llama3-8b", 32, 32, 4096, 8 * _K, groups=8, ffn=14336, vocab=128256, base=500_000),
            _llama("llama3-70b", 80, 64, 8192, 8 * _K, groups=8, ffn=28672, vocab=128256, base=500_000),
            _llama("llama3-405b", 126, 128, 16384, 8 * _K, groups=8, ffn=53248, vocab=128256, base=500_000),
            # Brown et al., 2020, and Narayanan et al., SC'21 (table 1), whose trillion-parameter GPT is the largest
            _gpt("gpt-175b", 96, 96, 12288, 2 * _K),
            _gpt("1t", 128, 160, 25600, 2 * _K),
            # Qwen3 technical report (2025) and the models' config.json; sequences of the last stage of pre-training
            _qwen3("qwen3-4b", 36, 32, 2560, ffn=9728, tied=True),
            _qwen3("qwen3-8b", 36, 32, 4096, ffn=12288),
            _qwen3("qwen3-14b", 40, 40, 5120, ffn=17408),
            _qwen3("qwen3-32b", 64, 64, 5120, ffn=25600),
            # Jiang et al., Mixtral of Experts, 2024; Qwen3 technical report; and the models' config.json
            _with_experts("mixtral-8x7b", _MIXTRAL, experts=8, topk=2, expert_ffn=14336),
            _with_experts(
                "qwen3-235b-a22b",
                replace(_qwen3("", 94, 64, 4096, ffn=12288), groups=4, head_channels=128),
                experts=128,
                topk=8,
                expert_ffn=1536,
            ),
            # DeepSeek-AI, DeepSeek-V2 and DeepSeek-V3, 2024, and the models' config.json
            _deepseek(_with(_with_experts("deepseek-v3", _V3, 256, 8, 2048), **_V3_ROUTER), 3, 2048, 1536, further=1),
            _deepseek(
                _with(_with_experts("deepseek-v2-lite", _LITE, 64, 6, 1408), moe_router_pre_softmax=True), 1, 2 * 1408
            ),
            # HelixPipe's setups: layers, heads, hidden; 32k to 128k tokens
            _gpt("helix-1.3b", 24, 16, 2048, 128 * _K),
            _gpt("helix-3b", 16, 32, 4096, 128 * _K),
            _gpt("helix-7b", 32, 32, 4096, 128 * _K),
            # Seq1F1B's 2.7B and 7B: GPT-3's sizes (Brown et al., 2020); RoPE and a head of its own, as its scripts say
            replace(_gpt("seq1f1b-2.7b", 32, 32, 2560, 32 * _K, "rope"), tied=False),
            replace(_gpt("seq1f1b-7b", 32, 32, 4096, 128 * _K, "rope"), tied=False),
            # WeiPipe's setups: 32 layers of 12 H^2 weights, 32 heads
            _gpt("weipipe-1024", 32, 32, 1024, 16 * _K),
            _gpt("weipipe-2048", 32, 32, 2048, 16 * _K),
            # SPPO's setups; heads of 128 channels; RoPE, as a million learned positions would be 4 G weights
            _gpt("sppo-7b", 32, 32, 4096, 1024 * _K, "rope"),
            _gpt("sppo-13b", 40, 40, 5120, 1024 * _K, "rope"),
            _gpt("sppo-65b", 80, 64, 8192, 1024 * _K, "rope"),
            # InfiniPipe's sizes; shapes of OPT (Zhang et al., 2022) with RoPE, for lack of its own
            _gpt("infinipipe-7b", 32, 32, 4096, 192 * _K, "rope"),
            _gpt("infinipipe-13b", 40, 40, 5120, 192 * _K, "rope"),
            _gpt("infinipipe-30b", 48, 56, 7168, 192 * _K, "rope"),
        )
    }
)
"""Every preset by its flag value."""


def find_model(name: str) -> ModelShape:
    """The preset of that name. Raises UserError that names the nearest one."""
    if name.lower() in MODELS:
        return MODELS[name.lower()]
    near = nearest_name(name, MODELS)
    hint = f"did you mean {near}? " if near else ""
    raise UserError(f"--model {name} is unknown: {hint}known are {', '.join(MODELS)}.")


A2A, P2P = "a2a", "p2p"
"""What context-parallel ranks exchange for core attention, as `--cp-comm-type` has it: rows for heads (Ulysses), or
keys and values round a ring."""

OFF, HALVES, PAIRS, AUTO = "off", "halves", "pairs", "auto"
"""How an op runs beside collectives of tensor-parallel and context-parallel ranks, as `--overlap-tp-comm` has it: all
of its tokens at once; in two halves, one of which computes while the other's ranks communicate; all at once, but
forwards beside backwards of other units; or whichever the cost model finds fastest."""

OPTIM_GRADS, OPTIM_GRADS_PARAMS = "optim_grads", "optim_grads_params"
IN_PARTS = (OPTIM_GRADS, OPTIM_GRADS_PARAMS)
"""Values of `--data-parallel-sharding-strategy` with which data-parallel ranks keep parts of weights and gradients: the
first gathers weights once a step (ZeRO's second stage), the second for each op (its third)."""

IN_PLACE, AUTOGRAD, FUSED = "in place", "autograd", "fused"
"""How the loss of a head in one part is computed. megatron-core's vocab-parallel cross entropy: float32 logits become
probabilities and these their gradient, in the same memory. torch's: each a tensor of its own. One kernel, which keeps
the logits as they are, not float32 probabilities, and writes their gradient beside them."""

LOSS_SLICE = 4096
"""Tokens of a slice of head and loss, over all sequences of a microbatch, where no flag gives them: enough that reading
the weight and adding to the sum of its gradients, once a slice, take little beside the products."""


@dataclass(frozen=True)
class Layout:
    """How a model is cut and stored on a GPU.

    element_bytes: of weights and activations (2: bfloat16). fused_kernels: those of a GPU (one kernel for RMSNorm, bias
    and activation function, and flash-attn); without, what the same pieces do on the CPU. mlp_chunk: tokens of a slice
    of the MLP, whose inner activations are recomputed in the backward, slice by slice; 0: the whole MLP at once.
    loss_chunk: tokens of a slice of head and loss, whose logits are made in the backward, slice by slice; 0: those of
    all tokens at once. context_parallel: ranks that share every chunk's rows outside core attention; cp_comm_type: what
    they exchange for it, `a2a` (heads for rows) or `p2p` (keys and values round a ring). overlap_tp_comm: `halves`
    where ops run over two halves of their tokens, to hide what ranks communicate inside them, `pairs` where
    forwards run beside backwards, `off` where neither is so, `auto` before that is decided. cuda_graphs: `auto`
    where pieces may run as CUDA graphs, whose memory stays, else `off`. attention_kernel: of core
    attention, one of `hardware.ATTENTION_KERNELS`. expert_parallel: ranks that share
    out the experts of every layer, of those of a pipeline rank; expert_tensor: ranks that each expert is split over, 0:
    all tensor-parallel ones. expert_load: the tokens of the expert-parallel rank that gets most, over the mean.

    Of other engines: kv_passes: how often a chunk's backward goes over the keys and values of earlier chunks to add
    their gradients (ours reads the sum and what comes to it, and writes the sum); kv_copies: how many there are of keys
    and values of chunks; eager: norms and RoPE are torch's own functions, one after another, in float32; views_of_qkv:
    values stay a view of the QKV layer's output, which is kept whole for them; scatters_messages: without sequence
    parallelism each tensor-parallel rank sends its part of a hidden state to the next stage, where they are gathered
    (Narayanan et al., 2021, section 4.1); batch_first: hidden states are [batch, sequence, channels], as attention
    wants them, and nothing is transposed; loss: how it is computed, one of `IN_PLACE`, `AUTOGRAD`, `FUSED`;
    stops_recomputing: a layer is made again up to the last tensor that its backward needs, without the MLP's second
    product (`torch.utils.checkpoint` without reentrant autograd, from torch 2.1 on).
    """

    tensor_parallel: int = 1
    sequence_parallel: bool = False
    micro_batch_size: int = 1
    element_bytes: int = 2
    fused_kernels: bool = True
    mlp_chunk: int = 0
    loss_chunk: int = 0
    context_parallel: int = 1
    cp_comm_type: str = P2P
    overlap_tp_comm: str = OFF
    cuda_graphs: str = OFF
    attention_kernel: str = "fa2"
    expert_parallel: int = 1
    expert_tensor: int = 0
    expert_load: float = 1.0
    kv_passes: int = 3
    kv_copies: int = 1
    eager: bool = False
    views_of_qkv: bool = False
    scatters_messages: bool = False
    batch_first: bool = False
    loss: str = IN_PLACE
    stops_recomputing: bool = False

    @property
    def expert_tensor_parallel(self) -> int:
        """Ranks that each expert is split over."""
        return self.expert_tensor or self.tensor_parallel

    @property
    def captures(self) -> bool:
        """Whether pieces run as CUDA graphs, where their program lets them."""
        return self.cuda_graphs != OFF and self.model_gpus == 1 and not self.mlp_chunk

    @property
    def halves(self) -> bool:
        """Whether ops run over two halves of their tokens; not for a ring alone, which hides what it sends."""
        return self.overlap_tp_comm == HALVES and (self.tensor_parallel * self.expert_parallel > 1 or self.swaps)

    @property
    def pairs(self) -> bool:
        """Whether forwards run beside backwards of other units."""
        return self.overlap_tp_comm == PAIRS and self.communicates

    @property
    def pauses(self) -> bool:
        """Whether a forward in a pair takes its first step before the backward, and both pause in the middle of what
        computes longest as well: beside tensor- and context-parallel ranks, not where experts' alone exchange
        something. A backward of experts begins with an exchange, for that step to run beside; and a short step would
        stand beside another exchange, a long one beside nothing."""
        return self.tensor_parallel * self.context_parallel > 1

    @property
    def communicates(self) -> bool:
        """Whether ranks exchange anything inside layers."""
        return self.tensor_parallel * self.context_parallel * self.expert_parallel > 1

    @property
    def reorders_rows(self) -> bool:
        """Whether embedding and head have tokens in another order than the sequence's."""
        return self.halves and (self.sequence_parallel or self.swaps)

    @property
    def swaps(self) -> bool:
        """Whether context-parallel ranks swap rows for heads."""
        return self.context_parallel > 1 and self.cp_comm_type == A2A

    @property
    def rings(self) -> bool:
        """Whether keys and values go round context-parallel ranks."""
        return self.context_parallel > 1 and self.cp_comm_type == P2P

    @property
    def parts(self) -> int:
        """Equal runs of tokens that context-parallel ranks make of a chunk; a ring's ranks have two each."""
        return context_parts(self.context_parallel, self.cp_comm_type)

    @property
    def unit(self) -> int:
        """Tokens that lengths of chunks are multiples of."""
        return shared_unit(self.tensor_parallel, self.context_parallel, self.parts)

    @property
    def model_gpus(self) -> int:
        """GPUs side by side that run one stage of one microbatch."""
        return self.tensor_parallel * self.context_parallel

    def mlp_slices(self, tokens: float) -> list[float]:
        """Tokens of each slice of a sequence's MLP; one, the sequence, if it is not sliced."""
        return _slices(tokens, self.mlp_chunk)

    def loss_slices(self, tokens: float) -> list[float]:
        """Tokens of each slice of a sequence's loss; one, the sequence, if it is not sliced."""
        return _slices(tokens, self.loss_chunk)

    def with_loss_slices(self) -> Layout:
        """The same with slices of `LOSS_SLICE` tokens."""
        return replace(self, loss_chunk=max(LOSS_SLICE // self.micro_batch_size, 1))


def context_parts(context_parallel: int, cp_comm_type: str) -> int:
    """Equal runs of tokens that so many ranks make of a chunk."""
    return context_parallel * (2 if context_parallel > 1 and cp_comm_type == P2P else 1)


def shared_unit(tensor_parallel: int, context_parallel: int, parts: int) -> int:
    """Tokens that the length of a chunk is a multiple of: context-parallel ranks share it in so many equal runs, and
    tensor-parallel ones, with sequence parallelism, each rank's rows."""
    return math.lcm(parts, tensor_parallel * context_parallel)


def _slices(tokens: float, size: int) -> list[float]:
    if not size:
        return [tokens]
    count = max(math.ceil(tokens / size), 1)
    return [size] * (count - 1) + [tokens - (count - 1) * size]


@dataclass(frozen=True)
class Chunk:
    """Tokens of a chunk, and how many of its document come earlier.

    stored: whether its microbatch runs in several chunks, so that keys and values lie in buffers of all of it. slices:
    where it is of several documents, the tokens and the earlier tokens of each. window: tokens that one sees at most,
    its own among them; 0: all.
    """

    tokens: float
    earlier: float = 0.0
    stored: bool = False
    slices: Extents = ()
    window: int = 0

    @property
    def pairs(self) -> float:
        """Pairs of a query and a key it sees: n tokens after c earlier ones have n(c + n/2)."""
        return attention_pairs(self.slices or (Extent(self.tokens, self.earlier),), self.window)

    @property
    def seen(self) -> float:
        """Keys that its attention reads."""
        parts, most = self.slices or (Extent(self.tokens, self.earlier),), self.window - 1 if self.window else math.inf
        return sum(part.tokens + min(part.earlier, most) for part in parts)


def chunk_of(extents: Extents, whole: float | None, seq_length: float) -> Chunk:
    """The chunk of those extents, in tokens. whole: tokens of a microbatch on average; None where the extents are parts
    of microbatches, which then have seq_length tokens."""
    scale = seq_length if whole is None else 1
    slices = extents
    if scale != 1:
        slices = tuple(Extent(part.tokens * scale, part.earlier * scale, part.stored) for part in extents)
    if len(slices) == 1:
        return Chunk(*slices[0])
    tokens, earlier = sum([part.tokens for part in slices]), sum([part.earlier for part in slices])
    return Chunk(tokens, earlier, any(part.stored for part in slices), slices)


def tokens_of(extents: Extents, whole: float | None, seq_length: float) -> tuple[float, bool]:
    """`Chunk.tokens` and `Chunk.stored` of those extents."""
    tokens = sum([part.tokens for part in extents])
    return tokens * seq_length if whole is None else tokens, any(part.stored for part in extents)
