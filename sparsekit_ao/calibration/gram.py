"""Gram matrices X^T X of a layer's inputs X, as tensors or by the rows of X; damped and inverted."""

import math
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from ..errors import SparsityError

USUAL = 2.0**16  # products of values between 1 / USUAL and USUAL neither over- nor underflow
FREE = 1e-8  # share of the damping that an input gets whose weights may be anything, as it is zero in all tokens


@dataclass(frozen=True, eq=False)
class RowGram:
    """The matrix X^T A X + diag(d) of each group, stored by the rows of X.

    If X has fewer rows than columns, products with it cost less than with the whole matrix. A Gram matrix has A = I and
    d = 0. The class has those operations of a tensor that the solvers use.

    >>> x = torch.tensor([[[1.0, 2.0, 2.0]]])
    >>> gram, dense = damped_gram(RowGram.of(x), 0.5), x.mT @ x + 1.5 * torch.eye(3)
    >>> torch.equal(torch.eye(3)[None] @ gram, dense)
    True
    >>> torch.allclose(dense @ gram.penalized_inverse(0.5), dense @ (dense + 0.5 * torch.eye(3)).inverse())
    True
    """

    rows: Tensor  # X, [groups, tokens, inputs]
    core: Tensor | None  # A, [groups, tokens, tokens], or None for the identity
    added: Tensor  # d, [groups, 1, inputs]

    @classmethod
    def of(cls, rows: Tensor) -> Self:
        """Return X^T X for the rows X, [groups, tokens, inputs]."""
        return cls(rows, None, rows.new_zeros(len(rows), 1, rows.shape[2]))

    def __rmatmul__(self, matrix: Tensor) -> Tensor:
        of_rows = matrix @ self.rows.mT
        return ((of_rows if self.core is None else of_rows @ self.core) @ self.rows).addcmul_(matrix, self.added)

    def to(self, dtype: torch.dtype) -> Self:
        """Convert to another dtype."""
        return replace(self, rows=self.rows.to(dtype), added=self.added.to(dtype))

    def diagonal(self, dim1: int = 1, dim2: int = 2) -> Tensor:
        """Return the diagonal of a Gram matrix, [groups, inputs]."""
        return self.rows.square().sum(1) + self.added[:, 0]

    def scaled(self, scale: Tensor) -> Self:
        """Divide rows and columns of a Gram matrix by a scale, [groups, 1, inputs]."""
        return replace(self, rows=self.rows / scale, added=self.added / scale.square())

    def penalized_inverse(self, rho: float) -> Self:
        """Invert a Gram matrix after adding rho to its diagonal, by an inverse of as many rows as X has (Woodbury)."""
        added = self.added + rho
        rows = self.rows / added
        small = rows @ self.rows.mT
        small.diagonal(dim1=1, dim2=2).add_(1)
        return type(self)(rows, -torch.cholesky_inverse(torch.linalg.cholesky(small)), 1 / added)


def is_finite(values: Tensor) -> bool:
    """Return whether no value is NaN or infinite."""
    if values.numel() and values.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        values = torch.stack(torch.aminmax(values.detach()))  # both are NaN if any value is; no tensor of bools is made
    return bool(torch.isfinite(values).all())


def power_of_two(values: Tensor) -> float:
    """Return 1, or the power of two that divides unusually large or small values so that the largest is about 1."""
    largest = float(torch.stack(torch.aminmax(values)).abs().max()) if values.numel() else 0.0
    if not largest or 1 / USUAL < largest < USUAL or not math.isfinite(largest):
        return 1.0
    return 2.0 ** (math.frexp(largest)[1] - 1)


def divided(values: Tensor, unit: float) -> Tensor:
    """Return values divided by a power of two, which may itself be beyond their dtype; the values are exact."""
    return values if unit == 1 else (values.double() / unit).to(values.dtype)


def damped_gram(gram: Tensor | RowGram, damp: float) -> Any:
    """Return G + damp * mean(diag G) I of each group, as a tensor or by rows as `gram` is.

    Inputs that are zero in all tokens do not count for the mean, and get next to no damping: their weights are free.
    """
    squares = gram.diagonal(dim1=1, dim2=2)
    is_live = squares > 0
    mean = squares.sum(1, keepdim=True) / is_live.sum(1, keepdim=True).clamp(min=1)
    added = damp * torch.where(is_live, mean, FREE * mean.amax())
    if isinstance(gram, RowGram):
        return replace(gram, added=gram.added + added[:, None])
    damped = gram.clone()
    damped.diagonal(dim1=1, dim2=2).add_(added)
    return damped


def damped_inverse(gram: Tensor | RowGram, damp: float, name: str) -> Tensor:
    """Return the inverse of what `damped_gram` gives, in float64 where Cholesky fails in float32."""
    if isinstance(gram, RowGram):
        gram = torch.eye(gram.added.shape[2], dtype=gram.added.dtype, device=gram.added.device) @ gram
    if not bool((gram.diagonal(dim1=1, dim2=2) > 0).any()):
        raise SparsityError(f"{name}: all inputs of this layer are zero in the calibration data")
    unit = power_of_two(gram)
    damped = damped_gram(divided(gram, unit), damp)
    factor, failed = torch.linalg.cholesky_ex(damped)
    if bool(failed.any()):
        factor, failed = torch.linalg.cholesky_ex(damped.double())
        if bool(failed.any()):
            raise SparsityError(f"{name}: X^T X is singular; use more calibration tokens or a larger damp than {damp}")
    return divided(torch.cholesky_inverse(factor), unit).to(gram.dtype)
