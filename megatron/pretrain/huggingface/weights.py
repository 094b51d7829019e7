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

Shape = tuple[int, ...]


class Weight(NamedTuple):
    """A tensor of a checkpoint, or one layer's part of it. key: without the layer's number. names, shapes: of what it
    is made of."""

    key: str
    layer: int | None
    names: tuple[str, ...]
    shapes: tuple[Shape, ...]


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
        hidden, ffn, channels = given["hidden_size"], given["ffn_hidden_size"], given["kv_channels"]
        query, kv = given["num_attention_heads"] * channels, self.groups * channels
        mixed = tuple(f"self_attn.{name}_proj" for name in "qkv")
        table: list[tuple[str, tuple[str, ...], tuple[Shape, ...]]] = [
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
            ("mlp.linear_fc1.layer_norm_weight", ("post_attention_layernorm.weight",), ((hidden,),)),
            ("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), ((ffn, hidden),) * 2),
            ("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), ((hidden, ffn),)),
        ]
        for key, names, shapes in table:
            yield Weight(f"decoder.layers.{key}", layer, tuple(f"model.layers.{layer}.{n}" for n in names), shapes)

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
