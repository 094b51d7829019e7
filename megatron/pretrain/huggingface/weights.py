"""The weights of Hugging Face's that make up one of megatron-core's, and the order of its rows.

A tensor of megatron-core is here the whole of it, as in a checkpoint: tensor-parallel ranks have runs of its rows (of a
gated MLP's first layer, of each half). Rows of the QKV layer lie group by group: the queries that share a key, the key,
the value. Of the MLP's first layer the gate's rows come first. All else is the same tensor under another name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from helixpipe.costs.huggingface.experts import mixed_by_layer, mixed_of

Shape = tuple[int, ...]

Row = tuple[str, tuple[str, ...], tuple[Shape, ...]]
"""A weight's key without the layer; names and shapes of what it is made of."""


EXPERT_BIAS = "mlp.router.expert_bias"
"""Key of a router's biases, which are in float32, and no weights that are trained."""


class Weight(NamedTuple):
    """A tensor of a checkpoint, or one layer's part of it, or one of its experts'. key: without the layer's number and
    the expert's. names, shapes: of what it is made of."""

    key: str
    layer: int | None
    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    expert: int | None = None

    def place(self, numbered: bool) -> tuple[str, tuple[int, ...]]:
        """Return its key among a checkpoint's, and its place along their first axes: of layers, unless these have keys
        of their own (numbered), and of experts."""
        lead = () if self.expert is None else (self.expert,)
        if self.layer is None or numbered:
            return self.key.replace("decoder.layers.", f"decoder.layers.{self.layer}."), lead
        return self.key, (self.layer, *lead)


