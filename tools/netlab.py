"""Several hosts on one machine, joined by slow links, and a torchrun node on each (Linux, as root).

    python tools/netlab.py --hosts 4 --rate 100mbit --delay 1ms -- pretrain_gpt.py --pipeline-model-parallel-size 4 …
    python tools/netlab.py --hosts 2 --rate 100mbit            # measures a link and ends
    python tools/netlab.py --clean                             # removes what a killed netlab left

Each host is a network namespace, joined to a switch by a link of its own (netlab/hosts.py); hosts reach each other and
nothing else. A link carries `--rate` in each direction at once, counted in frames, of which headers are 4 %; `--delay`
is what a frame takes from host to host. Namespaces and all that runs in them are removed at the end, after an error,
on Ctrl-C and on SIGTERM. When a node fails, the others have `--grace` seconds to notice and end; the exit status is
that of the node that failed first.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere, installed or not

from helixpipe.common.command import run_command
from helixpipe.common.flags import FlagParser
from netlab.hosts import Lab, clean
from netlab.job import Job, parse_delay, parse_rate


class _Stopped(BaseException):
    """A signal asked for the end."""

    def __init__(self, number: int):
        super().__init__()
        self.number = number


@contextlib.contextmanager
def _signals_raise() -> Iterator[Callable[[], None]]:
    """Let the first Ctrl-C, SIGTERM or SIGHUP raise. Later ones are ignored, and all are once the yielded function has
    been called: nothing must interrupt the removal.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def ignore() -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        ignore()
        raise _Stopped(number)

    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield ignore
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = FlagParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options] -- program …",
    )
    parser.add_argument("--hosts", type=int, default=2, help="default: 2")
    parser.add_argument("--rate", default="unlimited", help="of each link and direction: 100mbit (default: unlimited)")
    parser.add_argument("--delay", default="0", help="from host to host: 1ms (default: 0)")
    parser.add_argument("--ranks-per-host", type=int, default=1, help="default: 1")
    parser.add_argument("--grace", type=float, default=30.0, help="seconds, see above (default: 30)")
    parser.add_argument("--clean", action="store_true", help="remove what netlabs left that are gone, and end")
    parser.add_argument("program", nargs="*", help="what each torchrun starts, with its arguments")
    return run_command("netlab.py", lambda: _run(parser.parse_args(arguments)))


def _run(options: argparse.Namespace) -> int:
    job = None
    try:
        if options.clean:
            print("\n".join(clean()) or "nothing was left")
            return 0
        lab = Lab(options.hosts, parse_rate(options.rate), parse_delay(options.delay))
        with _signals_raise() as ignore_signals, lab:
            try:
                if not options.program:
                    print(lab.measure())
                    return 0
                job = Job(lab, options.program, options.ranks_per_host, echo=lambda line: print(line, flush=True))
                job.wait(options.grace)
                return job.first_failure if job.first_failure >= 0 else 128 - job.first_failure  # as shells do
            finally:
                ignore_signals()
                if job is not None:
                    job.end()
    except _Stopped as stopped:
        return 128 + stopped.number


if __name__ == "__main__":
    sys.exit(main())
