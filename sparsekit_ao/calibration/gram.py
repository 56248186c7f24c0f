"""Linear algebra of input Gram matrices G = X^T X: damping, inverses, and the joint saliency of blocks of weights."""

import torch
from torch import Tensor

from ..errors import SparsityError

AT_ONCE = 1 << 24  # elements of inverses of blocks that are stored at once


def damped_gram(gram: Tensor, damp: float) -> Tensor:
    """G + damp * mean(diag G) I of each group."""
    scale = damp * gram.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    return gram + scale * torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device)


def damped_inverse(gram: Tensor, damp: float, name: str) -> Tensor:
    """(G + damp * mean(diag G) I)^-1 of each group, float32; in float64 where the Cholesky factor of float32 fails.

    Raises:
        SparsityError: all inputs are zero.
    """
    if not bool((gram.diagonal(dim1=1, dim2=2).mean(1) > 0).all()):
        raise SparsityError(f"{name}: all inputs of this layer are zero in the calibration data")
    damped = damped_gram(gram, damp)
    factor, failed = torch.linalg.cholesky_ex(damped)
    if bool(failed.any()):
        factor, failed = torch.linalg.cholesky_ex(damped.double())
        if bool(failed.any()):
            raise SparsityError(f"{name}: X^T X is singular; use more calibration tokens or a larger damp than {damp}")
    return torch.cholesky_inverse(factor).float()


def joint_saliency(rows: Tensor, inverse: Tensor, labels: Tensor) -> Tensor:
    """Each element's share of its block's loss, see `obs_block`.

    Args:
        rows: weights [outputs, inputs].
        inverse: C [inputs, inputs].
        labels: the block of each element, int64 [outputs, inputs]; negative where it is in none and alone.
    """
    alone = labels.max() + 1 + torch.arange(labels.shape[1], device=labels.device)
    labels = torch.where(labels < 0, alone, labels)
    order = labels.argsort(dim=1, stable=True)
    ordered, position = labels.gather(1, order), torch.arange(labels.shape[1], device=labels.device).expand_as(labels)
    starts = torch.cat([torch.ones_like(labels[:, :1]), (ordered[:, 1:] != ordered[:, :-1]).long()], 1)
    within = position - (starts * position).cummax(1).values  # in the block's run of sorted columns
    size = int(within.max()) + 1
    if size == 1:
        return rows.square() / (2 * inverse.diagonal())
    run = starts.cumsum(1) - 1
    columns = torch.full((len(rows), (int(run.max()) + 1) * size), -1, device=labels.device)  # -1: a smaller block
    columns = columns.scatter_(1, run * size + within, order).unflatten(1, (-1, size))
    is_same = bool((columns == columns[:1]).all())
    step = len(rows) if is_same else max(1, AT_ONCE // max(columns[0].numel() * size, 1))
    out, identity = torch.zeros_like(rows), torch.eye(size, dtype=rows.dtype, device=rows.device)
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        own = columns[:1] if is_same else columns[part]
        real, at = own >= 0, own.clamp(min=0)
        joint = torch.where(
            real[..., :, None] & real[..., None, :], inverse[at[..., :, None], at[..., None, :]], identity
        )
        at = columns[part].clamp(min=0).flatten(1)
        values = (rows[part].gather(1, at) * (columns[part] >= 0).flatten(1)).unflatten(1, (-1, size))
        share = values * torch.linalg.solve(joint, values[..., None])[..., 0] / 2
        out[part] = out[part].scatter_add(1, at, share.flatten(1))
    return out
