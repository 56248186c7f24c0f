"""Blocks, the elements that are kept or dropped together, with their norms, masks and multipliers.

`SparseBlock` is the base class of `BlockSpec`, the blocks of one tensor, and of `BlockCoupling`, blocks of several
tensors whose grids are aligned by permutations.
"""

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from ..errors import CouplingError, SparsityError
from .thresholds import Thresholded, Values
from .tiles import Shape, aligned_grid, from_aligned, grid_of
from .view import View, is_dense, resolve_tile
from .windows import ScopeWindows, Window, block_scores, elements_of, fill_mask


class SparseBlock(Thresholded):
    """Base class of `BlockSpec` and `BlockCoupling`: blocks on one grid.

    Arguments called `values` have the parameters' shapes: one tensor for a `BlockSpec`, a mapping {parameter: tensor}
    for a `BlockCoupling`. None means the parameters themselves. `grid_shape` is the number of blocks along each
    dimension of the grid; the grids of coupled tensors are first aligned by permutations.
    """

    edge: str

    @abstractmethod
    def members(self) -> "list[tuple[BlockSpec, Shape]]":
        """Return each spec with its order: dimension k of the aligned grid is its order[k], and () is the identity."""

    @property
    def grid_ndim(self) -> int:
        """The number of dimensions of the aligned grid."""
        return len(self.grid_shape)

    def blocks(self) -> "list[BlockSpec]":
        """The specs of all members, in order."""
        return [spec for spec, _ in self.members()]

    def parameters(self) -> list[Tensor]:
        """The distinct parameters of all members, in order."""
        return list({id(b.view.param): b.view.param for b in self.blocks()}.values())

    def numblk(self) -> int:
        """The number of blocks."""
        return math.prod(self.grid_shape)

    def numel(self) -> int:
        """The number of elements in all blocks together."""
        return sum(b.view.numel() for b in self.blocks())

    def numel_per_block(self) -> int:
        """The number of elements of one full block, over all members."""
        return sum(math.prod(b.shape) for b in self.blocks())

    def nnz(self, eps: float = 1e-8) -> int:
        """Return how many elements are larger than `eps` in magnitude, or NaN.

        >>> block = BlockSpec(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), (1, 2))
        >>> block.nnz(), block.nnz_blocks()
        (1, 1)
        """
        windows = [b.view.window(b.view.param) for b in self.blocks()]
        return sum(int((~((window >= -eps) & (window <= eps))).sum()) for window in windows)

    def nnz_blocks(self, eps: float = 1e-8) -> int:
        """Return how many blocks have an element that is larger than `eps` in magnitude, or NaN."""
        return int((~(self.norms(p=float("inf")) <= eps)).sum())

    def norms(self, values: Values = None, p: float = 2) -> Tensor:
        """Return the p-norm of every block over all members, `(sum_j ||.||_p^p)^(1/p)`.

        The result has the grid's shape, in float32 or wider. If blocks at an edge may be smaller (`edge="partial"`), it
        is the power mean over the elements of a block instead.

        Args:
            values: The tensors whose norms are computed; None means the parameters.
            p: 1, 2 or inf.
        """
        if isinstance(p, bool) or not isinstance(p, (int, float)) or p not in (1, 2, math.inf):
            raise SparsityError(f"{self.prefix()}norms: p must be 1, 2 or inf, got {p!r}")
        return block_scores(block_windows(self, values), p, self.grid_ndim)

    def min(self, values: Values = None) -> Tensor:
        """Return the smallest (signed) element of every block, in the grid's shape."""
        return self._elements(values, float("inf")).amin(-1)

    def max(self, values: Values = None) -> Tensor:
        """Return the largest (signed) element of every block, in the grid's shape."""
        return self._elements(values, float("-inf")).amax(-1)

    def reduce(self, values: Values, fn: Callable[..., Tensor]) -> Tensor:
        """Return `fn(elements, dim=-1)` of each block (`torch.sum`, `torch.amax`, ...), in the grid's shape."""
        self._refuse_partial("reduce")
        return fn(self._elements(values, 0.0), dim=-1)

    def apply_mask(self, mask: Tensor) -> None:
        """Zero every member's blocks where `mask` (bool, in the grid's shape) is True. All other masks: True = keep."""
        self._refuse_partial("apply_mask")
        for spec, order in self.members():
            spec.view.apply_mask(from_aligned(self._on_grid(mask), order, spec.grid_shape), spec.shape)

    def apply_multiplier(self, c: Tensor) -> None:
        """Multiply every member's blocks by `c` (of the grid's shape), in place."""
        self._refuse_partial("apply_multiplier")
        for spec, order in self.members():
            spec.view.apply_multiplier(from_aligned(self._on_grid(c), order, spec.grid_shape), spec.shape)

    def get_masks(self, block_mask: Tensor) -> "dict[BlockSpec, Tensor]":
        """Expand a mask of blocks, in the grid's shape, to bool masks in the parameters' shapes (True = keep).

        Elements outside a view are kept.
        """
        masks = {spec: spec.view.new_mask() for spec in self.blocks()}
        fill_mask(block_windows(self, None, masks), self._on_grid(block_mask).bool())
        # a slice of a larger tensor leaves gaps in memory; users get a mask without them
        return {s: m if is_dense(m.shape, m.stride()) else m.contiguous() for s, m in masks.items()}

    def _windows(self, values: Values = None) -> list[ScopeWindows]:
        """Scopes of one block each."""
        return [ScopeWindows(windows=block_windows(self, values), shape=(1,) * self.grid_ndim)]

    def _elements(self, values: Values, fill: float) -> Tensor:
        """(*grid, elements of the block over all members), padded by `fill`."""
        return elements_of(block_windows(self, values), self.grid_ndim, fill)

    def _on_grid(self, t: Tensor) -> Tensor:
        if tuple(t.shape) != self.grid_shape:
            raise SparsityError(
                f"{self.prefix()}expected a tensor of the block grid's shape {self.grid_shape}, got {tuple(t.shape)}"
            )
        return t

    def _refuse_partial(self, what: str) -> None:
        for b in self.blocks():
            if b.is_partial:
                raise SparsityError(
                    f"{b.prefix()}{what} needs whole blocks; block {b.shape} leaves partial ones on {b.view.shape}"
                )


