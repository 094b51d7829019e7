"""`python -m helixpipe.megatron` over an imitation of Megatron-LM's checkout: its layout, its functions' names and
arguments (tests/integration/megatron_checkout), with the installed megatron-core."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from helixpipe.common.errors import ScheduleError, UserError
from helixpipe.megatron import split_arguments
from tests.drop_in.loop import BATCH, SEQUENCE
from tests.integration.launching import ROOT, Launch
from tests.integration.test_neighbours import core_folder
from tests.selection import graded

IMITATION = Path(__file__).parent / "megatron_checkout"
FLAGS = (
    f"--pipeline-model-parallel-size 2 --num-layers 4 --micro-batch-size {BATCH} --global-batch-size 8 --train-iters 3"
)
UNTIED = "--untie-embeddings-and-output-weights"
OURS = "helixpipe.megatron pretrain_gpt.py"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("Megatron-LM")
    for path in IMITATION.glob("*.py"):
        shutil.copy(path, folder)
    shutil.copytree(IMITATION / "training", folder / "megatron" / "training")
    (folder / "megatron" / "core").symlink_to(core_folder())
    return folder


@pytest.fixture(scope="module")
def theirs(checkout: Path) -> list[str]:
    """What the script prints by itself, under megatron-core's own 1F1B."""
    return printed(checkout, "pretrain_gpt.py", f"{FLAGS} {UNTIED}")


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def printed(checkout: Path, script: str, flags: str) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        done = Launch("megatron", flags, script=script, folder=checkout).run()
    assert done.status == 0, done.output
    return re.findall(r"iteration \d.*", done.output)


SCHEDULES = [
    ("1f1b", ""),
    ("zb1p", "--zb-max-inflight 3"),
    ("gpipe", ""),
    ("interleaved-1f1b", "--num-virtual-stages-per-pipeline-rank 2"),
    ("zbv", "--num-virtual-stages-per-pipeline-rank 2"),
    ("hanayo", "--num-virtual-stages-per-pipeline-rank 2"),
]


@pytest.mark.parametrize("case", graded(SCHEDULES, [SCHEDULES[4]]), ids=lambda case: case[0])
def test_schedules_train_as_the_script_does(checkout: Path, theirs: list[str], case: tuple[str, str]) -> None:
    """Losses, gradient norms and a validation, with the head on whichever rank."""
    assert len(theirs) == 4 and SEQUENCE == 12
    name, more = case
    ours = printed(checkout, "-m", f"{OURS} {FLAGS} {UNTIED} --pipeline-schedule {name} {more}")
    assert [numbers(line) for line in ours] == [pytest.approx(numbers(line), abs=2e-5) for line in theirs]


def numbers(line: str) -> list[float]:
    return [float(text) for text in re.findall(r"[\d.]+", line)]


@pytest.mark.thorough
def test_a_wrong_number_of_chunks_is_told_with_the_flag(checkout: Path) -> None:
    flags = f"{OURS} {FLAGS} {UNTIED} --pipeline-schedule zbv --num-virtual-stages-per-pipeline-rank 1"
    done = Launch("megatron", flags, script="-m", folder=checkout).run()
    assert done.status != 0
    assert "helixpipe: schedule zbv has 2 stages a rank; give --num-virtual-stages-per-pipeline-rank 2." in done.output


def test_our_flags_are_taken_and_theirs_left(checkout: Path) -> None:
    script = str(checkout / "pretrain_gpt.py")
    flags = ["--num-layers", "4", "--pipeline-schedule", "zb1p", "--zb-max-inflight", "3", "--bf16"]
    found, name, options, theirs = split_arguments([script, *flags])
    assert (str(found), name, options.zb_max_inflight) == (script, "zb1p", 3)
    assert theirs == ["--num-layers", "4", "--bf16"]


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ([], UserError, "the script must come first"),
        (["absent.py"], UserError, "there is no script absent.py"),
        (["SCRIPT"], UserError, "give --pipeline-schedule"),
        (["SCRIPT", "--pipeline-schedule", "zb3p"], ScheduleError, "did you mean zb[12]p"),
        (
            ["SCRIPT", "--pipeline-schedule", "seq1f1b"],
            ScheduleError,
            "cuts sequences into chunks, which Megatron-LM's",
        ),
        (["SCRIPT", "--pipeline-schedule", "helix"], ScheduleError, "flags and --pipeline-schedule helix"),
        (["SCRIPT", "--pipeline-schedule", "weipipe"], ScheduleError, "has stages on several ranks"),
    ],
)
def test_what_cannot_be_run_is_told(checkout: Path, arguments: list[str], error: type, sentence: str) -> None:
    given = [str(checkout / "pretrain_gpt.py") if each == "SCRIPT" else each for each in arguments]
    with pytest.raises(error, match=sentence):
        split_arguments(given)
