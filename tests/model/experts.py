"""What the ranks of test_experts.py run: layers with experts against megatron-core's model in one process."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, get_updated_expert_bias

from helixpipe.common.errors import UserError
from helixpipe.model import PipelineModel, UnitContext
from helixpipe.model.collectives import ForwardBeside
from helixpipe.model.experts import exchange
from helixpipe.model.options import layers_of
from helixpipe.program.stages import model_pieces
from tests.model.common import (
    BATCH,
    SEQUENCE,
    gradients_of,
    make_batch,
    make_config,
    make_options,
    make_reference,
    reference_forward,
    set_parallel,
    worst,
)

VARIANTS: dict[str, dict[str, Any]] = {
    "alltoall": {},
    "allgather": {"moe_token_dispatcher_type": "allgather"},
    "softmax": {"moe_router_score_function": "softmax"},
    "pre-softmax": {
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": True,
        "moe_router_topk": 1,
        "moe_router_topk_scaling_factor": 2.5,
    },
    "groups": {"moe_router_num_groups": 2, "moe_router_group_topk": 1, "moe_router_dtype": "fp64"},
    "one loss": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.4},
    "no loss": {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": None},
    "capacity": {"moe_expert_capacity_factor": 0.5, "moe_router_load_balancing_type": "seq_aux_loss"},
    "padded": {
        "moe_expert_capacity_factor": 1.0,
        "moe_pad_expert_input_to_capacity": True,
        "moe_token_drop_policy": "position",
        "moe_router_load_balancing_type": "aux_loss",
    },
    "gate": {"moe_shared_expert_gate": True},
    "sinkhorn": {
        "moe_router_load_balancing_type": "sinkhorn",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_topk": 1,
        "moe_router_score_function": "softmax",
    },
    "all layers": {"moe_layer_freq": 1, "moe_shared_expert_intermediate_size": None},
    "list": {"moe_layer_freq": [0, 1], "moe_ffn_hidden_size": 40},
    "biases": {"add_bias_linear": True, "moe_shared_expert_intermediate_size": None},
}


def compare(rank: int, world_size: int) -> dict[str, tuple[float, str]]:
    """For each variant the largest error of a gradient and the parameter's name; half of the gradient of auxiliary
    losses is asked for."""
    set_parallel()
    return {name: _difference(changes) for name, changes in VARIANTS.items()}


def _changes(changes: dict[str, Any]) -> dict[str, Any]:
    if isinstance(changes.get("moe_router_load_balancing_type"), str):
        changes = {"moe_aux_loss_coeff": 0.3, **changes}
    return changes


def _difference(changes: dict[str, Any]) -> tuple[float, str]:
    changes, batch = _changes(changes), make_batch()
    ours, theirs = _model(changes), make_reference("experts", False, **changes)
    theirs.load_state_dict(ours.state_dict())
    for module in theirs.modules():
        if getattr(module, "is_expert", False):  # else megatron-core cannot add an expert's bias on one rank
            module.explicit_expert_comm = True
    (loss,) = ours.run(ours.pieces, (), batch, UnitContext(0, 0, auxiliary_gradient=lambda: 0.5))
    loss.backward()
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(0.5, dtype=torch.float64))
    torch.sum(reference_forward(theirs, batch, batch.labels) * batch.loss_mask).backward()
    return worst(gradients_of(ours), gradients_of(theirs))


def _model(changes: dict[str, Any]) -> PipelineModel:
    config = make_config("experts", **changes)
    options = make_options("experts", False)
    return PipelineModel(config, options, model_pieces(layers_of(config)), seed=7)


def one_expert(rank: int, world_size: int) -> dict[str, Any]:
    """A router that sends every token to the same expert first: its load, and whether all gradients are numbers."""
    set_parallel(ep=world_size)
    model = _model({"moe_router_topk": 1, "moe_router_pre_softmax": True, "expert_model_parallel_size": world_size})
    router: Any = model.decoder.layers["0"].mlp.router
    with torch.no_grad():
        router.weight.zero_()  # all scores alike: the first expert is the best
    (loss,) = model.run(model.pieces, (), make_batch(), UnitContext(0, 0))
    loss.backward()
    counts = router.counts.of[0][0, 0]
    finite = all(bool(torch.isfinite(each.grad).all()) for each in model.parameters() if each.grad is not None)
    missing = [name for name, each in model.named_parameters() if each.grad is None]
    return {"load": counts.load.tolist(), "finite": finite, "missing": missing}


def too_early(rank: int, world_size: int) -> str:
    """What a backward says that runs before the forward of another chunk of its microbatch."""
    set_parallel()
    model, batch = _model({}), make_batch()
    unit = UnitContext(0, 0, length=8, row_length=12)
    first = replace(batch, tokens=batch.tokens[:, :8], labels=batch.labels[:, :8], loss_mask=batch.loss_mask[:, :8])
    (loss,) = model.run(model.pieces, (), first, unit)
    try:
        loss.backward()
    except UserError as error:
        return str(error)
    return ""


def biases(rank: int, world_size: int) -> dict[str, Any]:
    """Of a model whose four layers two pipeline ranks share out, experts in the first and the third."""
    set_parallel(pp=2)
    config = make_config("experts", num_layers=4, moe_router_bias_update_rate=0.125)
    pieces = model_pieces(layers_of(config))
    own = [piece for piece in pieces if piece.layer // 2 == rank]
    model = PipelineModel(config, make_options("experts", False), own, seed=7)
    routing, layer = model.routing, 2 * rank
    router: Any = model.decoder.layers[str(layer)].mlp.router
    hidden = torch.randn(SEQUENCE, BATCH, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    router.route(hidden, UnitContext(3, 0))
    loads = routing.loads(3)
    local = loads[layer : layer + 1].float()
    torch.distributed.all_reduce(loads)
    routing.change_biases(loads)
    changed = routing.biases[layer : layer + 1].clone()  # type: ignore[index]
    theirs = get_updated_expert_bias(local, torch.zeros(1, 4), 0.125)
    router.expert_bias.copy_(torch.arange(1, 5) / 4 + rank)
    routing.share_biases(parallel_state.get_pipeline_model_parallel_group())
    shell: Any = model.shell([piece for piece in pieces if piece.layer == 2])
    return {
        "dtype": router.expert_bias.dtype,
        "changed": changed.tolist(),
        "of megatron-core": theirs.tolist(),
        "shared": routing.biases.tolist(),
        "of a shell": shell.decoder.layers["2"].mlp.router.expert_bias.tolist(),
    }


def sinkhorn(rank: int, world_size: int) -> dict[str, Any]:
    """Whether training deals tokens out otherwise than an evaluation does, and what chunks are told."""
    set_parallel()
    model, batch = _model(VARIANTS["sinkhorn"]), make_batch()
    router: Any = model.decoder.layers["0"].mlp.router
    hidden = torch.randn(12, 2, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    loads = [router.route(hidden, UnitContext(0, 0, training=each))[1].sum(0).tolist() for each in (True, False)]
    try:
        model.run(model.pieces, (), batch, UnitContext(0, 0, length=8, row_length=12))
    except UserError as error:
        return {"loads": loads, "chunks": str(error)}
    return {"loads": loads, "chunks": ""}


ORDERS = ("F0 B0 F1 B1 F2 B2", "F0 F1 F2 B2 B0 B1", "F1 F0 F2 B1 B0 B2")


def balanced_over_a_step(rank: int, world_size: int) -> dict[str, Any]:
    """Three microbatches on each of two data-parallel ranks, in several orders, against megatron-core's in its own; and
    what a backward says that comes too early. Gradients are those of a rank, before any reduction."""
    set_parallel()
    changes = {"moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"], "moe_aux_loss_coeff": [0.3, 0.9]}
    ours, theirs = _model(changes), make_reference("experts", False, **changes)
    theirs.load_state_dict(ours.state_dict())
    batches = [make_batch(3 * rank + number) for number in range(3)]
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(0.5, dtype=torch.float64))
    for batch in batches:
        torch.sum(reference_forward(theirs, batch, batch.labels) * batch.loss_mask).backward()
    results, expected = dict[str, Any](), gradients_of(theirs)

    def forward(step: int, number: int) -> torch.Tensor:
        unit = UnitContext(step, 3 * rank + number, auxiliary_gradient=lambda: 0.5, number=number)
        return ours.run(ours.pieces, (), batches[number], unit)[0]

    for step, order in enumerate(ORDERS):
        ours.zero_grad()
        losses = dict[int, torch.Tensor]()
        for kind, number in ((op[0], int(op[1])) for op in order.split()):
            if kind == "F":
                losses[number] = forward(step, number)
            else:
                losses[number].backward()
        results[order] = worst(gradients_of(ours), expected)
    try:
        forward(len(ORDERS), 1).backward()
        results["too early"] = ""
    except UserError as error:
        results["too early"] = str(error)
    return results


def evaluated(rank: int, world_size: int) -> int:
    """How many chunks' counts an evaluation leaves behind."""
    set_parallel()
    model = _model({})
    with torch.no_grad():
        model.run(model.pieces, (), make_batch(), UnitContext(0, 0, training=False))
    router: Any = model.decoder.layers["0"].mlp.router
    assert parallel_state.get_expert_model_parallel_world_size() == 1
    return len(router.counts.of)


