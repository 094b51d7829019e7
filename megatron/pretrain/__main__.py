"""pretrain_gpt.py for a launcher that has no path to it: `python -m megatron.pretrain`."""

from __future__ import annotations

import sys
import time


def main() -> None:
    started = time.monotonic()
    from megatron.pretrain.launch import run

    sys.exit(run(started))


if __name__ == "__main__":  # dist_checkpointing may spawn processes, which import this file
    main()
