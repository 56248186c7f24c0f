"""`View`, a strided window (shape, stride, offset) on one parameter, without a copy.

Strides count elements of the parameter's own memory, so a channels_last or transposed weight is addressed as it is
stored. Every index of a window is an element of the parameter, and no element has two indices. `where` in signatures is
the opening words of an error message.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..errors import SparsityError
from .tiles import Shape, addresses, cosize, row_major, split, tiles_of


class View:
    """Look at elements of a parameter through a strided window, without a copy.

    The address of index i is `o + offset + sum(i_k * stride_k)`, where o is the storage offset of the parameter.

    Args:
        param: A tensor of any rank, dtype and strides, on any device (also meta).
        shape: The size of each dimension of the window.
        stride: The stride of each dimension, in elements of the parameter's memory.
        offset: The address of the window's first element, in elements from the parameter's first one; 0 by default.
        name: The first words of error messages.

    Raises:
        SparsityError: `shape` and `stride` differ in length, an address is outside of the parameter, or two indices
            have the same address (also a `ValueError`).

    >>> w = torch.arange(8.0).reshape(2, 4)
    >>> View(w, (2, 2, 2), (4, 1, 2)).data[0]
    tensor([[0., 2.],
            [1., 3.]])
    """

    __slots__ = ("_strides", "name", "offset", "param", "shape", "stride")

    def __init__(
        self, param: Tensor, shape: Sequence[int], stride: Sequence[int], offset: int = 0, *, name: str | None = None
    ) -> None:
        self.param, self.offset, self.name = param, offset, name
        refuse_computed(param, self.prefix())
        self.shape: Shape = tuple(shape)
        self.stride: Shape = tuple(stride)
        self._strides = param.stride()  # the memory layout that the window's strides refer to
        for what, numbers in (("shape", self.shape), ("stride", self.stride), ("offset", (offset,))):
            if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in numbers):
                raise SparsityError(f"{self.prefix()}view {what} must be non-negative ints, got {numbers}")
        _check_window(tuple(param.shape), self._strides, self.shape, self.stride, offset, self.prefix())

    @classmethod
    def from_existing(cls, param: "Tensor | View", *, name: str | None = None) -> "View":
        """Return a view of the whole parameter with its own shape and strides; a `View` is returned unchanged."""
        if isinstance(param, View):
            return param
        where = f"{name}: " if name else ""
        refuse_computed(param, where)
        view = cls.__new__(cls)
        view.param, view.offset, view.name = param, 0, name
        view.shape, view.stride, view._strides = tuple(param.shape), param.stride(), param.stride()
        refuse_expanded(view.shape, view.stride, where)
        return view

    @classmethod
    def from_function(cls, param: Tensor, function: Any, *, name: str | None = None) -> "View":
        """Return the window that `function(param)` returns, where `function` is any chain of torch view operations.

        >>> View.from_function(torch.zeros(6, 4), lambda w: w.unflatten(0, (2, 3)))
        View(shape=(2, 3, 4), stride=(12, 4, 1), offset=0)
        """
        base = param.detach()
        view = function(base)
        where = f"{name}: " if name else ""
        if not isinstance(view, Tensor):
            raise SparsityError(f"{where}the view function must return a tensor, got {type(view).__name__}")
        if view.dtype != base.dtype:
            raise SparsityError(f"{where}the view function must keep the dtype {base.dtype}, got {view.dtype}")
        if view.untyped_storage()._cdata != base.untyped_storage()._cdata:
            raise SparsityError(
                f"{where}the view function returned a copy, not a view. Use view, unflatten, permute or transpose, "
                "or make the parameter contiguous first."
            )
        offset = int(view.storage_offset() - param.storage_offset())
        return cls(param, tuple(view.shape), view.stride(), offset, name=name)

    def window(self, t: Tensor) -> Tensor:
        """Return this window on another tensor of the parameter's shape: a view of it if strides agree, else a copy.

        Raises:
            SparsityError: The shape of `t` is not that of the parameter.
        """
        if t.shape != self.param.shape:
            raise SparsityError(
                f"{self.prefix()}values must have the parameter's shape {tuple(self.param.shape)}, got {tuple(t.shape)}"
            )
        t = t.detach()
        if t.stride() != self._strides and not self.is_aligned(t):
            t = torch.empty_strided(self.param.shape, self._strides, dtype=t.dtype, device=t.device).copy_(t)
        return t.as_strided(self.shape, self.stride, t.storage_offset() + self.offset)

    def is_aligned(self, t: Tensor) -> bool:
        """Return whether t has the strides of the parameter, dimensions of size 1 aside."""
        return all(n <= 1 or a == b for n, a, b in zip(t.shape, t.stride(), self._strides, strict=True))

    def new_mask(self) -> Tensor:
        """Return a mask of True with the parameter's shape, strides and device."""
        empty = torch.empty_strided(self.param.shape, self._strides, dtype=torch.bool, device=self.param.device)
        return empty.fill_(True)

    @property
    def data(self) -> Tensor:
        """The window's elements in the parameter's own memory, outside autograd; assigning to `data` writes them."""
        if not self.is_aligned(self.param):
            raise SparsityError(
                f"{self.prefix()}the parameter's strides changed from {self._strides} to {self.param.stride()} since "
                "this view was made; make the view again"
            )
        return self.window(self.param)

    @data.setter
    def data(self, values: Tensor) -> None:
        self.data.copy_(values)

    @property
    def ndim(self) -> int:
        """The number of dimensions of the window."""
        return len(self.shape)

    def numel(self) -> int:
        """The number of elements in the window."""
        return math.prod(self.shape)

    @property
    def cosize(self) -> int:
        """The window's largest address plus one, counted from the parameter's first element."""
        return cosize(self.shape, self.stride, self.offset)

    def linear_offset(self, idx: Sequence[int] | Tensor) -> Any:
        """Return the address of an index, in elements from the parameter's first one.

        Args:
            idx: One index, or an integer tensor of them [..., ndim].

        Returns:
            An int; for a tensor of indices, an int64 tensor of its leading shape.

        >>> view = View(torch.zeros(2, 4), (2, 2), (4, 2), 1)
        >>> view.linear_offset((1, 1)), view.linear_offset(torch.tensor([[0, 0], [1, 1]]))
        (7, tensor([1, 7]))
        """
        if isinstance(idx, Tensor):
            return self.offset + (self._checked(idx) * idx.new_tensor(self.stride, dtype=torch.int64)).sum(-1)
        if not all(hasattr(i, "__index__") for i in idx):
            raise SparsityError(f"{self.prefix()}an index must consist of ints, got {tuple(idx)}")
        if len(idx) != self.ndim or any(not 0 <= i < s for i, s in zip(idx, self.shape, strict=True)):
            raise SparsityError(f"{self.prefix()}index {tuple(idx)} is out of bounds for the view {self.shape}")
        return self.offset + sum(i * d for i, d in zip(idx, self.stride, strict=True))

    def to_param_rc(self, idx: Sequence[int] | Tensor) -> tuple[Any, Any]:
        """Return the (row, column) in the parameter of an index of the window, whatever the strides.

        The row is the first dimension; the column counts the others row-major (0 for a 1-D parameter). Indices may be
        an integer tensor [..., ndim]; rows and columns are then int64 of its leading shape.

        >>> View.from_existing(torch.zeros(3, 4).t()).to_param_rc((1, 2))
        (1, 2)
        """
        address = self.linear_offset(idx)
        addresses = address if isinstance(address, Tensor) else torch.tensor(address, device="cpu")
        at = coordinates_of(addresses, tuple(self.param.shape), self._strides)
        columns = [c * d for c, d in zip(at[1:], row_major(self.param.shape[1:]), strict=True)]
        zeros = torch.zeros_like(addresses)
        row, column = (at[0] if at else zeros), sum(columns, zeros)
        return (row, column) if isinstance(address, Tensor) else (int(row), int(column))

    def _checked(self, idx: Tensor) -> Tensor:
        """Return indices as int64. Raise an error unless they are integers [..., ndim] inside the window."""
        if idx.is_floating_point() or idx.dtype == torch.bool or not idx.ndim or idx.shape[-1] != self.ndim:
            raise SparsityError(
                f"{self.prefix()}indices must be an integer tensor [..., {self.ndim}], got {idx.dtype} "
                f"{tuple(idx.shape)}"
            )
        outside = ((idx < 0) | (idx >= idx.new_tensor(self.shape))).any(-1)
        if bool(outside.any()):
            first = tuple(idx[outside][0].tolist())
            raise SparsityError(f"{self.prefix()}index {first} is out of bounds for the view {self.shape}")
        return idx.long()

    def block_view_of(self, t: Tensor, block_shape: Sequence[int], reorder: bool = True, merge: bool = False) -> Tensor:
        """Cut a tensor of the parameter's or the window's shape into blocks.

        Args:
            t: A tensor of the parameter's shape, from which the window is taken, or one of the window's shape.
            block_shape: As for `BlockSpec`; it must divide the window.
            reorder: True gives (*grid, *block); False interleaves (g0, b0, g1, b1, ...).
            merge: With `reorder`, the block's dimensions become one: (*grid, elements of a block).

        Returns:
            A view of t if its strides allow it (always without `merge`, if t has the parameter's strides), else a copy.
        """
        is_window = t.shape == self.shape and t.shape != self.param.shape
        return tiles_of(t.detach() if is_window else self.window(t), self._tile(block_shape), reorder, merge)

    def broadcast_block_to_element(self, values: Tensor, block_shape: Sequence[int], fake: bool = False) -> Tensor:
        """Give every element the value of its block.

        Args:
            values: A tensor of any dtype and device, whose shape broadcasts to the grid's.
            block_shape: As for `BlockSpec`; it must divide the window.
            fake: If True, return the expanded view (g0, b0, g1, b1, ...), which has strides of 0 and takes no memory.

        Returns:
            A tensor of the window's shape, or that view.
        """
        tile = self._tile(block_shape)
        grid = tuple(s // b for s, b in zip(self.shape, tile, strict=True))
        try:
            values = values.expand(grid)
        except RuntimeError:
            raise SparsityError(
                f"{self.prefix()}block values must have the grid's shape {grid}, got {tuple(values.shape)}"
            ) from None
        spread = values[tuple(i for _ in grid for i in (slice(None), None))]
        spread = spread.expand([n for g, b in zip(grid, tile, strict=True) for n in (g, b)])
        return spread if fake else spread.reshape(self.shape)

    def apply_multiplier(self, c: Tensor, block_shape: Sequence[int]) -> None:
        """Multiply every block of the parameter by its entry of `c`, in the grid's shape, in place."""
        tiles = split(self.data, self._tile(block_shape))
        tiles.mul_(self.broadcast_block_to_element(c, block_shape, fake=True).to(tiles.dtype))

    def apply_mask(self, mask: Tensor, block_shape: Sequence[int]) -> None:
        """Zero the parameter's blocks where `mask` (bool, of the grid's shape) is True, unlike other masks."""
        if mask.dtype != torch.bool:
            raise SparsityError(
                f"{self.prefix()}apply_mask needs a bool mask (True = zero the block), got {mask.dtype}; "
                "compare it first, such as mask != 0"
            )
        tiles = split(self.data, self._tile(block_shape))
        tiles.masked_fill_(self.broadcast_block_to_element(mask, block_shape, fake=True), 0)

    def write_back(self, window: Tensor, target: Tensor) -> None:
        """Copy a window back to the tensor that `window` made it from, unless it is an alias of it."""
        if target.stride() == self._strides or self.is_aligned(target):
            return
        full = torch.empty_strided(self.param.shape, self._strides, dtype=target.dtype, device=target.device)
        self.window(full.copy_(target)).copy_(window)  # another view may have written the rest of the target
        target.detach().copy_(full)

    def _tile(self, block_shape: Sequence[int]) -> Shape:
        return resolve_tile("block", self.shape, block_shape, where=self.prefix())

    def prefix(self) -> str:
        """Return the first words of an error: the name, if there is one."""
        return f"{self.name}: " if self.name else ""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, View):
            return NotImplemented
        same = (self.shape, self.stride, self.offset) == (other.shape, other.stride, other.offset)
        return same and self.param is other.param

    def __hash__(self) -> int:
        return hash((id(self.param), self.shape, self.stride, self.offset))

    def __repr__(self) -> str:
        return f"View(shape={self.shape}, stride={self.stride}, offset={self.offset})"


