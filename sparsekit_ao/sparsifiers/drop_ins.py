"""Drop-in replacements for torch.ao's `WeightNormSparsifier` (any shape and dtype) and `NearlyDiagonalSparsifier`.

`WeightNormSparsifier` applies the selection rule twice: to whole blocks over the tensor, and to the elements inside
each block. The mask keeps the union. Both are scopes like those of `ScopeSparsifier`, scored by the masked weight.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from .. import distributed, masking
from ..errors import SparsityError, is_number, warn
from ..scores import saliency_of
from ..selection import Request
from ..structure import BlockSpec, Budget, ScopeSpec, View
from ..structure.tiles import Shape, row_major
from .base import MaskSparsifier, refuse_meta_masks
from .config import ConfigContext, TensorGroup, copied
from .scope import AT_ONCE
from .usage import refuse_unknown_keys


class WeightNormSparsifier(MaskSparsifier):
    """Zero elements in the fraction `sparsity_level` of the blocks that has the smallest norms.

    It is a drop-in replacement for `torch.ao.pruning.WeightNormSparsifier`. A block's score is the mean of
    `norm_fn(masked weight)` over its elements. The `round(sparsity_level * blocks)` blocks of lowest score lose their
    `zeros_per_block` smallest elements. At least one block stays whole, unless the level is 1. Among equal scores the
    lower index is kept. A weight is seen as a matrix (dimension 0, all others), a 1-D weight as a single row. Masks
    have the weight's dtype. A subclass may override `update_mask`, which `step` then calls for every tensor.

    Args:
        sparsity_level: Fraction of blocks that lose elements, in [0, 1]; 0.5 by default. Others are clamped, with one
            warning.
        sparse_block_shape: Two ints, the rows and columns of a block; (1, 4) by default.
        zeros_per_block: The number of elements that such a block loses; None (default) is all of them.
        norm: 1, 2 (default), or a function of the masked weight that returns a saliency for each element.

    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4))
    >>> sparsifier = WeightNormSparsifier(sparsity_level=1.0, sparse_block_shape=(1, 4), zeros_per_block=2)
    >>> sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}])
    >>> sparsifier.step()
    >>> sparsifier.mask("0.weight").mean()
    tensor(0.5000)
    """

    def __init__(
        self,
        sparsity_level: float = 0.5,
        sparse_block_shape: tuple[int, int] = (1, 4),
        zeros_per_block: int | None = None,
        norm: Callable[[Tensor], Tensor] | int | None = None,
    ) -> None:
        name = "WeightNormSparsifier"
        shape, zeros_per_block = _checked_tile(copied(sparse_block_shape), f"{name}: "), copied(zeros_per_block)
        self._zeros_follow_shape, self._has_warned = zeros_per_block is None, False
        zeros = math.prod(shape) if zeros_per_block is None else zeros_per_block
        super().__init__({"sparsity_level": sparsity_level, "sparse_block_shape": shape, "zeros_per_block": zeros})
        self._check_fit({**self.defaults, "tensor_fqn": name})
        if norm is not None and not callable(norm) and norm not in (1, 2):
            raise SparsityError(f"{name}: norm must be 1, 2 or a callable (weight -> saliency), got {norm!r}")
        self.norm_fn = norm if callable(norm) else torch.abs if norm == 1 else torch.square

    def update_mask(  # type: ignore[override]
        self,
        module: nn.Module,
        tensor_name: str,
        sparsity_level: float,
        sparse_block_shape: Sequence[int],
        zeros_per_block: int,
        **kwargs: Any,
    ) -> None:
        """Choose the mask of one tensor anew, in place; the arguments are the keys of its group."""
        group = {
            "module": module,
            "tensor_name": tensor_name,
            "tensor_fqn": _prepared_name(self, module, tensor_name, kwargs),
            "sparsity_level": sparsity_level,
            "sparse_block_shape": sparse_block_shape,
            "zeros_per_block": zeros_per_block,
        }
        self._check_fit(group)
        with torch.no_grad():
            self._fill([group])

    def _update_all(self) -> None:
        if type(self).update_mask is not WeightNormSparsifier.update_mask:
            return super()._update_all()
        self._check_groups(self.groups)
        masks = list(map(self.live_mask, self.groups))
        refuse_meta_masks("step", self.groups, masks)
        # Other norms return tensors. In a large model one is held at a time, and an error leaves earlier masks updated.
        at_once = self.norm_fn in (torch.abs, torch.square) or sum(map(Tensor.numel, masks)) <= AT_ONCE
        for groups in [self.groups] if at_once else [[g] for g in self.groups]:
            self._fill(groups)

    def _fill(self, groups: Sequence[TensorGroup]) -> None:
        """Choose the masks of these groups together; none is changed before all values are computed."""
        requests_of_groups = [self._requests_of(group) for group in groups]
        distributed.choose_sharded([request for requests in requests_of_groups for request in requests])
        for group, requests in zip(groups, requests_of_groups, strict=True):
            if len(requests) == 2:
                blocks, inside = (next(iter(r.masks.values())) for r in requests)
                distributed.copy_values(self.live_mask(group), blocks.logical_or_(inside))
            elif not requests:
                self.live_mask(group).fill_(group["sparsity_level"] <= 0 or group["zeros_per_block"] == 0)

    def _requests_of(self, group: TensorGroup) -> list[Request]:
        """The update of a group's mask, or the two whose masks it is the union of; none if it keeps all or nothing."""
        mask, shape, zeros = self.live_mask(group), tuple(group["sparse_block_shape"]), group["zeros_per_block"]
        level = group["sparsity_level"]
        if level <= 0 or zeros == 0 or mask.numel() == 0 or (level >= 1 and zeros == math.prod(shape)):
            return []
        values, norm = self._scored(group, mask)
        budgets = _matrix_budgets(values, shape, level, zeros)
        masks = [mask != 0, mask != 0] if len(budgets) > 1 else [mask]
        return [
            Request(scope=s, masks={s.blocks()[0]: m}, keep=k, values=values, norm=norm, masked=norm is not None)
            for (s, k), m in zip(budgets, masks, strict=True)
        ]

    def _scored(self, group: TensorGroup, mask: Tensor) -> tuple[Tensor, int | None]:
        """The weight and its norm; for a callable its saliencies of the masked weight, and None."""
        weight = masking.dense_weight(group["module"], group["tensor_name"])
        if self.norm_fn in (torch.abs, torch.square):
            return weight, 1 if self.norm_fn is torch.abs else 2
        masked = masking.select(*map(distributed.full_tensor, (weight, mask)))
        matrix = (masked if masked.dtype == torch.float64 else masked.float()).reshape(_matrix_shape(weight.shape))
        saliency = saliency_of(lambda w, _: self.norm_fn(w), matrix, group["tensor_fqn"])
        return distributed.placed_like(saliency.reshape(weight.shape), weight), None

    def _complete(self, entry: dict[str, Any], place: ConfigContext) -> dict[str, Any]:
        if "sparse_block_shape" in entry:
            entry = {**entry, "sparse_block_shape": _checked_tile(entry["sparse_block_shape"], place.where)}
            if self._zeros_follow_shape:
                entry.setdefault("zeros_per_block", None)
        group = super()._complete(entry, place)
        if group["zeros_per_block"] is None:
            group["zeros_per_block"] = math.prod(group["sparse_block_shape"])
        return group

    def _check_fit(self, group: TensorGroup) -> None:
        shape, level, zeros = (group[k] for k in ("sparse_block_shape", "sparsity_level", "zeros_per_block"))
        where = f"{group['tensor_fqn']}: "
        size = math.prod(_checked_tile(shape, where))
        if not is_number(level) or math.isnan(level):
            raise SparsityError(f"{where}sparsity level must be a number in [0, 1], got {level!r}")
        if isinstance(zeros, bool) or not isinstance(zeros, int) or not 0 <= zeros <= size:
            of = f"the elements of a block {tuple(shape)}"
            raise SparsityError(f"{where}zeros_per_block must lie in 0 .. {size} ({of}), got {zeros!r}")
        if not 0 <= level <= 1 and not self._has_warned:
            self._has_warned = True
            warn(f"{where}sparsity level {level} is outside [0, 1]; it acts as {level > 1:d}")


