"""Time a few training steps under each of some schedules, one run after the other, and say it in a sentence.

python tools/step_times.py --ranks 2 --schedules helix 1f1b --steps 6 -- FLAGS OF pretrain_gpt.py
"""

from __future__ import annotations

import re
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

WARM_UP = 2
"""Steps before those that count."""


def main(argv: Sequence[str] | None = None) -> int:
    return run_command("step_times.py", lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    parser = FlagParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, required=True, help="Processes that torchrun starts.")
    parser.add_argument("--schedules", nargs="+", required=True, help="The first is compared with each of the others.")
    parser.add_argument("--steps", type=int, default=6, help="Steps of each that count (default: 6).")
    parser.add_argument("flags", nargs="*", help="Those of pretrain_gpt.py, after --.")
    options = parser.parse_args(argv)
    times = {}
    for schedule in options.schedules:
        flags = ["--pipeline-schedule", schedule, "--train-iters", str(WARM_UP + options.steps), "--log-interval", "1"]
        command = python_command("torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks))
        command += [str(ROOT / "pretrain_gpt.py"), *options.flags, *flags, "--eval-iters", "0"]
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode:
            sys.stderr.write(ended.stdout + ended.stderr)
            return ended.returncode
        times[schedule] = milliseconds(ended.stdout)[WARM_UP:]
    print(sentence(times))
    return 0


def milliseconds(log: str) -> list[float]:
    """Of each step, as the log has them."""
    return [float(text) for text in re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", log)]


def sentence(times: dict[str, list[float]]) -> str:
    """What the first schedule's steps took, and the others'; honest whichever is faster."""
    medians = {name: statistics.median(values) for name, values in times.items()}
    (first, own), *others = medians.items()
    number = len(times[first])
    compared = [
        f"{name} {value:.0f} ms: {first} takes {own / value:.2f} of its time" for name, value in others if value
    ]
    return "; ".join(
        [f"a step under {first} takes {own:.0f} ms (median of {number}, run after one another)", *compared]
    )


if __name__ == "__main__":
    sys.exit(main())
