"""Rules of operations that move elements: reshape, permute, expand, slice, concatenate, pad."""

import math

from .call import Call, Label
from .factors import Axis, Part, cut, freeze, regroup
from .pointwise import combined

__all__ = [
    "concatenate",
    "expand",
    "like",
    "pad",
    "permute",
    "piece",
    "pieces",
    "repeat",
    "reshape",
    "same",
    "select",
    "stack",
    "transpose",
    "unbind",
]


def same(call: Call) -> Label:
    """The same elements in the same places."""
    return call.label_of(call.tensors[0])


def like(call: Call) -> Label:
    """A new tensor of the same shape, all of one value: `zeros_like`, `full_like`."""
    zero = call.name == "zeros_like" or call.get("fill_value") == 0
    return tuple(tuple(Part(part.factor, zero) for part in axis) for axis in call.label_of(call.tensors[0]))


def reshape(call: Call) -> Label:
    """The same elements in row-major order: factors are split and merged."""
    label, shape = call.label_of(call.tensors[0]), call.outs[0].shape
    found = regroup(label, shape)
    if found is None:
        for axis in label:
            call.freeze(axis, "the new shape cuts across its factors")
        found = tuple(call.fixed(n) for n in shape)
    return found


def permute(call: Call) -> Label:
    """Dimensions in another order."""
    label = call.label("self")
    return tuple(label[d] for d in call.dims("dims", len(label)))


def transpose(call: Call) -> Label:
    """Two dimensions exchanged; `t` exchanges those of a matrix."""
    label = list(call.label("self"))
    if len(label) > 1:
        a, b = (call.dim(f"dim{k}", len(label)) for k in (0, 1)) if call.name == "transpose" else (0, 1)
        label[a], label[b] = label[b], label[a]
    return tuple(label)


def expand(call: Call) -> Label:
    """A dimension of size 1 repeated: a new factor, which other tensors may tie to theirs."""
    shape = call.outs[0].shape
    label = ((),) * (len(shape) - len(call.label("self"))) + call.label("self")
    return tuple(axis or call.free(n) for axis, n in zip(label, shape, strict=True))


def repeat(call: Call) -> Label:
    """Whole dimensions tiled: a new outer factor."""
    repeats = call["repeats"]
    label = ((),) * (len(repeats) - len(call.label("self"))) + call.label("self")
    return tuple(call.free(n) + axis for axis, n in zip(label, repeats, strict=True))


def piece(call: Call) -> Label:
    """A slice."""
    label, shape = list(call.label("self")), call["self"].shape
    dim = call.dim("dim", len(label))
    start, step = call["start"] or 0, call.get("step") or 1
    start = max(start + shape[dim], 0) if start < 0 else start
    label[dim] = _piece(call, label[dim], shape[dim], (start, call.outs[0].shape[dim], step))
    return tuple(label)


def pieces(call: Call) -> list[Label]:
    """`split` and `chunk`: slices that follow each other."""
    label, size = call.label("self"), call["self"].shape
    dim, start, found = call.dim("dim", len(label)), 0, []
    for out in call.outs:
        n = out.shape[dim]
        axis = _piece(call, label[dim], size[dim], (start, n, 1))
        found.append((*label[:dim], axis, *label[dim + 1 :]))
        start += n
    return found


def _piece(call: Call, axis: Axis, size: int, window: tuple[int, int, int]) -> Axis:
    """The axis of a window (start, length, step): its place is a frozen outer factor, what is inside stays."""
    start, length, step = window
    if length in (0, size):
        return axis if length else call.fixed(0)
    if step > 1 and size % step == 0 and length == size // step:
        outer, inner = cut(axis, length, call.why)
        call.freeze(inner)
        return outer
    inner_size = math.gcd(start, length, size) if step == 1 else 1
    outer, inner = cut(axis, size // inner_size, call.why)
    call.freeze(outer)
    return call.fixed(length // inner_size) + inner


def select(call: Call) -> Label:
    """One index of a dimension."""
    label = call.label("self")
    dim = call.dim("dim", len(label))
    call.freeze(label[dim])
    return label[:dim] + label[dim + 1 :]


def unbind(call: Call) -> list[Label]:
    """Every index of a dimension by itself."""
    return [select(call)] * len(call.outs)


def concatenate(call: Call) -> Label:
    """Tensors one after the other: equal pieces (or multiples of the smallest) are tied, others frozen."""
    rank = call.outs[0].dim()
    dim = call.dim("dim", rank)
    tensors = [t for t in call["tensors"] if t.dim() == rank and t.shape[dim]]  # what is empty adds nothing
    labels = [call.label_of(t) for t in tensors]
    if len(tensors) < 2:
        return labels[0] if labels else tuple(call.fixed(n) for n in call.outs[0].shape)
    sizes = [t.shape[dim] for t in tensors]
    inner = min(sizes) if all(n % min(sizes) == 0 for n in sizes) else 1
    cuts = [cut(label[dim], n // inner, call.why) for label, n in zip(labels, sizes, strict=True)]
    for outer, _ in cuts:
        call.freeze(outer)
    joined = _joined(call, [part for _, part in cuts])
    return tuple(
        call.fixed(sum(sizes) // inner) + joined if k == dim else _joined(call, [label[k] for label in labels])
        for k in range(len(labels[0]))
    )


def stack(call: Call) -> Label:
    """Tensors side by side along a new dimension."""
    labels = [call.label_of(t) for t in call["tensors"]]
    joined = tuple(_joined(call, list(axes)) for axes in zip(*labels, strict=True))
    dim = call.dim("dim", len(joined) + 1)
    return (*joined[:dim], call.fixed(len(labels)), *joined[dim:])


def _joined(call: Call, axes: list[Axis]) -> Axis:
    """One axis that several tensors share: zero where all of them are."""
    return combined([(axis,) for axis in axes], call.why)[0]


def pad(call: Call) -> Label:
    """Constants put around some dimensions, which are frozen."""
    label, widths = list(call.label("self")), call["pad"]
    for k in range(len(widths) // 2):
        dim = len(label) - 1 - k
        if widths[2 * k] or widths[2 * k + 1]:
            freeze(label[dim], call.why)
            label[dim] = call.fixed(call.outs[0].shape[dim])
    zero = not call.get("value")
    return tuple(tuple(Part(part.factor, part.zero and zero) for part in axis) for axis in label)
