"""Rules of operations that read by index: embeddings, gathers, advanced indexing.

Which entries are read depends on values, so nothing may be removed from an indexed axis.
"""

from torch import Tensor

from .call import Call, Label
from .factors import Axis

__all__ = ["embedding", "gather", "index", "index_select"]


def embedding(call: Call) -> Label:
    """Rows of a table."""
    rows, columns = call.label("weight")
    call.freeze(rows, "read by index")
    return (*call.label("indices"), columns)


def index_select(call: Call) -> Label:
    """Some entries of one dimension."""
    label = list(call.label("self"))
    dim = call.dim("dim", len(label))
    call.freeze(label[dim], "read by index")
    label[dim] = call.fixed(call.outs[0].shape[dim])
    return tuple(label)


def gather(call: Call) -> Label:
    """An index for every entry: nothing may be removed from any dimension."""
    for axis in call.label("self"):
        call.freeze(axis, "read by index")
    return tuple(call.fixed(n) for n in call.outs[0].shape)


def index(call: Call) -> Label:
    """Advanced indexing `x[i, :, j]`: the dimensions of the indices stand at the first of them, or in front."""
    label = call.label("self")
    indices = call["indices"]
    at = [d for d, given in enumerate(indices) if isinstance(given, Tensor)]
    for d in at:
        call.freeze(label[d], "read by index")
    kept: list[Axis] = [axis for d, axis in enumerate(label) if d not in at]
    first = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    read = [call.fixed(n) for n in call.outs[0].shape[first : call.outs[0].dim() - len(kept) + first]]
    return (*kept[:first], *read, *kept[first:])
