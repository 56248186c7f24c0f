"""Blocks: the elements that are kept or dropped together, and their norms, masks and multipliers.

`SparseBlock` is the base class of one tensor's blocks (`BlockSpec`) and coupled ones (`BlockCoupling`), whose grids are
aligned by permutations.
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
    """Blocks on one aligned grid; base class of `BlockSpec` and `BlockCoupling`.

    `values` arguments are always parameter-shaped tensors: one tensor for a `BlockSpec`, a mapping
    {parameter: tensor} for coupled ones; None means the parameters themselves. `grid_shape` counts the blocks along
    each dimension of the aligned grid.
    """

    edge: str

    @abstractmethod
    def members(self) -> "list[tuple[BlockSpec, Shape]]":
        """Every spec with its order: aligned grid dimension k is the spec's dimension order[k] (() = identity)."""

    @property
    def grid_ndim(self) -> int:
        """Dimensions of the aligned grid."""
        return len(self.grid_shape)

    def blocks(self) -> "list[BlockSpec]":
        """The specs of all members, in order."""
        return [spec for spec, _ in self.members()]

    def parameters(self) -> list[Tensor]:
        """The distinct parameters of all members, in order."""
        return list({id(b.view.param): b.view.param for b in self.blocks()}.values())

    def numblk(self) -> int:
        """Number of blocks."""
        return math.prod(self.grid_shape)

    def numel(self) -> int:
        """Number of elements in all blocks together."""
        return sum(b.view.numel() for b in self.blocks())

    def numel_per_block(self) -> int:
        """Elements of one full block, over all members."""
        return sum(math.prod(b.shape) for b in self.blocks())

    def nnz(self, eps: float = 1e-8) -> int:
        """Elements larger than eps in magnitude (or NaN).

        >>> block = BlockSpec(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), (1, 2))
        >>> block.nnz(), block.nnz_blocks()
        (1, 1)
        """
        return sum(int((~(b.view.window(b.view.param).abs() <= eps)).sum()) for b in self.blocks())

    def nnz_blocks(self, eps: float = 1e-8) -> int:
        """Blocks with any element larger than eps in magnitude (or NaN)."""
        return int((~(self.norms(p=float("inf")) <= eps)).sum())

    def norms(self, values: Values = None, p: float = 2) -> Tensor:
        """The p-norm of every block, `(sum_j ||.||_p^p)^(1/p)` over members; float32 or wider, of the grid's shape.

        With partial edges it is the power mean over the elements of a block.

        Args:
            values: What the norms are taken of; None means the parameters.
            p: 1, 2 or inf.
        """
        if isinstance(p, bool) or not isinstance(p, (int, float)) or p not in (1, 2, math.inf):
            raise SparsityError(f"{self._where()}norms: p must be 1, 2 or inf, got {p!r}")
        return block_scores(block_windows(self, values), p, self.grid_ndim)

    def min(self, values: Values = None) -> Tensor:
        """Smallest (signed) element of every block, of the grid's shape."""
        return self._elements(values, float("inf")).amin(-1)

    def max(self, values: Values = None) -> Tensor:
        """Largest (signed) element of every block, of the grid's shape."""
        return self._elements(values, float("-inf")).amax(-1)

    def reduce(self, values: Values, fn: Callable[..., Tensor]) -> Tensor:
        """`fn(elements, dim=-1)` over each block's elements, such as torch.sum or torch.amax; of the grid's shape."""
        self._refuse_partial("reduce")
        return fn(self._elements(values, 0.0), dim=-1)

    def apply_mask(self, mask: Tensor) -> None:
        """Zero every member's blocks where `mask` (bool, of the grid's shape) is True; other masks keep where True."""
        self._refuse_partial("apply_mask")
        for spec, order in self.members():
            spec.view.apply_mask(from_aligned(self._on_grid(mask), order, spec.grid_shape), spec.shape)

    def apply_multiplier(self, c: Tensor) -> None:
        """Multiply every member's blocks by `c` (of the grid's shape), in place."""
        self._refuse_partial("apply_multiplier")
        for spec, order in self.members():
            spec.view.apply_multiplier(from_aligned(self._on_grid(c), order, spec.grid_shape), spec.shape)

    def get_masks(self, block_mask: Tensor) -> "dict[BlockSpec, Tensor]":
        """Parameter-shaped bool masks (True = keep) from keep decisions of the grid's shape.

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
                f"{self._where()}expected a tensor of the block grid's shape {self.grid_shape}, got {tuple(t.shape)}"
            )
        return t

    def _refuse_partial(self, what: str) -> None:
        for b in self.blocks():
            if b.is_partial:
                raise SparsityError(
                    f"{b._where()}{what} needs whole blocks; block {b.shape} leaves partial ones on {b.view.shape}"
                )


class BlockSpec(SparseBlock):
    """One View cut into blocks: the block of element i is floor(i / b).

    Args:
        view_or_param: A View, or a parameter taken as it is.
        shape: Elements of a block; () is all ones, -1 the whole dimension.
        name: Opening words of error messages.
        edge: `"partial"` allows the last block of a dimension to be smaller.

    Raises:
        SparsityError: (a ValueError) a shape that does not fit the view.

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
        self.shape = resolve_tile("block", self.view.shape, shape, edge=edge, where=self._where())
        self.grid_shape = grid_of(self.view.shape, self.shape)

    def members(self) -> "list[tuple[BlockSpec, Shape]]":
        """The spec itself."""
        return [(self, ())]

    @property
    def data(self) -> Tensor:
        """Live alias of the view's elements (see `View.data`)."""
        return self.view.data

    @property
    def is_partial(self) -> bool:
        """Whether some last block is smaller than the others."""
        return any(size % n for size, n in zip(self.view.shape, self.shape, strict=True))

    def block_view(self, values: Tensor | None = None, reorder: bool = True, merge: bool = False) -> Tensor:
        """A parameter-shaped tensor cut into blocks; see `View.block_view_of`."""
        self._refuse_partial("block_view")
        return self.view.block_view_of(self.view.param if values is None else values, self.shape, reorder, merge)

    def __repr__(self) -> str:
        return f"BlockSpec({self.view!r}, shape={self.shape})"


