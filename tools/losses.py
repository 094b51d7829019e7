"""Prints a small model's losses under several schedules, to compare installations.

    python tools/losses.py --output losses.json      # here
    python tools/losses.py --equal losses.json       # there: exit status 1 at the first difference

Two processes on the CPU train it for a few steps under each schedule, by `pretrain_gpt.py`. Losses and gradient
norms are compared as printed: seven and four digits.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run from anywhere, installed or not

from helixpipe.common.child import python_command
from helixpipe.common.command import run_command
from helixpipe.common.flags import FlagParser
from helixpipe.common.json_values import parse_json
from helixpipe.model.device import prepare

SCHEDULES = ("1f1b", "helix", "seq1f1b --pipe-sp-splits 4", "zbv", "weipipe")
MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --swiglu "
    "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear --attention-dropout 0 "
    "--hidden-dropout 0 --untie-embeddings-and-output-weights --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 10 --eval-iters 0 --lr 1e-2 --log-interval 1 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 100 --pipeline-model-parallel-size 2 --num-workers 0"
)
_STEP = re.compile(r"iteration +(\d+)/.*?lm loss: (\S+).*?grad norm: (\S+)")


def losses(schedule: str, folder: str) -> list[list[str]]:
    """Return [iteration, loss, gradient norm] of each step, as printed. Raises RuntimeError with the output if it
    fails.
    """
    flags = [*MODEL.split(), "--pipeline-schedule", *schedule.split(), "--data-cache-path", folder]
    command = python_command("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, str(ROOT / "pretrain_gpt.py"), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        check=False,
    )
    steps = [list(match) for match in _STEP.findall(done.stdout)]
    if done.returncode or not steps:
        raise RuntimeError(f"training under {schedule} failed:\n{done.stdout}")
    return steps


def main(argv: list[str] | None = None) -> int:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--output", type=Path, help="write the losses to this file")
    chosen.add_argument("--equal", type=Path, help="compare with the losses in this file")
    return run_command("losses.py", lambda: _run(parser.parse_args(argv)))


def _run(arguments: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        measured = {schedule: losses(schedule, folder) for schedule in SCHEDULES}
    prepare()
    import megatron.core  # which may be a checkout's, on PYTHONPATH

    here = f"megatron-core {megatron.core.__version__}, torch {version('torch')}"
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps({"with": here, "losses": measured}, indent=1) + "\n", encoding="utf-8")
        return 0
    other = parse_json(arguments.equal.read_text(encoding="utf-8"))
    for schedule, steps in measured.items():
        if steps != (expected := other["losses"][schedule]):
            print(f"{schedule}: {here} gives {steps}, {other['with']} gave {expected}")
            return 1
    print(f"equal losses with {here} and {other['with']}: {', '.join(measured)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
