"""WeightNormSparsifier: torch.ao's arguments and masks, on every shape and dtype.

The selection rule is applied twice: to whole blocks over the tensor, and to the elements inside each block; the mask
keeps the union.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import distributed, masking
from ..algebra import checked_level
from ..errors import SparsityError
from ..selection import Blocks, Scopes, fill_mask, from_scopes, keep_mask, to_scopes
from ..selection.radix import CHUNK
from ..selection.strides import grid_of
from .base import MaskSparsifier
from .config import Place, TensorGroup


class WeightNormSparsifier(MaskSparsifier):
    """Zero elements of a fraction `sparsity_level` of the blocks (0.5 by default), those of smallest norm.

    The drop-in for `torch.ao.pruning.WeightNormSparsifier`.

    A block's score is the mean of `norm_fn(masked weight)` over the elements that it has (at an edge it may have
    fewer). `k = round(sparsity_level * blocks)` blocks of lowest score, at most all but one, lose `zeros_per_block`
    elements each, the smallest; a level of 1 is every block. Among equal scores the lower index stays. Weights with
    more than two dimensions are taken as (dimension 0, all others), 1-D ones as a single row.

    Args:
        sparsity_level: fraction of blocks that lose elements, in [0, 1].
        sparse_block_shape: (rows, columns) of a block.
        zeros_per_block: zeros in each such block; all of it by default.
        norm: 1, 2 (default) or a callable giving a saliency per element.

    Raises:
        SparsityError: arguments that do not fit each other.

    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4))
    >>> sparsifier = WeightNormSparsifier(sparsity_level=1.0, sparse_block_shape=(1, 4), zeros_per_block=2)
    >>> sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}])
    >>> sparsifier.step()
    >>> sparsifier.mask("0.weight").mean()
    tensor(0.5000)
    """

    bool_masks = False  # code written for torch.ao calls mask.mean()

    def __init__(
        self,
        sparsity_level: float = 0.5,
        sparse_block_shape: tuple[int, int] = (1, 4),
        zeros_per_block: int | None = None,
        norm: Callable[[Tensor], Tensor] | int | None = None,
    ) -> None:
        where = "WeightNormSparsifier: "
        shape = _checked_shape(sparse_block_shape, where)
        self._zeros_follow_shape = zeros_per_block is None
        zeros = math.prod(shape) if zeros_per_block is None else zeros_per_block
        super().__init__({"sparsity_level": sparsity_level, "sparse_block_shape": shape, "zeros_per_block": zeros})
        _check_entry(self.defaults, where)
        if norm is not None and not callable(norm) and norm not in (1, 2):
            raise SparsityError(f"{where}norm must be 1, 2 or a callable (weight -> saliency), got {norm!r}")
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
        self._need_prepared("update_mask")
        self._refuse_unknown(kwargs, ("module_fqn", "tensor_fqn"))
        entry = {
            "sparsity_level": sparsity_level,
            "sparse_block_shape": sparse_block_shape,
            "zeros_per_block": zeros_per_block,
        }
        _check_entry(entry, f"{kwargs.get('tensor_fqn', tensor_name)}: ")
        found = masking.live_mask(module, tensor_name, kwargs.get("tensor_fqn", tensor_name))
        if found is None:
            raise SparsityError(f"update_mask: {tensor_name!r} of this {type(module).__name__} was not prepared")
        with torch.no_grad():
            weight, mask = (distributed.full_tensor(t) for t in (masking.dense_weight(module, tensor_name), found.mask))
            saliency = _Saliency(_matrix(weight), _matrix(mask), self.norm_fn)
            keep = _keep(saliency, sparsity_level, _checked_shape(sparse_block_shape, ""), zeros_per_block)
            distributed.fill(found.mask, keep.reshape(found.mask.shape))

    def _complete(self, own: dict[str, Any], place: Place) -> dict[str, Any]:
        if "sparse_block_shape" in own:
            own = {**own, "sparse_block_shape": _checked_shape(own["sparse_block_shape"], place.where)}
            if "zeros_per_block" not in own and self._zeros_follow_shape:
                own["zeros_per_block"] = math.prod(own["sparse_block_shape"])
        group = super()._complete(own, place)
        if group["zeros_per_block"] is None:
            group["zeros_per_block"] = math.prod(group["sparse_block_shape"])
        return group

    def _check_groups(self, groups: Sequence[TensorGroup]) -> None:
        for group in groups:
            _check_entry(group, f"{group['tensor_fqn']}: ")


class _Saliency:
    """`norm_fn` of the masked weight, as a matrix; norms 1 and 2 are computed for some rows at a time.

    A callable gets the whole masked weight at once, since it need not be elementwise.
    """

    def __init__(self, weight: Tensor, mask: Tensor, norm_fn: Callable[[Tensor], Tensor]) -> None:
        self.shape, self.device = weight.shape, weight.device
        self.never_negative = norm_fn in (torch.square, torch.abs)
        self._weight, self._mask, self._norm_fn = weight, mask, norm_fn
        self._whole = None if self.never_negative else norm_fn(_wide(masking.select(weight, mask)))

    def chunks(self, block_rows: int) -> list[slice]:
        """Slices of rows, in whole blocks, each of which fits the cache."""
        height, width = self.shape
        step = max(1, CHUNK // max(width * block_rows, 1)) * block_rows
        return [slice(at, min(at + step, height)) for at in range(0, height, step)]

    def rows(self, rows: slice) -> Tensor:
        """Saliencies of these rows; float32 or wider."""
        if self._whole is not None:
            return self._whole[rows]
        return self._norm_fn(_wide(masking.select(self._weight[rows], self._mask[rows])))


def _keep(saliency: _Saliency, level: float, block: tuple[int, int], zeros: int) -> Tensor:
    """The mask of a matrix of saliencies; bool, True = keep."""
    everything = level <= 0 or zeros == 0 or 0 in saliency.shape
    kept = _kept_blocks(saliency, level, block) if level < 1 and not everything else None
    mask = torch.ones(saliency.shape, dtype=torch.bool, device=saliency.device)
    if everything:
        return mask
    for rows in saliency.chunks(block[0]):
        part = mask[rows]
        if kept is None:
            part.zero_()
        else:
            fill_mask((Blocks(shape=block, mask=part),), kept[rows.start // block[0] : -(-rows.stop // block[0])])
        if zeros < math.prod(block):
            part |= _kept_inside(saliency.rows(rows), block, zeros, saliency.never_negative)
    return mask


def _kept_blocks(saliency: _Saliency, level: float, block: tuple[int, int]) -> Tensor:
    """Which blocks are kept whole: all but the k of lowest score over the tensor."""
    grid = grid_of(saliency.shape, block)
    scores: Tensor | None = None
    for rows in saliency.chunks(block[0]):
        part = saliency.rows(rows)
        if math.prod(block) > 1:  # torch's own pooling divides an edge block by the elements that it has
            part = F.avg_pool2d(part[None, None], block, block, ceil_mode=True)[0, 0]
        scores = part.new_empty(grid) if scores is None else scores
        scores[rows.start // block[0] : -(-rows.stop // block[0])] = part
    assert scores is not None
    drop = min(round(level * scores.numel()), scores.numel() - 1)
    kept = keep_mask(scores.reshape(1, -1), scores.numel() - drop, magnitude=saliency.never_negative)
    return kept.reshape(scores.shape)


def _kept_inside(saliency: Tensor, block: tuple[int, int], zeros: int, never_negative: bool) -> Tensor:
    """The mask that keeps all but the `zeros` smallest elements of every block."""
    scopes = Scopes(members=(Blocks(shape=(1, 1), values=saliency),), shape=block)
    rows = to_scopes(saliency, scopes, 0.0)
    if not any(s % b for s, b in zip(saliency.shape, block, strict=True)):
        return from_scopes(keep_mask(rows, math.prod(block) - zeros, magnitude=never_negative), scopes)
    real = to_scopes(torch.ones_like(saliency, dtype=torch.bool), scopes, False)
    budget = (real.sum(1) - zeros).clamp(min=0)
    return from_scopes(keep_mask(rows, budget, candidates=real, magnitude=never_negative), scopes)


def _matrix(t: Tensor) -> Tensor:
    return t.reshape(1, -1) if t.ndim < 2 else t.flatten(1)


def _wide(t: Tensor) -> Tensor:
    return t if t.dtype in (torch.float32, torch.float64) else t.float()


def _checked_shape(shape: object, where: str) -> tuple[int, int]:
    ok = isinstance(shape, Sequence) and not isinstance(shape, str) and len(shape) == 2
    if not ok or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in shape):  # type: ignore[attr-defined]
        raise SparsityError(f"{where}sparse_block_shape must be two positive ints (rows, columns), got {shape!r}")
    return tuple(shape)  # type: ignore[arg-type, return-value]


def _check_entry(entry: Mapping[str, Any], where: str) -> None:
    zeros = entry["zeros_per_block"]
    size = math.prod(_checked_shape(entry["sparse_block_shape"], where))
    checked_level(entry["sparsity_level"], where)
    if isinstance(zeros, bool) or not isinstance(zeros, int) or not 0 <= zeros <= size:
        raise SparsityError(
            f"{where}zeros_per_block must lie in 0 .. {size} (the elements of a block "
            f"{tuple(entry['sparse_block_shape'])}), got {zeros!r}"
        )
