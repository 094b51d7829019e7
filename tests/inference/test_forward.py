"""A checkpoint writes and predicts alike over any ranks, with what it keeps and without."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch

from helixpipe.common.errors import UserError
from megatron.pretrain.inference.perplexity import PositionLoss, edges, table
from tests.distributed import run_ranks
from tests.integration.forked import run_forked
from tests.integration.launching import MOCK, MODEL, Launch

SHAPE = MODEL.replace("--hidden-size 32", "--hidden-size 64")
LLAMA = (
    "--group-query-attention --num-query-groups 2 --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights --tokenizer-type ByteLevelTokenizer "
    "--make-vocab-size-divisible-by 24 --attention-dropout 0 --hidden-dropout 0 "
    "--window-size 4,0 --window-attn-skip-freq 2 --no-rope-freq 2"
)
TRAINED = Launch(
    "trained under helix",
    f"{SHAPE} {LLAMA} --mock-data --train-iters 2 --pipeline-model-parallel-size 2 --pipeline-schedule helix "
    "--save {save}",
)
LAYOUTS = {"p2": (2, "--pipeline-model-parallel-size 2"), "tp2": (2, "--tensor-model-parallel-size 2")}
PROMPT = "def f(x):"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "checkpoints"
    run_forked(TRAINED, save=folder).done()
    return folder


class Said(NamedTuple):
    greedy: list[int]
    drawn: list[list[int]]
    whole: list[int]
    buckets: list[PositionLoss]


def ask(rank: int, world: int, folder: str, flags: str) -> Said:
    """Tokens written, likewise by running each row anew without keeping anything, and losses."""
    from megatron.pretrain.arguments import parse_args
    from megatron.pretrain.inference.commands import CHECKPOINT_FLAGS
    from megatron.pretrain.inference.generation import GenerationOptions, generate
    from megatron.pretrain.inference.model import open_model
    from megatron.pretrain.inference.perplexity import PerplexityOptions, perplexity
    from megatron.pretrain.launch import saved_arguments
    from megatron.pretrain.process.parallel import Parallel
    from tests.model.common import set_parallel

    set_parallel(tp=2 if "tensor" in flags else 1, pp=2 if "pipeline" in flags else 1)
    argv = [*CHECKPOINT_FLAGS, "--load", folder, *flags.split()]
    model: Any = open_model(parse_args(argv, load_checkpoint_args=saved_arguments), Parallel.current())
    prompt = model.tokenizer.tokenize(PROMPT)

    def written(**options: Any) -> list[list[int]]:
        columns = list(generate(model, prompt, GenerationOptions(max_new_tokens=6, **options)))
        return torch.stack(columns, dim=1).tolist()

    greedy = written(greedy=True)[0]
    whole = [*prompt]
    for _ in greedy:
        whole += [int(each) for each in next(generate(model, whole, GenerationOptions(max_new_tokens=1, greedy=True)))]
    documents = [numpy.arange(1, 41) % 100, numpy.arange(5, 15), numpy.array([7])]
    asked = PerplexityOptions(context=32, chunk=5, buckets=(1, 8))
    buckets, count = perplexity(model, documents, asked)
    assert count == 3
    drawn = written(num_samples=3, prefill_chunk=4, top_p=0.9)
    return Said(greedy, drawn, whole[len(prompt) :], buckets if model.is_last else [])


def test_alike_over_any_ranks_and_without_what_is_kept(checkpoint: Path) -> None:
    one = run_ranks(ask, 1, str(checkpoint), "")[0]
    assert one.greedy == one.whole and len(one.drawn) == 3 and len({tuple(row) for row in one.drawn}) == 3
    assert [bucket.tokens for bucket in one.buckets] == [0, 14, 26]  # nothing is predicted at position 0
    assert all(4 < bucket.loss < 7 for bucket in one.buckets[1:])
    for ranks, flags in LAYOUTS.values():
        said = run_ranks(ask, ranks, str(checkpoint), flags)
        assert all(each.greedy == one.greedy and each.drawn == one.drawn for each in said)
        assert [each.loss for each in said[-1].buckets[1:]] == pytest.approx(
            [each.loss for each in one.buckets[1:]], rel=1e-5
        )


def test_commands(checkpoint: Path, tmp_path: Path) -> None:
    write = Launch("write", f"--load {checkpoint} --prompt a b --max-new-tokens 3 --greedy", 0, "tools/generate.py")
    said = run_forked(write).done().output.splitlines()
    assert sum(line == "-" * 80 for line in said) == 2
    text, out = tmp_path / "text.txt", tmp_path / "table.json"
    text.write_text("x = 1\n" * 9)
    flags = f"--load {checkpoint} --text {text} --context 32 --json {out} --pipeline-model-parallel-size 2"
    output = run_forked(Launch("predict", flags, 2, "tools/evaluate.py")).done().output
    assert re.search(r"^ +1 documents +31 +\d\.\d{4} +\d+\.\d{3}$", output, re.MULTILINE), output
    assert sum(row["tokens"] for row in json.loads(out.read_text())) == 31


@pytest.mark.parametrize(
    ("script", "flags", "sentence"),
    [
        ("generate", "", "--load is needed"),
        ("generate", "--top-p 1.5", "--top-p 1.5"),
        ("evaluate", "--load {folder}", "give either --documents"),
        ("evaluate", "--load {folder} --text {folder}/none", "none cannot be read"),
        ("evaluate", "--load {folder} --text {folder}/none --json {folder}/no/table.json", "--json: cannot write"),
        ("generate", "--load {folder}/none", "none holds no checkpoint, so --use-checkpoint-args can take no model"),
    ],
)
def test_mistakes_are_one_sentence(checkpoint: Path, script: str, flags: str, sentence: str) -> None:
    launch = Launch(script, flags.format(folder=checkpoint), 0, f"tools/{script}.py")
    assert sentence in run_forked(launch).sentence()


def test_experts_are_shared_by_pipeline_ranks_alone() -> None:
    """Which is said before ranks meet, and not that sequence parallelism is missing, which they have."""
    from megatron.pretrain.arguments import parse_args
    from megatron.pretrain.inference.model import open_model

    experts = "--num-experts 4 --disable-bias-linear --tensor-model-parallel-size 2 --sequence-parallel --train-iters 1"
    config = parse_args(f"{MOCK} {experts}".split(), environ={"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})
    with pytest.raises(UserError, match="--tensor-model-parallel-size 2: a model with experts is shared here by"):
        open_model(config)


def test_buckets_double_and_few_tokens_join_those_before() -> None:
    assert edges(8192, ()) == [0, 1024, 2048, 4096, 8192]
    assert edges(5000, ()) == [0, 1024, 2048, 5000]
    assert edges(6000, ()) == [0, 1024, 2048, 4096, 6000]
    assert edges(64, ()) == [0, 8, 16, 32, 64]
    assert edges(100, (10, 50)) == [0, 10, 50, 100]
    for wrong in ((50, 10), (10, 10), (100,)):
        with pytest.raises(UserError, match="must increase and stay below 100"):
            edges(100, wrong)


def test_the_table_has_a_line_a_bucket_and_their_mean() -> None:
    lines = table(
        [PositionLoss(0, 8, 2, 1.0), PositionLoss(8, 16, 0, float("nan")), PositionLoss(16, 32, 6, 2.0)], 3
    ).splitlines()
    assert [line.split()[-2:] for line in lines[1:]] == [
        ["1.0000", "2.718"],
        ["-", "-"],
        ["2.0000", "7.389"],
        ["1.7500", "5.755"],
    ]
