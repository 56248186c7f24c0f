"""Weights whose groups of rows keep the same inputs: a gather and a dense product for each group, on any device."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import SparsityError
from ..models.names import parameter_of
from .weights import Conversion, WeightToExport, checked_layers, gathered_refusals, row_groups


class GatheredLinear(nn.Module):
    """A Linear of groups of rows, each of which reads some of the inputs.

    Its parameters are `weight` (groups, rows of a group, inputs of a group) and `bias` (outputs,), and its buffer
    `indices` (groups, inputs of a group), int64, which inputs a group reads.

    >>> layer = GatheredLinear(torch.ones(2, 1, 2), torch.tensor([[0, 1], [1, 2]]), None, in_features=3)
    >>> layer(torch.tensor([1.0, 2.0, 4.0])).tolist()
    [3.0, 6.0]
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
        """Return the weight of the Linear that computes the same, (out_features, in_features)."""
        dense = self.weight.new_zeros(*self.weight.shape[:2], self.in_features)
        return dense.scatter(2, self.indices[:, None].expand_as(self.weight), self.weight).flatten(0, 1)


def to_gathered(model: nn.Module, tensors: Sequence[str] | None = None) -> Conversion:
    """Replace Linear layers whose groups of rows keep the same inputs by `GatheredLinear`, in place.

    Weights pruned by `patterns.row_groups` are such. Each group multiplies the inputs that it keeps by a dense matrix.
    What is kept can be trained, by an optimizer that is made afterwards. The state dict has weights of shape (groups,
    rows, inputs of a group) under the same names, and `indices`. Each new layer is compared with the old weight.

    Args:
        model: Masked or squashed; float32, bfloat16 or float16. Masks go with the layers that are replaced.
        tensors: Weights to convert, as for `export.check`.

    Raises:
        SparsityError: A weight has no such groups, or they keep different numbers of inputs. The layer has hooks, is
            the model itself, of a subclass of Linear, or in an `nn.TransformerEncoderLayer`, whose fused code reads
            its weight. The model is not changed.

    >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    >>> sparsifier = sparsekit_ao.ScopeSparsifier(pattern=sparsekit_ao.patterns.row_groups(32, 0.5))
    >>> sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}])
    >>> sparsifier.step()
    >>> to_gathered(model).converted, model[0].weight.shape
    (('0.weight',), torch.Size([2, 32, 32]))
    """
    chosen, others = checked_layers(model, "to_gathered", gathered_refusals, tensors)
    for layer in chosen:
        parent = model.get_submodule(layer.path.rpartition(".")[0])
        if parent is layer.module or isinstance(parent, nn.TransformerEncoderLayer):
            what = f"needs a module around it that calls it and does not read its weight, got {type(parent).__name__}"
            raise SparsityError(f"to_gathered: {layer.fqn} {what}; name other weights by tensors=[...]")
    new = [_gathered(layer) for layer in chosen]
    before, after = (sum(layer.weight.nbytes for layer in layers) for layers in (chosen, new))
    for layer, gathered in zip(chosen, new, strict=True):
        model.set_submodule(layer.path, gathered)
        after += gathered.indices.nbytes
    names = tuple(layer.fqn for layer in chosen)
    return Conversion(target="to_gathered", converted=names, left=others, before=before, after=after)


def _gathered(layer: WeightToExport) -> GatheredLinear:
    module, weight, reads = layer.module, layer.weight, row_groups(layer)
    indices = torch.stack([row.nonzero()[:, 0] for row in reads])
    values = weight.unflatten(0, (len(reads), -1)).take_along_dim(indices[:, None], 2)
    gathered = GatheredLinear(values, indices, module._parameters["bias"], weight.shape[1])
    gathered.weight.requires_grad_(parameter_of(module, "weight").requires_grad)
    if not torch.equal(gathered.dense_weight(), weight):
        raise SparsityError(f"to_gathered: {layer.fqn} is not the same weight after its conversion; please report this")
    return gathered.train(module.training)
