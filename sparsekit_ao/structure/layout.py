"""Shapes, strides and offsets of windows: whether they fit a parameter, and how tiles divide a shape.

All numbers count elements. `where` in the signatures is the opening words of an error message.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ..errors import SparsityError
from ..selection.strides import Shape, addresses, cosize


def coordinates_of(address: Tensor, shape: Shape, stride: Shape) -> list[Tensor]:
    """The index of the tensor's element at each address; the inverse of `sum(i_k * stride_k)`.

    >>> [at.tolist() for at in coordinates_of(torch.tensor([5, 1]), (3, 4), (1, 3))]
    [[2, 1], [1, 0]]
    """
    at, left = [torch.zeros_like(address)] * len(shape), address
    for k in sorted((k for k in range(len(shape)) if shape[k] > 1), key=lambda k: -stride[k]):
        at[k], left = left // stride[k], left % stride[k]
    if bool((left != 0).any()) or any(bool((i >= n).any()) for i, n in zip(at, shape, strict=True)):
        ordered, order = addresses(shape, stride).sort()  # strides that are not nested: look it up
        flat = order[torch.searchsorted(ordered, address.cpu())].to(address.device)
        return list(torch.unravel_index(flat, shape))
    return at


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the addresses are exactly 0 .. numel-1, each once (contiguous in some order of dimensions)."""
    expected = 1
    for d, n in sorted((d, n) for n, d in zip(shape, stride, strict=True) if n != 1):
        if d != expected:
            return False
        expected *= n
    return True


def resolve_tile(
    kind: str, sizes: Sequence[int], tile: Sequence[int], *, edge: str = "error", where: str = ""
) -> Shape:
    """Check the block or scope shape that a user gave; one positive int for each dimension of what it tiles.

    Args:
        kind: `"block"` (`()` is all ones, else one entry a dimension) or `"scope"` (missing entries are whole).
        sizes: what is tiled: the view's shape for a block, the block grid for a scope.
        tile: the shape as given; -1 is the whole dimension.
        edge: `"error"`, or `"partial"` to allow a smaller last tile.
        where: opening words of an error.

    >>> resolve_tile("block", (8, 6), (-1, 3))
    (8, 3)
    >>> resolve_tile("scope", (8, 6), ())
    (8, 6)
    """
    if not isinstance(edge, str) or edge not in ("error", "partial"):
        raise SparsityError(f'{where}edge must be "error" or "partial", got {edge!r}')
    if isinstance(tile, (str, int)) or not isinstance(tile, Sequence):
        raise SparsityError(f"{where}{kind} shape must be a tuple of ints, got {tile!r}")
    full = tuple(tile)
    if kind == "block":
        full = full or (1,) * len(sizes)
        tiled, rule = "view", "Give one entry a dimension, or () for single elements."
    else:
        tiled, rule = "block grid", "Missing entries mean the whole dimension."
    if len(full) > len(sizes) or (kind == "block" and len(full) < len(sizes)):
        raise SparsityError(
            f"{where}{kind} {full} has {len(full)} entries, but the {tiled} has {len(sizes)} dimensions "
            f"{tuple(sizes)}. {rule}"
        )
    full += (-1,) * (len(sizes) - len(full))
    return tuple(_resolve_one(kind, k, size, full, edge, where) for k, size in enumerate(sizes))


def _resolve_one(kind: str, k: int, size: int, tile: Shape, edge: str, where: str) -> int:
    entry, at = tile[k], f"{'dimension' if kind == 'block' else 'block-grid dimension'} {k}"
    needs = f"{where}{kind} {tile} needs"
    if isinstance(entry, bool) or not isinstance(entry, int):
        raise SparsityError(f"{needs} an int at {at}, got {entry!r}")
    if entry == -1:
        return max(size, 1)
    if entry < 1:
        raise SparsityError(f"{needs} a positive size (or -1 for all) at {at}, got {entry}")
    if size % entry and edge == "error":
        remedy = 'Use edge="partial", or leave the tensor out.'
        raise SparsityError(f"{needs} {at} divisible by {entry}, got {size}. {remedy}")
    return entry


def check_window(
    param_shape: Shape, param_stride: Shape, shape: Shape, stride: Shape, offset: int, where: str = ""
) -> None:
    """Check that a window contains only elements of the parameter, and none of them twice.

    Addresses count from the parameter's first element. Raises SparsityError with the first thing that is wrong.
    """
    for what, numbers in (("shape", shape), ("stride", stride), ("offset", (offset,))):
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in numbers):
            raise SparsityError(f"{where}view {what} must be non-negative ints, got {numbers}")
    _check_window(param_shape, param_stride, shape, stride, offset, where)


