"""megatron-core's weights behind the interface: which sums over replicas start when, each exactly once."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from helixpipe.model.layers import plain_piece_of
from helixpipe.program.stages import Piece
from megatron.pretrain.step import gradients
from megatron.pretrain.step.weights import MegatronWeights

EMBED, FIRST, SECOND, HEAD = Piece("embed"), Piece("mlp", 0), Piece("mlp", 1), Piece("head")
SHAPES = {
    "embedding.word_embeddings.weight": (3, 2),
    "decoder.layers.0.pre_mlp_layernorm.weight": (2,),  # of each tensor-parallel rank's part of the sequence
    "decoder.layers.0.mlp.linear_fc1.weight": (2, 2),
    "decoder.layers.0.mlp.linear_fc1.bias": (2,),
    "decoder.layers.0.mlp.linear_fc2.bias": (3,),
    "decoder.layers.1.mlp.linear_fc1.weight": (2, 2),
    "decoder.final_layernorm.weight": (2,),
}
NORM = "decoder.layers.0.pre_mlp_layernorm.weight"


class Model:
    """Everything is replicated on two ranks; rank 2 holds another layer."""

    share_embeddings_and_output_weights = False
    pieces = (EMBED, FIRST, SECOND, HEAD)

    def __init__(self) -> None:
        self.weights: dict[str, Any] = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
        for weight in self.weights.values():
            weight.main_grad = torch.ones_like(weight)
        self.weights[NORM].sequence_parallel = True

    def parameters(self) -> list[torch.nn.Parameter]:
        return list(self.weights.values())

    def piece_of(self, parameter: str) -> Piece:
        return plain_piece_of(parameter)

    def replicated_parameters(self) -> dict[str, torch.nn.Parameter]:
        return self.weights


class Setting:
    """Weights on the first of three pipeline ranks, and of two tensor-parallel ones. A sum doubles, once waited for."""

    def __init__(self, tied: bool) -> None:
        self.model = Model()
        self.model.share_embeddings_and_output_weights = tied
        self.ddp = mock.Mock()
        parallel: Any = SimpleNamespace(pp_size=3, pp_group=None, tp_size=2, tp_rank=1, tp_group="tp", device="cpu")
        optimizer = SimpleNamespace(chained_optimizers=[])
        self.weights = MegatronWeights(self.ddp, self.model, optimizer, parallel, per_token=False)
        self.under_way: list[torch.Tensor] = []

    def started(self) -> list[int]:
        """The numbers of elements of what is being summed, which tell weights apart: vectors go together."""
        return [each.numel() for each in self.under_way]


@pytest.fixture
def setting(request: pytest.FixtureRequest) -> Iterator[Setting]:
    """param: whether the head's weight is the embedding's, and the head on rank 2 as well."""
    tied = getattr(request, "param", False)

    def gather(found: list[Any], own: Any, group: Any) -> None:
        found[:] = [own, own, (Piece("mlp", 2), HEAD) if tied else (Piece("mlp", 2),)]

    def start(tensor: torch.Tensor, group: Any, async_op: bool) -> Any:
        if group == "replicas":
            made.under_way.append(tensor)
        return SimpleNamespace(wait=lambda: tensor.mul_(2.0))

    def groups(several: list[tuple[int, ...]], parallel: Any) -> dict[tuple[int, ...], Any]:
        return dict.fromkeys(several, "replicas")

    with (
        mock.patch.multiple(torch.distributed, all_gather_object=gather, all_reduce=start),
        mock.patch.object(gradients, "_make_groups", groups),
    ):
        made = Setting(tied)
        yield made
    made.ddp.finish_grad_sync.assert_called_once()
    for name, weight in made.model.weights.items():  # the norm's by tensor-parallel ranks, too
        assert torch.equal(weight.main_grad, torch.full(SHAPES[name], 4.0 if name == NORM else 2.0)), name


def test_sums_that_have_their_place_start_there(setting: Setting) -> None:
    """Whatever the others wait for, stage by stage."""
    setting.weights.sum_replicas((EMBED,))
    assert setting.started() == [6]
    setting.weights.sum_replicas((FIRST,))
    assert setting.started() == [6, 4, 5]
    setting.weights.sum_replicas((HEAD,))
    assert setting.started() == [6, 4, 5, 2]
    setting.weights.reduce(None)
    assert setting.started() == [6, 4, 5, 2, 4, 2]


@pytest.mark.parametrize("setting", [True], indirect=True)
def test_a_weight_of_two_stages_on_other_ranks_waits_for_the_end(setting: Setting) -> None:
    """Rank 2 has no place in the order to sum the embedding's gradient at."""
    setting.weights.sum_replicas((EMBED,))
    setting.weights.sum_replicas((HEAD,))
    assert setting.started() == [2]
    setting.weights.reduce(None)


def test_who_holds_and_counts(setting: Setting) -> None:
    assert setting.weights.holders((HEAD,)) == (0, 1)
    assert setting.weights.holders((Piece("mlp", 2), HEAD)) == (0, 1, 2)
    plain, split, replica = (torch.nn.Parameter(torch.zeros(1)) for _ in range(3))
    split.tensor_model_parallel = replica.tensor_model_parallel = True  # type: ignore[attr-defined]
    replica.shared = True  # type: ignore[attr-defined]
    assert [setting.weights.counts_here(weight) for weight in (plain, split, replica)] == [False, True, False]
    setting.weights.reduce(None)
