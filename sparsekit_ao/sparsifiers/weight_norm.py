"""WeightNormSparsifier: torch.ao's arguments and masks, on every shape and dtype.

The selection rule is applied twice: to whole blocks over the tensor, and to the elements inside each block; the mask
keeps the union. Both are scopes like those of `ScopeSparsifier`, scored by the masked weight.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import distributed, masking
from ..errors import SparsityError
from ..scores import saliency_of
from ..structure import MaskUpdate, is_number
from .base import MaskSparsifier
from .config import ConfigContext, TensorGroup
from .plan import matrix_budgets, matrix_shape
from .structure import checked_tile


class WeightNormSparsifier(MaskSparsifier):
    """Zero elements of a fraction `sparsity_level` of the blocks (0.5 by default), those of smallest norm.

    The drop-in for `torch.ao.pruning.WeightNormSparsifier`. A block's score is the mean of `norm_fn(masked weight)`
    over its elements. `k = round(sparsity_level * blocks)` blocks of lowest score, at most all but one, lose their
    `zeros_per_block` smallest elements; a level of 1 is every block. Among equal scores the lower index stays. A weight
    is taken as (dimension 0, all others), or as a single row. Masks have the weight's dtype. A subclass may override
    `update_mask`; `step` then calls it for every tensor.

    Args:
        sparsity_level: fraction of blocks that lose elements; below 0 and above 1 it acts as 0 and 1, with one warning.
        sparse_block_shape: (rows, columns) of a block.
        zeros_per_block: zeros in each such block; all of it by default.
        norm: 1, 2 (default) or a callable giving a saliency per element.

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
        own = "WeightNormSparsifier"
        shape = checked_tile(sparse_block_shape, f"{own}: ")
        self._zeros_follow_shape, self._has_warned = zeros_per_block is None, False
        zeros = math.prod(shape) if zeros_per_block is None else zeros_per_block
        super().__init__({"sparsity_level": sparsity_level, "sparse_block_shape": shape, "zeros_per_block": zeros})
        self._check_groups([{**self.defaults, "tensor_fqn": own}])
        if norm is not None and not callable(norm) and norm not in (1, 2):
            raise SparsityError(f"{own}: norm must be 1, 2 or a callable (weight -> saliency), got {norm!r}")
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
        """Choose the mask of one tensor anew, in place; arguments as the group has them."""
        group = {k: v for k, v in locals().items() if k not in ("self", "kwargs")}
        self._refuse_unknown(kwargs, ("module_fqn", "tensor_fqn"))
        group["tensor_fqn"] = self._check_prepared(module, tensor_name, kwargs)
        self._check_groups([group])
        with torch.no_grad():
            self._fill([group])

    def _update_all(self) -> None:
        if type(self).update_mask is not WeightNormSparsifier.update_mask:
            return super()._update_all()
        self._check_groups(self.groups)
        at_once = self.norm_fn in (torch.abs, torch.square)  # others return tensors, of which one is held at a time
        for groups in [self.groups] if at_once else [[g] for g in self.groups]:
            self._fill(groups)

    def _fill(self, groups: Sequence[TensorGroup]) -> None:
        """Choose the masks of these groups together."""
        found = [self._updates_of(group) for group in groups]
        distributed.update_masks([update for updates in found for update in updates])
        for group, updates in zip(groups, found, strict=True):
            if len(updates) == 2:
                blocks, inside = (distributed.local(next(iter(u.masks.values()))) for u in updates)
                distributed.local(self._live_mask(group)).copy_(blocks.logical_or_(inside))

    def _updates_of(self, group: TensorGroup) -> list[MaskUpdate]:
        """The update of a group's mask, or the two whose masks it is the union of."""
        mask, shape, zeros = self._live_mask(group), tuple(group["sparse_block_shape"]), group["zeros_per_block"]
        level = group["sparsity_level"]
        if level <= 0 or zeros == 0 or mask.numel() == 0 or (level >= 1 and zeros == math.prod(shape)):
            distributed.local(mask).fill_(level <= 0 or zeros == 0)
            return []
        values, norm = self._scored(group, mask)
        budgets = matrix_budgets(values, shape, level, zeros)
        masks = [mask != 0, mask != 0] if len(budgets) > 1 else [mask]
        return [
            MaskUpdate(scope=s, masks={s.blocks()[0]: m}, keep=k, values=values, norm=norm, masked=norm is not None)
            for (s, k), m in zip(budgets, masks, strict=True)
        ]

    def _scored(self, group: TensorGroup, mask: Tensor) -> tuple[Tensor, int | None]:
        """The weight and its norm; for a callable its saliencies of the masked weight, and None."""
        weight = masking.dense_weight(group["module"], group["tensor_name"])
        if self.norm_fn in (torch.abs, torch.square):
            return weight, 1 if self.norm_fn is torch.abs else 2
        masked = masking.select(*map(distributed.full_tensor, (weight, mask)))
        matrix = (masked if masked.dtype == torch.float64 else masked.float()).reshape(matrix_shape(weight.shape))
        found = saliency_of(lambda w, _: self.norm_fn(w), matrix, group["tensor_fqn"])
        return distributed.placed_like(found.reshape(weight.shape), weight), None

    def _complete(self, own: dict[str, Any], place: ConfigContext) -> dict[str, Any]:
        if "sparse_block_shape" in own:
            own = {**own, "sparse_block_shape": checked_tile(own["sparse_block_shape"], place.where)}
            if self._zeros_follow_shape:
                own.setdefault("zeros_per_block", None)
        group = super()._complete(own, place)
        if group["zeros_per_block"] is None:
            group["zeros_per_block"] = math.prod(group["sparse_block_shape"])
        return group

    def _check_groups(self, groups: Sequence[TensorGroup]) -> None:
        for group in groups:
            shape, level, zeros = (group[k] for k in ("sparse_block_shape", "sparsity_level", "zeros_per_block"))
            where = f"{group['tensor_fqn']}: "
            size = math.prod(checked_tile(shape, where))
            if not is_number(level) or math.isnan(level):
                raise SparsityError(f"{where}sparsity level must be a number in [0, 1], got {level!r}")
            if isinstance(zeros, bool) or not isinstance(zeros, int) or not 0 <= zeros <= size:
                of = f"the elements of a block {tuple(shape)}"
                raise SparsityError(f"{where}zeros_per_block must lie in 0 .. {size} ({of}), got {zeros!r}")
            if not 0 <= level <= 1 and not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"{where}sparsity level {level} is outside [0, 1]; it acts as {level > 1:d}", stacklevel=2
                )