@lru_cache(maxsize=4096)
def _check_window(
    param_shape: Shape, param_stride: Shape, shape: Shape, stride: Shape, offset: int, where: str
) -> None:
    if len(shape) != len(stride):
        raise SparsityError(
            f"{where}a view needs one stride a dimension, got shape {shape} ({len(shape)}) "
            f"and stride {stride} ({len(stride)})"
        )
    if 0 in shape:
        return
    refuse_expanded(param_shape, param_stride, where)
    end, last = cosize(shape, stride, offset) - 1, cosize(param_shape, param_stride) - 1
    view = f"{where}view {shape}:{stride}"
    if end > last:
        raise SparsityError(
            f"{view} with offset {offset} is out of bounds: it ends at element {end}, the parameter {param_shape} at "
            f"element {last}"
        )
    if not _is_inside(param_shape, param_stride, shape, stride, offset):
        raise SparsityError(
            f"{view} with offset {offset} contains elements that are not the parameter's: {param_shape}:{param_stride} "
            "is a slice of a larger tensor"
        )
    if not is_injective(shape, stride):
        first, second = _overlap(shape, stride)
        raise SparsityError(
            f"{view}: strides overlap: indices {first} and {second} map to one element. Use strides under which every "
            "index has its own element."
        )


def refuse_expanded(shape: Shape, stride: Shape, where: str = "") -> None:
    """Raise where elements of a parameter share memory, so that a mask cannot drop one of them alone."""
    if 0 not in shape and not is_injective(shape, stride):
        raise SparsityError(
            f"{where}the parameter {shape}:{stride} is expanded: several of its elements share memory. Make it "
            "contiguous first."
        )


def _is_inside(param_shape: Shape, param_stride: Shape, shape: Shape, stride: Shape, offset: int) -> bool:
    """Whether every address of a window within the parameter's bounds is an element of the parameter."""
    if is_dense(param_shape, param_stride) or _no_carry(param_shape, param_stride, shape, stride, offset):
        return True
    return bool(torch.isin(addresses(shape, stride, offset), addresses(param_shape, param_stride)).all())


def _no_carry(param_shape: Shape, param_stride: Shape, shape: Shape, stride: Shape, offset: int) -> bool:
    """Whether the window is inside for certain: its last index, as digits of the parameter's strides, is in bounds."""
    dims = sorted(((d, n) for n, d in zip(param_shape, param_stride, strict=True) if n > 1), reverse=True)
    last = [0] * len(dims)
    for steps, jump in ((1, offset), *((n - 1, d) for n, d in zip(shape, stride, strict=True))):
        for j, (d, _) in enumerate(dims):
            digit, jump = divmod(jump, d)
            last[j] += steps * digit
        if jump and steps:
            return False
    return all(at < n for at, (_, n) in zip(last, dims, strict=True))


def is_injective(shape: Shape, stride: Shape) -> bool:
    """Whether every index has an address of its own."""
    end = 0
    for d, n in sorted((d, n) for n, d in zip(shape, stride, strict=True) if n > 1):
        if d == 0:
            return False
        if d <= end:  # strides that are not nested: count the addresses
            fits = math.prod(shape) <= cosize(shape, stride)  # else some address has two indices
            return fits and int(addresses(shape, stride).unique().numel()) == math.prod(shape)
        end += (n - 1) * d
    return True


def _overlap(shape: Shape, stride: Shape) -> tuple[Shape, Shape]:
    """Two indices with one address, where there are such."""
    most = cosize(shape, stride)
    small: list[int] = []
    for n, d in zip(shape, stride, strict=True):  # few, but more than there are addresses if all of them are more
        left = most // math.prod(small) + 1
        small.append(min(n, 2 if d == 0 else left) if left > 1 else 1)
    ordered, order = addresses(tuple(small), stride).sort(stable=True)
    at = int((ordered[1:] == ordered[:-1]).nonzero()[0, 0])
    return _unravel(int(order[at]), tuple(small)), _unravel(int(order[at + 1]), tuple(small))


def _unravel(flat: int, shape: Shape) -> Shape:
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat, device="cpu"), shape))


def refuse_computed(param: Tensor, where: str) -> None:
    """Raise for a tensor that is computed at every access, such as the weight of a parametrized layer.

    Views of a parameter share its memory, so that they may be changed.
    """
    if not isinstance(param, Tensor):
        raise SparsityError(f"{where}the parameter must be a tensor, got {type(param).__name__}")
    is_temporary = not param.is_leaf and (param._base is None or not param._base.is_leaf)
    if is_temporary or getattr(param, "is_masked_weight", False):
        raise SparsityError(
            f"{where}this tensor is computed from others, so that changes of it would be lost. For the weight of a "
            "prepared (parametrized) layer give the parameter behind it, layer.parametrizations.weight.original; "
            "else a parameter or a detached tensor."
        )
