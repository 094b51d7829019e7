"""What the drop-in for megatron-core refuses, and that its signature is megatron-core's."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType

from helixpipe.common.errors import ScheduleError, UserError
from helixpipe.costs.by_hand import unit_costs
from helixpipe.drop_in.checks import check_chunks, check_config, check_deferral, check_program
from helixpipe.drop_in.sequences import check_models, check_sequences
from helixpipe.planning.vocabulary.choice import split_heads
from helixpipe.program.files import save_program
from helixpipe.program.program import Op, Program, Unit, forward_only
from helixpipe.program.stages import Activations, Piece, Stage, model_pieces
from helixpipe.program.text import to_csv
from helixpipe.program.workload import uniform
from schedules import CATALOGUE, Shape, build
from schedules.drop_in import ForwardBackward, OffloadOptions, get_forward_backward_func

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


@pytest.mark.parametrize("name", [name for name, schedule in CATALOGUE.items() if schedule.chunks])
def test_schedules_made_for_chunks_need_their_number(name: str) -> None:
    with pytest.raises(ScheduleError, match=f"^schedule {name} runs sequences in chunks; give their number, such as "):
        get_forward_backward_func(name)
    get_forward_backward_func(name, chunks=1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"virtual_stages": 2, "chunks": 2}, "^virtual_stages need a helixpipe.model.PipelineModel"),
        ({"chunks": 2, "offload": OffloadOptions("auto")}, "give offload_activations a number from 0 to 1"),
        ({"chunks": 2, "offload": OffloadOptions("1", ("mlp",))}, "give offload_activations a number from 0 to 1"),
        ({"chunks": 2, "offload": OffloadOptions(kv_blocks=True)}, "without offload_modules and kv_blocks"),
    ],
)
def test_what_needs_our_own_model(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        get_forward_backward_func("seq1f1b", **given).program(2, 4, 1)


def test_a_head_of_its_own_joins_the_stage_before() -> None:
    """sppo's, as a GPTModel has both in one chunk; what is offloaded is all of a stage, and back one op early."""
    made = get_forward_backward_func("sppo", chunks=3, offload=OffloadOptions("0.5")).program(2, 4, 1)
    check_program(made, 2, 4)
    assert [stage.pieces[-1].kind for stage in made.stages] == ["mlp", "head"]
    assert {op.kind + str(op.stage) for op in made.ranks[1]} == {"F1", "B1"} and len(made.ranks[1]) == 24
    assert set(made.activations) == set(made.units()) and made.min_offloaded_bytes == 2 * 1024 * 1024
    assert all(each.ahead >= 1 and each.offload[0][1] == 0.5 for each in made.activations.values())
    one = get_forward_backward_func("1f1b", offload=OffloadOptions("1")).program(1, 2, 1)
    assert one.stages[0].pieces[-1].kind == "head"


CAUSAL = AttnMaskType.causal
PLAIN_MODEL: dict[str, Any] = {
    "context_parallel_size": 1,
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "num_moe_experts": None,
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
}


def attention_chunk(mask: AttnMaskType = CAUSAL, **attributes: Any) -> Any:
    attention = SelfAttention.__new__(SelfAttention)
    torch.nn.Module.__init__(attention)
    attention.attn_mask_type = mask
    layer = torch.nn.Module()
    layer.self_attention = attention
    chunk: Any = Chunk()
    chunk.decoder.layers = [layer]
    for name, value in attributes.items():
        setattr(chunk, name, value)
    return chunk


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"multi_latent_attention": True}, r"latent attention \(multi_latent_attention=True\); choose a schedule that"),
        ({"mtp_num_layers": 1}, "multi-token prediction"),
        ({"context_parallel_size": 2}, "context parallelism"),
        ({"softmax_type": "learnable"}, "a softmax with an offset"),
        ({"num_moe_experts": 4, "moe_router_load_balancing_type": "sinkhorn"}, "balanced over a microbatch"),
        ({"num_moe_experts": 4, "moe_router_load_balancing_type": ["aux_loss"], "moe_aux_loss_coeff": [0.1]}, "aux"),
        ({"num_moe_experts": 4, "moe_z_loss_coeff": 0.1}, "moe_z_loss_coeff=0.1"),
        ({"num_moe_experts": 4, "moe_expert_capacity_factor": 1.0}, "moe_expert_capacity_factor=1.0"),
    ],
)
def test_models_whose_sequences_cannot_be_cut(changes: dict[str, Any], message: str) -> None:
    config: Any = SimpleNamespace(**PLAIN_MODEL)
    check_models([Wrapper(attention_chunk())], config)
    check_models([attention_chunk()], SimpleNamespace(**PLAIN_MODEL | {"num_moe_experts": 4}))
    with pytest.raises(UserError, match=message):
        check_models([attention_chunk()], SimpleNamespace(**PLAIN_MODEL | changes))


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (Chunk(), r"with model\[0\], a Chunk, which is not of self-attention, MLP and experts alone"),
        (attention_chunk(AttnMaskType.no_mask), "attention that is not causal"),
        (attention_chunk(position_embedding_type="mrope"), "position_embedding_type=mrope"),
    ],
)
def test_modules_whose_sequences_cannot_be_cut(chunk: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_models([Wrapper(chunk)], SimpleNamespace(**PLAIN_MODEL))


def test_lengths_of_chunks() -> None:
    config: Any = SimpleNamespace(**PLAIN_MODEL)
    check_sequences(program("seq1f1b", chunks=3), config, (None, 12))
    with pytest.raises(UserError, match="chunks of 5, 5 tokens must be multiples of 2, the ranks that"):
        check_sequences(program("seq1f1b", chunks=2), config, (10, 10))
    with pytest.raises(UserError, match="decoder_seq_length must be seq_length, 12, or None, not 6"):
        check_sequences(program("seq1f1b", chunks=3), config, (6, 12))
    with pytest.raises(UserError, match="do not add up to the sequence's 12 tokens"):
        check_sequences(program("seq1f1b", chunks=2, chunk_lengths=(4, 4)), config, (None, 12))
    config.sequence_parallel = False
    check_sequences(program("seq1f1b", chunks=2), config, (None, 10))


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


def offloading(pieces: slice) -> Program:
    plain = program("1f1b")
    return replace(plain, activations={Unit(0, 1): Activations((), ((plain.stages[0].pieces[pieces], 1.0),))})


def shipped() -> Program:
    plain = program("1f1b")
    return replace(plain, stages=tuple(replace(stage, placement="shipped") for stage in plain.stages))


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (replace(program("seq1f1b", chunks=2), kv_blocks=True), "seq1f1b keeps keys and values in blocks"),
        (offloading(slice(3)), "schedule 1f1b treats the activations of the unit of 0F1 piece by piece: only those of"),
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


def test_programs_of_sequences_in_chunks_and_of_offloaded_units() -> None:
    check_program(program("seq1f1b", chunks=2), 2, 4)
    check_program(offloading(slice(None)), 2, 4)


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
