"""Blocks: the elements that are kept or dropped together.

`SparseBlock` is what one tensor's blocks (`BlockSpec`) and coupled ones (`coupling.BlockCoupling`) have in common.
Knows no budgets: choosing is the scope's job.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import SparsityError
from ..selection import Blocks, Scopes, block_scores, fill_mask
from ..selection.reference import element_counts
from ..selection.strides import Shape, grid_of
from ..selection.tiling import from_aligned, to_aligned
from .in_place import Settings, negative_threshold, on_grid, refuse_triton, shrink_in_place, threshold_in_place
from .layout import resolve_tile
from .threshold import shrink, shrink_conditioned
from .view import View, padded_split, public_mask

__all__ = ["BlockSpec", "SparseBlock", "Values"]

Values = Tensor | Mapping[Tensor, Tensor] | None


class SparseBlock(ABC):
    """Blocks on one aligned grid; `BlockSpec` and `BlockCoupling` are the two kinds.

    `values` arguments are always parameter-shaped tensors: one tensor for a `BlockSpec`, a mapping
    {parameter: tensor} for coupled ones; None means the parameters themselves.
    """

    name: str | None

    @abstractmethod
    def members(self) -> "list[tuple[BlockSpec, Shape]]":
        """Every spec with its order: aligned grid dimension k is the spec's dimension order[k] (() = identity)."""

    @property
    @abstractmethod
    def grid_shape(self) -> Shape:
        """Blocks along each dimension of the aligned grid."""

    @property
    def grid_ndim(self) -> int:
        """Dimensions of the aligned grid."""
        return len(self.grid_shape)

    def blocks(self) -> "list[BlockSpec]":
        """The specs that take part, in order."""
        return [spec for spec, _ in self.members()]

    def parameters(self) -> list[Tensor]:
        """The distinct parameters that take part, in order."""
        return list({id(b.view.param): b.view.param for b in self.blocks()}.values())

    def numblk(self) -> int:
        """Number of blocks."""
        return math.prod(self.grid_shape)

    def numel(self) -> int:
        """Number of elements that the blocks hold together."""
        return sum(b.view.numel() for b in self.blocks())

    def numel_per_block(self) -> int:
        """Elements of one full block, over all members."""
        return sum(math.prod(b.shape) for b in self.blocks())

    def nnz(self, eps: float = 1e-8) -> int:
        """Blocks with any element larger than eps in magnitude (or NaN)."""
        return int((~(self.norms(p=float("inf")) <= eps)).sum())

    def norms(self, values: Values = None, p: float = 2) -> Tensor:
        """The p-norm of every block, `(sum_j ||.||_p^p)^(1/p)` over members; float32 or wider, of the grid's shape.

        With partial edges it is the power mean over the elements that a block has.
        """
        return block_scores(self.operands(values), p, ndim=self.grid_ndim)

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
        """Zero every member's blocks where `mask` (bool, of the grid's shape) is True: the one inverted mask here."""
        self._refuse_partial("apply_mask")
        for spec, order in self.members():
            spec.view.apply_mask(from_aligned(self._on_grid(mask), order, spec.own_grid), spec.shape)

    def apply_multiplier(self, c: Tensor) -> None:
        """Multiply every member's blocks by `c` (of the grid's shape), in place."""
        self._refuse_partial("apply_multiplier")
        for spec, order in self.members():
            spec.view.apply_multiplier(from_aligned(self._on_grid(c), order, spec.own_grid), spec.shape)

    def get_masks(self, block_mask: Tensor) -> "dict[BlockSpec, Tensor]":
        """Parameter-shaped bool masks (True = keep) from keep decisions of the grid's shape.

        Elements outside a view are kept.
        """
        masks = {spec: spec.view.new_mask() for spec in self.blocks()}
        fill_mask(self.operands(None, masks), self._on_grid(block_mask).bool())
        return {spec: public_mask(spec.view, mask) for spec, mask in masks.items()}

    @torch.no_grad()
    def hard_threshold(self, thresholds: Tensor | float, values: Values = None, *, impl: str = "auto") -> None:
        """Zero the blocks whose norm is strictly below the threshold (equal stays), in place.

        Args:
            thresholds: a number, or a tensor that broadcasts to the grid.
            values: what the norms are taken of; None means the parameters.
            impl: `"auto"`, `"reference"` or `"triton"` (which takes no other values).
        """
        if values is None:
            t = on_grid(thresholds, self.grid_shape, self._where())
            if threshold_in_place([self.alone()], t, soft=False, factors=[1.0], impl=impl):
                return
        else:
            refuse_triton(impl, "hard_threshold by other values", self._where())
        self.zero_blocks(self.below(thresholds, values))

    @torch.no_grad()
    def soft_threshold(
        self,
        thresholds: Tensor | float,
        conditioners: Values = None,
        scale: bool = False,
        max_iter: int = 50,
        atol: float | None = None,
        eps: float = 0.0,
        *,
        impl: str = "auto",
    ) -> None:
        """Shrink every block by the prox of `t ||.||_2`, in place.

        Args:
            thresholds: t >= 0, a number or a tensor that broadcasts to the grid.
            conditioners: positive parameter-shaped diagonals (Adam's preconditioner); None is the Euclidean prox.
            scale: multiply each t by sqrt(elements of the block), so that t is per element.
            max_iter: Newton steps of the conditioned variant.
            atol: its tolerance on |phi(s) - 1|; by default 1e-6, or 1e-12 for float64.
            eps: added to the conditioners (Adam's epsilon).
            impl: `"auto"`, `"reference"` or `"triton"`.

        Raises:
            SparsityError: a negative or NaN threshold, a conditioner that is not positive, no convergence.
        """
        groups, t = [self.alone(conditioners)], on_grid(thresholds, self.grid_shape, self._where())
        factors = [math.sqrt(self.numel_per_block()) if scale else 1.0]
        settings = Settings(conditioned=conditioners is not None, max_iter=max_iter, atol=atol, eps=eps)
        if shrink_in_place(groups, t, factors=factors, settings=settings, impl=impl, where=self._where()):
            return
        self.write_elements(self.shrunk(thresholds, conditioners, scale, max_iter, atol, eps))

    def alone(self, conditioners: Values = None) -> Scopes:
        """Scopes of one block each, as kernels take them; conditioners stand where masks do."""
        return Scopes(members=self.live(conditioners), shape=(1,) * self.grid_ndim)

    def live(self, conditioners: Values = None) -> tuple[Blocks, ...]:
        """Windows on the parameters themselves, to be changed; conditioners stand where masks do."""
        for spec in self.blocks():
            _ = spec.view.data  # raises if a parameter's strides have changed
        if conditioners is None:
            return self.operands()
        windows = self.operands(conditioners)
        return tuple(replace(m, mask=h.values) for m, h in zip(self.operands(), windows, strict=True))

    def below(self, thresholds: Tensor | float, values: Values = None, as_mean: bool | None = None) -> Tensor:
        """Which blocks have a norm strictly below the threshold; bool, of the grid's shape."""
        norms = block_scores(self.operands(values), 2, ndim=self.grid_ndim, as_mean=as_mean)
        return norms < self._per_block(thresholds, norms.dtype, norms.device)

    def shrunk(
        self,
        thresholds: Tensor | float,
        conditioners: Values,
        scale: bool,
        max_iter: int,
        atol: float | None,
        eps: float,
    ) -> Tensor:
        """What `soft_threshold` writes: [blocks, elements], float32 or wider."""
        v = self._elements(None, 0.0)
        v = v.reshape(self.numblk(), v.shape[-1])
        v = v if v.dtype == torch.float64 else v.float()
        t = self._per_block(thresholds, v.dtype, v.device)
        self._check_thresholds(t)
        t = (t * self._counts().to(v.dtype).sqrt() if scale else t).reshape(-1)
        if conditioners is None:
            return shrink(v, t)
        h = self._elements(conditioners, 1.0).reshape(v.shape).to(v.dtype) + eps
        if not bool((h > 0).all()):
            raise SparsityError(f"{self._where()}soft_threshold needs conditioners > 0, got {float(h.min())}")
        tolerance = (1e-12 if v.dtype == torch.float64 else 1e-6) if atol is None else atol
        return shrink_conditioned(v, h, t, max_iter=max_iter, atol=tolerance)

    def operands(self, values: Values = None, masks: "Mapping[BlockSpec, Tensor] | None" = None) -> tuple[Blocks, ...]:
        """The members as the kernels take them: windows on the values, and on the masks if given."""
        if isinstance(values, Tensor) and len(self.parameters()) > 1:
            raise SparsityError(f"{self._where()}coupled blocks take values as a mapping {{parameter: tensor}}")
        out = []
        for spec, order in self.members():
            param = spec.view.param
            if isinstance(values, Mapping) and param not in values:
                raise SparsityError(f"{spec._where()}values hold no tensor for this parameter")
            found = param if values is None else values if isinstance(values, Tensor) else values[param]
            mask = None if masks is None else spec.view.window(masks[spec])
            out.append(Blocks(shape=spec.shape, values=spec.view.window(found), mask=mask, order=order))
        return tuple(out)

    def zero_blocks(self, drop: Tensor) -> None:
        """Zero the parameters' blocks where `drop` (bool, of the grid's shape) is True; partial blocks too."""
        for spec, mask in self.get_masks(~drop).items():
            spec.view.param.detach().masked_fill_(~mask, 0)

    def _elements(self, values: Values, fill: float) -> Tensor:
        """(*grid, elements of the block over all members), padded by `fill`."""
        parts = []
        for m in self.operands(values):
            n = m.window.ndim
            tiles = padded_split(m.window, m.shape, fill).permute([*range(0, 2 * n, 2), *range(1, 2 * n, 2)])
            parts.append(to_aligned(tiles.reshape([*m.grid, math.prod(m.shape)]), m.order, self.grid_ndim, trailing=1))
        return torch.cat(parts, dim=-1)

    def write_elements(self, elements: Tensor) -> None:
        """Write [blocks, elements] back to the parameters; the inverse of `_elements`."""
        for spec in self.blocks():
            _ = spec.view.data  # raises if a parameter's strides have changed, before any is written
        widths = [math.prod(spec.shape) for spec in self.blocks()]
        parts = elements.reshape([*self.grid_shape, elements.shape[-1]]).split(widths, dim=-1)
        for (spec, order), part in zip(self.members(), parts, strict=True):
            n = len(spec.shape)
            tiles = from_aligned(part, order, spec.own_grid, trailing=1).reshape([*spec.own_grid, *spec.shape])
            whole = tiles.permute([axis for k in range(n) for axis in (k, n + k)]).reshape(
                [g * b for g, b in zip(spec.own_grid, spec.shape, strict=True)]
            )
            spec.view.data = whole[tuple(slice(0, s) for s in spec.view.shape)]

    def _counts(self) -> Tensor:
        """Elements that each block really has, over all members; float, of the grid's shape."""
        total = None
        for m in self.operands():
            count = to_aligned(element_counts(m), m.order, self.grid_ndim)
            total = count if total is None else total + count
        assert total is not None
        return total

    def _on_grid(self, t: Tensor) -> Tensor:
        if tuple(t.shape) != self.grid_shape:
            raise SparsityError(
                f"{self._where()}expected a tensor of the block grid's shape {self.grid_shape}, got {tuple(t.shape)}"
            )
        return t

    def _per_block(self, thresholds: Tensor | float, dtype: torch.dtype, device: torch.device) -> Tensor:
        t = torch.as_tensor(on_grid(thresholds, self.grid_shape, self._where()), dtype=dtype, device=device)
        return t.expand(self.grid_shape)

    def _check_thresholds(self, t: Tensor) -> None:
        if not bool((t >= 0).all()):
            raise negative_threshold(float(t.min()), self._where())

    def _refuse_partial(self, what: str) -> None:
        for b in self.blocks():
            if any(s % n for s, n in zip(b.view.shape, b.shape, strict=True)):
                raise SparsityError(
                    f"{b._where()}{what} needs whole blocks; block {b.shape} leaves partial ones on {b.view.shape}"
                )

    def _where(self) -> str:
        return f"{self.name}: " if self.name else ""


