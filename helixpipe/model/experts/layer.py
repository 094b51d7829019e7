"""A layer's MLP that is a mixture of experts: megatron-core's router, token dispatcher, experts and shared experts.

Routing, the tokens' way to their experts, the experts, and the way back run in one piece of the layer, `mlp.moe`: how
many tokens travel is known only when they have been routed, and no schedule needs to know. Expert-parallel ranks are
data-parallel ones and run the same program, each on its own microbatches, so that they meet in every exchange. An
exchange is begun and ended apart (`exchange.py`): shared experts run meanwhile, and in steps what else there is.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from helixpipe.common.alternate import finished
from helixpipe.model.collectives import ForwardBeside
from helixpipe.model.experts.exchange import way_of
from helixpipe.model.experts.router import Half, Router
from helixpipe.model.options import UnitContext
from helixpipe.model.real_tokens import RealRows

DrawExpert = Callable[[int], AbstractContextManager[None]]
"""Gives the context in which the weights of an expert, by its number in the layer, are drawn."""


class Experts(SequentialMLP):
    """Those of this rank, one after another, each drawn on its own, so that expert-parallel sizes do not matter."""

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        draw: DrawExpert,
        pg_collection: Any = None,
        **newer: Any,
    ):
        super().__init__(0, config, submodules, pg_collection, **newer)
        self.num_local_experts = num_local_experts
        first = pg_collection.ep.rank() * num_local_experts
        for number in range(first, first + num_local_experts):
            with draw(number), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "`sequence_parallel` is set")  # whole experts beside split layers
                expert = MLP(
                    self.config,
                    submodules,
                    ffn_hidden_size=self.config.moe_ffn_hidden_size,
                    is_expert=True,
                    tp_group=pg_collection.expt_tp,
                )
            # The dispatcher sums over tensor-parallel ranks. On one rank megatron-core's layers would sum as well, over
            # that rank, and autograd refuses the bias that is then added in place to the output of a function.
            for linear in (expert.linear_fc1, expert.linear_fc2):
                linear.explicit_expert_comm = True
            self.local_experts.append(expert)


class ExpertLayer(MoELayer):
    """Names and checkpoint entries are megatron-core's."""

    def __init__(self, config: TransformerConfig, number: int, draw: DrawExpert):
        """number: of the layer; draw: the weights of each of its experts."""
        linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        submodules = MoESubmodules(
            router=Router,
            experts=ModuleSpec(module=Experts, params={"draw": draw}, submodules=linear),
            shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=linear),
        )
        super().__init__(config, submodules, pg_collection=get_default_pg_collection())
        self.router.layer_of_experts = number

    def forward(self, hidden: Tensor, unit: UnitContext, real: RealRows | None = None) -> tuple[Tensor, None]:
        """Hidden states [s, b, h], with sequence parallelism [s / tp, b, h], to (output of the same shape, no bias)."""
        return finished(self.steps(hidden, unit, real=real))

    def steps(
        self,
        hidden: Tensor,
        unit: UnitContext,
        beside: ForwardBeside | None = None,
        half: Half | None = None,
        real: RealRows | None = None,
    ) -> Generator[None, None, tuple[Tensor, None]]:
        """The same in steps, which end where tokens have been sent. Shared experts run while tokens travel to the
        others, and their backward while gradients travel back. beside: takes steps in its backward. half: of the
        unit's tokens that these are; None: all. real: the rows that are no padding, which goes to no
        expert; None: all."""
        probs, routing_map = self.router.route(hidden, unit, half, real)
        # A dispatcher keeps what it needs to bring the tokens back: this one is for these tokens.
        dispatcher: Any = copy.copy(self.token_dispatcher)
        tokens, probs = dispatcher.dispatch_preprocess(hidden, routing_map, probs)
        way = way_of(dispatcher)
        way.begin_dispatch(tokens, probs, beside)
        shared = self.shared_experts_compute(hidden)
        yield
        tokens, counts, probs = dispatcher.dispatch_postprocess(*way.end_dispatch())
        # Nothing here refers to what the experts give once it has been put in order.
        way.begin_combine(dispatcher.combine_preprocess(self.experts(tokens, counts, probs)[0]), beside)
        yield
        output = dispatcher.combine_postprocess(way.end_combine())
        return output if shared is None else output + shared, None
