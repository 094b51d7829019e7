"""What torch keeps of a head that predicts further tokens, beside what the costs count; runs inside a rank."""

from __future__ import annotations

import torch

from benchmarks.accounting import SavedBytes
from helixpipe.costs.models import Chunk, Layout, ModelShape
from helixpipe.costs.piece_bytes import PieceBytes
from helixpipe.model import GPTOptions, PipelineModel, UnitContext, layers_of
from helixpipe.program.stages import HEAD_MTP, Piece, model_pieces
from tests.costs.layouts import BATCH, TOKENS, VOCABULARY
from tests.costs.pieces import batch
from tests.model.common import make_config, set_parallel

SHAPE = ModelShape(
    "further", 2, 32, 4, 2, 40, True, VOCABULARY, False, "RMSNorm", "rope", False, TOKENS, vocab_multiple=1, further=2
)


def bytes_of_head(rank: int, world_size: int) -> dict[str, tuple[float, float]]:
    """(torch's, ours) of weights, and of what one unit keeps and puts off."""
    set_parallel()
    config = make_config("further", params_dtype=torch.float32)
    chain = (*model_pieces(layers_of(config))[:-1], Piece(HEAD_MTP))
    options = GPTOptions(VOCABULARY, TOKENS, "rope", share_embeddings_and_output_weights=False)
    model, head = PipelineModel(config, options, chain), PipelineModel(config, options, chain[-1:])
    layout = Layout(micro_batch_size=BATCH, element_bytes=4, fused_kernels=False)
    own, data = PieceBytes(SHAPE, layout), batch()
    model.run(chain, (), data, UnitContext(0, 0))  # makes RoPE's table
    hidden = torch.randn(TOKENS, BATCH, 32, requires_grad=True)
    tables = model._rotary._table if model._rotary is not None and model._rotary._table is not None else ()
    known = [*model.parameters(), *tables, data.tokens, data.labels, data.loss_mask]
    with SavedBytes(known) as account:
        outputs = model.run(chain[-1:], (hidden,), data, UnitContext(0, 0))
        held = hidden * hidden  # saves the input too
        stash = account.now
    del outputs, held
    weights = [sum(each.numel() for each in one.parameters()) for one in (model, head)]
    return {
        "stash": (stash, own.stash(chain[-1:], Chunk(TOKENS))),
        "weights": (weights[0], own.parameters(chain)),
        "weights of the head": (weights[1], own.parameters(chain[-1:])),
    }