class BlockCoupling(SparseBlock):
    """Blocks of several tensors that are kept or dropped together: `B_ref[k] = B_j[order_j(k)]`.

    Args:
        specs: The members; the first one's grid is the reference. Missing grid dimensions have size 1, so a bias
            couples with a weight's rows.
        orders: For each member None, or a permutation: aligned dimension k is the member's dimension order[k].
        name: Opening words of error messages.

    Raises:
        CouplingError: Aligned grids differ, or an order is no permutation.

    >>> up, down = torch.ones(4, 3), torch.ones(3, 4)  # rows of up go with columns of down
    >>> c = BlockCoupling([BlockSpec(up, (1, -1)), BlockSpec(down, (-1, 1))], orders=[None, (1, 0)])
    >>> c.grid_shape, c.numel_per_block()
    ((4, 1), 6)
    """

    def __init__(
        self, specs: Sequence[BlockSpec], orders: Sequence[Sequence[int] | None] | None = None, name: str | None = None
    ) -> None:
        self.name = name
        refuse_others("BlockCoupling", specs, BlockSpec, self._where())
        check_distinct(specs, self._where())
        full, self.grid_shape = aligned_members("block", specs, orders, self._where())
        self._members = list(zip(specs, full, strict=True))
        self.edge = "partial" if any(spec.edge == "partial" for spec in specs) else "error"

    def members(self) -> "list[tuple[BlockSpec, Shape]]":
        """The members with their orders."""
        return list(self._members)

    @property
    def data(self) -> tuple[Tensor, ...]:
        """Live aliases of the members' elements."""
        return tuple(spec.data for spec in self.blocks())

    def __repr__(self) -> str:
        return f"BlockCoupling({self.blocks()!r})"


def refuse_others(coupling: str, members: object, kind: type, where: str) -> None:
    """Raise unless the members of a coupling (a class name) are a list of one kind."""
    listed = members if isinstance(members, (list, tuple)) else [members]
    if listed is not members or not all(isinstance(m, kind) for m in listed):
        names = ", ".join(dict.fromkeys(type(m).__name__ for m in listed))
        raise SparsityError(f"{where}{coupling} takes a list of {kind.__name__}, got {names}")


def check_distinct(specs: Sequence[BlockSpec], where: str) -> None:
    """Raise where a block spec is given twice."""
    for spec, times in Counter(specs).items():
        if times > 1:
            raise CouplingError(f"{where}{spec.name or 'a block spec'} is given twice; members must be distinct")


def aligned_members(
    kind: str, specs: Sequence[Thresholded], orders: Sequence[Sequence[int] | None] | None, where: str
) -> tuple[list[Shape], Shape]:
    """A checked permutation for each member, of all aligned dimensions (() is the identity), and the aligned grid."""
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
                f"{where}{s.name or 'a member'}: order {tuple(order)} is no permutation of the {ndim} aligned grid "
                "dimensions"
            )
    grids = [aligned_grid(s.grid_shape, order, ndim) for s, order in zip(specs, full, strict=True)]
    for grid, s in zip(grids, specs, strict=True):
        if grid != grids[0]:
            raise CouplingError(
                f"{where}{s.name or 'a member'} has the aligned {kind} grid {grid}, but {specs[0].name or 'the first'} "
                f"has {grids[0]}. Give an order that permutes one onto the other, or name the shared units by axes, as "
                'a Coupling({tensor: axes}) does ("(u d) i" and "o (u d)" for heads and the columns that read them).'
            )
    return full, grids[0]


def block_windows(
    block: SparseBlock, values: Values = None, masks: Mapping[BlockSpec, Tensor] | None = None
) -> tuple[Window, ...]:
    """A block's members as `selection` takes them: windows on the values, and on the masks ({block: mask}) if given."""
    if isinstance(values, Tensor) and len(block.parameters()) > 1:
        raise SparsityError(f"{block._where()}coupled blocks take values as a mapping {{parameter: tensor}}")
    windows = []
    for spec, order in block.members():
        param = spec.view.param
        if isinstance(values, Mapping) and param not in values:
            raise SparsityError(f"{spec._where()}values hold no tensor for this parameter")
        scored = param if values is None else values if isinstance(values, Tensor) else values[param]
        mask = None if masks is None else spec.view.window(masks[spec])
        windows.append(Window(shape=spec.shape, values=spec.view.window(scored), mask=mask, order=order))
    return tuple(windows)
