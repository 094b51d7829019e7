"""`make bench-infinipipe-steps`: training on documents of all lengths over two processes of this machine, measured.

    python benchmarks/infinipipe_steps.py [--rounds 2] [--steps 4] [--data stdlib skewed] [--output table.md]

Two sets of documents: the files of Python's standard library, cut off at 8192 bytes, and generated ones whose lengths
are as skewed as GitHub's (log-normal; few long ones). Each way of running them is started in turn, `--rounds` times; of
a run the first step does not count. Prints Markdown: tokens a second (median of all steps), what infinipipe does beside
it (median over the rounds of the ratio of neighbouring runs), the bubble and the spread of chunk times on paper, the
time of a step on paper over the measured, and what of planning was hidden.

Costs are those of `helixpipe profile` on this machine. Run it where nothing else runs.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from helixpipe.common.child import python_command

ROOT = Path(__file__).resolve().parents[1]
LENGTH = 8192
MODEL = (
    "--num-layers 4 --hidden-size 64 --ffn-hidden-size 176 --num-attention-heads 2 --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights"
)
TRAINING = (
    f"--seq-length {LENGTH} --max-position-embeddings {LENGTH} --attention-dropout 0 --hidden-dropout 0 --lr 1e-3 "
    "--tokenizer-type ByteLevelTokenizer --eval-iters 0 --log-interval 1 --pipeline-model-parallel-size 2 "
    "--micro-batch-size 1 --num-workers 1"
)
MIXED = "(d) concatenated and cut, mixed, under 1f1b"
DOCUMENTS = "--variable-seq-lengths --pipeline-schedule"
WAYS = {
    "infinipipe": f"{DOCUMENTS} infinipipe",
    "the same chunks under seq1f1b-zb": f"{DOCUMENTS} seq1f1b-zb",
    "(b) fixed chunks, packed, under seq1f1b": f"{DOCUMENTS} seq1f1b --infinipipe-split fixed",
    "(c) whole documents, best fit, under 1f1b": f"{DOCUMENTS} 1f1b --infinipipe-packing best-fit",
    "(d) concatenated and cut, isolated, under 1f1b": "--pipeline-schedule 1f1b --reset-attention-mask",
    MIXED: "--pipeline-schedule 1f1b",
}


@dataclass(frozen=True)
class Data:
    """documents: a step of documents. samples: a step of samples of `LENGTH`, about as many tokens. mean: tokens of a
    document, of which (a) pads each to `LENGTH`."""

    flags: str
    documents: int
    samples: int
    mean: float

    @property
    def ways(self) -> dict[str, str]:
        """Generated samples of equal length are not of the generated documents."""
        generated = "--mock-data" in self.flags
        return {way: flags for way, flags in WAYS.items() if not generated or DOCUMENTS in flags}


@dataclass
class Measured:
    seconds: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    figures: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        self.figures.setdefault(name, []).append(value)

    def median(self, name: str) -> float | None:
        return statistics.median(self.figures[name]) if name in self.figures else None


PATTERNS = {
    "planned bubble": r"planned bubble: ([\d.]+) %",
    "spread": r"chunk time spread: ([\d.]+) %",
    "hidden": r"planning hidden: ([\d.]+) %",
    "planned": r"planned step \(s\): ([\d.]+)",
}


def run(flags: str, steps: int, port: int) -> Measured:
    command = python_command("torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port))
    command += ["pretrain_gpt.py", *f"{MODEL} {TRAINING} {flags} --train-iters {steps + 1}".split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if " iteration  " in line]
    if len(lines) != steps + 1:
        raise RuntimeError(f"{flags} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    found = Measured()
    for line in lines[1:]:
        seconds = float(re.search(r"iteration \(ms\): ([\d.]+)", line).group(1)) / 1000  # type: ignore[union-attr]
        found.seconds.append(seconds)
        found.rates.append(2 * float(re.search(r"per second per GPU: ([\d.]+)", line).group(1)))  # type: ignore[union-attr]
        for name, pattern in PATTERNS.items():
            if (match := re.search(pattern, line)) is not None:
                found.add(name, float(match.group(1)))
        if (match := re.search(PATTERNS["planned"], line)) is not None:
            found.add("predicted", float(match.group(1)) / seconds)
    return found


def make_data(folder: Path) -> dict[str, Data]:
    import sysconfig

    import numpy

    from benchmarks.documents import build
    from megatron.pretrain.data.document_files import MockDocuments

    prefix, lengths = build(folder, Path(sysconfig.get_path("stdlib")))
    mock = MockDocuments(1234, 257).lengths - 1
    means = [float(numpy.minimum(each, LENGTH).mean()) for each in (lengths, mock)]
    split = f"--data-path {prefix} --data-cache-path {folder}/cache --split 1,0,0"
    return {
        "stdlib": Data(split, 16, max(2, round(16 * means[0] / LENGTH)), means[0]),
        "skewed": Data("--mock-data", 64, max(2, round(64 * means[1] / LENGTH)), means[1]),
    }


def profile(folder: Path) -> Path:
    path = folder / "profile.json"
    if not path.exists():
        shape = MODEL.replace("--swiglu", "--swiglu --vocab-size 257")
        command = python_command("schedules.command", "profile", *shape.split(), "--seq-length", str(LENGTH))
        subprocess.run([*command, "--repeats", "3", "-o", str(path)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return path


def table(name: str, data: Data, results: dict[str, list[Measured]]) -> list[str]:
    lines = [
        f"**{name}**: {data.documents} documents a step, {data.mean:.0f} tokens each on average, {LENGTH} at most",
        "",
        "| | tokens/s | infinipipe over it | bubble, planned | spread of chunk time | planned / measured step | "
        "planning hidden |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    rates = {way: [statistics.median(each.rates) for each in runs] for way, runs in results.items()}
    for way, runs in results.items():
        ratio = statistics.median([ours / theirs for ours, theirs in zip(rates["infinipipe"], rates[way], strict=True)])
        cells = [f"{statistics.median(rates[way]):.0f}", f"{ratio:.2f}"]
        for figure, form in (
            ("planned bubble", "{:.1f} %"),
            ("spread", "{:.1f} %"),
            ("predicted", "{:.2f}"),
            ("hidden", "{:.1f} %"),
        ):
            values = [value for each in runs if (value := each.median(figure)) is not None]
            cells.append(form.format(statistics.median(values)) if values else "–")
        lines.append(f"| {way} | {' | '.join(cells)} |")
    if MIXED not in rates:
        return [*lines, ""]
    mixed = statistics.median(rates[MIXED]) * data.mean / LENGTH
    ours = statistics.median(rates["infinipipe"])
    padded = f"(a) each padded to {LENGTH}, from the time of a sample above"
    lines.append(f"| {padded} | {mixed:.0f} | {ours / mixed:.2f} | – | – | – | – |")
    return [*lines, ""]


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure training on documents.", allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="of a run that count")
    parser.add_argument("--data", nargs="+", choices=("stdlib", "skewed"), default=["stdlib", "skewed"])
    parser.add_argument("--folder", type=Path, default=Path("runs/infinipipe"))
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    every, costs = make_data(folder), profile(folder)
    lines: list[str] = []
    for name in arguments.data:
        data, results = every[name], {way: [] for way in every[name].ways}  # type: dict[str, list[Measured]]
        for number in range(arguments.rounds):
            for way, flags in data.ways.items():
                size = data.documents if "--variable-seq-lengths" in flags else data.samples
                flags = f"{flags} {data.flags} --global-batch-size {size} --cost-profile {costs}"
                results[way].append(run(flags, arguments.steps, 29600 + number))
                print(f"{name}, {way}: {statistics.median(results[way][-1].rates):.0f} tokens/s", file=sys.stderr)
        lines += table(name, data, results)
    text = "\n".join(lines)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
