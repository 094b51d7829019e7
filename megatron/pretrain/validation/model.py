"""The shape of the model."""

from __future__ import annotations

from helixpipe.common.errors import UserError
from helixpipe.costs.conflicts import with_further_tokens, with_latent_attention
from helixpipe.costs.layer_patterns import shape_fields
from helixpipe.costs.models import AUTO, OFF
from helixpipe.planning.division import further_tokens_of
from megatron.pretrain.config import Config
from megatron.pretrain.validation.wording import alternatives, checked, nearest


def position_embeddings(config: Config) -> Config:
    """Apply the older flags for rope and for no positions; check that a learned table has a size and
    holds a sequence.
    """
    model = config.model
    if model.use_rotary_position_embeddings:
        config = config.replace("model", position_embedding_type="rope")
    if not model.add_position_embedding and config.model.position_embedding_type == "learned_absolute":
        config = config.replace("model", position_embedding_type="none")
    longest, length = model.max_position_embeddings, checked(model.seq_length)
    if longest is None:
        if config.model.position_embedding_type == "learned_absolute":
            raise UserError(
                f"--max-position-embeddings must be given with learned positions, at least --seq-length {length}."
            )
        return config.replace("model", max_position_embeddings=length)
    if longest < length:
        raise UserError(f"--max-position-embeddings {longest} must be at least --seq-length {length}.")
    return config