def coordinates_of(address: Tensor, shape: Shape, stride: Shape) -> list[Tensor]:
    """Return the index of the tensor's element at each address, the inverse of `sum(i_k * stride_k)`."""
    at, rest = [torch.zeros_like(address)] * len(shape), address
    for k in sorted((k for k in range(len(shape)) if shape[k] > 1), key=lambda k: -stride[k]):
        at[k], rest = rest // stride[k], rest % stride[k]
    if bool((rest != 0).any()) or any(bool((i >= n).any()) for i, n in zip(at, shape, strict=True)):
        ordered, order = addresses(shape, stride).sort()  # strides that are not nested: look it up
        flat = order[torch.searchsorted(ordered, address.cpu())].to(address.device)
        return list(torch.unravel_index(flat, shape))
    return at


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether addresses are exactly 0 .. numel-1, each once (contiguous in some order of dimensions)."""
    expected = 1
    for d, n in sorted((d, n) for n, d in zip(shape, stride, strict=True) if n != 1):
        if d != expected:
            return False
        expected *= n
    return True


def resolve_tile(
    kind: str, sizes: Sequence[int], tile: Sequence[int], *, edge: str = "error", where: str = ""
) -> Shape:
    """Check a block or scope shape of a user, and return it as one positive int for each dimension of `sizes`.

    An entry of -1 means the whole dimension, as does a missing entry of a `"scope"`; () of a `"block"` means all ones.
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
    needs, resolved = f"{where}{kind} {full} needs", []
    for k, (entry, size) in enumerate(zip(full, sizes, strict=True)):
        at = f"{'dimension' if kind == 'block' else 'block-grid dimension'} {k}"
        if isinstance(entry, bool) or not isinstance(entry, int):
            raise SparsityError(f"{needs} an int at {at}, got {entry!r}")
        if entry < 1 and entry != -1:
            raise SparsityError(f"{needs} a positive size (or -1 for all) at {at}, got {entry}")
        if size % entry and edge == "error":
            remedy = 'Use edge="partial", or leave the tensor out.'
            raise SparsityError(f"{needs} {at} divisible by {entry}, got {size}. {remedy}")
        resolved.append(max(size, 1) if entry == -1 else entry)
    return tuple(resolved)


