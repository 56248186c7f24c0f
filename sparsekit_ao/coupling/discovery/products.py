"""Rules of operations that sum: matrix products, convolutions, means, norms, softmax, pooling.

A sum over a factor may lose the units whose terms are zero, so it needs zeros in one operand at least; what weighs or
ranks all entries along an axis (softmax, LayerNorm, sorting) freezes it.
"""

from collections.abc import Sequence

from .call import Call, Label
from .factors import Axis, Part, cut, leaves
from .pointwise import combined

__all__ = ["along", "batch_norm", "convolution", "group_norm", "layer_norm", "matmul", "pool", "reduce", "rms_norm"]

_SUMS = ("sum", "linalg_vector_norm")  # what adds terms, so that zeros can be left out
_KEEP_ZEROS = (*_SUMS, "mean", "amax", "amin")
_FACTORS = {"mm": ("self", "mat2"), "bmm": ("self", "mat2"), "mv": ("self", "vec"), "dot": ("self", "tensor")}
_FACTORS |= {"addmm": ("mat1", "mat2"), "baddbmm": ("batch1", "batch2"), "addmv": ("mat", "vec")}


def matmul(call: Call) -> Label:
    """`mm`, `bmm`, `mv`, `dot` and those that add a bias: the last axis of one, the second last of the other."""
    a, b = (call.label(name) for name in _FACTORS[call.name.rstrip("_")])
    inner = max(len(b) - 2, 0)
    _contract(call, a[-1], b[inner])
    batch = combined([a[:-2], b[:-2]], call.why, any_zero=True) if len(b) > 2 else ()
    product = (*batch, *a[len(batch) : -1], *b[inner + 1 :])
    return product if call.name.rstrip("_") in ("mm", "bmm", "mv", "dot") else _plus(call, product, call.label("self"))


def convolution(call: Call) -> Label:
    """Convolution, transposed or not, in groups or not; its window is frozen."""
    x, w, groups = call.label("input"), call.label("weight"), call["groups"]
    x_group, x_in = cut(x[1], groups, call.why)
    w_group, rest = cut(w[0], groups, call.why)
    w_in, w_out = (rest, w[1]) if call["transposed"] else (w[1], rest)
    group = combined([(x_group,), (w_group,)], call.why, any_zero=True)[0]
    _contract(call, x_in, w_in)
    for axis in (*x[2:], *w[2:]):
        call.freeze(axis)
    out = (x[0], group + w_out, *(call.fixed(n) for n in call.outs[0].shape[2:]))
    return out if call["bias"] is None else _plus(call, out, (*call.label("bias"), *((),) * (len(x) - 2)))


def batch_norm(call: Call) -> list[Label]:
    """BatchNorm in eval mode: each channel by itself; zero where its weight and bias are."""
    x = call.label("input")
    own = [call.label(name)[0] for name in ("weight", "bias", "running_mean", "running_var") if call[name] is not None]
    channels = combined([(axis,) for axis in (x[1], *own)], call.why)[0]
    affine = own[: (call["weight"] is not None) + (call["bias"] is not None)]
    rows = [leaves(axis) for axis in affine]
    zero = [bool(rows) and all(row[k].zero for row in rows) for k in range(len(channels))]
    if any(len(row) != len(channels) for row in rows):
        zero = [False] * len(channels)
    channels = tuple(Part(part.factor, z) for part, z in zip(channels, zero, strict=True))
    return [(x[0], channels, *x[2:])]


def layer_norm(call: Call) -> list[Label]:
    """LayerNorm: its mean and variance change with every entry that is removed, so what it norms is frozen."""
    x, width = call.label("input"), len(call["normalized_shape"])
    own = [call.label(name) for name in ("weight", "bias") if call.get(name) is not None]
    normed = combined([x[-width:], *own], call.why)
    for axis in normed:
        call.freeze(axis)
    return [(*(x[:-width] if call.get("bias") is None else _nonzero(x[:-width])), *normed)]


def group_norm(call: Call) -> list[Label]:
    """GroupNorm: a group can go as a whole, nothing inside of it."""
    x = call.label("input")
    own = [call.label(name) for name in ("weight", "bias") if call.get(name) is not None]
    x_group, inside = cut(x[1], call["group"], call.why)
    call.freeze(inside)
    channels = combined([(x_group + inside,), *own], call.why)[0]
    return [(*_nonzero((x[0],)), channels, *_nonzero(x[2:]))]


def rms_norm(call: Call) -> list[Label]:
    """A root-mean-square norm: entries that are zero can go, since `compact` folds their number into the weight."""
    x, width = call.label("input"), len(call["normalized_shape"])
    for axis in x[-width:]:
        _needs_zeros(call, axis)
    own = [call.label("weight")] if call.get("weight") is not None else []
    return [(*x[:-width], *combined([x[-width:], *own], call.why, any_zero=True))]


def reduce(call: Call) -> Label | list[Label]:
    """Sums, means, extremes: what is reduced away needs zeros (a sum) or is frozen."""
    label = call.label("self")
    dims = call.dims("dim", len(label))
    for d in dims:
        if call.name in _SUMS or (call.name == "mean" and call.is_norm(call["self"], label[d])):
            _needs_zeros(call, label[d])
        else:
            call.freeze(label[d])
    kept = label if call.name in _KEEP_ZEROS else _nonzero(label)
    keepdim = bool(call.outs) and call.outs[0].dim() == len(label)
    out = tuple(() if d in dims else axis for d, axis in enumerate(kept) if keepdim or d not in dims)
    return [out] * len(call.outs)


def along(call: Call) -> list[Label]:
    """What depends on the order or on all entries along a dimension: softmax, cumsum, sort, topk, tril."""
    label = _nonzero(call.label("self"))
    if call.name.startswith("tri"):  # tril and triu look at places in a matrix
        dims = [len(label) - 2, len(label) - 1]
    else:
        dims = call.dims("dims" if call.name in ("flip", "roll") else "dim", len(label))
    for d in dims:
        call.freeze(label[d])
    whole = call["self"].shape
    return [
        tuple(axis if out.shape[d] == whole[d] else call.fixed(out.shape[d]) for d, axis in enumerate(label))
        for out in call.outs
    ]


def pool(call: Call) -> list[Label]:
    """Pooling and resampling of images: their last two (or three) dimensions are frozen."""
    label = call.label_of(call.tensors[0])
    kept = len(label) - (3 if "3d" in call.name else 2)
    for axis in label[kept:]:
        call.freeze(axis)
    return [(*label[:kept], *(call.fixed(n) for n in out.shape[kept:])) for out in call.outs]


def _contract(call: Call, a: Axis, b: Axis) -> None:
    """Sum over an axis that two operands share."""
    _needs_zeros(call, combined([(a,), (b,)], call.why, any_zero=True)[0])


def _needs_zeros(call: Call, axis: Sequence[Part]) -> None:
    for part in leaves(axis):
        if not part.zero:
            call.freeze([part], "what it sums over is not zero where a unit is")


def _plus(call: Call, product: Label, bias: Label) -> Label:
    return combined([product, bias], call.why)


def _nonzero(label: Label) -> Label:
    return tuple(tuple(Part(part.factor) for part in axis) for axis in label)
