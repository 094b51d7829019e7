"""`make bench-gpu`: all that is to be run once a GPU is at hand, in one command; what it finds goes into a folder.

    python benchmarks/gpu.py [--output runs/gpu] [--only profile-8k ...] [--list]

Steps run one after the other, each by itself with a time limit, the quick and telling ones first; one that fails or
takes too long stops none of the others. Of each there is a log, and where it measures, a JSON file; `summary.md` says
after every step what has been done. Steps that have ended well are left out when the same folder is named again, so a
run that is cut off goes on where it was. Without a GPU the same steps run at tiny sizes on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODEL = "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope --vocab-size 8192"
LENGTHS = {"8k": (8, 4096), "32k": (32, 2048), "128k": (128, 512)}
"""Ki-tokens of a sequence, and hidden size: what fits on a GPU of 80 GB."""
SHORT = "tests/runtime/test_recording.py tests/runtime/test_host_reads.py"
COMMON = ("helix", "1f1b", "zb1p")


@dataclass(frozen=True)
class Step:
    """A command of this checkout's Python; {output} is the folder. minutes: its limit."""

    name: str
    command: str
    minutes: float = 10.0


def steps_on_gpu() -> list[Step]:
    """What a GPU is wanted for."""
    steps = [
        Step("machine", "-m torch.utils.collect_env", 2),
        Step("tests-kernels", "-m pytest -m gpu -q tests/model tests/costs"),
        Step("tests-short", f"-m pytest -m gpu -q {SHORT} tests/watch"),
        Step("tests-equality", "-m pytest -m gpu -q tests/runtime", 30),
        Step("host-time", "benchmarks/host_time.py --json {output}/host-time.json"),
    ]
    for name, (tokens, hidden) in LENGTHS.items():
        sizes = f"--num-layers 4 --hidden-size {hidden} --num-attention-heads {hidden // 128} --dtype bfloat16"
        steps.append(
            Step(
                f"profile-{name}",
                f"-m schedules.command profile {MODEL} {sizes} --seq-length {tokens << 10} "
                f"--output {{output}}/profile-{name}.json",
            )
        )
    steps += [predicted(f"gpu-{name}") for name in LENGTHS]
    return steps + [trained(schedule, "--bf16 --seq-length 8192 --hidden-size 1024") for schedule in COMMON]


def steps_on_cpu() -> list[Step]:
    """The same commands at sizes for a laptop; the tests for a GPU are only collected."""
    sizes = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64"
    return [
        Step("machine", "-m torch.utils.collect_env", 2),
        Step("tests", "-m pytest -m gpu -q --collect-only tests"),
        Step("host-time", "benchmarks/host_time.py --steps 5 --cases 1f1b --json {output}/host-time.json"),
        Step("profile-tiny", f"-m schedules.command profile {MODEL} {sizes} --output {{output}}/profile-tiny.json"),
        predicted("tiny", 5),
        trained("helix", "--seq-length 64 --hidden-size 64"),
    ]


def predicted(case: str, steps: int = 10) -> Step:
    """Steps as simulated from a profile and as measured, four ranks, which share the GPUs there are."""
    words = f"benchmarks/predict.py --cases {case} --steps {steps} --profiles {{output}}"
    return Step(f"predict-{case}", f"{words} --json {{output}}/predict-{case}.json")


def trained(schedule: str, sizes: str) -> Step:
    """Training of four pipeline ranks without tensor parallelism, with its timeline."""
    flags = (
        f"--pipeline-model-parallel-size 4 --pipeline-schedule {schedule} --num-layers 4 --num-attention-heads 8 "
        f"{sizes} --position-embedding-type rope --micro-batch-size 1 --global-batch-size 8 --train-iters 6 --lr 1e-4 "
        "--mock-data --tokenizer-type NullTokenizer --vocab-size 511 --eval-iters 0 --log-interval 1 --num-workers 0 "
        f"--record-timeline {{output}}/timeline-{schedule}.json"
    )
    return Step(
        f"train-{schedule}", f"-m torch.distributed.run --standalone --nproc-per-node 4 pretrain_gpt.py {flags}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"), help="folder (default: runs/gpu)")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="some steps, also if they have been done")
    parser.add_argument("--list", action="store_true", help="print the steps and their commands")
    arguments = parser.parse_args()
    steps = steps_on_gpu() if has_gpu() else steps_on_cpu()
    names = [step.name for step in steps]
    if unknown := sorted(set(arguments.only or ()) - set(names)):
        parser.error(f"--only {' '.join(unknown)}: valid here are {', '.join(names)}")
    if arguments.list:
        for step in steps:
            print(f"{step.name:<16} {step.command}")
        return
    output = arguments.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    record = Path(output, "steps.json")
    done: dict[str, dict[str, float | str]] = json.loads(record.read_text()) if record.exists() else {}
    for step in steps:
        if step.name not in (arguments.only or names) or (
            not arguments.only and done.get(step.name, {}).get("ended") == "well"
        ):
            continue
        print(f"{step.name} ...", end=" ", flush=True)
        start = time.monotonic()
        ended = run(step, output)
        done[step.name] = {"ended": ended, "seconds": round(time.monotonic() - start, 1)}
        print(f"{ended}, {done[step.name]['seconds']} s", flush=True)
        record.write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")
        Path(output, "summary.md").write_text(summary(steps, done, output), encoding="utf-8")
    sys.exit(any(each["ended"] != "well" for each in done.values()))


def has_gpu() -> bool:
    """Asked of another process: this one must not hold memory on it."""
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def run(step: Step, output: Path) -> str:
    """How it ended: `well`, `with exit code 1`, `out of time`."""
    words = step.command.format(output=output).split()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with Path(output, f"{step.name}.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that its ranks, too, can be ended
        )
        try:
            code = process.wait(60 * step.minutes)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return "out of time"
    return "well" if code == 0 else f"with exit code {code}"


def summary(steps: list[Step], done: dict[str, dict[str, float | str]], output: Path) -> str:
    """A table of the steps, and the end of each log."""
    lines = ["| step | ended | seconds |", "|---|---|--:|"]
    ran = [step for step in steps if step.name in done]
    lines += [f"| {step.name} | {done[step.name]['ended']} | {done[step.name]['seconds']} |" for step in ran]
    for step in ran:
        log = Path(output, f"{step.name}.log").read_text(encoding="utf-8", errors="replace").splitlines()
        lines += ["", f"## {step.name}", "", "    " + step.command.format(output=output), "", "```", *log[-40:], "```"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