@lru_cache(maxsize=4096)
def _check_window(
    param_shape: Shape, param_stride: Shape, shape: Shape, stride: Shape, offset: int, where: str
) -> None:
    """Check that a window contains only elements of the parameter, and none of them twice."""
    if len(shape) != len(stride):
        raise SparsityError(
            f"{where}a view needs one stride for each dimension, got shape {shape} ({len(shape)}) "
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
    if not is_dense(param_shape, param_stride):
        is_parameter = torch.zeros(last + 1, dtype=torch.bool, device="cpu")
        is_parameter.as_strided(param_shape, param_stride).fill_(True)
        if not is_parameter.as_strided(shape, stride, offset).all():
            raise SparsityError(
                f"{view} with offset {offset} contains elements that are not the parameter's: "
                f"{param_shape}:{param_stride} is a slice of a larger tensor"
            )
    if not is_injective(shape, stride):
        first, second = _overlap(shape, stride)
        raise SparsityError(
            f"{view}: strides overlap: indices {first} and {second} map to one element. Use strides under which every "
            "index has its own element."
        )


def refuse_expanded(shape: Shape, stride: Shape, where: str = "") -> None:
    """Raise an error if elements of a parameter share memory, because a mask cannot drop one of them alone."""
    if 0 not in shape and not is_injective(shape, stride):
        raise SparsityError(
            f"{where}the parameter {shape}:{stride} is expanded: several of its elements share memory. Make it "
            "contiguous first."
        )


def is_injective(shape: Shape, stride: Shape) -> bool:
    """Return whether every index has an address of its own."""
    end = 0
    for d, n in sorted(zip(stride, shape, strict=True)):
        if n <= 1:
            continue
        if d == 0:
            return False
        if d <= end:  # strides that are not nested: count the addresses
            fits = math.prod(shape) <= cosize(shape, stride)  # else some address has two indices
            return fits and int(addresses(shape, stride).unique().numel()) == math.prod(shape)
        end += (n - 1) * d
    return True


def _overlap(shape: Shape, stride: Shape) -> tuple[Shape, Shape]:
    """Return two indices with the same address; there must be such indices."""
    most = cosize(shape, stride)
    small: list[int] = []
    for n, d in zip(shape, stride, strict=True):  # few indices, but more than addresses if possible
        needed = most // math.prod(small) + 1
        small.append(min(n, 2 if d == 0 else needed) if needed > 1 else 1)
    ordered, order = addresses(tuple(small), stride).sort(stable=True)
    at = int((ordered[1:] == ordered[:-1]).nonzero()[0, 0])
    first, second = torch.stack(torch.unravel_index(order[at : at + 2], small), dim=1).tolist()
    return tuple(first), tuple(second)


def refuse_computed(param: Tensor, where: str) -> None:
    """Raise an error for a tensor that is computed at every access (a parametrized layer's weight), not for a view."""
    if not isinstance(param, Tensor):
        raise SparsityError(f"{where}the parameter must be a tensor, got {type(param).__name__}")
    is_temporary = not param.is_leaf and (param._base is None or not param._base.is_leaf)
    if is_temporary or getattr(param, "is_masked_weight", False):
        raise SparsityError(
            f"{where}this tensor is computed from others, so changes to it would be lost. For the weight of a "
            "prepared (parametrized) layer give the parameter behind it, layer.parametrizations.weight.original; "
            "else a parameter or a detached tensor."
        )
