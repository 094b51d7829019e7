"""What a user gets wrong is told in one sentence, once, by a job that then ends on every rank."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from helixpipe.common.errors import UserError
from megatron.pretrain.arguments import parse_args
from tests.integration.forked import run_forked
from tests.integration.launching import MOCK, MODEL, Launch

P2 = "--pipeline-model-parallel-size 2"
GOOD = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@dataclass(frozen=True)
class Mistake:
    """Flags (and a schedule file) that must be refused before anything starts, and words of the sentence."""

    name: str
    words: str
    flags: str = P2
    csv: str | None = None
    ranks: int = 2


MISTAKES = [
    Mistake("unknown schedule", "did you mean 1f1b?", f"{P2} --pipeline-schedule 1f1bb"),
    Mistake("layers", "--num-layers 3", f"{P2} --num-layers 3"),
    Mistake(
        "microbatches",
        "multiple of the pipeline size 2, not 3",
        f"{P2} --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 3",
    ),
    Mistake("world size", "the world size 3 must be a multiple", P2, ranks=3),
    Mistake("unknown flag", "--no-such-flag", f"{P2} --no-such-flag 3"),
    Mistake("not a number", "--lr", f"{P2} --lr fast"),
    Mistake("missing file", "no-such.csv", f"{P2} --pipeline-schedule no-such.csv"),
    Mistake("duplicate op", "0F1", csv=GOOD.replace("0F1", "0F1,0F1")),
    Mistake("missing op", "1B1", csv=GOOD.replace(",1B1", "")),
    Mistake("misordered ops", "1B0", csv=GOOD.replace("1F0,1B0", "1B0,1F0")),
    Mistake("malformed op", "column 2: cell '0F1x'", csv=GOOD.replace("0F1", "0F1x")),
    Mistake("cycle", "0B0", csv="0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n"),
    Mistake("other microbatches", "2 ranks and 2 microbatches", f"{P2} --global-batch-size 8", csv=GOOD),
    Mistake("other ranks", "3 ranks", csv=GOOD + "2F0,2F1,2B0,2B1\n"),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_flags_and_schedules_are_refused_before_anything_starts(mistake: Mistake, tmp_path: Path) -> None:
    flags = f"{MOCK} --train-iters 4 --num-layers 6 --global-batch-size 2 {mistake.flags}"
    if mistake.csv is not None:
        (tmp_path / "mine.csv").write_text(mistake.csv)
        flags += f" --pipeline-schedule {tmp_path}/mine.csv"
    with pytest.raises(UserError) as caught:
        parse_args(flags.split(), environ={"RANK": "0", "WORLD_SIZE": str(mistake.ranks), "LOCAL_RANK": "0"})
    sentence = str(caught.value)
    assert mistake.words in sentence and sentence.rstrip().endswith((".", "?"))
    if mistake.name != "cycle":  # its ops are listed one a line
        assert "\n" not in sentence


@pytest.mark.thorough
def test_a_job_whose_flags_are_wrong_says_so_once() -> None:
    result = Launch("unknown schedule", f"{MOCK} {P2} --train-iters 4 --pipeline-schedule zigzag1f1b").run()
    assert "unknown pipeline schedule 'zigzag1f1b': did you mean" in result.sentence()
    assert "arguments ---" not in result.output


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (f"{MOCK} --train-iters 4 --distributed-backend nccl", "--distributed-backend nccl needs a GPU"),
        (
            f"{MODEL} --train-iters 4 --tokenizer-type ByteLevelTokenizer --data-path no/such/prefix",
            "no/such/prefix.idx",
        ),
    ],
    ids=["NCCL on CPU", "missing data"],
)
def test_what_only_the_run_can_find_out(flags: str, words: str, tmp_path: Path) -> None:
    result = run_forked(Launch(words, f"{flags} --save {tmp_path / 'save'}", ranks=1))
    assert words in result.sentence()
    assert not (tmp_path / "save").exists()


def test_corrupt_data_ends_every_rank(corpus: Path, tmp_path: Path) -> None:
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{corpus}{suffix}", tmp_path / f"bad{suffix}")
    index = tmp_path / "bad.idx"
    index.write_bytes(index.read_bytes()[:40])
    flags = f"{MODEL} {P2} --train-iters 4 --tokenizer-type ByteLevelTokenizer --data-path {tmp_path}/bad"
    result = run_forked(Launch("corrupt .idx", f"{flags} --save {tmp_path / 'save'}"))
    assert "bad.idx" in result.sentence()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.bin", "bad.idx"]


def test_unusable_checkpoints_and_a_diverging_run_end_every_rank(tmp_path: Path) -> None:
    flags = f"{MOCK} {P2} --train-iters 100 --save {tmp_path} --save-interval 1"
    diverging = run_forked(Launch("lr too high", f"{flags} --lr 1e30"))
    assert "the loss is " in diverging.sentence() and "lower --lr" in diverging.sentence()
    folders = sorted(tmp_path.glob("iter_*"))
    assert folders and not list(tmp_path.glob(".iter_*")), "what was saved before is whole"
    for folder in folders:
        (folder / ".metadata").write_bytes(b"garbage")
    corrupt = run_forked(Launch("all checkpoints corrupt", f"{flags} --load {tmp_path}"))
    said = corrupt.sentence()
    assert said.startswith(f"no checkpoint in --load {tmp_path} is usable") and "iter_0000001: " in said
    assert sorted(tmp_path.glob("iter_*")) == folders
