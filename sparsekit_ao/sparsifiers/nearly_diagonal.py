"""NearlyDiagonalSparsifier: keep a band around the main diagonal; torch.ao's masks without its loop over rows."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .. import distributed
from ..errors import SparsityError
from .base import MaskSparsifier
from .checkpoint import shape_of
from .config import TensorGroup


class NearlyDiagonalSparsifier(MaskSparsifier):
    """Keep the `nearliness` diagonals closest to the main one; drop-in for torch.ao's class of this name.

    Args:
        nearliness: An odd number of diagonals, less than twice the smaller dimension; 0 or less drops everything.

    Raises:
        SparsityError: An even number in `step`, as torch.ao raises; one that is too large in `prepare` already.

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
        self._refuse_unknown(kwargs, ("module_fqn", "tensor_fqn"))
        fqn = self._check_prepared(module, tensor_name, kwargs)
        group = {"module": module, "tensor_name": tensor_name, "tensor_fqn": fqn, "nearliness": nearliness}
        self._check_groups([group])
        mask = self._live_mask(group)
        rows, columns = (torch.arange(n, device=mask.device) for n in mask.shape)
        distributed.fill(mask, (rows[:, None] - columns).abs() * 2 < nearliness)

    def _check_groups(self, groups: Sequence[TensorGroup]) -> None:
        for group in groups:
            shape, nearliness, where = shape_of(group), group["nearliness"], f"{group['tensor_fqn']}: "
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
