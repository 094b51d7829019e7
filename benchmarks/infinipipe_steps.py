"""Training on documents of all lengths over two processes of this machine, measured.

    make bench-infinipipe-steps ARGS="[--rounds 2] [--steps 4] [--data stdlib skewed] [--output table.md]"

Two sets of documents: the files of Python's standard library, cut off at 8192 bytes, and generated ones whose lengths
are as skewed as GitHub's (log-normal; few long ones). Each way of running them is started in turn, `--rounds` times; of
a run the first step does not count. Prints Markdown: tokens a second (median of all steps), what infinipipe does beside
it (median over the rounds of the ratio of neighbouring runs), the bubble and the spread of chunk times on paper, the
time of a step on paper over the measured, and what of planning was hidden.

Costs are those of `helixpipe profile` on this machine. Run it where nothing else runs.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import numpy

from benchmarks.documents import build
from benchmarks.ranks import own_environment, run_module
from benchmarks.report import ROOT, Outcome, Page, markdown, progress
from helixpipe.common.child import python_command
from helixpipe.common.errors import UserError
from helixpipe.common.flags import option
from megatron.pretrain.data.document_files import MockDocuments

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
WAYS: Mapping[str, str] = MappingProxyType(
    {
        "infinipipe": f"{DOCUMENTS} infinipipe",
        "the same chunks under seq1f1b-zb": f"{DOCUMENTS} seq1f1b-zb",
        "(b) fixed chunks, packed, under seq1f1b": f"{DOCUMENTS} seq1f1b --infinipipe-split fixed",
        "(c) whole documents, best fit, under 1f1b": f"{DOCUMENTS} 1f1b --infinipipe-packing best-fit",
        "(d) concatenated and cut, isolated, under 1f1b": "--pipeline-schedule 1f1b --reset-attention-mask",
        MIXED: "--pipeline-schedule 1f1b",
    }
)


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
    rates: list[float] = field(default_factory=list)
    figures: dict[str, list[float]] = field(default_factory=dict)

    def median(self, name: str) -> float | None:
        return statistics.median(self.figures[name]) if name in self.figures else None


PATTERNS = MappingProxyType(
    {
        "milliseconds": r"iteration \(ms\): ([\d.]+)",
        "rate": r"per second per GPU: ([\d.]+)",
        "planned bubble": r"planned bubble: ([\d.]+) %",
        "spread": r"chunk time spread: ([\d.]+) %",
        "hidden": r"planning hidden: ([\d.]+) %",
        "planned": r"planned step \(s\): ([\d.]+)",
    }
)
"""Of the training program's log lines."""


def trained(flags: str, steps: int, port: int) -> Measured:
    """One run; its first step does not count."""
    command = python_command("torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port))
    command += ["pretrain_gpt.py", *f"{MODEL} {TRAINING} {flags} --train-iters {steps + 1}".split()]
    done = subprocess.run(command, cwd=ROOT, env=own_environment(), capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if " iteration  " in line]
    if len(lines) != steps + 1:
        raise UserError(f"{flags} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    found = Measured()
    for line in lines[1:]:
        told = {name: float(match[1]) for name, pattern in PATTERNS.items() if (match := re.search(pattern, line))}
        found.rates.append(2 * told["rate"])
        if "planned" in told:
            told["predicted"] = told["planned"] / (told["milliseconds"] / 1000)
        for name, value in told.items():
            found.figures.setdefault(name, []).append(value)
    return found


def make_data(folder: Path) -> dict[str, Data]:
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
        shape = MODEL.replace("--swiglu", "--swiglu --vocab-size 257").split()
        words = ("--seq-length", str(LENGTH), "--repeats", "3", "-o", str(path))
        run_module("schedules.command", "profile", *shape, *words)
    return path


FIGURES = MappingProxyType(
    {"planned bubble": "{:.1f} %", "spread": "{:.1f} %", "predicted": "{:.2f}", "hidden": "{:.1f} %"}
)


def table(name: str, data: Data, results: Mapping[str, list[Measured]]) -> list[str]:
    """By way, a line each."""
    rates = {way: [statistics.median(each.rates) for each in runs] for way, runs in results.items()}
    ours = statistics.median(rates["infinipipe"])
    rows = []
    for way, runs in results.items():
        ratio = statistics.median([ours / theirs for ours, theirs in zip(rates["infinipipe"], rates[way], strict=True)])
        cells = [way, f"{statistics.median(rates[way]):.0f}", f"{ratio:.2f}"]
        for figure, form in FIGURES.items():
            values = [value for each in runs if (value := each.median(figure)) is not None]
            cells.append(form.format(statistics.median(values)) if values else "–")
        rows.append(cells)
    if MIXED in rates:
        padded = statistics.median(rates[MIXED]) * data.mean / LENGTH
        label = f"(a) each padded to {LENGTH}, from the time of a sample above"
        rows.append([label, f"{padded:.0f}", f"{ours / padded:.2f}", *"––––"])
    heads = ("", "tokens/s", "infinipipe over it", "bubble, planned", "spread of chunk time", "planned / measured step")
    title = f"**{name}**: {data.documents} documents a step, {data.mean:.0f} tokens each on average, {LENGTH} at most"
    return [title, "", *markdown((*heads, "planning hidden"), rows, "lrrrrrr"), ""]


@dataclass(frozen=True)
class Options(Page):
    rounds: int = option(2, "How often each way is run.", at_least=1)
    steps: int = option(4, "Of a run that count.", at_least=1)
    data: tuple[str, ...] = option(("stdlib", "skewed"), "Which documents.", choices=("stdlib", "skewed"))
    folder: str = option("runs/infinipipe", "Where data and profile are kept.", metavar="DIR")


def run(options: Options) -> Outcome:
    folder = Path(options.folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    every, costs = make_data(folder), profile(folder)
    lines: list[str] = []
    for name in options.data:
        data = every[name]
        results: dict[str, list[Measured]] = {way: [] for way in data.ways}
        for number in range(options.rounds):
            for way, flags in data.ways.items():
                size = data.documents if "--variable-seq-lengths" in flags else data.samples
                flags = f"{flags} {data.flags} --global-batch-size {size} --cost-profile {costs}"
                results[way].append(trained(flags, options.steps, 29600 + number))
                progress(f"{name}, {way}: {statistics.median(results[way][-1].rates):.0f} tokens/s")
        lines += table(name, data, results)
    return Outcome("\n".join(lines))
