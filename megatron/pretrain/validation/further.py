"""Checks of heads that predict further tokens."""

from __future__ import annotations

from helixpipe.common.errors import UserError
from helixpipe.costs.models import AUTO, HALVES, OFF, PAIRS
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
    for other, given in (
        (f"--loss-chunk-size {model.loss_chunk_size}: the output layer runs more than once", model.loss_chunk_size),
        ("weights or gradients in parts; use --use-distributed-optimizer", parallel.shards_weights),
        ("--cost-profile, which knows no such head", parallel.cost_profile),
        ("--position-embedding-type none: later tokens need places", model.position_embedding_type == "none"),
        (
            f"--pipeline-vocab-parallel {config.vocabulary.pipeline_vocab_parallel}, which takes the head apart; "
            "give ends",
            config.vocabulary.pipeline_vocab_parallel in ("spread", "split"),
        ),
        (f"--overlap-tp-comm {HALVES}; give {PAIRS} or {OFF}", parallel.overlap_tp_comm == HALVES),
    ):
        if given:
            raise UserError(f"{flag} {other}.")
    config = config.replace("model", loss_chunk_size=0)
    return config.replace("parallel", overlap_tp_comm=OFF) if parallel.overlap_tp_comm == AUTO else config
