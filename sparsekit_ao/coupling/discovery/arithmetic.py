"""Rules of operations that compute: elementwise ones, sums (products of matrices, convolutions, means), norms, pooling.

Elementwise operations make the axes of their operands the same; whether the result is zero where an operand is
(relu(0) = 0 and 0 * x = 0, but not sigmoid(0) and 0 + x) is found by running them on a few numbers. A sum over a factor
is unchanged without the units whose terms are zero, so at least one operand must be zero there; what normalizes or
ranks all entries along an axis (softmax, LayerNorm, sorting) freezes it.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils import _pytree

from .call import AxisRule, Call, Label
from .factors import Axis, AxisFactor, leaves, split_axis, unify

_PROBES = (0.7, -1.3, 2.1)
_SUMS = ("sum", "linalg_vector_norm")  # they add terms, so that zeros can be left out
_KEEP_ZEROS = (*_SUMS, "mean", "amax", "amin")
_PRODUCTS = {"mm": ("self", "mat2"), "bmm": ("self", "mat2"), "mv": ("self", "vec"), "dot": ("self", "tensor")}
_WITH_BIAS = {"addmm": ("mat1", "mat2"), "baddbmm": ("batch1", "batch2"), "addmv": ("mat", "vec")}


def pointwise(call: Call) -> Label:
    """Any elementwise operation of tensors that broadcast."""
    is_zero = functools.cache(lambda zeros: any(zeros) and _is_zero(call, zeros))
    return combined([call.label_of(t) for t in call.tensors], call.why, is_zero)


def combined(labels: Sequence[Label], why: str, is_zero: Callable[[tuple[bool, ...]], bool] = all) -> Label:
    """Axes of the result for operands that broadcast; `why` as in `unify`.

    `is_zero` tells from which operands are zero whether the result is (`all`: of a sum, `any`: of a product).
    """
    width = max(map(len, labels))
    padded = [((),) * (width - len(label)) + label for label in labels]
    return tuple(_combined(axes, is_zero, why) for axes in zip(*padded, strict=True))


def _combined(axes: Sequence[Axis], is_zero: Callable[[tuple[bool, ...]], bool], why: str) -> Axis:
    """One axis of the result; an operand of size 1 is constant along it, hence not zero at single units."""
    present = [axis for axis in axes if axis]
    if not present:
        return ()
    unify(present, why)
    rows = [leaves(axis) if axis else None for axis in axes]
    first = next(row for row in rows if row is not None)
    if any(row is not None and len(row) != len(first) for row in rows):  # frozen: its factors do not line up
        return tuple(AxisFactor(part.factor) for part in first)
    return tuple(
        AxisFactor(part.factor, is_zero(tuple(row is not None and row[k].zero for row in rows)))
        for k, part in enumerate(first)
    )


def _is_zero(call: Call, zeros: tuple[bool, ...]) -> bool:
    """Whether the result is 0 whenever the tensors marked in `zeros` are; boolean operands are tried both ways."""
    flags = sum(t.dtype == torch.bool and not zero for t, zero in zip(call.tensors, zeros, strict=True))
    tries = itertools.product(_PROBES, itertools.product((True, False), repeat=flags))
    return all(_run(call, zeros, value, flag) == 0 for value, flag in tries)


def _run(call: Call, zeros: tuple[bool, ...], value: float, flags: Sequence[bool]) -> float:
    """The operation on single numbers; each tensor has its own, so that x - y or x == y is not zero by chance."""
    operands = zip(zeros, (value * (1 + k / 8) for k in itertools.count()), strict=False)
    flag = iter(flags)

    def number(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        zero, own = next(operands)
        if x.dtype == torch.bool:
            return torch.tensor(not zero and next(flag), device="cpu")
        return torch.tensor(0.0 if zero else own, device="cpu").to(x.dtype)

    with unset_fake_temporarily(), torch.no_grad():
        args, kwargs = _pytree.tree_map(number, (call.args, {k: v for k, v in call.kwargs.items() if k != "device"}))
        try:
            return float(call.func(*args, **kwargs))
        except (RuntimeError, TypeError, ValueError):
            return math.nan  # it takes or gives no single real numbers, so its zeros are unknown


def _matmul(call: Call) -> Label:
    """`mm`, `bmm`, `mv`, `dot` and those that add a bias: the last axis of one, the second last of the other."""
    name = call.name.rstrip("_")
    a, b = (call.label(operand) for operand in (_PRODUCTS | _WITH_BIAS)[name])
    inner = max(len(b) - 2, 0)
    contract(call, a[-1], b[inner])
    batch = combined([a[:-2], b[:-2]], call.why, any) if len(b) > 2 else ()
    product = (*batch, *a[len(batch) : -1], *b[inner + 1 :])
    return product if name in _PRODUCTS else combined([product, call.label("self")], call.why)


def _convolution(call: Call) -> Label:
    """Convolution, transposed or not, grouped or not; its window is frozen."""
    x, w, groups = call.label("input"), call.label("weight"), call["groups"]
    x_group, x_in = split_axis(x[1], groups, call.why)
    w_group, rest = split_axis(w[0], groups, call.why)
    w_in, w_out = (rest, w[1]) if call["transposed"] else (w[1], rest)
    group = combined([(x_group,), (w_group,)], call.why, any)[0]
    contract(call, x_in, w_in)
    call.freeze(*x[2:], *w[2:])
    out = (x[0], group + w_out, *call.fixed(*call.outs[0].shape[2:]))
    return combined([out, *((*bias, *((),) * (len(x) - 2)) for bias in call.labels("bias"))], call.why)


def _batch_norm(call: Call) -> list[Label]:
    """BatchNorm in eval mode: each channel by itself; zero where its weight and bias are."""
    x = call.label("input")
    affine = call.labels("weight", "bias")
    channels = combined([(x[1],), *affine, *call.labels("running_mean", "running_var")], call.why)[0]
    rows = [leaves(axis) for (axis,) in affine]
    aligned = bool(rows) and all(len(row) == len(channels) for row in rows)
    zero = [aligned and all(row[k].zero for row in rows) for k in range(len(channels))]
    channels = tuple(AxisFactor(part.factor, z) for part, z in zip(channels, zero, strict=True))
    return [(x[0], channels, *x[2:])]


def _layer_norm(call: Call) -> list[Label]:
    """LayerNorm: its mean and variance change with every entry that is removed, so the normalized axes are frozen."""
    x, width = call.label("input"), len(call["normalized_shape"])
    normed = combined([x[-width:], *call.labels("weight", "bias")], call.why)
    call.freeze(*normed)
    return [(*(x[:-width] if call["bias"] is None else _nonzero(x[:-width])), *normed)]


def _group_norm(call: Call) -> list[Label]:
    """GroupNorm: whole groups can be removed, but nothing inside of one."""
    x = call.label("input")
    x_group, inside = split_axis(x[1], call["group"], call.why)
    call.freeze(inside)
    channels = combined([(x_group + inside,), *call.labels("weight", "bias")], call.why)[0]
    return [(*_nonzero((x[0],)), channels, *_nonzero(x[2:]))]


def _rms_norm(call: Call) -> list[Label]:
    """A root-mean-square norm: zero entries can be removed, since `compact` folds their number into the weight."""
    x, width = call.label("input"), len(call["normalized_shape"])
    for axis in x[-width:]:
        _require_zeros(call, axis)
    return [(*x[:-width], *combined([x[-width:], *call.labels("weight")], call.why, any))]


def _reduce(call: Call) -> Label | list[Label]:
    """Sums, means, extremes: the reduced axes need zeros (a sum) or are frozen."""
    label = call.label("self")
    dims = call.dims("dim", len(label))
    for d in dims:
        if call.name in _SUMS or (call.name == "mean" and call.is_norm(call["self"], label[d])):
            _require_zeros(call, label[d])
        else:
            call.freeze_value(label[d])
    rest = label if call.name in _KEEP_ZEROS else _nonzero(label)
    keepdim = bool(call.outs) and call.outs[0].dim() == len(label)
    out = tuple(() if d in dims else axis for d, axis in enumerate(rest) if keepdim or d not in dims)
    return [out] * len(call.outs)


def _along(call: Call) -> list[Label]:
    """What depends on the order or on all entries along a dimension: softmax, cumsum, sort, topk, tril."""
    label = _nonzero(call.label("self"))
    if call.name.startswith("tri"):  # tril and triu depend on the position in a matrix
        dims = [len(label) - 2, len(label) - 1]
    else:
        dims = call.dims("dims" if call.name in ("flip", "roll") else "dim", len(label))
    call.freeze(*(label[d] for d in dims))
    whole = call["self"].shape
    return [
        tuple(axis if n == size else call.fixed(n)[0] for axis, n, size in zip(label, out.shape, whole, strict=True))
        for out in call.outs
    ]


def _pool(call: Call) -> list[Label]:
    """Pooling and resampling of images: their last two (or three) dimensions are frozen."""
    label = call.label_of(call.tensors[0])
    first = len(label) - (3 if "3d" in call.name else 2)
    call.freeze(*label[first:])
    return [(*label[:first], *call.fixed(*out.shape[first:])) for out in call.outs]


def contract(call: Call, a: Axis, b: Axis) -> None:
    """Sum over an axis that two operands share."""
    _require_zeros(call, combined([(a,), (b,)], call.why, any)[0])


def _require_zeros(call: Call, axis: Sequence[AxisFactor]) -> None:
    nonzero = [part for part in leaves(axis) if not part.zero]
    call.freeze_value(nonzero, what="what it sums over is not zero where a unit is")


def _nonzero(label: Label) -> Label:
    return tuple(tuple(AxisFactor(part.factor) for part in axis) for axis in label)


RULES: dict[AxisRule, str] = {
    _matmul: "mm bmm mv dot addmm baddbmm addmv",
    _convolution: "convolution",
    _batch_norm: "native_batch_norm _native_batch_norm_legit_no_training cudnn_batch_norm",
    _layer_norm: "native_layer_norm",
    _group_norm: "native_group_norm",
    _rms_norm: "_fused_rms_norm",
    _reduce: "sum mean amax amin linalg_vector_norm prod any all argmax argmin max min var std var_mean logsumexp",
    _along: "_softmax _safe_softmax _log_softmax cumsum cumprod sort topk argsort flip roll tril triu",
    _pool: "max_pool2d_with_indices max_pool3d_with_indices avg_pool2d avg_pool3d _adaptive_avg_pool2d "
    "_adaptive_avg_pool3d adaptive_max_pool2d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d",
}
