"""Rules of operations that move or select elements: reshape, permute, expand, slice, concatenate, pad, index.

Which entries an index reads depends on values, so nothing may be removed from an indexed axis.
"""

import math
from collections.abc import Iterable, Sequence

from torch import Tensor

from .arithmetic import combined
from .call import AxisRule, Call, Label
from .factors import Axis, AxisFactor, Factor, concatenated, fixed, leaves, reshape_axes, split_axis


def _same(call: Call) -> Label:
    """The same elements in the same places."""
    return call.label_of(call.tensors[0])


def _like(call: Call) -> Label:
    """A new tensor of the same shape, all of one value: `zeros_like`, `full_like`."""
    zero = call.name == "zeros_like" or call["fill_value"] == 0
    return tuple(tuple(AxisFactor(part.factor, zero) for part in axis) for axis in _same(call))


def filled(call: Call) -> Label:
    """A constant of one value: its sizes are integers of the forward, as those of a reshape are."""
    zero = call.name in ("zeros", "new_zeros") or call["fill_value"] == 0
    return tuple(() if n == 1 else (AxisFactor(Factor(n), zero),) for n in call.outs[0].shape)


def _reshape(call: Call) -> Label:
    """The same elements in row-major order: factors are split and merged."""
    label, shape = _same(call), call.outs[0].shape
    found = reshape_axes(label, shape)
    if found is None:
        call.freeze(*label, what="the new shape cuts across its factors")
        found = call.fixed(*shape)
    return found


def _permute(call: Call) -> Label:
    label = call.label("self")
    return tuple(label[d] for d in call.dims("dims", len(label)))


def _transpose(call: Call) -> Label:
    """Two dimensions exchanged; `t` exchanges those of a matrix."""
    label = list(call.label("self"))
    if len(label) > 1:
        a, b = (call.dim(f"dim{k}", len(label)) for k in (0, 1)) if call.name == "transpose" else (0, 1)
        label[a], label[b] = label[b], label[a]
    return tuple(label)


def _expand(call: Call) -> Label:
    """A dimension of size 1 repeated: a new factor, which may become the same as another tensor's."""
    return tuple(axis or fixed(n, "") for axis, n in _with_sizes(call, call.outs[0].shape))


def _repeat(call: Call) -> Label:
    """Whole dimensions tiled: a new outer factor."""
    return tuple(fixed(n, "") + axis for axis, n in _with_sizes(call, call["repeats"]))


def _with_sizes(call: Call, sizes: Sequence[int]) -> Iterable[tuple[Axis, int]]:
    """The operand's axes, with leading dimensions of size 1 added, and the size for each."""
    label = call.label("self")
    return zip(((),) * (len(sizes) - len(label)) + label, sizes, strict=True)


def _slice(call: Call) -> Label:
    label, shape = list(call.label("self")), call["self"].shape
    dim = call.dim("dim", len(label))
    start, step = call["start"] or 0, call["step"] or 1
    start = max(start + shape[dim], 0) if start < 0 else start
    label[dim] = _sliced(call, label[dim], shape[dim], (start, call.outs[0].shape[dim], step))
    return tuple(label)


def _split(call: Call) -> list[Label]:
    label, size = call.label("self"), call["self"].shape
    dim, start, found = call.dim("dim", len(label)), 0, []
    for out in call.outs:
        n = out.shape[dim]
        axis = _sliced(call, label[dim], size[dim], (start, n, 1))
        found.append((*label[:dim], axis, *label[dim + 1 :]))
        start += n
    return found


