"""Flags of Megatron-LM and of papers' code that are read, ignored or refused; the dump of arguments."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helixpipe.common.errors import CheckpointError, UserError
from megatron.pretrain.arguments import (
    build_parser,
    overlay_checkpoint_args,
    parse_args,
)
from megatron.pretrain.config import compat, core
from megatron.pretrain.log.summary import format_arguments, print_arguments
from megatron.pretrain.plan.costs import training_costs
from tests.training.helpers import config

ROOT = Path(__file__).resolve().parents[2]

# --------------------------------------------------------------------------------------- flags of Megatron-LM, the dump


def test_ignored_flags_are_named_in_one_warning() -> None:
    chosen = config("--no-masked-softmax-fusion --manual-gc-interval 5 --lr 0.5 --tp-comm-overlap-rs-dgrad")
    assert chosen.training.lr == 0.5
    assert len(chosen.warnings) == 1
    for flag in ("--no-masked-softmax-fusion", "--manual-gc-interval", "--tp-comm-overlap-rs-dgrad"):
        assert flag in chosen.warnings[0]


def test_a_log_says_once_what_overlaps_tensor_parallel_communication() -> None:
    """Whoever asks for it with several flags, at any size."""
    flags = "--tp-comm-overlap-rs-dgrad --disable-tp-comm-bulk-dgrad --no-masked-softmax-fusion"
    (warning,) = config(f"{flags} --tensor-model-parallel-size 2", world=2).warnings
    assert ": --tp-comm-overlap-rs-dgrad (--overlap-tp-comm says what of tensor-parallel" in warning
    assert "; --disable-tp-comm-bulk-dgrad (as --tp-comm-overlap-rs-dgrad); " in warning
    assert warning.count("tensor-parallel") == 1 and "; --no-masked-softmax-fusion (" in warning


@pytest.mark.parametrize("flag", ["--tp-comm-overlap", "--overlap-tp-comm auto"])
def test_tensor_parallel_overlap_is_chosen_by_the_cost_model(flag: str) -> None:
    """Short sequences run whole: each half would begin every collective anew."""
    sizes = "--tensor-model-parallel-size 2 --sequence-parallel --num-layers 2 --hidden-size 4096"
    sizes += " --num-attention-heads 32 --max-position-embeddings 32768"
    for length, way in ((8192, "halves"), (64, "off")):
        chosen = config(f"{flag} {sizes} --seq-length {length}", world=2)
        assert chosen.parallel.overlap_tp_comm == way
        assert core.gpt_options(chosen).overlap_tp_comm == way
        assert training_costs(chosen).bytes.layout.halves == (way == "halves")
    assert config(f"{sizes} --seq-length 8192", world=2).parallel.overlap_tp_comm == "off"
    alone = config(f"{flag} --seq-length 4096 --max-position-embeddings 4096")
    assert not training_costs(alone).bytes.layout.halves


def test_pairs_of_units_are_refused() -> None:
    with pytest.raises(UserError, match=r"^--overlap-tp-comm pairs cannot .* are off, halves and auto\.$"):
        config("--overlap-tp-comm pairs")


@pytest.mark.parametrize(("flag", "values"), compat.NEUTRAL.items())
def test_refused_flags_are_accepted_where_they_ask_for_nothing(flag: str, values: tuple[str, ...]) -> None:
    assert flag in compat.REFUSED
    for value in values:
        assert config(f"{flag} {value}").warnings == ()


def test_no_flag_is_in_two_tables_or_also_real() -> None:
    tables = [set(compat.IGNORED), set(compat.REFUSED), set(build_parser().option_strings())]
    assert sum(map(len, tables)) == len(set.union(*tables))
    families = {*compat.IGNORED_FAMILIES, *compat.REFUSED_FAMILIES}
    assert [flag for flag in tables[-1] if any(flag.startswith(prefix) for prefix in families)] == []


def test_each_flag_has_one_reason() -> None:
    """A second one would silently take the place of the first."""
    text = (ROOT / "megatron/pretrain/config/megatron_flags.toml").read_text(encoding="utf-8")
    listed = text.split("[[understood]]")[0]
    for heading, reasons in (
        ("[refused]", (compat.REFUSED, compat.REFUSED_FAMILIES)),
        ("[ignored]", (compat.IGNORED, compat.IGNORED_FAMILIES)),
    ):
        flags = re.findall(r'"(--[\w-]+)(\*?)"', re.split(r"\n\[", listed.split(heading)[1])[0])
        assert sorted(name for name, star in flags if not star) == sorted(reasons[0])
        assert sorted(name for name, star in flags if star) == sorted(reasons[1])
    assert compat.REFUSED["--qk-clip"] == compat.REFUSED_FAMILIES["--dsa-"]


def test_an_installed_package_has_the_table(tmp_path: Path) -> None:
    """As setuptools builds it from the project's own files."""
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "helixpipe").mkdir()
    shutil.copy(ROOT / "helixpipe/__init__.py", tmp_path / "helixpipe")
    shutil.copytree(ROOT / "megatron/pretrain/config", tmp_path / "megatron/pretrain/config")
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path / "built")]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    table = "megatron/pretrain/config/megatron_flags.toml"
    assert (tmp_path / "built" / table).read_bytes() == (ROOT / table).read_bytes()


