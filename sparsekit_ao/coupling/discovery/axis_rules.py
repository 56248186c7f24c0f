"""Rules: how each operation relates the axes of its tensors. `RULES` has one for each operator that is followed.

Elementwise operations make the axes of their operands the same. A run on a few numbers shows whether the
result is zero where an operand is: relu(0) and 0 * x are, sigmoid(0) and 0 + x are not. A sum over a factor is
unchanged without the units whose terms are zero, so at least one operand must be zero there. An operation that
normalizes or ranks all entries along an axis (softmax, LayerNorm, sorting) freezes it. Other operations move or select
elements; which entries an index reads depends on values, so nothing may be removed from an indexed axis.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils import _pytree

from .factors import Axis, AxisFactor, Factor, concatenated, fixed, freeze, leaves, reshape_axes, split_axis, unify
from .operation import AxisRule, Label, Operation

_PROBES = (0.7, -1.3, 2.1)
_SUMS = ("sum", "linalg_vector_norm")  # they add terms, so that zeros can be left out
_KEEP_ZEROS = (*_SUMS, "mean", "amax", "amin")
_PRODUCTS = {"mm": ("self", "mat2"), "bmm": ("self", "mat2"), "mv": ("self", "vec"), "dot": ("self", "tensor")}
_WITH_BIAS = {"addmm": ("mat1", "mat2"), "baddbmm": ("batch1", "batch2"), "addmv": ("mat", "vec")}
IsZero = Callable[[tuple[bool, ...]], bool]
_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def pointwise(op: Operation) -> Label:
    """Follow any elementwise operation of tensors that broadcast."""
    is_zero = functools.cache(lambda zeros: any(zeros) and _is_zero(op, zeros))
    return combined(op, [op.label_of(t) for t in op.tensors], is_zero)


def combined(op: Operation, labels: Sequence[Label], is_zero: IsZero = all) -> Label:
    """Return the axes of the result of broadcast operands; `is_zero` is `all` for a sum and `any` for a product."""
    width = max(map(len, labels))
    padded = [((),) * (width - len(label)) + label for label in labels]
    return tuple(united(op, axes, is_zero) for axes in zip(*padded, strict=True))


def united(op: Operation, axes: Sequence[Axis], is_zero: IsZero = all) -> Axis:
    """Return one axis of the result; an operand of size 1 is constant along it, hence not zero at single units."""
    unify([axis for axis in axes if axis], op.why)
    rows = [leaves(axis) for axis in axes]
    first = next(filter(None, rows), ())
    if any(row and len(row) != len(first) for row in rows):  # frozen: its factors do not line up
        return tuple(AxisFactor(part.factor) for part in first)
    zeros = [tuple(bool(row) and row[k].zero for row in rows) for k in range(len(first))]
    return tuple(AxisFactor(part.factor, is_zero(zero)) for part, zero in zip(first, zeros, strict=True))


def _is_zero(op: Operation, zeros: tuple[bool, ...]) -> bool:
    """Whether the result is 0 whenever the tensors marked in `zeros` are; boolean operands are tried both ways."""
    flags = sum(t.dtype == torch.bool and not zero for t, zero in zip(op.tensors, zeros, strict=True))
    tries = itertools.product(_PROBES, itertools.product((True, False), repeat=flags))
    return all(_run(op, zeros, value, flag) == 0 for value, flag in tries)


def _run(op: Operation, zeros: tuple[bool, ...], value: float, flags: Sequence[bool]) -> float:
    """The operation on single numbers; each tensor has its own, so that x - y or x == y is not zero by chance."""
    operands = zip(zeros, (value * (1 + k / 8) for k in itertools.count()), strict=False)
    flag = iter(flags)

    def number(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        zero, nonzero = next(operands)
        if x.dtype == torch.bool:
            return torch.tensor(not zero and next(flag), device="cpu")
        return torch.tensor(0.0 if zero else nonzero, device="cpu").to(x.dtype)

    with unset_fake_temporarily(), torch.no_grad():
        args, kwargs = _pytree.tree_map(number, (op.args, {k: v for k, v in op.kwargs.items() if k != "device"}))
        try:
            return float(op.func(*args, **kwargs))
        except (RuntimeError, TypeError, ValueError):
            return math.nan  # it takes or gives no single real numbers, so its zeros are unknown


def _matmul(op: Operation) -> Label:
    """`mm`, `bmm`, `mv`, `dot` and those that add a bias: the last axis of one, the second last of the other."""
    name = op.name.rstrip("_")
    a, b = (op.label(operand) for operand in (_PRODUCTS | _WITH_BIAS)[name])
    inner = max(len(b) - 2, 0)
    _contract(op, a[-1], b[inner])
    batch = combined(op, [a[:-2], b[:-2]], any) if len(b) > 2 else ()
    product = (*batch, *a[len(batch) : -1], *b[inner + 1 :])
    return product if name in _PRODUCTS else combined(op, [product, op.label("self")])


def _trilinear(op: Operation) -> Label:
    """The product of three tensors, with further dimensions of size 1, summed over some dimensions: `nn.Bilinear`."""
    labels, summed = list[Label](), op["sumdim"]
    for k in (1, 2, 3):
        axes, further = iter(op.label(f"i{k}")), op[f"expand{k}"]
        labels.append(tuple(() if d in further else next(axes) for d in range(op[f"i{k}"].dim() + len(further))))
    product = combined(op, labels, any)
    _require_zeros(op, [part for d in summed for part in product[d]])
    return tuple(axis for d, axis in enumerate(product) if d not in summed)


def _convolution(op: Operation) -> Label:
    """Convolution, transposed or not, grouped or not; its window is frozen."""
    x, w, groups = op.label("input"), op.label("weight"), op["groups"]
    x_group, x_in = split_axis(x[1], groups, op.why)
    w_group, rest = split_axis(w[0], groups, op.why)
    w_in, w_out = (rest, w[1]) if op["transposed"] else (w[1], rest)
    group = united(op, [x_group, w_group], any)
    _contract(op, x_in, w_in)
    op.freeze(*x[2:], *w[2:])
    out = (x[0], group + w_out, *op.fixed(*op.outs[0].shape[2:]))
    return combined(op, [out, *((*bias, *((),) * (len(x) - 2)) for bias in op.labels("bias"))])


def _batch_norm(op: Operation) -> list[Label]:
    """BatchNorm: each channel by itself; zero where its weight and bias are."""
    x, affine = op.label("input"), op.labels("weight", "bias")
    op.freeze(*((x[0], *x[2:]) if op["training"] else ()), what="its mean and variance are those of the batch")
    operands = [x[1], *(axis for (axis,) in (*affine, *op.labels("running_mean", "running_var")))]
    is_zero = lambda zeros: op["weight"] is not None and all(zeros[1 : 1 + len(affine)])  # noqa: E731
    return [(x[0], united(op, operands, is_zero), *x[2:])]


def _layer_norm(op: Operation) -> list[Label]:
    """LayerNorm: its mean and variance change with every entry that is removed, so the normalized axes are frozen."""
    x, width = op.label("input"), len(op["normalized_shape"])
    normed = combined(op, [x[-width:], *op.labels("weight", "bias")])
    op.freeze(*normed, what="its mean and variance are those of all units")
    return [(*(x[:-width] if op["bias"] is None else _nonzero(x[:-width])), *normed)]


def _group_norm(op: Operation) -> list[Label]:
    """GroupNorm: whole groups can be removed, but nothing inside of one."""
    x = op.label("input")
    x_group, inside = split_axis(x[1], op["group"], op.why)
    op.freeze(inside)
    channels = united(op, [x_group + inside, *(axis for (axis,) in op.labels("weight", "bias"))])
    return [(*_nonzero((x[0],)), channels, *_nonzero(x[2:]))]


def _rms_norm(op: Operation) -> list[Label]:
    """A root-mean-square norm: zero entries can be removed, since `compact` folds their number into the weight."""
    x, width = op.label("input"), len(op["normalized_shape"])
    for axis in x[-width:]:
        _require_zeros(op, axis)
    return [(*x[:-width], *combined(op, [x[-width:], *op.labels("weight")], any))]


def _reduce(op: Operation) -> Label | list[Label]:
    """Sums, means, extremes: the reduced axes need zeros (a sum) or are frozen."""
    label = op.label("self")
    dims = op.dims("dim", len(label))
    is_sum = op.name in _SUMS and (op["ord"] is None or op["ord"] >= 0)  # others are infinite, or least, at a zero
    for d in dims:
        if is_sum or (op.name == "mean" and op.is_norm(op["self"], label[d])):
            _require_zeros(op, label[d])
        else:
            op.freeze_value(label[d])
    rest = label if op.name in _KEEP_ZEROS else _nonzero(label)
    keepdim = bool(op.outs) and op.outs[0].dim() == len(label)
    out = tuple(() if d in dims else axis for d, axis in enumerate(rest) if keepdim or d not in dims)
    return [out] * len(op.outs)


def _along(op: Operation) -> list[Label]:
    """Operations on the order or on all entries along a dimension: softmax, cumsum, sort, topk, tril."""
    label = _nonzero(op.label("self"))
    if op.name.startswith("tri"):  # tril and triu depend on the position in a matrix
        dims = [len(label) - 2, len(label) - 1]
    else:
        dims = op.dims("dims" if op.name in ("flip", "roll") else "dim", len(label))
    freeze_along = op.freeze if op.name == "topk" else op.freeze_value  # a number of entries must exist
    freeze_along(*(label[d] for d in dims))
    whole = op["self"].shape
    return [
        tuple(axis if n == size else op.fixed(n)[0] for axis, n, size in zip(label, out.shape, whole, strict=True))
        for out in op.outs
    ]


def _pool(op: Operation) -> list[Label]:
    """Pooling and resampling of images: their last two (or three) dimensions are frozen."""
    label = op.label_of(op.tensors[0])
    first = len(label) - (3 if "3d" in op.name else 2)
    op.freeze(*label[first:])
    return [(*label[:first], *op.fixed(*out.shape[first:])) for out in op.outs]


def _contract(op: Operation, a: Axis, b: Axis) -> None:
    """Sum over an axis that two operands share."""
    _require_zeros(op, united(op, [a, b], any))


def _require_zeros(op: Operation, axis: Sequence[AxisFactor]) -> None:
    nonzero = [part for part in leaves(axis) if not part.zero]
    op.freeze_value(nonzero, what="what it sums over is not zero where a unit is")


def _nonzero(label: Sequence[Axis]) -> Label:
    return tuple(tuple(AxisFactor(part.factor) for part in axis) for axis in label)


def attention_scale(op: Operation) -> list[Label]:
    """Attention that torch has decomposed: its default scale follows from the size of a head."""
    if op.is_used and op["scale"] is None:
        freeze(op.label("query")[-1], f"attention in {op.module}: its scale follows from the size of a head")
    return [op.label_of(out) for out in op.outs]


def _recurrent(op: Operation) -> list[Label]:
    """LSTM, GRU, plain recurrent layers: torch runs all layers, directions and steps as one operation."""
    x = op.label("data" if op["batch_sizes"] is not None else "input")
    states = [op["hx"]] if isinstance(op["hx"], Tensor) else op["hx"]
    first, *cells = [op.label_of(state)[-1] for state in states]
    ways = 2 if op["bidirectional"] else 1
    each = len(op["params"]) // (ways * op["num_layers"])  # weights of inputs and of states, two biases, a projection
    layers = [[op.label_of(t) for t in op["params"][at : at + each]] for at in range(0, len(op["params"]), each)]
    gated = 4 if op["has_biases"] else 2
    split = [split_axis(label[0], _GATES[op.name], op.why) for layer in layers for label in layer[:gated]]
    op.freeze(*(gate for gate, _ in split))
    # Units are the same in all layers and directions, which have one size and one tensor of initial states. A unit
    # whose rows and biases are zero stays zero, if it begins with zero: tanh(0) = 0, and every gate multiplies.
    unit = united(op, [*(rows for _, rows in split), *cells])
    projections = [layer[gated] for layer in layers if len(layer) > gated]
    for _, columns in projections:
        _contract(op, unit, columns)
    hidden = united(op, [first, *([rows for rows, _ in projections] or [unit])])
    for at, (inputs, recurrent) in enumerate((layer[0][1], layer[1][1]) for layer in layers):
        _contract(op, hidden, recurrent)
        way, inner = split_axis(inputs, ways, op.why) if at >= ways else ((), inputs)
        op.freeze(way)
        _contract(op, hidden if at >= ways else x[-1], inner)
    op.freeze(*x[:-1], *(axis for state in states for axis in op.label_of(state)[:-1]))
    last = [op.fixed(*out.shape[:-1]) for out in op.outs[1:]]
    ends = [(*axes, axis) for axes, axis in zip(last, (hidden, unit), strict=False)]
    return [(*x[:-1], op.fixed(ways)[0] + hidden), *ends]


def _same(op: Operation) -> Label:
    """The same elements in the same places."""
    return op.label_of(op.tensors[0])


def _like(op: Operation) -> Label:
    """A new tensor of the same shape, all of one value: `zeros_like`, `full_like`."""
    zero = op.name == "zeros_like" or op["fill_value"] == 0
    return tuple(tuple(AxisFactor(part.factor, zero) for part in axis) for axis in _same(op))


def filled(op: Operation) -> Label:
    """A constant of one value: its sizes are integers of the forward, as those of a reshape are."""
    zero = op.name in ("zeros", "new_zeros") or op["fill_value"] == 0
    return tuple(() if n == 1 else (AxisFactor(Factor(n), zero),) for n in op.outs[0].shape)


def _reshape(op: Operation) -> Label:
    """The same elements in row-major order: factors are split and merged."""
    label, shape = _same(op), op.outs[0].shape
    axes = reshape_axes(label, shape)
    if axes is None:
        op.freeze(*label, what="the new shape cuts across its factors")
    return op.fixed(*shape) if axes is None else axes


def _transpose(op: Operation) -> Label:
    """Dimensions in another order: `permute`; or two of them exchanged, for `t` those of a matrix."""
    label = list(op.label("self"))
    if op.name == "permute":
        label = [label[d] for d in op.dims("dims", len(label))]
    elif len(label) > 1:
        a, b = (op.dim(f"dim{k}", len(label)) for k in (0, 1)) if op["dim0"] is not None else (0, 1)
        label[a], label[b] = label[b], label[a]
    return tuple(label)


def _expand(op: Operation) -> Label:
    """A dimension of size 1 repeated, or any tiled: a new outer factor, which may become that of another tensor."""
    sizes = op["repeats"] if op.name == "repeat" else op.outs[0].shape
    padded = ((),) * (len(sizes) - len(op.label("self"))) + op.label("self")
    pairs = zip(padded, sizes, strict=True)
    return tuple(axis if axis and op.name == "expand" else fixed(n, "") + axis for axis, n in pairs)


def _pack(op: Operation) -> list[Label]:
    """Sequences one after the other, as recurrent layers read them: their places in the batch are frozen."""
    label = op.label("input")
    op.freeze(*label[:2])
    return [(*op.fixed(op.outs[0].shape[0]), *label[2:]), op.fixed(*op.outs[1].shape)]


def _transform(op: Operation) -> Label:
    """Fourier transforms, whose dimensions are frozen; pairs of real numbers as complex ones, and the reverse."""
    label, shape = op.label("self"), op.outs[0].shape
    dims = [len(label) - 1] * (op.name == "view_as_complex") if op["dim"] is None else op.dims("dim", len(label))
    op.freeze(*(label[d] for d in dims))
    followed = [op.fixed(n)[0] if d in dims else label[d] for d, n in enumerate(shape[: len(label)])]
    return (*followed, *op.fixed(*shape[len(label) :]))


def _slice(op: Operation) -> list[Label]:
    """A range of a dimension, or ranges one after the other (`split`, `chunk`)."""
    label = op.label("self")
    dim = op.dim("dim", len(label))
    size, start, labels = op["self"].shape[dim], op["start"] or 0, []
    start = max(start + size, 0) if start < 0 else start
    for out in op.outs:
        axis = _sliced(op, label[dim], size, (start, out.shape[dim], op["step"] or 1))
        labels.append((*label[:dim], axis, *label[dim + 1 :]))
        start += out.shape[dim]
    return labels


def _sliced(op: Operation, axis: Axis, size: int, window: tuple[int, int, int]) -> Axis:
    """The axis of a slice (start, length, step): its position is a frozen outer factor, the inner one is unchanged."""
    start, length, step = window
    if length in (0, size):
        return axis if length else op.fixed(0)[0]
    if step > 1 and size % step == 0 and length == size // step:
        outer, inner = split_axis(axis, length, op.why)
        op.freeze(inner)
        return outer
    inner_size = math.gcd(start, length, size) if step == 1 else 1
    outer, inner = split_axis(axis, size // inner_size, op.why)
    op.freeze(outer, what=f"{length} of {size}, no equal parts" if step == 1 and length != inner_size else "")
    return op.fixed(length // inner_size)[0] + inner


def _select(op: Operation) -> list[Label]:
    """One index of a dimension, or each of them (`unbind`)."""
    label = op.label("self")
    dim = op.dim("dim", len(label))
    op.freeze(label[dim])
    return [label[:dim] + label[dim + 1 :]] * len(op.outs)


def _concatenate(op: Operation) -> Label:
    """Tensors one after the other: equal ones are united, others stay apart as parts of one axis."""
    rank = op.outs[0].dim()
    dim = op.dim("dim", rank)
    tensors = [t for t in op["tensors"] if t.dim() == rank and t.shape[dim]]  # empty ones contribute nothing
    labels = [op.label_of(t) for t in tensors]
    if len(tensors) < 2:
        return labels[0] if labels else op.fixed(*op.outs[0].shape)
    sizes = [t.shape[dim] for t in tensors]
    axes, inner = [label[dim] for label in labels], min(sizes)
    nested = any(part.factor.is_concatenation for axis in axes for part in leaves(axis))
    if (nested or len(set(sizes)) > 1) and not (all(n % inner == 0 for n in sizes) and _end_alike(axes, inner)):
        rest = combined(op, [(*label[:dim], (), *label[dim + 1 :]) for label in labels])
        return (*rest[:dim], concatenated(axes), *rest[dim + 1 :])
    halves = [split_axis(label[dim], n // inner, op.why) for label, n in zip(labels, sizes, strict=True)]
    op.freeze(*(outer for outer, _ in halves))
    inner_labels = [(*label[:dim], half, *label[dim + 1 :]) for label, (_, half) in zip(labels, halves, strict=True)]
    label = combined(op, inner_labels)
    return (*label[:dim], op.fixed(sum(sizes) // inner)[0] + label[dim], *label[dim + 1 :])


def _end_alike(axes: Sequence[Axis], size: int) -> bool:
    """Whether all axes have the same innermost factors, of this size: they are made of pieces of one tensor."""
    inner = [[part.factor for part in reversed(leaves(axis))] for axis in axes]
    products = list(itertools.accumulate((factor.size for factor in inner[0]), operator.mul))
    count = products.index(size) + 1 if size in products else 0
    return count > 0 and all(factors[:count] == inner[0][:count] for factors in inner)


def _stack(op: Operation) -> Label:
    labels = [op.label_of(t) for t in op["tensors"]]
    label = combined(op, labels)
    dim = op.dim("dim", len(label) + 1)
    return (*label[:dim], *op.fixed(len(labels)), *label[dim:])


def _pad(op: Operation) -> Label:
    """Constants around some dimensions, which are frozen."""
    label, widths = list(op.label("self")), op["pad"]
    for k in range(len(widths) // 2):
        dim = len(label) - 1 - k
        if widths[2 * k] or widths[2 * k + 1]:
            op.freeze(label[dim])
            (label[dim],) = op.fixed(op.outs[0].shape[dim])
    return _nonzero(label) if op["value"] else tuple(label)


def _embedding(op: Operation) -> list[Label]:
    """Rows read by index; of bags their sums, means or maxima, and then integers of bags and indices."""
    rows, columns = op.label("weight")
    op.freeze(rows, what="read by index")
    places = op.label("indices") if op.name == "embedding" else op.fixed(op.outs[0].shape[0])
    return [(*places, columns), *(op.fixed(*out.shape) for out in op.outs[1:])]


def _index_select(op: Operation) -> Label:
    """Entries of one dimension by index; of `gather` every entry, so nothing may be removed from any dimension."""
    label, shape = op.label("self"), op.outs[0].shape
    dims = [op.dim("dim", len(label))] if op.name == "index_select" else range(len(label))
    op.freeze(*(axis for d, axis in enumerate(label) if d in dims), what="read by index")
    rows = enumerate(zip(label, shape, strict=False))  # one number of a vector has no dimension
    return tuple(op.fixed(n)[0] if d in dims else axis for d, (axis, n) in rows)


def _index(op: Operation) -> Label:
    """Advanced indexing `x[i, :, j]`: the dimensions of the indices replace the first indexed one, or come first."""
    label = op.label("self")
    at, first, count = _indexed(op["indices"])
    op.freeze(*(label[d] for d in at), what="read by index")
    rest = [axis for d, axis in enumerate(label) if d not in at]
    return (*rest[:first], *op.fixed(*op.outs[0].shape[first : first + count]), *rest[first:])


def _index_put(op: Operation) -> Label:
    """Values written by advanced indexing `x[i] = y`: dimensions that are not indexed are those of the values."""
    label, values = op.label("self"), op.label("values")
    at, first, count = _indexed(op["indices"])
    rest = [d for d in range(len(label)) if d not in at]
    values = ((),) * (len(rest) + count - len(values)) + values
    op.freeze(*(label[d] for d in at), *values[first : first + count], what="written by index")
    written = combined(op, [tuple(label[d] for d in rest), (*values[:first], *values[first + count :])])
    return tuple(_nonzero((axis,))[0] if d in at else written[rest.index(d)] for d, axis in enumerate(label))


def _indexed(indices: Sequence[Tensor | None]) -> tuple[list[int], int, int]:
    """Return the dimensions that indices read, and the first and the number of dimensions that replace them."""
    at: list[int] = []
    d, starts, count = 0, 0, 0
    for index in indices:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        width = index.dim() if index is not None and is_mask else 1  # a mask reads as many dimensions as it has
        if index is not None:
            starts += not at or at[-1] != d - 1
            at += range(d, d + width)
            count = max(count, 1 if is_mask else index.dim())
        d += width
    return at, at[0] if starts == 1 else 0, count


def _index_add(op: Operation) -> Label:
    """Slices of `source` added to, or copied into, some indices of a dimension."""
    label, source = op.label("self"), op.label("source")
    dim = op.dim("dim", len(label))
    at = slice(dim, dim + 1)  # single numbers have no such dimension
    op.freeze(*label[at], *source[at], what="written by index")
    others = combined(op, [(*axes[:dim], (), *axes[dim + 1 :]) for axes in (label, source)])
    return (*others[:dim], *label[at], *others[dim + 1 :])


def _fake_quantize(op: Operation) -> list[Label]:
    """Rounding to a grid that has a zero, for each entry; scales are those of all entries or of one dimension."""
    label = op.label("self")
    if op["axis"] is not None:
        per_entry = [axis for (axis,) in op.labels("scale", "zero_point")]
        along = united(op, [label[op["axis"]], *per_entry], lambda zeros: zeros[0])
        label = (*label[: op["axis"]], along, *label[op["axis"] + 1 :])
    return [label] * len(op.outs)


_OPERATORS: dict[AxisRule, str] = {
    _matmul: "mm bmm mv dot addmm baddbmm addmv",
    _trilinear: "_trilinear",
    _convolution: "convolution",
    _batch_norm: "native_batch_norm _native_batch_norm_legit_no_training cudnn_batch_norm",
    _layer_norm: "native_layer_norm",
    _group_norm: "native_group_norm",
    _rms_norm: "_fused_rms_norm",
    _reduce: "sum mean amax amin linalg_vector_norm prod any all argmax argmin max min var std var_mean logsumexp",
    _along: "_softmax _safe_softmax _log_softmax cumsum cumprod sort topk argsort flip roll tril triu",
    _pool: "max_pool2d_with_indices max_pool3d_with_indices avg_pool2d avg_pool3d _adaptive_avg_pool2d "
    "_adaptive_avg_pool3d adaptive_max_pool2d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d",
    _recurrent: "lstm gru rnn_tanh rnn_relu",
    _same: "clone alias detach _to_copy lift_fresh contiguous",
    _like: "zeros_like ones_like full_like empty_like rand_like randn_like",
    filled: "zeros ones full new_zeros new_ones new_full",
    _reshape: "view _unsafe_view reshape _reshape_alias unsqueeze squeeze flatten unflatten",
    _transpose: "permute transpose t",
    _expand: "expand repeat",
    _slice: "slice split split_with_sizes chunk unsafe_split unsafe_split_with_sizes unsafe_chunk",
    _select: "select unbind",
    _pack: "_pack_padded_sequence",
    pointwise: "complex",
    _transform: "view_as_complex view_as_real _fft_r2c _fft_c2r _fft_c2c",
    _concatenate: "cat",
    _stack: "stack",
    _pad: "constant_pad_nd",
    _embedding: "embedding _embedding_bag _embedding_bag_forward_only",
    _index_select: "index_select gather",
    _index: "index _unsafe_index",
    _index_put: "index_put _unsafe_index_put",
    _index_add: "index_add index_copy",
    _fake_quantize: "fake_quantize_per_tensor_affine_cachemask fake_quantize_per_channel_affine_cachemask "
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
}
RULES = {name: rule for rule, names in _OPERATORS.items() for name in names.split()}


def rule_of(func: Any, args: Sequence[Any]) -> AxisRule | None:
    """Return the rule of an operator, before it runs with these arguments, if there is one."""
    name = str(func.overloadpacket.__name__)
    if name.startswith("as_strided") and len(args) == 3:  # pooling to one pixel restores channels_last by it
        rows = zip(args[0].shape, args[0].stride(), *args[1:], strict=False)
        is_same = args[0].dim() == len(args[1]) and all(n == m and (s == t or n == 1) for n, s, m, t in rows)
        return _same if is_same else None
    if name in ("max", "min") and func._overloadname == "other":
        return pointwise
    rule = RULES.get(name.rstrip("_"))
    return pointwise if rule is None and (torch.Tag.pointwise in func.tags or name == "copy_") else rule
