"""Output layer and loss run over slices where a flag says so, or else memory."""

from __future__ import annotations

from pathlib import Path

from helixpipe.costs.hardware import GIB
from helixpipe.costs.models import Layout
from megatron.pretrain.arguments import parse_and_plan
from megatron.pretrain.config import Config, core
from megatron.pretrain.plan.costs import model_shape, training_costs
from megatron.pretrain.plan.programs import full_batch
from tests.profile.test_profile import make_profile

FLAGS = (
    "--num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 16384 --max-position-embeddings 16384 "
    "--micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --train-iters 1 --mock-data --tokenizer-type NullTokenizer "
    "--bf16 --pipeline-schedule 1f1b --pipeline-model-parallel-size 2 --position-embedding-type rope"
)
FEW, MANY = "--vocab-size 1000", "--vocab-size 100000"


def parsed(flags: str) -> Config:
    return parse_and_plan(f"{FLAGS} {flags}".split(), environ={"WORLD_SIZE": "2"})[0]


def needed(flags: str) -> float:
    """GiB of the rank that needs most."""
    config, plans = parse_and_plan(f"{FLAGS} {flags}".split(), environ={"WORLD_SIZE": "2"})
    return max(plans.plan(full_batch(config)).simulation.device_needs) / GIB


def slices(config: Config) -> tuple[int | None, int, int]:
    """By the flags, of the model, and of the costs."""
    return (
        config.model.loss_chunk_size,
        core.gpt_options(config).loss_chunk_size,
        training_costs(config).bytes.layout.loss_chunk,
    )


def test_a_flag_is_a_flag() -> None:
    assert slices(parsed(FEW)) == (0, 0, 0)
    for limit in ("", "--memory-limit 1000", "--memory-limit 1"):
        given = parsed(f"{MANY} --loss-chunk-size 512 {limit}")
        assert slices(given) == (512, 512, 512) and given.model.loss_slices_why is None
    assert slices(parsed(f"{MANY} --loss-chunk-size 0 --memory-limit 1")) == (0, 0, 0)


def test_slices_are_taken_where_a_step_does_not_fit_without() -> None:
    whole, sliced = needed(MANY), needed(f"{MANY} --loss-chunk-size 2048")
    assert sliced < 0.7 * whole
    assert slices(parsed(f"{MANY} --memory-limit {whole + 0.1}")) == (0, 0, 0)
    found = parsed(f"{MANY} --memory-limit {whole - 0.1}")
    assert slices(found) == (2048, 2048, 2048)  # of each of two sequences: 4096 tokens
    why = f"without slices a rank needs {whole:.1f} of {whole - 0.1:.1f} GiB, with them {sliced:.1f}, and a step takes"
    assert (found.model.loss_slices_why or "").startswith(why)
    assert slices(parsed(f"{MANY} --hardware a100-80")) == (0, 0, 0)


def test_slices_are_taken_before_activations_leave_the_device() -> None:
    limit = needed(MANY) - 1.0
    flags = f"{MANY} --memory-limit {limit} --offload-activations auto --hardware h100"
    assert needed(f"{flags} --loss-chunk-size 0") <= limit
    found = parsed(flags)
    assert found.model.loss_chunk_size == 2048
    assert (found.model.loss_slices_why or "").startswith(
        f"with slices there is more room in {limit:.1f} GiB, and a step takes -"
    )
    assert slices(parsed(flags.replace(f"{limit}", "1000")))[0] == 0


def test_slices_that_save_nothing_are_not_taken() -> None:
    """Where the first rank needs most, and where a sequence is no longer than a slice."""
    assert slices(parsed(f"{FEW} --memory-limit 0.1"))[0] == 0
    assert slices(parsed(f"{MANY} --memory-limit 0.1 --seq-length 2048"))[0] == 0


def test_a_schedule_that_fits_with_slices_alone() -> None:
    """adapipe refuses what does not fit."""
    flags = f"{MANY} --pipeline-schedule adapipe"
    found = parsed(f"{flags} --memory-limit 18")
    assert found.model.loss_chunk_size == 2048
    assert (found.model.loss_slices_why or "").startswith("without slices nothing fits into 18.0 GiB, with them a rank")


def test_a_profile_says_what_it_was_measured_with(tmp_path: Path) -> None:
    path, shape = tmp_path / "profile.json", model_shape(parsed(MANY))
    layout = Layout(micro_batch_size=2, element_bytes=2, loss_chunk=512)
    make_profile(model=shape, layout=layout, seq_length=16384).save(path)
    assert slices(parsed(f"{MANY} --cost-profile {path}")) == (512, 512, 512)
