"""`python -m helixpipe.megatron` over an imitation of Megatron-LM's checkout: its layout, its functions' names and
arguments (tests/integration/megatron_checkout), with the installed megatron-core."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from helixpipe.common.errors import ProgramError, ScheduleError, UserError
from helixpipe.megatron import parse
from schedules.drop_in import OffloadOptions
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
    ("seq1f1b", "--pipe-sp-splits 4"),
    ("seq1f1b", "--chunk-lengths 7,5"),
    ("sppo", "--pipe-sp-splits 3 --offload-activations 0.5 --min-offloaded-tensor-size 0"),
    ("zbv", "--num-virtual-stages-per-pipeline-rank 2 --pipe-sp-splits 2 --offload-activations 1"),
]


@pytest.mark.parametrize("case", graded(SCHEDULES, [SCHEDULES[9]]), ids=" ".join)
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
    command = parse([script, *flags])
    assert (str(command.script), command.schedule, command.settings) == (script, "zb1p", command.settings)
    assert command.settings["zb_max_inflight"] == 3
    assert command.script_flags == ["--num-layers", "4", "--bf16"]


SIZES = "--seq-length 4096 --hidden-size 64 --num-attention-heads 4 --swiglu --bf16"


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ("--pipe-sp-splits 3", {"chunks": 3}),
        ("--pipe-sp-splits 1", {"chunks": 1}),
        ("--chunk-lengths 7,5", {"chunks": 2, "chunk_lengths": (7, 5)}),
        # 131072 operations a token in linear layers, and 2·64 a pair of tokens: half at x where 0.2 x + 0.8 x² = 0.5
        (f"{SIZES} --pipe-sp-splits 2", {"chunks": 2, "chunk_lengths": (2752, 1344)}),
        (f"{SIZES} --pipe-sp-splits 2 --ffn-hidden-size 4096", {"chunks": 2, "chunk_lengths": (2304, 1792)}),
        (f"{SIZES} --pipe-sp-splits 3 --pipe-sp-strategy average", {"chunks": 3, "chunk_lengths": (1408, 1344, 1344)}),
        (
            "--seq-length 80 --pipe-sp-splits 2 --tensor-model-parallel-size 8 --sequence-parallel",
            {"chunks": 2, "chunk_lengths": (40, 40)},
        ),
        ("--offload-activations 0.5", {"offload": OffloadOptions("0.5")}),
        (
            "--offload-activations 1 --min-offloaded-tensor-size 7",
            {"offload": OffloadOptions("1", min_offloaded_tensor_size=7)},
        ),
    ],
)
def test_flags_of_chunks_and_offloading(checkout: Path, flags: str, settings: dict[str, Any]) -> None:
    """Chunks take equally long by the sizes of the script's flags, which stay there."""
    schedule = "seq1f1b" if "chunks" in settings else "1f1b"
    command = parse([str(checkout / "pretrain_gpt.py"), "--pipeline-schedule", schedule, *flags.split()])
    assert command.settings == settings
    ours = ("--pipe-sp", "--chunk", "--offload", "--min-offloaded")
    expected, words = [], iter(flags.split())
    for word in words:
        if word.startswith(ours):
            next(words)
        else:
            expected.append(word)
    assert command.script_flags == expected


def test_what_is_not_asked_for_stays_the_scripts(checkout: Path) -> None:
    """Megatron-LM has flags of these names, for its own way to offload and its interleaved schedule."""
    script = str(checkout / "pretrain_gpt.py")
    flags = ["--min-offloaded-tensor-size", "7", "--microbatch-group-size-per-virtual-pipeline-stage", "2"]
    command = parse([script, *flags, "--pipeline-schedule", "1f1b"])
    assert command.script_flags == flags and not command.settings


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ([], UserError, "the script must come first"),
        (["absent.py"], UserError, "there is no script absent.py"),
        (["SCRIPT"], UserError, "give --pipeline-schedule"),
        (["SCRIPT", "--pipeline-schedule", "zb3p"], ScheduleError, "did you mean zb[12]p"),
        (["SCRIPT", "--pipeline-schedule", "1f1b", "--pipe-sp-splits", "auto"], UserError, "auto needs this project's"),
        (["SCRIPT", "--pipeline-schedule", "1f1b", "--pipe-sp-splits", "0"], UserError, "--pipe-sp-splits 0 must be"),
        (
            ["SCRIPT", "--pipeline-schedule", "sppo", "--pipe-sp-splits", "2", "--pipe-sp-strategy", "uniform_comp"],
            UserError,
            "uniform_comp needs --seq-length and --hidden-size",
        ),
        (["SCRIPT", "--pipeline-schedule", "1f1b", "--offload-activations", "auto"], UserError, "give a share from 0"),
        (["SCRIPT", "--pipeline-schedule", "sppo"], UserError, "^--pipe-sp-splits must be a number here, such as 4"),
        (["SCRIPT", "--pipeline-schedule", "1f1b", "--offload-activations", "2"], ScheduleError, "offload-activations"),
        (["SCRIPT", "--pipeline-schedule", "absent.json"], ProgramError, "absent.json"),
        (
            ["SCRIPT", "--pipeline-schedule", "1f1b", "--zb-max-inflight", "3"],
            ScheduleError,
            "--zb-max-inflight is an option of .*zb1p.*, not of 1f1b",
        ),
        (["SCRIPT", "--pipeline-schedule", "helix"], ScheduleError, "flags and --pipeline-schedule helix"),
        (["SCRIPT", "--pipeline-schedule", "weipipe"], ScheduleError, "has stages on several ranks"),
    ],
)
def test_what_cannot_be_run_is_told(checkout: Path, arguments: list[str], error: type, sentence: str) -> None:
    given = [str(checkout / "pretrain_gpt.py") if each == "SCRIPT" else each for each in arguments]
    with pytest.raises(error, match=sentence):
        parse(given)