def _sliced(call: Call, axis: Axis, size: int, window: tuple[int, int, int]) -> Axis:
    """The axis of a slice (start, length, step): its position is a frozen outer factor, the inner one is unchanged."""
    start, length, step = window
    if length in (0, size):
        return axis if length else call.fixed(0)[0]
    if step > 1 and size % step == 0 and length == size // step:
        outer, inner = split_axis(axis, length, call.why)
        call.freeze(inner)
        return outer
    inner_size = math.gcd(start, length, size) if step == 1 else 1
    outer, inner = split_axis(axis, size // inner_size, call.why)
    call.freeze(outer)
    return call.fixed(length // inner_size)[0] + inner


def _select(call: Call) -> Label:
    label = call.label("self")
    dim = call.dim("dim", len(label))
    call.freeze(label[dim])
    return label[:dim] + label[dim + 1 :]


def _unbind(call: Call) -> list[Label]:
    return [_select(call)] * len(call.outs)


def _concatenate(call: Call) -> Label:
    """Tensors one after the other: equal ones are united, others stay apart as parts of one axis."""
    rank = call.outs[0].dim()
    dim = call.dim("dim", rank)
    tensors = [t for t in call["tensors"] if t.dim() == rank and t.shape[dim]]  # empty ones contribute nothing
    labels = [call.label_of(t) for t in tensors]
    if len(tensors) < 2:
        return labels[0] if labels else call.fixed(*call.outs[0].shape)
    sizes = [t.shape[dim] for t in tensors]
    axes, inner = [label[dim] for label in labels], min(sizes)
    if len(set(sizes)) > 1 and not (all(n % inner == 0 for n in sizes) and _end_alike(axes, inner)):
        rest = combined([(*label[:dim], (), *label[dim + 1 :]) for label in labels], call.why)
        return (*rest[:dim], concatenated(axes), *rest[dim + 1 :])
    halves = [split_axis(label[dim], n // inner, call.why) for label, n in zip(labels, sizes, strict=True)]
    call.freeze(*(outer for outer, _ in halves))
    united = [(*label[:dim], half, *label[dim + 1 :]) for label, (_, half) in zip(labels, halves, strict=True)]
    label = combined(united, call.why)
    return (*label[:dim], call.fixed(sum(sizes) // inner)[0] + label[dim], *label[dim + 1 :])


def _end_alike(axes: Sequence[Axis], size: int) -> bool:
    """Whether all axes have the same innermost factors, of this size: they are made of pieces of one tensor."""
    ends = []
    for axis in axes:
        end: list[Factor] = []
        for part in reversed(leaves(axis)):
            if math.prod(factor.size for factor in end) < size:
                end.append(part.factor)
        ends.append(end)
    return math.prod(factor.size for factor in ends[0]) == size > 1 and all(end == ends[0] for end in ends)


def _stack(call: Call) -> Label:
    labels = [call.label_of(t) for t in call["tensors"]]
    label = combined(labels, call.why)
    dim = call.dim("dim", len(label) + 1)
    return (*label[:dim], *call.fixed(len(labels)), *label[dim:])


def _pad(call: Call) -> Label:
    """Constants around some dimensions, which are frozen."""
    label, widths = list(call.label("self")), call["pad"]
    for k in range(len(widths) // 2):
        dim = len(label) - 1 - k
        if widths[2 * k] or widths[2 * k + 1]:
            call.freeze(label[dim])
            (label[dim],) = call.fixed(call.outs[0].shape[dim])
    zero = not call["value"]
    return tuple(tuple(AxisFactor(part.factor, part.zero and zero) for part in axis) for axis in label)


def _embedding(call: Call) -> Label:
    rows, columns = call.label("weight")
    call.freeze(rows, what="read by index")
    return (*call.label("indices"), columns)


def _index_select(call: Call) -> Label:
    label = list(call.label("self"))
    dim = call.dim("dim", len(label))
    call.freeze(label[dim], what="read by index")
    (label[dim],) = call.fixed(call.outs[0].shape[dim])
    return tuple(label)


def _gather(call: Call) -> Label:
    """An index for every entry: nothing may be removed from any dimension."""
    call.freeze(*call.label("self"), what="read by index")
    return call.fixed(*call.outs[0].shape)


def _index(call: Call) -> Label:
    """Advanced indexing `x[i, :, j]`: the dimensions of the indices replace the first indexed one, or come first."""
    label = call.label("self")
    at = [d for d, given in enumerate(call["indices"]) if isinstance(given, Tensor)]
    call.freeze(*(label[d] for d in at), what="read by index")
    rest = [axis for d, axis in enumerate(label) if d not in at]
    first = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    read = call.fixed(*call.outs[0].shape[first : call.outs[0].dim() - len(rest) + first])
    return (*rest[:first], *read, *rest[first:])


RULES: dict[AxisRule, str] = {
    _same: "clone alias detach _to_copy lift_fresh contiguous",
    _like: "zeros_like ones_like full_like empty_like rand_like randn_like",
    filled: "zeros ones full new_zeros new_ones new_full",
    _reshape: "view _unsafe_view reshape _reshape_alias unsqueeze squeeze flatten unflatten",
    _permute: "permute",
    _transpose: "transpose t",
    _expand: "expand",
    _repeat: "repeat",
    _slice: "slice",
    _split: "split split_with_sizes chunk unsafe_split unsafe_split_with_sizes unsafe_chunk",
    _select: "select",
    _unbind: "unbind",
    _concatenate: "cat",
    _stack: "stack",
    _pad: "constant_pad_nd",
    _embedding: "embedding",
    _index_select: "index_select",
    _gather: "gather",
    _index: "index _unsafe_index",
}