def attention_heads(config: Config) -> Config:
    """Set the channels of a head, by default hidden / heads, and check that tensor-parallel ranks can
    divide the heads.
    """
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    heads, hidden = checked(model.num_attention_heads), checked(model.hidden_size)
    if heads % tp:
        raise UserError(
            f"--num-attention-heads {heads} must be a multiple of --tensor-model-parallel-size {tp}; "
            f"the nearest valid values are {nearest(heads, tp)}."
        )
    if model.kv_channels is None:
        if hidden % heads and not model.multi_latent_attention:
            raise UserError(
                f"--hidden-size {hidden} must be a multiple of --num-attention-heads {heads}, such as "
                f"{nearest(hidden, heads)}, unless --kv-channels is given."
            )
        config = config.replace("model", kv_channels=hidden // heads)
    channels, positions = checked(config.model.kv_channels), config.model.position_embedding_type
    if positions in ("rope", "yarn") and channels % 2 and not model.multi_latent_attention:
        raise UserError(
            f"--kv-channels {channels} must be even with --position-embedding-type {positions}, which rotates pairs of "
            "them."
        )
    return config


def rotary_embeddings(config: Config) -> Config:
    """Check that extensions of rotary embeddings have the positions they need: YaRN its own, the others `rope`."""
    model, positions = config.model, config.model.position_embedding_type
    for flag, given, needed in (
        ("--use-rope-scaling", model.use_rope_scaling, ("rope",)),
        (
            "--rotary-seq-len-interpolation-factor",
            model.rotary_seq_len_interpolation_factor not in (None, 1),
            ("rope",),
        ),
        ("--rotary-interleaved", model.rotary_interleaved, ("rope", "yarn")),
        ("--rotary-scaling-factor", model.rotary_scaling_factor != 1, ("yarn",)),
    ):
        if flag == "--rotary-scaling-factor" and model.multi_latent_attention:
            continue
        if given and positions not in needed:
            raise UserError(f"{flag} needs --position-embedding-type {' or '.join(needed)}, not {positions}.")
    if positions == "yarn" and model.rotary_scaling_factor == 1:
        raise UserError(
            "--position-embedding-type yarn with --rotary-scaling-factor 1 extends nothing: give a factor of more than "
            "1, such as 4, or --position-embedding-type rope, which is the same model."
        )
    low, high = model.rope_scaling_low_freq_factor, model.rope_scaling_high_freq_factor
    if model.use_rope_scaling and low >= high:
        raise UserError(
            f"--rope-scaling-low-freq-factor {low:g} must be less than --rope-scaling-high-freq-factor {high:g}."
        )
    return config


def layer_patterns(config: Config) -> Config:
    """Check which layers attend to a window and which have no RoPE; the flags are kept as they were typed."""
    model = config.model
    found = shape_fields(model.window_size, model.window_attn_skip_freq, model.no_rope_freq, checked(model.num_layers))
    if found["unrotated"] and model.position_embedding_type not in ("rope", "yarn"):
        raise UserError(
            f"--no-rope-freq {model.no_rope_freq} needs --position-embedding-type rope or yarn, not "
            f"{model.position_embedding_type}."
        )
    return config


def query_groups(config: Config) -> Config:
    """Check that key/value heads divide the query heads and that tensor-parallel ranks can divide them."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    heads = checked(model.num_attention_heads)
    if not model.group_query_attention:
        if model.num_query_groups != 1:
            raise UserError(f"--num-query-groups {model.num_query_groups} needs --group-query-attention.")
        return config
    valid = [groups for groups in range(tp, heads + 1, tp) if heads % groups == 0]
    if model.num_query_groups not in valid:
        raise UserError(
            f"--num-query-groups {model.num_query_groups} must divide --num-attention-heads {heads} and be a multiple "
            f"of --tensor-model-parallel-size {tp}; valid values are {alternatives(valid)}."
        )
    return config


def ffn_hidden_size(config: Config) -> Config:
    """Set the default 4h, or as many parameters with a gated MLP: 2/3 of that, down to a multiple of 64 (Megatron-LM's
    rule).
    """
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    if model.swiglu and model.squared_relu:
        raise UserError("--swiglu and --squared-relu name two activations; give one.")
    size = model.ffn_hidden_size
    if size is None:
        wide = 4 * checked(model.hidden_size)
        size = wide * 2 // 3 // 64 * 64 if model.swiglu else wide
        if size == 0:
            raise UserError(
                f"--hidden-size {model.hidden_size} is too small for --swiglu's default width; give --ffn-hidden-size."
            )
    if size % tp:
        raise UserError(
            f"--ffn-hidden-size {size} must be a multiple of --tensor-model-parallel-size {tp}; "
            f"the nearest valid values are {nearest(size, tp)}."
        )
    return config.replace("model", ffn_hidden_size=size)


def further_tokens(config: Config) -> Config:
    """Check what goes with `--mtp-num-layers`; 0 is none."""
    model, parallel, layout = config.model, config.parallel, config.division.pipeline_model_parallel_layout
    further = model.mtp_num_layers or 0
    if layout is not None and (own := further_tokens_of(layout)) != further:
        raise UserError(
            f"--pipeline-model-parallel-layout {layout} has {own} layers of further tokens (m), but "
            f"--mtp-num-layers is {further}."
        )
    if not further:
        return config.replace("model", mtp_num_layers=None)
    flag = f"--mtp-num-layers {further} cannot be combined with"
    for other in with_further_tokens(
        positions=model.position_embedding_type,
        loss_chunk=model.loss_chunk_size or 0,
        parts=parallel.shards_weights,
        overlap=parallel.overlap_tp_comm,
    ):
        raise UserError(f"{flag} {other}.")
    if parallel.cost_profile:
        raise UserError(f"{flag} --cost-profile, which knows no such head.")
    way = config.vocabulary.pipeline_vocab_parallel
    if way in ("spread", "split"):
        raise UserError(f"{flag} --pipeline-vocab-parallel {way}, which takes the head apart; give ends.")
    config = config.replace("model", loss_chunk_size=0)
    return config.replace("parallel", overlap_tp_comm=OFF) if parallel.overlap_tp_comm == AUTO else config


def latent_attention(config: Config) -> Config:
    """Check that the flags of multi-latent attention fit the others; settle how it rotates."""
    model, parallel = config.model, config.parallel
    if not model.multi_latent_attention:
        if model.rope_type is not None:
            raise UserError(
                f"--rope-type {model.rope_type} is for --multi-latent-attention; otherwise give "
                f"--position-embedding-type {model.rope_type}."
            )
        return config
    if model.qk_pos_emb_head_dim % 2:
        raise UserError(f"--qk-pos-emb-head-dim {model.qk_pos_emb_head_dim} must be even: pairs of them are rotated.")
    cp, conflicts = parallel.context_parallel_size, []
    if model.rotary_interleaved:
        conflicts.append(("--rotary-interleaved", "it rotates neighbouring channels in any case"))
    if model.position_embedding_type == "yarn":
        conflicts.append(("--position-embedding-type yarn", "give rope, and --rope-type yarn"))
    conflicts += with_latent_attention(
        grouped=model.group_query_attention,
        qkv_bias=model.add_qkv_bias,
        windows=model.window_size is not None,
        unrotated=model.no_rope_freq is not None,
        output_gate=model.attention_output_gate,
        context=f"--context-parallel-size {cp}" * (cp > 1),
        overlap=parallel.overlap_tp_comm,
    )
    for flag, why in conflicts:
        raise UserError(f"{flag} cannot be had with --multi-latent-attention: {why}.")
    return config.replace("model", rope_type=model.rope_type or "yarn")