class BlockSpec(SparseBlock):
    """Cut a parameter, or a `View` of it, into blocks of equal shape.

    Args:
        view_or_param: A `View`, or a parameter as it is. Element i belongs to the block floor(i / shape).
        shape: Number of elements of a block along each dimension. () means single elements, and -1 the whole dimension.
        name: The first words of error messages.
        edge: With `"partial"`, the last block of a dimension may be smaller; with `"error"` (default) it may not.

    Raises:
        SparsityError: The shape does not fit the view, or the parameter is complex (also a `ValueError`).

    >>> b = BlockSpec(torch.arange(8.0).reshape(2, 4), (1, 2))
    >>> b.grid_shape, b.norms(p=1)
    ((2, 2), tensor([[ 1.,  5.],
            [ 9., 13.]]))
    """

    def __init__(
        self, view_or_param: View | Tensor, shape: Sequence[int] = (), name: str | None = None, *, edge: str = "error"
    ) -> None:
        self.view = View.from_existing(view_or_param, name=name)
        self.name = name if name is not None else self.view.name
        self.edge = edge
        if self.view.param.is_complex():
            raise SparsityError(
                f"{self.prefix()}blocks need real numbers, but the parameter is {self.view.param.dtype}; give "
                "torch.view_as_real(parameter), whose last dimension has the real and the imaginary part"
            )
        self.shape = resolve_tile("block", self.view.shape, shape, edge=edge, where=self.prefix())
        self.grid_shape = grid_of(self.view.shape, self.shape)

    def members(self) -> "list[tuple[BlockSpec, Shape]]":
        """The spec itself."""
        return [(self, ())]

    @property
    def data(self) -> Tensor:
        """The view's elements, which share the parameter's memory; see `View.data`."""
        return self.view.data

    @property
    def is_partial(self) -> bool:
        """Whether some last block is smaller than the others."""
        return any(size % n for size, n in zip(self.view.shape, self.shape, strict=True))

    def block_view(self, values: Tensor | None = None, reorder: bool = True, merge: bool = False) -> Tensor:
        """Return a tensor of the parameter's shape cut into blocks; see `View.block_view_of`."""
        self._refuse_partial("block_view")
        return self.view.block_view_of(self.view.param if values is None else values, self.shape, reorder, merge)

    def __repr__(self) -> str:
        return f"BlockSpec({self.view!r}, shape={self.shape})"


