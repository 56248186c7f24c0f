"""Solvers on matrices: the kept weights of a layer make up for the dropped ones.

Everywhere W is [groups, outputs, inputs], G = X^T X of the layer's inputs [groups, inputs, inputs], a mask is bool in
the shape of W, all float32 (or all float64). The error of V for W is tr((W - V) G (W - V)^T).
"""

from collections.abc import Callable

import torch
from torch import Tensor

CG_STEPS = 30
FEW_STEPS = 10  # of conjugate gradients, for the weights at which ADMM starts, and from those at which it ends
ADMM_STEPS = 27
RHO = 0.1  # first penalty, for a Gram matrix with unit diagonal
GROWTH, EVERY = 2.0, 9  # the penalty grows by this factor, after so many steps: each growth is a factorization


def relative_error(weight: Tensor, gram: Tensor, found: Tensor) -> float:
    """sqrt(tr((W - V) G (W - V)^T) / tr(W G W^T)); 0 where the layer's output is zero.

    >>> w, g = torch.ones(1, 1, 4), torch.eye(4)[None]
    >>> relative_error(w, g, w * torch.tensor([1, 1, 0, 1]))
    0.5
    """
    rest = weight - found
    lost, all_of_it = ((rest @ gram) * rest).double().sum(), ((weight @ gram) * weight).double().sum()
    return float((lost.clamp(min=0) / all_of_it).sqrt()) if all_of_it > 0 else 0.0


def least_squares(
    weight: Tensor, gram: Tensor, mask: Tensor, steps: int = CG_STEPS, start: Tensor | None = None
) -> Tensor:
    """The best kept weights for a mask: conjugate gradients on all rows at once, preconditioned by diag(G).

    Starts at the masked weights, so that a singular G needs no damping: what the data does not determine stays.

    Args:
        weight, gram, mask: see the module.
        steps: of conjugate gradients; each is one product with G.
        start: weights to start at, by default the masked ones.

    Returns:
        V, zero where the mask drops.

    >>> w, g = torch.tensor([[[1.0, 1.0]]]), torch.tensor([[[1.0, 1.0], [1.0, 1.0]]])  # two equal inputs
    >>> least_squares(w, g, torch.tensor([[[True, False]]]))
    tensor([[[2., 0.]]])
    """
    scale = gram.diagonal(dim1=1, dim2=2)[:, None, :]
    scale = scale.clamp(min=1e-12 * float(scale.mean()) or 1.0)
    found = (weight if start is None else start) * mask
    rest = ((weight - found) @ gram) * mask
    direction = rest / scale
    size = (rest * direction).sum(2, keepdim=True)
    first = size.clone()
    for _ in range(steps):
        moved = (direction @ gram) * mask
        curvature = (direction * moved).sum(2, keepdim=True)
        step = torch.where((curvature > 0) & (size > 1e-14 * first), size / curvature, 0)
        found = torch.addcmul(found, step, direction)
        rest = torch.addcmul(rest, step, moved, value=-1)
        turned = rest / scale
        before, size = size, (rest * turned).sum(2, keepdim=True)
        direction = turned + torch.where(before > 0, size / before, 0) * direction
    return found


def admm(
    weight: Tensor, gram: Tensor, project: Callable[[Tensor], Tensor], steps: int = ADMM_STEPS
) -> tuple[Tensor, Tensor]:
    """Mask and weights by the alternating direction method of multipliers (ALPS, arXiv 2406.07831).

    The projection is an exact selection, so that any structure can be given.

    Args:
        weight, gram: see the module.
        project: saliencies to the mask that keeps the highest of every scope; it is given |values| in the shape of W.
        steps: each is a product with a matrix of the size of G, and one projection.

    Returns:
        The mask of the last projection, and weights that are nearly the best for it.
    """
    scale = gram.diagonal(dim1=1, dim2=2)[:, None, :]
    scale = scale.clamp(min=1e-8 * float(scale.mean()) or 1.0).sqrt()
    scaled = weight * scale
    hessian = gram / (scale.mT * scale)
    target = scaled @ hessian
    mask = project(scaled)
    kept, rho = least_squares(weight, gram, mask, FEW_STEPS) * scale, RHO
    dual = target - kept @ hessian  # what makes the start a fixed point, but for the projection
    for step in range(steps):
        if step % EVERY == 0:
            rho = rho * GROWTH if step else rho
            penalized = hessian + rho * torch.eye(hessian.shape[-1], dtype=hessian.dtype, device=hessian.device)
            inverse = torch.cholesky_inverse(torch.linalg.cholesky(penalized))
        found = (target - dual + rho * kept) @ inverse
        shifted = found + dual / rho
        mask = project(shifted)
        kept = shifted * mask
        dual = dual + rho * (found - kept)
    return mask, kept / scale