def _prepared_name(sparsifier: MaskSparsifier, module: nn.Module, tensor_name: str, group: Mapping[str, Any]) -> str:
    """Return the `tensor_fqn` of a tensor for `update_mask`; raise if it is not prepared, or a key is unknown."""
    refuse_unknown_keys(group, ("module_fqn", "tensor_fqn"), sparsifier.keys)
    sparsifier.require_prepared("update_mask")
    weight_mask, name = masking.find_mask(module, tensor_name), str(group.get("tensor_fqn", tensor_name))
    if weight_mask is None:
        raise SparsityError(f"update_mask: {tensor_name!r} of this {type(module).__name__} was not prepared")
    refuse_meta_masks("update_mask", [{"tensor_fqn": name}], [weight_mask.mask])
    return name


def _checked_tile(shape: object, where: str) -> tuple[int, int]:
    """A `sparse_block_shape` as a tuple; raises unless it is two positive ints."""
    ok = isinstance(shape, Sequence) and not isinstance(shape, str) and len(shape) == 2
    if not ok or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in shape):  # type: ignore[attr-defined]
        raise SparsityError(f"{where}sparse_block_shape must be two positive ints (rows, columns), got {shape!r}")
    return tuple(shape)  # type: ignore[arg-type, return-value]


def _matrix_shape(shape: Sequence[int]) -> Shape:
    """The shape of a weight taken as a matrix."""
    return (1, math.prod(shape)) if len(shape) < 2 else (shape[0], math.prod(shape[1:]))


