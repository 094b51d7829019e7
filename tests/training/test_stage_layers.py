"""Megatron-LM's flags that divide layers unevenly: what each stage has, and what is refused."""

from __future__ import annotations

import pytest

from helixpipe.common.errors import UserError
from helixpipe.planning.vocabulary.choice import head_place
from helixpipe.program.stages import layers_of
from megatron.pretrain.arguments import parse_and_plan, parse_args
from tests.training.helpers import BASE

RANKS = "--pipeline-model-parallel-size 4"


def words(flags: str) -> list[str]:
    return [*BASE.split(), "--train-iters", "10", "--global-batch-size", "16", *RANKS.split(), *flags.split()]


@pytest.mark.parametrize(
    ("flags", "layers"),
    [
        ("--num-layers 8", None),
        ("--num-layers 9 --decoder-first-pipeline-num-layers 3", (3, 2, 2, 2)),
        ("--num-layers 9 --decoder-last-pipeline-num-layers 3", (2, 2, 2, 3)),
        ("--num-layers 9 --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 2", (1, 3, 3, 2)),
        (
            "--num-layers 20 --decoder-first-pipeline-num-layers 2 --num-virtual-stages-per-pipeline-rank 2",
            (1, 3, 3, 3, 1, 3, 3, 3),
        ),
        (
            "--num-layers 6 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
            "--num-virtual-stages-per-pipeline-rank 2",
            (0, 1, 1, 1, 1, 1, 1, 0),
        ),
        ("--num-layers 7 --account-for-loss-in-pipeline-split", (2, 2, 2, 1)),
        ("--num-layers 7 --pipeline-model-parallel-layout Et*2|(tt|)*2,t,L", (2, 2, 2, 1)),
        ("--num-layers 5 --pipeline-model-parallel-layout E|tt|ttt|L", (0, 2, 3, 0)),
        ("--num-layers 8 --pipeline-model-parallel-layout E,(t|)*7,t,L", (1, 1, 1, 1, 1, 1, 1, 1)),
    ],
)
def test_layers_of_each_stage(flags: str, layers: tuple[int, ...] | None) -> None:
    config, plans = parse_and_plan(words(flags), environ={"WORLD_SIZE": "4"})
    assert config.parallel.stage_layers == layers
    program = plans.plan(8).program
    assert layers_of(program.stages) == (layers or (2, 2, 2, 2))
    assert program.schedule == ("interleaved-1f1b" if len(program.stages) == 8 else "1f1b")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--num-layers 8 --decoder-first-pipeline-num-layers 3", "leave 5 of --num-layers 8 to 3 other pipeline ranks"),
        ("--num-layers 8 --decoder-first-pipeline-num-layers 8", "leave 0 of --num-layers 8"),
        ("--num-layers 7 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split", "9 together"),
        ("--num-layers 8 --pipeline-model-parallel-layout Et|tt|tt|ttL", "has 7 layers (t), but --num-layers is 8"),
        ("--num-layers 8 --pipeline-model-parallel-layout Et|t|ttt|ttt|L", "has 5 stages"),
        ("--num-layers 8 --pipeline-model-parallel-layout tt|tt|tt|ttL", "must have E at its start"),
        ("--num-layers 8 --pipeline-model-parallel-layout Ett||ttt|tttL", "at least one t in every stage between"),
        ("--num-layers 8 --pipeline-model-parallel-layout Et*99999999|L", "more stages and layers than there can be"),
        (
            f"--num-layers 8 --pipeline-model-parallel-layout Et*{'9' * 5000}|L",
            "more stages and layers than there can be",
        ),
        (
            "--num-layers 9 --decoder-first-pipeline-num-layers 3 --account-for-loss-in-pipeline-split",
            "three ways to divide the layers; give one",
        ),
        (
            "--num-layers 8 --decoder-first-pipeline-num-layers 2 --pipeline-schedule helix",
            "helix divides the layers itself",
        ),
        (
            "--num-layers 8 --decoder-first-pipeline-num-layers 2 --pipeline-schedule adapipe",
            "divides the layers itself",
        ),
        (
            "--num-layers 8 --num-virtual-stages-per-pipeline-rank 2 "
            "--microbatch-group-size-per-virtual-pipeline-stage 3",
            "must be at least the pipeline size 4",
        ),
        (
            "--num-layers 8 --num-virtual-stages-per-pipeline-rank 2 "
            "--microbatch-group-size-per-virtual-pipeline-stage 7",
            "leave none or as many of the 8 microbatches over",
        ),
    ],
)
def test_what_cannot_be_is_refused(flags: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_args(words(flags), environ={"WORLD_SIZE": "4"})
    assert said in str(caught.value)


@pytest.mark.parametrize("which", ["first", "last"])
def test_one_rank_has_all_layers(which: str) -> None:
    one = ["--pipeline-model-parallel-size", "1", f"--decoder-{which}-pipeline-num-layers", "8", "--num-layers", "8"]
    assert parse_args([*words(""), *one], environ={}).parallel.stage_layers == (8,)


def test_groups_of_interleaved_microbatches() -> None:
    """A stage runs so many in turn; what is left over, as many as ranks or more, is a group of its own."""
    flags = "--num-layers 8 --num-virtual-stages-per-pipeline-rank 2 --microbatch-group-size-per-virtual-pipeline-stage"
    for size, groups in ((5, [5]), (6, [6, 4])):
        count = sum(groups)
        given = [*words(f"{flags} {size}"), "--global-batch-size", str(2 * count)]
        _, plans = parse_and_plan(given, environ={"WORLD_SIZE": "4"})
        forwards = [(op.stage, op.microbatch) for op in plans.plan(count).program.ranks[3] if op.kind == "F"]
        expected, first = [], 0
        for group in groups:
            expected += [(stage, first + i) for stage in (3, 7) for i in range(group)]
            first += group
        assert forwards == expected


def test_auto_leaves_out_what_would_be_refused() -> None:
    """A tied head is not split where data-parallel ranks have parts of the weights."""
    flags = "--num-layers 4 --vocab-size 500000 --tokenizer-type NullTokenizer --pipeline-vocab-parallel auto"
    parts = "--data-parallel-sharding-strategy optim_grads_params"
    for more, place in ((parts, "spread"), (f"{parts} --untie-embeddings-and-output-weights", "split")):
        config, _ = parse_and_plan(words(f"{flags} {more}"), environ={"WORLD_SIZE": "8"})
        assert config.vocabulary.pipeline_vocab_parallel == place


@pytest.mark.parametrize(("vocabulary", "place"), [(500_000, "split"), (100, "ends")])
def test_one_place_of_the_head_for_all_steps(vocabulary: int, place: str) -> None:
    """Which the step of the full batch decides, whatever other sizes would rather have."""
    flags = f"--num-layers 4 --vocab-size {vocabulary} --tokenizer-type NullTokenizer"
    asked = [*words(flags), "--rampup-batch-size", "4", "4", "40", "--enable-vocab-parallel"]
    config, plans = parse_and_plan(asked, environ={"WORLD_SIZE": "4"})
    assert config.vocabulary.pipeline_vocab_parallel == place
    assert {head_place(plans.program(size)) for size in (4, 8, 16)} == {place}


def test_further_tokens_are_predicted_in_the_last_stage() -> None:
    layout = "--num-layers 7 --pipeline-model-parallel-layout Et*2|(tt|)*2,t,m*2,L"
    config, plans = parse_and_plan(words(f"{layout} --mtp-num-layers 2"), environ={"WORLD_SIZE": "4"})
    assert (
        config.parallel.stage_layers == (2, 2, 2, 1) and str(plans.plan(8).program.stages[-1].pieces[-1]) == "head.mtp"
    )
    for flags, said in (
        (layout, "has 2 layers of further tokens (m), but --mtp-num-layers is 0"),
        (f"{layout} --mtp-num-layers 1", "but --mtp-num-layers is 1"),
        ("--num-layers 8 --mtp-num-layers 1 --loss-chunk-size 8", "cannot be combined with --loss-chunk-size 8"),
        ("--num-layers 8 --mtp-num-layers 1 --pipeline-vocab-parallel split", "takes the head apart"),
        ("--num-layers 8 --mtp-num-layers 1 --overlap-tp-comm halves", "cannot be combined with --overlap-tp-comm"),
        ("--num-layers 8 --mtp-num-layers 1 --position-embedding-type none", "later tokens need places"),
        ("--num-layers 8 --mtp-num-layers 1 --use-torch-fsdp2", "weights or gradients in parts"),
        ("--num-layers 8 --mtp-num-layers 1 --pipeline-schedule sppo --sppo-multiplex left", "give off"),
    ):
        with pytest.raises(UserError) as caught:
            parse_and_plan(words(flags), environ={"WORLD_SIZE": "4"})
        assert said in str(caught.value), flags