class BlockCoupling(SparseBlock):
    """Couple blocks of several tensors, so that they are kept or dropped together: `B_ref[k] = B_j[order_j(k)]`.

    Args:
        specs: A sequence of `BlockSpec`s, the members. The grid of the first one is the reference. Missing grid
            dimensions have size 1, so a bias can be coupled with a weight's rows.
        orders: For each member None, or a permutation: dimension k of the aligned grid is the member's dimension
            order[k].
        name: The first words of error messages.

    Raises:
        CouplingError: The aligned grids differ, or an order is not a permutation.

    >>> up, down = torch.ones(4, 3), torch.ones(3, 4)  # rows of up go with columns of down
    >>> c = BlockCoupling([BlockSpec(up, (1, -1)), BlockSpec(down, (-1, 1))], orders=[None, (1, 0)])
    >>> c.grid_shape, c.numel_per_block()
    ((4, 1), 6)
    """

    def __init__(
        self, specs: Sequence[BlockSpec], orders: Sequence[Sequence[int] | None] | None = None, name: str | None = None
    ) -> None:
        self.name = name
        full, self.grid_shape = aligned_members(BlockSpec, specs, orders, self.prefix())
        self._members = list(zip(specs, full, strict=True))
        self.edge = "partial" if any(spec.edge == "partial" for spec in specs) else "error"

    def members(self) -> "list[tuple[BlockSpec, Shape]]":
        """The members with their orders."""
        return list(self._members)

    @property
    def data(self) -> tuple[Tensor, ...]:
        """The members' elements, which share the parameters' memory."""
        return tuple(spec.data for spec in self.blocks())

    def __repr__(self) -> str:
        return f"BlockCoupling({self.blocks()!r})"


def aligned_members(
    kind: type, specs: Sequence[Thresholded], orders: Sequence[Sequence[int] | None] | None, where: str
) -> tuple[list[Shape], Shape]:
    """Check the members of a coupling, which are of one kind, `BlockSpec` or `ScopeSpec`, and their orders.

    Returns a permutation for each member, of all aligned dimensions (() is the identity), and the aligned grid.
    """
    what = kind.__name__.removesuffix("Spec").lower()  # "block" or "scope"
    if not isinstance(specs, (list, tuple)) or not all(isinstance(s, kind) for s in specs):
        found: list[object] = [*specs] if isinstance(specs, (list, tuple)) else [specs]
        names = ", ".join(dict.fromkeys(type(s).__name__ for s in found))
        raise SparsityError(f"{where}{what.title()}Coupling takes a list of {kind.__name__}, got {names}")
    for (view, shape), times in Counter((spec.view, spec.shape) for s in specs for spec in s.blocks()).items():
        if times > 1:
            raise CouplingError(
                f"{where}the blocks {shape} of {view.name or 'a view'} are given twice; members must be distinct"
            )
    if not specs:
        raise CouplingError(f"{where}a coupling needs at least one member")
    orders = [None] * len(specs) if orders is None else orders
    if len(orders) != len(specs):
        raise CouplingError(f"{where}{len(specs)} members but {len(orders)} orders; give one for each member, or None")
    ndim = max(len(s.grid_shape) for s in specs)
    full = [() if order is None else (*order, *range(len(order), ndim)) for order in orders]
    for order, permutation, s in zip(orders, full, specs, strict=True):
        if order is not None and sorted(permutation) != list(range(ndim)):
            raise CouplingError(
                f"{where}{s.name or 'a member'}: order {tuple(order)} is not a permutation of the {ndim} aligned grid "
                "dimensions"
            )
    grids = [aligned_grid(s.grid_shape, order, ndim) for s, order in zip(specs, full, strict=True)]
    for grid, s in zip(grids, specs, strict=True):
        if grid != grids[0]:
            raise CouplingError(
                f"{where}{s.name or 'a member'} has the aligned {what} grid {grid}, but {specs[0].name or 'the first'} "
                f"has {grids[0]}. Give an order that permutes one onto the other, or name the shared units by axes, as "
                'a Coupling({tensor: axes}) does ("(u d) i" and "o (u d)" for heads and the columns that read them).'
            )
    return full, grids[0]


def block_windows(
    block: SparseBlock, values: Values = None, masks: Mapping[BlockSpec, Tensor] | None = None
) -> tuple[Window, ...]:
    """A block's members as `selection` takes them: windows on the values, and on the masks ({block: mask}) if given."""
    if isinstance(values, Tensor) and len(block.parameters()) > 1:
        raise SparsityError(f"{block.prefix()}coupled blocks take values as a mapping {{parameter: tensor}}")
    windows = []
    for spec, order in block.members():
        param = spec.view.param
        if isinstance(values, Mapping) and param not in values:
            raise SparsityError(f"{spec.prefix()}values hold no tensor for this parameter")
        scored = param if values is None else values if isinstance(values, Tensor) else values[param]
        mask = None if masks is None else spec.view.window(masks[spec])
        windows.append(Window(shape=spec.shape, values=spec.view.window(scored), mask=mask, order=order))
    return tuple(windows)
