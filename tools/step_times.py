"""Time a few training steps under two schedules, one run after the other, and say in a sentence what the first gains.

python tools/step_times.py --ranks 2 --schedules "seq1f1b --pipe-sp-splits 4" 1f1b --profile profile.json -- FLAGS

FLAGS are those of pretrain_gpt.py. Beside what is measured stands what is simulated from a file of `helixpipe profile`.
"""

from __future__ import annotations

import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run from anywhere, installed or not

from helixpipe.common.child import python_command
from helixpipe.common.command import run_command
from helixpipe.common.flags import FlagParser
from helixpipe.common.json_values import parse_json

WARM_UP = 2
"""Steps before those that count."""


def main(argv: Sequence[str] | None = None) -> int:
    return run_command("step_times.py", lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    parser = FlagParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, required=True, help="Processes that torchrun starts.")
    parser.add_argument(
        "--schedules", nargs=2, required=True, help="The first is compared with the second; each with its own flags."
    )
    parser.add_argument("--profile", required=True, help="File of `helixpipe profile`, to simulate with.")
    parser.add_argument("--microbatches", type=int, required=True, help="Of a step, to simulate with.")
    parser.add_argument("--steps", type=int, default=6, help="Steps of each that count (default: 6).")
    parser.add_argument("flags", nargs="*", help="Those of pretrain_gpt.py, after --.")
    options = parser.parse_args(argv)
    measured: list[list[float]] = []
    simulated: list[float] = []
    for schedule in options.schedules:
        flags = ["--train-iters", str(WARM_UP + options.steps), "--log-interval", "1", "--eval-iters", "0"]
        train = [str(ROOT / "pretrain_gpt.py"), *options.flags, "--pipeline-schedule", *shlex.split(schedule), *flags]
        launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
        measured.append(milliseconds(_output(*launch, *train)))
        size = ["-p", str(options.ranks), "-m", str(options.microbatches), "--profile", options.profile, "--json"]
        printed = _output("schedules.command", "simulate", *shlex.split(schedule), *size)
        simulated.append(1000 * parse_json(printed)["makespan"])
    first, second = (schedule.split()[0] for schedule in options.schedules)
    print(sentence((first, second), [each[WARM_UP:] for each in measured], simulated))
    return 0


def _output(*module: str) -> str:
    """Return the output of a module run with these arguments. Ends this process if it fails."""
    ended = subprocess.run(python_command(*module), capture_output=True, text=True)
    if ended.returncode:
        sys.stderr.write(ended.stdout + ended.stderr)
        sys.exit(ended.returncode)
    return ended.stdout


def milliseconds(log: str) -> list[float]:
    """Return the time of each step in a log."""
    return [float(text) for text in re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", log)]


def sentence(names: tuple[str, str], measured: Sequence[Sequence[float]], simulated: Sequence[float]) -> str:
    """Return how a step's time under the first schedule compares with the second, whichever is faster. Times in
    milliseconds: of each step of each, and simulated ones.
    """
    own, other = map(statistics.median, measured)
    return (
        f"a step under {names[0]} takes {_compared(own, other)} time than under {names[1]}, {own:.0f} against "
        f"{other:.0f} ms (medians of {len(measured[0])} steps); {_compared(*simulated)} was simulated from what the "
        f"model's pieces take here, {simulated[0]:.0f} against {simulated[1]:.0f} ms"
    )


def _compared(own: float, other: float) -> str:
    """Return `13 % less`, or more."""
    return f"{100 * abs(own / other - 1):.0f} % {'less' if own <= other else 'more'}"


if __name__ == "__main__":
    sys.exit(main())