def test_flags_of_helix_authors_are_other_names() -> None:
    theirs = ["--attention-pipeline", "--num-fold", "3", "--transfer-weight", "--checkpoint-without-attn"]
    ours = ["--pipeline-schedule", "helix", "--helix-folds", "3", "--helix-ship", "qkv"]
    ours += ["--recompute-granularity", "without-attention"]
    assert build_parser().parse(theirs) == build_parser().parse(ours)
    two_ranks = "--pipeline-model-parallel-size 2 --global-batch-size 4"
    own = config(f"--attention-pipeline --helix-ship none --num-fold 1 {two_ranks}", world=2)
    assert own.schedule_options.helix_folds == 1
    with pytest.raises(UserError, match=r"^--num-fold: 'two' is not a whole number\.$"):
        config("--num-fold two")


def test_reasons_read_as_the_end_of_a_sentence() -> None:
    for table in (compat.IGNORED, compat.REFUSED, compat.IGNORED_FAMILIES, compat.REFUSED_FAMILIES):
        for flag, reason in table.items():
            assert re.fullmatch(r"--[A-Za-z0-9_-]+", flag) and reason and not reason.endswith("."), flag


def test_the_dump_is_megatrons(capsys: pytest.CaptureFixture[str]) -> None:
    lines = format_arguments(config("--bf16")).splitlines()
    assert lines[0] == "------------------------ arguments ------------------------"
    assert lines[-1] == "-------------------- end of arguments ---------------------"
    assert all(re.fullmatch(r"  [A-Za-z0-9_]+ \.* .*", line) and line[51] == " " for line in lines[1:-1])
    assert "  bf16 ............................................ True" in lines
    assert [line.lower() for line in lines[1:-1]] == sorted(line.lower() for line in lines[1:-1])
    print_arguments(config(rank=1, world=2))
    assert capsys.readouterr().out == ""


def test_model_shape_from_a_checkpoint() -> None:
    saved = {**config("--num-layers 2 --swiglu --normalization RMSNorm").flat(), "lr": 5.0}

    def load(checkpoint: object) -> dict[str, object]:
        return saved

    words = "--use-checkpoint-args --load x --micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --num-layers 9"
    chosen = parse_args(words.split(), environ={}, load_checkpoint_args=load)
    assert (chosen.model.num_layers, chosen.model.hidden_size, chosen.model.swiglu) == (2, 64, True)
    assert (chosen.training.lr, chosen.data.vocab_size) == (1e-3, 100)
    longer = parse_args(
        [*words.split(), "--seq-length", "128", "--max-position-embeddings", "256"],
        environ={},
        load_checkpoint_args=load,
    ).model
    assert (longer.seq_length, longer.max_position_embeddings) == (128, 256)
    assert "no checkpoint" in overlay_checkpoint_args(config(), None).warnings[0]
    with pytest.raises(
        CheckpointError, match="--load x holds no checkpoint, so --use-checkpoint-args can take no model"
    ):
        parse_args(words.split(), environ={}, load_checkpoint_args=lambda checkpoint: None)
    with pytest.raises(CheckpointError, match="mixture of experts"):
        overlay_checkpoint_args(config(), argparse.Namespace(num_experts=8))


def test_the_end_of_a_null_tokenizers_documents_has_a_row() -> None:
    """It is the number after those that --vocab-size counts."""
    null = "--tokenizer-type NullTokenizer --make-vocab-size-divisible-by 512 --vocab-size"
    assert core.gpt_options(config(f"{null} 511")).vocab_size == 512
    assert core.gpt_options(config(f"{null} 512")).vocab_size == 1024
