"""The cases of test_equality.py whose head predicts further tokens, beside those of experts and unlike layers."""

from __future__ import annotations

from tests.runtime.case import RAGGED, Case

CHUNKS = (5, 4, 3)

FURTHER = [
    # every way to place the ends; the embedding is used by the head as well
    Case("none", 1, 2, "further"),
    *(Case("1f1b", 2, 3, "further", tied=tied) for tied in (False, True)),
    *(Case("zbv", 2, 4, "further", tied=tied) for tied in (False, True)),
    *(Case("helix", 2, 4, "further", folds=2, ship="qkv", tied=tied) for tied in (False, True)),
    *(Case("weipipe", 2, 4, "further", tied=tied) for tied in (False, True)),
    Case("interleaved-1f1b", 2, 4, "further", v=2),
    Case("zb1p", 4, 3, "further"),
    # chunks: the next tokens' embeddings and keys cross their edges
    *(Case("seq1f1b", 2, 2, "further", lengths=CHUNKS, tied=tied) for tied in (False, True)),
    Case("seq1f1b-interleaved", 2, 2, "further", v=2, lengths=CHUNKS),
    Case("helix", 2, 4, "further", folds=1, lengths=CHUNKS),
    Case("weipipe", 2, 2, "further", lengths=CHUNKS),
    Case("sppo", 2, 2, "further", lengths=(1, 10, 1), offload=3),
    # documents
    Case("infinipipe", 2, 2, "further", lengths=CHUNKS, documents=4),
    Case("seq1f1b", 2, 2, "further", lengths=CHUNKS, documents=6, blocks=True),
    Case(RAGGED, 2, 5, "further"),
    # tensor- and context-parallel ranks
    Case("1f1b", 2, 3, "further", tp=2, sequence_parallel=True, tied=True),
    Case("1f1b", 2, 2, "further", tp=2),
    *(Case("1f1b", 2, 3, "further", tp=2, sequence_parallel=True, tied=tied, pairs=True) for tied in (False, True)),
    Case("zbv", 2, 4, "further", tp=2, sequence_parallel=True, pairs=True),
    Case("seq1f1b", 2, 2, "further", lengths=(4, 8), documents=3, cp=2, cp_comm_type="p2p"),
    Case("seq1f1b", 2, 2, "further", lengths=CHUNKS, dropout=0.2),
]

FURTHER_ELSEWHERE = [
    # the other schedules, which place the head as some of those above do
    *(Case(name, 2, 3, "further") for name in ("gpipe", "zb2p")),
    *(Case(name, 2, 4, "further", v=2) for name in ("hanayo", "zb-interleaved")),
    Case("chimera", 2, 4, "further", layers=4),
    Case("adapipe", 2, 3, "further", layers=5),
    *(Case(name, 2, 4, "further", layers=3) for name in ("weipipe-naive", "wzb1", "wzb2")),
    *(Case(name, 2, 2, "further", lengths=CHUNKS) for name in ("terapipe", "seq1f1b-zb")),
]
