"""Layers whose groups of rows keep the same inputs: a gather and a dense product for each group, in plain torch.

    sparsifier = ScopeSparsifier(**row_groups(128, 0.75))  # each group of 128 rows keeps a quarter of the inputs
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}])
    sparsifier.step()
    sparsifier.squash_mask()
    to_gathered(model, ["0"], rows=128)

Wide layers become faster and keep their widths; `examples/benchmarks/gathered.py` has the times. Removal of units
(`shrink`) is better and faster on the one model that was measured, so consider it first.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def row_groups(rows: int, sparsity_level: float) -> dict[str, Any]:
    """The config of a Linear in which every group of `rows` rows keeps the same inputs, equally many in each."""
    return {"block_shape": (rows, 1), "scope_shape": (1, -1), "sparsity_level": sparsity_level}


class GatheredLinear(nn.Module):
    """A Linear of groups of rows, each of which reads some of the inputs.

    Its parameters are `weight` (groups, rows of a group, inputs of a group) and `bias` (outputs,), and its buffer
    `indices` (groups, inputs of a group), int64, says which inputs a group reads.
    """

    indices: Tensor

    def __init__(self, weight: Tensor, indices: Tensor, bias: nn.Parameter | None, in_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, weight.shape[0] * weight.shape[1]
        self.weight, self.bias = nn.Parameter(weight), bias
        self.register_buffer("indices", indices)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply inputs (..., in_features)."""
        biases = [None] * len(self.weight) if self.bias is None else self.bias.chunk(len(self.weight))
        groups = zip(self.indices, self.weight, biases, strict=True)
        return torch.cat([F.linear(x.index_select(-1, inputs), weight, bias) for inputs, weight, bias in groups], -1)

    def dense_weight(self) -> Tensor:
        """The weight of the Linear that computes the same, (out_features, in_features)."""
        dense = self.weight.new_zeros(*self.weight.shape[:2], self.in_features)
        return dense.scatter(2, self.indices[:, None].expand_as(self.weight), self.weight).flatten(0, 1)


@torch.no_grad()
def to_gathered(model: nn.Module, layers: Iterable[str], rows: int) -> None:
    """Replace Linear layers of a squashed model, pruned in groups of `rows` rows, by `GatheredLinear`, in place."""
    gathered = {}
    for name in layers:
        layer = model.get_submodule(name)
        if type(layer) is not nn.Linear:
            raise TypeError(f"{name} must be a plain nn.Linear without a mask, got {type(layer).__name__}")
        weight = layer.weight.unflatten(0, (-1, rows))
        reads = (weight != 0).any(1)
        counts = reads.sum(1).tolist()
        if len({*counts}) > 1:
            raise ValueError(f"{name}: groups of {rows} rows must read equally many inputs, got {counts}")
        indices = reads.nonzero()[:, 1].view(len(weight), -1)
        values = weight.take_along_dim(indices[:, None], 2)
        gathered[name] = GatheredLinear(values, indices, layer.bias, layer.in_features).train(layer.training)
    for name, layer in gathered.items():
        model.set_submodule(name, layer)
