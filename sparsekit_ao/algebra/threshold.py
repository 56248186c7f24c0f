"""Proximal maps of the group norm: what soft thresholding does to one block, plain and conditioned.

Knows vectors [blocks, elements] and one threshold a block; nothing of views or scopes. The plain map is the Euclidean
prox of `t ||.||_2` (Yuan and Lin 2006); the conditioned one replaces the distance by a positive diagonal, such as
Adam's preconditioner.
"""

import torch
from torch import Tensor

from ..errors import SparsityError

__all__ = ["shrink", "shrink_conditioned"]


def shrink(v: Tensor, t: Tensor) -> Tensor:
    """`v max(0, 1 - t / ||v||)` for each row.

    Args:
        v: [blocks, elements].
        t: [blocks], not negative.

    >>> shrink(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), torch.tensor([1.0, 1.0]))
    tensor([[2.4000, 3.2000],
            [0.0000, 0.0000]])
    """
    size = torch.linalg.vector_norm(v, dim=1)
    scale = torch.where(size > t, (size - t) / size, torch.where(size.isnan(), size, 0))
    scale = torch.where(t == 0, 1, scale)  # also where the squares underflow
    return torch.where((scale == 0)[:, None], 0, v * scale[:, None])


def shrink_conditioned(v: Tensor, h: Tensor, t: Tensor, *, max_iter: int, atol: float) -> Tensor:
    """`argmin_w 1/2 (w - v)' D (w - v) + t ||w||` for each row, D = diag(h).

    w = 0 iff `||Dv|| <= t`; else `w_i = h_i v_i s / (h_i s + t)` with s the root of
    `phi(s) = ||(h_i v_i / (h_i s + t))_i|| = 1`. Newton on `1/phi(s)` from `(||Dv|| - t) / max(h)` rises to the root
    without ever passing it.

    Args:
        v, h: [blocks, elements]; h > 0.
        t: [blocks], not negative.
        max_iter: Newton steps at most.
        atol: stop once every |phi(s) - 1| is at most this.

    Raises:
        SparsityError: no convergence within `max_iter` steps.
    """
    pull = h * v
    force = torch.linalg.vector_norm(pull, dim=1)
    alive = force > t
    s = torch.where(alive, (force - t) / h.amax(1), 1.0)
    slack = torch.where(alive, t, 1.0)[:, None]
    for steps_left in range(max(max_iter, 0), -1, -1):
        denominator = h * s[:, None] + slack
        u = torch.where(alive[:, None], pull, 0) / denominator
        phi = torch.linalg.vector_norm(u, dim=1)
        miss = torch.where(alive, phi - 1, 0)
        if not bool((miss.abs() > atol).any()):
            break
        if steps_left == 0:
            worst = float(miss.abs().max())
            raise SparsityError(
                f"soft_threshold: no convergence to atol={atol:g} in {max_iter} steps (missed by {worst:.1e}). "
                "Raise max_iter, or atol to what the dtype can hold."
            )
        slope = (h * u * u / denominator).sum(1)
        s = torch.where(alive, s + phi * phi * miss / torch.where(slope > 0, slope, 1), s)
    w = pull * s[:, None] / (h * s[:, None] + slack)
    w = torch.where(alive[:, None], w, torch.where(force.isnan(), force, 0)[:, None])
    return torch.where((t == 0)[:, None], v, w)
