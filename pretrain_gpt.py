"""Train a GPT model under a pipeline schedule.

    torchrun --nproc-per-node 2 pretrain_gpt.py --pipeline-model-parallel-size 2 --pipeline-schedule 1f1b ...

`--help` lists the flags; README.md and examples/ show whole command lines.
"""

from __future__ import annotations

import sys
import time


def main() -> None:
    started = time.monotonic()
    from megatron.pretrain.launch import run

    sys.exit(run(started))


if __name__ == "__main__":  # dist_checkpointing may spawn processes, which import this file
    main()