def _matrix_budgets(weight: Tensor, block: Shape, level: float, zeros: int) -> list[tuple[ScopeSpec, Budget]]:
    """Return scopes and budgets whose masks together drop `zeros` elements in a fraction `level` of the blocks."""
    blocks, elements = _matrix_scopes(tuple(weight.shape), weight.stride(), block)
    budgets: list[tuple[ScopeSpec, Budget]] = []
    if level < 1:
        count = blocks.numblk()
        budgets.append((blocks, count - min(round(level * count), count - 1)))
    if zeros < math.prod(block) and elements.is_partial:
        budgets.append((elements, (elements.blocks_per_scope() - zeros).clamp_(min=0)))
    elif zeros < math.prod(block):
        budgets.append((elements, max(elements.numblk_per_scope() - zeros, 0)))
    return budgets


@lru_cache(maxsize=256)  # a model has many tensors of few shapes
def _matrix_scopes(shape: Shape, stride: Shape, block: Shape) -> tuple[ScopeSpec, ScopeSpec]:
    """Blocks over the whole tensor, and elements inside each block, of a weight of this shape taken as a matrix."""
    matrix = _matrix_shape(shape)
    strides = (stride, stride) if len(shape) == 2 else (row_major(shape), row_major(matrix))
    view = View(torch.empty_strided(shape, strides[0], device="meta"), matrix, strides[1])
    tile = [min(n, size) for n, size in zip(block, matrix, strict=True)]
    blocks, elements = (BlockSpec(view, s, edge="partial") for s in (tile, (1, 1)))
    return ScopeSpec(blocks), ScopeSpec(elements, tile)


class NearlyDiagonalSparsifier(MaskSparsifier):
    """Keep the `nearliness` diagonals closest to the main one.

    It is a drop-in replacement for `torch.ao.pruning.NearlyDiagonalSparsifier`.

    Args:
        nearliness: The number of diagonals to keep (1 by default), an odd int less than twice the smaller dimension.
            With 0 or less, everything is dropped.

    Raises:
        SparsityError: `nearliness` is even (raised by `step`, as in torch.ao), or too large (raised by `prepare`).

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3))
    >>> sparsifier = NearlyDiagonalSparsifier(nearliness=3)
    >>> sparsifier.prepare(model, None)
    >>> sparsifier.step()
    >>> sparsifier.mask("0.weight")
    tensor([[1., 1., 0., 0.],
            [1., 1., 1., 0.],
            [0., 1., 1., 1.]])
    """

    def __init__(self, nearliness: int = 1) -> None:
        super().__init__({"nearliness": nearliness})

    def update_mask(  # type: ignore[override]
        self, module: nn.Module, tensor_name: str, nearliness: int, **kwargs: Any
    ) -> None:
        """Fill the mask of one tensor, in place."""
        fqn = _prepared_name(self, module, tensor_name, kwargs)
        group = {"module": module, "tensor_name": tensor_name, "tensor_fqn": fqn, "nearliness": nearliness}
        self._check_fit(group)
        mask = self.live_mask(group)
        rows, columns = (torch.arange(n, device=mask.device) for n in mask.shape)
        distributed.copy_values(mask, (rows[:, None] - columns).abs() * 2 < nearliness)

    def _check_fit(self, group: TensorGroup) -> None:
        shape = masking.shape_of(group["module"], group["tensor_name"])
        nearliness, where = group["nearliness"], f"{group['tensor_fqn']}: "
        if len(shape) != 2:
            raise SparsityError(f"{where}a diagonal needs a matrix, got shape {shape}")
        if isinstance(nearliness, bool) or not isinstance(nearliness, int):
            raise SparsityError(f"{where}nearliness must be an int, got {nearliness!r}")
        if self._phase == "prepared" and nearliness > 0 and nearliness % 2 == 0:
            raise SparsityError(f"{where}nearliness can only be an odd number, got {nearliness}")
        if nearliness // 2 >= min(shape):
            raise SparsityError(
                f"{where}nearliness // 2 must be smaller than both dimensions {shape}, got nearliness {nearliness}"
            )