def beside_exchanges(rank: int, world_size: int, dispatcher: str) -> tuple[list[int], list[int]]:
    """Collectives under way when the forward of a layer's experts pauses, and when its backward lets another unit's
    forward take a step."""
    set_parallel(ep=2)
    config = make_config("experts", expert_model_parallel_size=2, moe_token_dispatcher_type=dispatcher)
    model = PipelineModel(config, make_options("experts", False), model_pieces(layers_of(config)), seed=7)
    works: list[Waited] = []

    def under_way() -> int:
        return sum(not work.finished for work in works)

    beside, at_steps = ForwardBeside(), list[int]()

    def other() -> Generator[None, None, None]:
        yield
        while True:
            at_steps.append(under_way())
            yield

    with mock.patch.object(exchange, "dist", Recorded(works)):
        beside.begin(other())
        hidden = torch.randn(SEQUENCE, BATCH, 32, dtype=torch.float64, requires_grad=True)
        experts: Any = model.decoder.layers["0"].mlp
        steps = experts.steps(hidden, UnitContext(0, 0), beside)
        at_pauses = []
        try:
            while True:
                next(steps)
                at_pauses.append(under_way())
        except StopIteration as ended:
            output = ended.value[0]
        output.sum().backward()
    return at_pauses, at_steps


class Recorded:
    """torch.distributed, which keeps the works that it starts."""

    def __init__(self, works: list[Waited]):
        self._works = works

    def __getattr__(self, name: str) -> Any:
        def start(*arguments: Any, **settings: Any) -> Waited:
            self._works.append(Waited(getattr(torch.distributed, name)(*arguments, **settings)))
            return self._works[-1]

        return start


class Waited:
    """A collective, and whether it has been waited for."""

    def __init__(self, work: Any):
        self.work, self.finished = work, False

    def wait(self) -> None:
        self.work.wait()
        self.finished = True
