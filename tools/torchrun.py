"""Run torchrun for the scripts of examples/. If a rank fails, print one line and end with that rank's exit status.

    python tools/torchrun.py --nproc-per-node 8 pretrain_gpt.py …

It takes torchrun's flags. torchrun itself ends with a traceback and status 1, whatever the rank's status was, so that
a wrong flag (2) looks like a crash, which is worth another try.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run


def main(argv: Sequence[str] | None = None) -> int:
    logging.disable(logging.ERROR)  # torchrun logs a traceback where another node ends first
    try:
        run(parse_args(argv))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        status = failure.exitcode
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        print(f"torchrun: rank {rank} on this node {how}", file=sys.stderr)
        return 128 - status if status < 0 else status
    except SignalException as error:
        return 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main())