class BlockSpec(SparseBlock):
    """One View cut into blocks: the block of element i is floor(i / b).

    Args:
        view_or_param: a View, or a parameter taken as it is.
        shape: elements of a block; () is all ones, -1 the whole dimension.
        name: opening words of error messages.
        edge: `"partial"` allows the last block of a dimension to be smaller.

    Raises:
        SparsityError: (a ValueError) naming the dimension, both numbers and the way out.

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
        self.own_grid = grid_of(self.view.shape, self.shape)

    def members(self) -> "list[tuple[BlockSpec, Shape]]":
        """The spec itself."""
        return [(self, ())]

    @property
    def grid_shape(self) -> Shape:
        """Blocks along each dimension."""
        return self.own_grid

    @property
    def data(self) -> Tensor:
        """Live alias of the view's elements (see `View.data`)."""
        return self.view.data

    def block_view(self, values: Tensor | None = None, reorder: bool = True, merge: bool = False) -> Tensor:
        """A parameter-shaped tensor cut into blocks; see `View.block_view_of`."""
        self._refuse_partial("block_view")
        return self.view.block_view_of(self.view.param if values is None else values, self.shape, reorder, merge)

    def __repr__(self) -> str:
        return f"BlockSpec({self.view!r}, shape={self.shape})"
