"""Couplings: blocks of several tensors that are kept or dropped together, scopes of several that share one budget.

Grids are aligned by permutations; grids that differ are an error. Everything else is inherited from `SparseBlock` and
`SparseScope`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import Tensor

from ..errors import CouplingError, SparsityError
from ..selection.strides import Shape
from ..selection.tiling import aligned_grid
from .block import BlockSpec, SparseBlock
from .scope import ScopeSpec
from .sparse_scope import ScopeMember, SparseScope

__all__ = ["BlockCoupling", "ScopeCoupling"]


class BlockCoupling(SparseBlock):
    """Blocks of several tensors that are kept or dropped together: `B_ref[k] = B_j[order_j(k)]`.

    Args:
        specs: the members; the first one's grid is the reference. Missing grid dimensions have size 1, so a bias
            couples with a weight's rows.
        orders: for each member None, or a permutation: aligned dimension k is the member's dimension order[k].
        name: opening words of error messages.

    Raises:
        CouplingError: aligned grids differ, or an order is no permutation.

    >>> up, down = torch.ones(4, 3), torch.ones(3, 4)  # rows of up go with columns of down
    >>> c = BlockCoupling([BlockSpec(up, (1, -1)), BlockSpec(down, (-1, 1))], orders=[None, (1, 0)])
    >>> c.grid_shape, c.numel_per_block()
    ((4, 1), 6)
    """

    def __init__(
        self, specs: Sequence[BlockSpec], orders: Sequence[Sequence[int] | None] | None = None, name: str | None = None
    ) -> None:
        self.name = name
        _check_distinct(specs, self._where())
        full, self.grid_shape = _aligned("block", specs, orders, self._where())
        self._members = list(zip(specs, full, strict=True))

    def members(self) -> "list[tuple[BlockSpec, Shape]]":
        """The members with their orders."""
        return list(self._members)

    @property
    def data(self) -> tuple[Tensor, ...]:
        """Live aliases of the members' elements."""
        return tuple(spec.data for spec in self.blocks())

    def __repr__(self) -> str:
        return f"BlockCoupling({self.blocks()!r})"


class ScopeCoupling(SparseScope):
    """Scopes of several block grids that share one budget: their blocks compete with each other.

    Args:
        scopes: the members, which may have different counts of blocks in a scope; budgets count all of them.
        orders: for each member None, or a permutation: aligned scope dimension k is the member's dimension order[k].
        name: opening words of error messages.

    Raises:
        CouplingError: aligned scope grids differ, or an order is no permutation.

    >>> a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0])
    >>> c = ScopeCoupling([ScopeSpec(BlockSpec(a)), ScopeSpec(BlockSpec(b))])
    >>> [m.tolist() for m in c.get_masks(2).values()]
    [[False, True], [True]]
    """

    def __init__(
        self, scopes: Sequence[ScopeSpec], orders: Sequence[Sequence[int] | None] | None = None, name: str | None = None
    ) -> None:
        self.name = name
        _check_distinct([spec for s in scopes for spec in s.block.blocks()], self._where())
        full, self.grid_shape = _aligned("scope", scopes, orders, self._where())
        self._specs, self._members = list(scopes), []
        for s, order in zip(scopes, full, strict=True):
            # dimensions that a member lacks have one scope each, so they do not change the order of its scopes
            own = tuple(k for k in order if k < len(s.shape))
            self._members.append(ScopeMember(block=s.block, shape=s.shape, order=own, name=s.name))

    def members(self) -> list[ScopeMember]:
        """The members with their orders."""
        return list(self._members)

    def block_to_scope(self, t: Mapping[SparseBlock, Tensor], reorder: bool = True, merge: bool = False) -> Tensor:
        """Tensors of the members' block grids as (*scope grid, blocks per scope of all members); needs `merge=True`."""
        if not (reorder and merge):
            raise SparsityError(f"{self._where()}members may differ in shape; use merge=True")
        rows = self._rows_of(t, "t")
        assert rows is not None
        return rows.reshape([*self.grid_shape, rows.shape[1]])

    def scope_to_block(self, t: Tensor, reorder: bool = True) -> dict[SparseBlock, Tensor]:
        """The inverse of `block_to_scope`: {block: tensor of its grid's shape}."""
        want = (*self.grid_shape, self.numblk_per_scope())
        if not reorder or tuple(t.shape) != want:
            raise SparsityError(f"{self._where()}scope_to_block takes {want}, got {tuple(t.shape)}")
        return dict(self._grids_of(t.reshape(self.numscp(), want[-1])))

    def __repr__(self) -> str:
        return f"ScopeCoupling({self._specs!r})"


def _check_distinct(specs: Sequence[BlockSpec], where: str) -> None:
    for spec, times in Counter(specs).items():
        if times > 1:
            raise CouplingError(f"{where}{spec.name or 'a block spec'} is given twice; members must be distinct")


def _aligned(
    kind: str, specs: Sequence[BlockSpec | ScopeSpec], given: Sequence[Sequence[int] | None] | None, where: str
) -> tuple[list[Shape], Shape]:
    """A checked permutation for each member, of all aligned dimensions (() is the identity), and the aligned grid."""
    if not specs:
        raise CouplingError(f"{where}a coupling needs at least one member")
    orders = list(given) if given is not None else [None] * len(specs)
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
                f"has {grids[0]}. Give an order that permutes one onto the other, or other blocks and scopes."
            )
    return full, grids[0]
