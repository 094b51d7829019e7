"""What the drop-in for megatron-core refuses, and that its signature is megatron-core's."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helixpipe.common.errors import UserError
from helixpipe.costs.by_hand import unit_costs
from helixpipe.drop_in.checks import check_chunks, check_config, check_deferral, check_program
from helixpipe.planning.vocabulary.split import split_heads
from helixpipe.program.files import save_program
from helixpipe.program.program import Op, Program, Unit, forward_only
from helixpipe.program.stages import Activations, Piece, Stage, model_pieces
from helixpipe.program.text import to_csv
from helixpipe.program.workload import uniform
from schedules import Shape, build
from schedules.drop_in import ForwardBackward, get_forward_backward_func

PLAIN: dict[str, Any] = {"cuda_graph_impl": "none", "enable_autocast": False}


class Chunk(torch.nn.Module):
    """A GPTModel as far as the checks look."""

    def __init__(self, pre_process: bool = False, post_process: bool = False, tied: bool = False):
        super().__init__()
        self.pre_process, self.post_process = pre_process, post_process
        self.share_embeddings_and_output_weights = tied
        self.decoder = torch.nn.ModuleList([torch.nn.Linear(2, 2)])


class Wrapper(torch.nn.Module):
    def __init__(self, module: torch.nn.Module):
        super().__init__()
        self.module = module


def program(schedule: str, **shape: Any) -> Program:
    return build(schedule, Shape(2, 4, 4, **shape))


def test_signature_is_megatron_cores() -> None:
    from megatron.core.pipeline_parallel import schedules

    ours = list(inspect.signature(ForwardBackward.__call__).parameters.values())[1:]
    theirs = inspect.signature(schedules.forward_backward_pipelining_with_interleaving).parameters.values()
    assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schedule": "1f1"}, "unknown pipeline schedule '1f1': did you mean 1f1b?"),
        ({"schedule": "1f1b", "zb_max_inflight": 3}, "schedule 1f1b has no option zb_max_inflight: it has none."),
        ({"schedule": "zbv", "inflight": 3}, "schedule zbv has no option inflight: known are zb_max_inflight."),
        ({"schedule": "mine.csv", "inflight": 3}, r"options \(inflight\) belong to a schedule of the catalogue"),
    ],
)
def test_names_and_options(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        get_forward_backward_func(**arguments)


def test_sequence_chunks_need_our_own_model() -> None:
    message = "seq1f1b cuts sequences into chunks, .* choose one of none, gpipe, 1f1b, "
    with pytest.raises(UserError, match=message):
        get_forward_backward_func("seq1f1b").program(2, 4, 1)


def cut_inside_a_layer() -> Program:
    chain = model_pieces(4)
    cut = chain.index(Piece("attn", 2)) + 1
    return replace(program("1f1b"), stages=(Stage(chain[:cut]), Stage(chain[cut:])))


def out_of_order() -> Program:
    ops = tuple(Op(kind, 0, microbatch) for kind in "FB" for microbatch in (1, 0))
    return Program("mine", (Stage(model_pieces(1)),), (ops,), uniform(2))


def recomputed() -> Program:
    plain = program("1f1b")
    return replace(plain, stages=tuple(replace(stage, recompute=(stage.pieces,)) for stage in plain.stages))


def offloading() -> Program:
    plain = program("1f1b")
    whole = Activations((), ((plain.stages[0].pieces, 1.0),))
    return replace(plain, activations={Unit(0, 1): whole})


def shipped() -> Program:
    plain = program("1f1b")
    return replace(plain, stages=tuple(replace(stage, placement="shipped") for stage in plain.stages))


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (program("seq1f1b", chunks=2), "seq1f1b cuts sequences into chunks"),
        (offloading(), "schedule 1f1b says what becomes of the activations of the unit of 0F1: only those of a"),
        (cut_inside_a_layer(), r"cuts the model inside a layer, after attn\[2\]"),
        (recomputed(), "stage 0 of schedule 1f1b is recomputed by the schedule"),
        (shipped(), "has shipped stages"),
        (
            split_heads(program("1f1b"), unit_costs()),
            "schedule 1f1b divides the output layer over the pipeline: only a",
        ),
        (forward_only(program("1f1b")), "it is an evaluation program"),
        (build("1f1b", Shape(4, 4, 4)), "a program for 4 ranks and 4 microbatches, but the run has 2 and 4"),
        (build("1f1b", Shape(2, 3, 4)), "a program for 2 ranks and 3 microbatches, but the run has 2 and 4"),
    ],
)
def test_programs(refused: Program, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_program(refused, 2, 4)


def test_order_of_microbatches() -> None:
    with pytest.raises(UserError, match=r"runs microbatches in the order \[1, 0\], but a data iterator gives them"):
        check_program(out_of_order(), 1, 2)


@pytest.mark.parametrize(
    ("schedule", "rank", "chunks", "message"),
    [
        ("1f1b", 1, [Chunk(), Chunk()], r"has 1 stage on pipeline rank 1 \(1 of 2\), but model has 2 chunks"),
        ("zbv", 1, [Chunk()], r"has 2 stages on pipeline rank 1 \(1, 2 of 4\), but model has 1 chunk:"),
        ("1f1b", 0, [Chunk()], r"model\[0\] on pipeline rank 0 is stage 0 of 2 .*build it with pre_process=True"),
        ("zbv", 0, [Chunk(True), Wrapper(Chunk())], r"model\[1\] .* stage 3 of 4 .*build it with post_process=True"),
        ("zbv", 1, [Chunk(), Wrapper(Chunk(False, True))], r"is stage 2 of 4 .*build it with post_process=False"),
        ("zbv", 1, [Chunk(tied=True), Chunk(tied=True)], "embedding on pipeline rank 0 and the head on rank 0"),
    ],
)
def test_chunks(schedule: str, rank: int, chunks: list[Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_chunks(program(schedule), rank, chunks)


def test_chunks_that_fit() -> None:
    check_chunks(program("zbv"), 0, [Wrapper(Wrapper(Chunk(True))), Chunk(False, True)])
    check_chunks(program("1f1b"), 1, [Chunk(False, True, tied=True)])
    check_chunks(program("1f1b"), 1, [torch.nn.Linear(2, 2)])  # a model of another kind may lack these attributes


def test_layers_that_cannot_put_weight_gradients_off() -> None:
    config: Any = SimpleNamespace(**PLAIN)
    check_deferral(program("1f1b"), [Chunk()], config)
    with pytest.raises(UserError, match=r"the layers of model\[0\] \(Linear\) cannot do"):
        check_deferral(program("zb1p"), [Chunk()], config)
    config.enable_autocast = True
    with pytest.raises(UserError, match="enable_autocast does not allow"):
        check_deferral(program("zb1p"), [Chunk()], config)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("variable_seq_lengths", True),
        ("num_microbatches_with_partial_activation_checkpoints", 0),
        ("cuda_graph_impl", "local"),
    ],
)
def test_settings(name: str, value: Any) -> None:
    config: Any = SimpleNamespace(**PLAIN)
    check_config(config)
    setattr(config, name, value)
    with pytest.raises(UserError, match=f"{name}=.* is not supported with schedules of helixpipe"):
        check_config(config)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data_iterator": [None, None]}, "model has 1 chunk, but data_iterator is a list of 2"),
        ({"adjust_tensor_shapes_fn": print}, "adjust_tensor_shapes_fn is not supported"),
        ({"collect_non_loss_data": True}, "collect_non_loss_data .* needs forward_only=True"),
        ({"p2p_communicator": object()}, "give both of p2p_communicator and pg_collection, or neither"),
    ],
)
def test_arguments(arguments: dict[str, Any], message: str) -> None:
    call: dict[str, Any] = {
        "forward_step_func": None,
        "data_iterator": None,
        "model": Chunk(),
        "num_microbatches": 1,
        "seq_length": 1,
        "micro_batch_size": 1,
    }
    with pytest.raises(UserError, match=message):
        get_forward_backward_func("1f1b")(**{**call, **arguments})


def test_programs_and_files_of_ones_own(tmp_path: Path) -> None:
    given = program("1f1b")
    to_csv(given, tmp_path / "mine.csv")
    assert get_forward_backward_func(given).program(2, 4, 1) is given
    assert (
        get_forward_backward_func(lambda m: replace(given, workload=uniform(m))).program(2, 7, 1).num_microbatches == 7
    )
    assert get_forward_backward_func(str(tmp_path / "mine.csv")).program(2, 4, 1).ranks == given.ranks
    save_program(given, tmp_path / "mine.json")
    assert get_forward_backward_func(str(tmp_path / "mine.json")).program(2, 4, 1) == given
    with pytest.raises(UserError, match="is for 4 microbatches, but num_microbatches is 5"):
        get_forward_backward_func(given).program(2, 5, 1)
