"""A rank that may have something to complain of: `complains.py HOW RANK,…`. Those named do; run by test_told_once.py.

HOW: early (before there is a process group), late (after), meeting (they cannot meet), memory (in the run itself).
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from helixpipe.common.errors import UserError
from megatron.pretrain.process import once
from megatron.pretrain.process.meeting import MeetingError

HOST_WITHOUT = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 "
JOB = "--micro-batch-size 1 --train-iters 1 --lr 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 9"


def main(how: str, ranks: str) -> int:
    once._WAIT = 1.0
    rank = int(os.environ["RANK"])
    if how == "memory":
        return refused(rank, ranks)
    if how == "late":
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.barrier()  # or one that has spoken would leave while others still connect to it
    if str(rank) not in ranks.split(","):
        return 0
    what = "--lr is wrong." if not ranks.startswith("own") else f"--lr of rank {rank} is wrong."
    once.tell("helixpipe", MeetingError(what) if how == "meeting" else UserError(what))
    return 2


def refused(rank: int, ranks: str) -> int:
    from megatron.pretrain.launch import run

    def work(*_: Any) -> None:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.barrier()
        torch.empty(10**15)

    return run(time.monotonic(), f"{HOST_WITHOUT}{JOB} --pipeline-model-parallel-size 2".split(), work)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