@dataclass(frozen=True)
class Weights:
    """The weights of the model that these arguments describe (`config.arguments_of`)."""

    arguments: Mapping[str, Any]

    @property
    def groups(self) -> int:
        given = self.arguments
        return int(given["num_query_groups"] if given.get("group_query_attention") else given["num_attention_heads"])

    def __iter__(self) -> Iterator[Weight]:
        """Iterate over all weights, in the order of the model."""
        given = self.arguments
        hidden, vocabulary = given["hidden_size"], given["vocab_size"]
        yield Weight("embedding.word_embeddings.weight", None, ("model.embed_tokens.weight",), ((vocabulary, hidden),))
        for layer in range(given["num_layers"]):
            yield from self._of_layer(layer)
        yield Weight("decoder.final_layernorm.weight", None, ("model.norm.weight",), ((hidden,),))
        if given["untie_embeddings_and_output_weights"]:
            yield Weight("output_layer.weight", None, ("lm_head.weight",), ((vocabulary, hidden),))

    def _of_layer(self, layer: int) -> Iterator[Weight]:
        given = self.arguments
        hidden, ffn = given["hidden_size"], given["ffn_hidden_size"]
        table = self._latent() if given.get("multi_latent_attention") else self._attention()
        with_experts = self.mixed[layer]
        table += self._router() if with_experts else []
        if not with_experts:
            table += [
                ("mlp.linear_fc1.layer_norm_weight", ("post_attention_layernorm.weight",), ((hidden,),)),
                ("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), ((ffn, hidden),) * 2),
                ("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), ((hidden, ffn),)),
            ]
        experts: list[tuple[int | None, str, tuple[str, ...], tuple[Shape, ...]]] = [(None, *row) for row in table]
        for number in range(given["num_experts"] if with_experts else 0):
            experts += [(number, *row) for row in self._expert(number)]
        for expert, key, names, shapes in experts:
            own = tuple(f"model.layers.{layer}.{name}" for name in names)
            yield Weight(f"decoder.layers.{key}", layer, own, shapes, expert)

    def _latent(self) -> list[Row]:
        """Return the rows of multi-latent attention: DeepSeek's."""
        given = self.arguments
        hidden, heads, rank = given["hidden_size"], given["num_attention_heads"], given["kv_lora_rank"]
        own, shared, value = given["qk_head_dim"], given["qk_pos_emb_head_dim"], given["v_head_dim"]
        query, of_query = heads * (own + shared), given.get("q_lora_rank")
        table: list[tuple[str, str, Shape]] = [("input_layernorm", "input_layernorm", (hidden,))]
        if of_query is None:
            table += [("self_attention.linear_q_proj", "self_attn.q_proj", (query, hidden))]
        else:
            table += [
                ("self_attention.linear_q_down_proj", "self_attn.q_a_proj", (of_query, hidden)),
                ("self_attention.linear_q_up_proj.layer_norm", "self_attn.q_a_layernorm", (of_query,)),
                ("self_attention.linear_q_up_proj", "self_attn.q_b_proj", (query, of_query)),
            ]
        table += [
            ("self_attention.linear_kv_down_proj", "self_attn.kv_a_proj_with_mqa", (rank + shared, hidden)),
            ("self_attention.linear_kv_up_proj.layer_norm", "self_attn.kv_a_layernorm", (rank,)),
            ("self_attention.linear_kv_up_proj", "self_attn.kv_b_proj", (heads * (own + value), rank)),
            ("self_attention.linear_proj", "self_attn.o_proj", (hidden, heads * value)),
        ]
        return [
            (f"{key}{'_' if key.endswith('layer_norm') else '.'}weight", (f"{name}.weight",), (shape,))
            for key, name, shape in table
        ]

    def _attention(self) -> list[Row]:
        """Return the rows of other attention."""
        given = self.arguments
        hidden, channels = given["hidden_size"], given["kv_channels"]
        query, kv = given["num_attention_heads"] * channels, self.groups * channels
        mixed = tuple(f"self_attn.{name}_proj" for name in "qkv")
        table: list[Row] = [
            ("self_attention.linear_qkv.layer_norm_weight", ("input_layernorm.weight",), ((hidden,),)),
            (
                "self_attention.linear_qkv.weight",
                tuple(f"{name}.weight" for name in mixed),
                ((query, hidden), (kv, hidden), (kv, hidden)),
            ),
        ]
        if given["add_qkv_bias"]:
            biases = tuple(f"{name}.bias" for name in mixed)
            table.append(("self_attention.linear_qkv.bias", biases, ((query,), (kv,), (kv,))))
        if given["qk_layernorm"]:
            table += [
                (f"self_attention.{name}_layernorm.weight", (f"self_attn.{name}_norm.weight",), ((channels,),))
                for name in "qk"
            ]
        table += [
            ("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), ((hidden, query),)),
        ]
        return table

    @property
    def mixed(self) -> tuple[bool, ...]:
        """Whether each layer has experts."""
        return mixed_by_layer(self.arguments)

    @property
    def numbered(self) -> bool:
        """Whether a checkpoint of the model has keys for each layer, as `Decoder` writes them."""
        return len(mixed_of(self.arguments)) > 1

    def _names(self) -> tuple[str, tuple[str, str, str]]:
        """Return Hugging Face's names of a layer's experts, and of their gate, up and down projections: of Qwen3's,
        which has norms of queries and keys, and of Mixtral's."""
        if self.arguments["qk_layernorm"]:
            return "mlp", ("gate_proj", "up_proj", "down_proj")
        return "block_sparse_moe", ("w1", "w3", "w2")

    def _router(self) -> list[Row]:
        hidden, (of, _) = self.arguments["hidden_size"], self._names()
        experts, shared = self.arguments["num_experts"], self.arguments.get("moe_shared_expert_intermediate_size")
        table: list[Row] = [
            ("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), ((hidden,),)),
            ("mlp.router.weight", (f"{of}.gate.weight",), ((experts, hidden),)),
        ]
        if self.arguments.get("moe_router_enable_expert_bias"):
            table.append((EXPERT_BIAS, ("mlp.gate.e_score_correction_bias",), ((experts,),)))
        if shared:
            gate, up, down = (f"mlp.shared_experts.{name}_proj.weight" for name in ("gate", "up", "down"))
            table += [
                ("mlp.shared_experts.linear_fc1.weight", (gate, up), ((shared, hidden),) * 2),
                ("mlp.shared_experts.linear_fc2.weight", (down,), ((hidden, shared),)),
            ]
        return table

    def _expert(self, number: int) -> list[Row]:
        hidden, ffn = self.arguments["hidden_size"], self.arguments["moe_ffn_hidden_size"]
        of, names = self._names()
        gate, up, down = (f"{of}.experts.{number}.{name}.weight" for name in names)
        return [
            ("mlp.experts.experts.linear_fc1.weight", (gate, up), ((ffn, hidden),) * 2),
            ("mlp.experts.experts.linear_fc2.weight", (down,), ((hidden, ffn),)),
        ]

    def shape(self, weight: Weight) -> Shape:
        """Return the shape of the whole weight, of one layer."""
        return (sum(shape[0] for shape in weight.shapes), *weight.shapes[0][1:])

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Join a weight from the tensors it is made of."""
        if len(parts) == 3:
            return torch.cat([part.unflatten(0, (self.groups, -1)) for part in parts], dim=1).flatten(0, 1)
        return parts[0] if len(parts) == 1 else torch.cat(list(parts))

    def split(self, weight: Weight, whole: Tensor) -> tuple[Tensor, ...]:
        """Split a weight into the tensors it is made of, without the rows that pad the vocabulary."""
        rows = [shape[0] for shape in weight.shapes]
        if len(rows) == 3:
            by_group = whole.unflatten(0, (self.groups, -1)).split([count // self.groups for count in rows], dim=1)
            return tuple(part.flatten(0, 1) for part in by_group)
        return whole[: sum(rows)].split(rows)
