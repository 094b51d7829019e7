"""Checks of heads that predict further tokens."""

from __future__ import annotations

from helixpipe.common.errors import UserError
from helixpipe.costs.conflicts import with_further_tokens
from helixpipe.costs.models import AUTO, OFF
from helixpipe.planning.division import further_tokens_of
from megatron.pretrain.config import Config


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
