"""Flags that describe the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from helixpipe.common.flags import option, setting
from helixpipe.common.ranges import MOST_LAYERS, MOST_TOKENS, MOST_WIDTH
from helixpipe.costs.expert_flags import ExpertFlags
from helixpipe.costs.latent_flags import LatentFlags

ORIGINAL_LENGTHS = {
    "yarn_original_max_position_embeddings": 4096,
    "rope_scaling_original_max_position_embeddings": 8192,
}
"""Fields with the longest sequence before the context was extended, and Megatron-LM's defaults."""


@dataclass(frozen=True)
class ModelConfig(ExpertFlags, LatentFlags):
    """Shape and numerics of the GPT model, under Megatron-LM's names. Validation fills in every derived size."""

    num_layers: int | None = option(None, "Number of transformer layers.", at_least=1, at_most=MOST_LAYERS)
    hidden_size: int | None = option(None, "Width of the hidden states.", at_least=1, at_most=MOST_WIDTH)
    ffn_hidden_size: int | None = option(
        None,
        "Width of the MLP; by default 4 x hidden-size, or with --swiglu 2/3 of that rounded down to a multiple of 64.",
        at_least=1,
        at_most=MOST_WIDTH,
    )
    chunk_size: int = option(
        0,
        "Run every MLP over slices of this many tokens, whose inner activations are recomputed in the backward, slice "
        "by slice; 0: over the whole sequence.",
        at_least=0,
    )
    loss_chunk_size: int | None = option(
        None,
        "Run output layer and loss over slices of this many tokens, whose logits are made in the backward, slice by "
        "slice; 0: over the whole sequence. By default slices are taken where --memory-limit or --hardware says that a "
        "step does not fit without.",
        at_least=0,
    )
    loss_slices_why: str | None = setting(None, "Why output layer and loss run over slices; None where flags say so.")
    num_attention_heads: int | None = option(None, "Number of attention (query) heads.", at_least=1, at_most=MOST_WIDTH)
    kv_channels: int | None = option(
        None,
        "Channels of one attention head; by default hidden-size / num-attention-heads.",
        at_least=1,
        at_most=MOST_WIDTH,
    )
    group_query_attention: bool = option(False, "Share keys and values between groups of query heads.")
    num_query_groups: int = option(
        1, "Number of key/value heads with --group-query-attention.", at_least=1, at_most=MOST_WIDTH
    )
    seq_length: int | None = option(None, "Tokens in a training sequence.", at_least=1, at_most=MOST_TOKENS)
    max_position_embeddings: int | None = option(
        None,
        "Longest sequence the position embedding allows; at least --seq-length, which is the default with rope.",
        at_least=1,
        at_most=MOST_TOKENS,
    )
    position_embedding_type: Literal["learned_absolute", "rope", "yarn", "none"] = option(
        "learned_absolute",
        "How positions enter: a learned table, rotary embeddings, these extended as YaRN does, or not at all.",
    )
    use_rotary_position_embeddings: bool = option(False, "Older spelling of --position-embedding-type rope.")
    add_position_embedding: bool = option(
        True, "Older spelling of --position-embedding-type none; nothing with rope.", flags=["--no-position-embedding"]
    )
    rotary_base: int = option(10000, "Base period of the rotary embeddings.", at_least=1)
    rotary_percent: float = option(1.0, "Fraction of each head's channels that is rotated.", more_than=0, at_most=1)
    rotary_interleaved: bool = option(False, "Rotate each channel with its neighbour, not with that of the other half.")
    rotary_seq_len_interpolation_factor: float | None = option(
        None, "Position interpolation: divide the positions of the rotary embeddings by this.", at_least=1
    )
    use_rope_scaling: bool = option(False, "Extend rotary embeddings as Llama 3.1 does.")
    rope_scaling_factor: float = option(8.0, "--use-rope-scaling: by how much.", at_least=1)
    rope_scaling_low_freq_factor: float = option(
        1.0, "--use-rope-scaling: channels that turn less often in the original length are slowed down.", more_than=0
    )
    rope_scaling_high_freq_factor: float = option(
        4.0, "--use-rope-scaling: channels that turn more often in the original length are left alone.", more_than=0
    )
    rope_scaling_original_max_position_embeddings: int | None = option(
        None,
        "--use-rope-scaling: longest sequence of the model before its context was extended; by default as in --load, "
        "else 8192.",
        at_least=1,
    )
    rotary_scaling_factor: float = option(
        1.0, "YaRN: by how much the context is extended; more than 1 with --position-embedding-type yarn.", at_least=1
    )
    mscale: float = option(1.0, "YaRN: how much longer queries and keys become.", at_least=0)
    mscale_all_dim: float = option(0.0, "YaRN: what --mscale is held against.", at_least=0)
    yarn_original_max_position_embeddings: int | None = option(
        None,
        "YaRN: longest sequence of the model before its context was extended; by default as in --load, else 4096.",
        at_least=1,
    )
    yarn_beta_fast: float = option(32.0, "YaRN: channels that turn more often are left alone.", more_than=0)
    yarn_beta_slow: float = option(1.0, "YaRN: channels that turn less often are slowed down.", more_than=0)
    yarn_correction_range_round_to_int: bool = option(
        True,
        "YaRN: let the ramp between both begin and end inside a channel.",
        flags=["--no-yarn-correction-range-round-to-int"],
    )
    window_size: str | None = option(
        None,
        "LEFT,0: a token attends to LEFT tokens before its own and none before these; -1,0: to all of its document.",
        metavar="LEFT,0",
    )
    window_attn_skip_freq: str | None = option(
        None,
        "With --window-size: N, every N-th layer attends to all tokens, or a list of 1 (window) and 0, for each layer, "
        "such as ([1]*3+[0])*2 (default: all layers have the window).",
        metavar="N|LIST",
    )
    no_rope_freq: str | None = option(
        None,
        "N, every N-th layer does not rotate queries and keys, or a list of 1 (no RoPE) and 0, a number a layer.",
        metavar="N|LIST",
    )
    normalization: Literal["LayerNorm", "RMSNorm"] = option("LayerNorm", "Kind of normalization.")
    norm_epsilon: float = option(1e-5, "Epsilon of the normalization.", more_than=0)
    apply_layernorm_1p: bool = option(False, "Norms scale by their weight plus 1; weights begin at 0.")
    qk_layernorm: bool = option(False, "Normalize the query and the key of each head.")
    attention_output_gate: bool = option(
        False, "Multiply attention's output by the sigmoid of as many channels that the QKV projection gives as well."
    )
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = option(
        "vanilla",
        "Attention sinks: of each head a logit without a value beside those of the keys, 0 (off-by-one) or learnable.",
    )
    swiglu: bool = option(False, "Gated MLP with SiLU instead of GELU.")
    squared_relu: bool = option(False, "Squared ReLU instead of GELU.")
    add_bias_linear: bool = option(True, "No bias in the linear layers.", flags=["--disable-bias-linear"])
    add_qkv_bias: bool = option(False, "Bias in the QKV projection although --disable-bias-linear is given.")
    mtp_num_layers: int | None = option(
        None,
        "Tokens after the next that the head predicts as well, each by a transformer layer of its own (multi-token "
        "prediction).",
        at_least=0,
        at_most=MOST_LAYERS,
    )
    mtp_loss_scaling_factor: float = option(
        0.1, "--mtp-num-layers: weight of the mean of their losses beside that of the next token.", at_least=0
    )
    untie_embeddings_and_output_weights: bool = option(False, "Give the output layer weights of its own.")
    make_vocab_size_divisible_by: int = option(
        128, "The vocabulary is padded to a multiple of this times the tensor-parallel size.", at_least=1
    )
    attention_dropout: float = option(0.1, "Dropout probability of the attention weights.", at_least=0, less_than=1)
    hidden_dropout: float = option(0.1, "Dropout probability of the hidden states.", at_least=0, less_than=1)
    attention_softmax_in_fp32: bool = option(False, "Compute the attention softmax in float32.")
    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = option(
        "auto",
        "Core attention on GPUs: the best flash kernel there is (auto), a flash kernel or an error (flash), cuDNN's "
        "(fused), or torch's unfused one, which keeps all scores (unfused, local); on CPU torch's. Results agree up to "
        "rounding.",
    )
    transformer_impl: Literal["local", "transformer_engine"] | None = option(
        None,
        "transformer_engine: norms and attention of Transformer Engine where it is installed, else megatron-core's or "
        "torch's, as by default; linear layers are megatron-core's own in any case. local also names norms in "
        "checkpoints as megatron-core's local layers do.",
    )
    gradient_accumulation_fusion: bool = option(
        True,
        "Do not add weight gradients to their sum inside the matrix product (done on GPUs where apex's "
        "fused_weight_gradient_mlp_cuda is installed).",
        flags=["--no-gradient-accumulation-fusion"],
    )
    cuda_graphs: Literal["off", "auto"] = option(
        "off",
        "auto: issue norm, QKV, output projection and MLP of a chunk as CUDA graphs, captured once the same chunk has "
        "come a few times and only where the host then takes at least as long as the GPU. Their memory stays: one copy "
        "of what they save for each unit in flight. Not with parallel ranks inside ops, hidden dropout, --chunk-size, "
        "split backwards, offloading, or weights that travel or are in parts; the start says what is captured.",
    )
    apply_rope_fusion: bool = option(
        True,
        "Do not rotate queries and keys in one kernel (done on GPUs where Transformer Engine is installed).",
        flags=["--no-rope-fusion"],
    )
    init_method_std: float = option(0.02, "Standard deviation of the normal initialization of weights.", at_least=0)
    embedding_init_method_std: float | None = option(
        None, "Standard deviation for the embedding; by default that of the other weights.", at_least=0
    )
    init_method_xavier_uniform: bool = option(False, "Initialize weights with Xavier uniform.")
    use_cpu_initialization: bool = option(False, "Initialize weights on the CPU also where there is a GPU.")
    bias_gelu_fusion: bool = option(
        True, "Do not fuse bias and GELU (fused on GPU only).", flags=["--no-bias-gelu-fusion"]
    )
    bias_swiglu_fusion: bool = option(
        True, "Do not fuse bias and SwiGLU (fused on GPU only).", flags=["--no-bias-swiglu-fusion"]
    )
    bias_dropout_fusion: bool = option(
        True, "Do not fuse bias, dropout and residual (fused on GPU only).", flags=["--no-bias-dropout-fusion"]
    )
