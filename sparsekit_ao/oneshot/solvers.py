"""Solvers on matrices: masks of a layer's weight, and kept weights that make up for the dropped ones.

Unless a function says otherwise, W is [groups, outputs, inputs]. G = X^T X of the layer's inputs is [groups, inputs,
inputs], or a `RowGram` where there are fewer tokens than inputs. Both are float32, or both float64. A mask is bool in
the shape of W. The error of V for W is tr((W - V) G (W - V)^T). A solver of `SOLVERS` is called as `(W, G, scopes) ->
(mask, V)`, V final; `least_squares` takes a mask instead of scopes. `prune_layer` damps G before it calls a solver, so
solvers damp it no further; the errors of the report are those of G itself.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..calibration.gram import RowGram, damped_inverse, divided, power_of_two
from ..errors import SparsityError
from ..scores import joint_saliency
from ..selection import keep_mask

CG_STEPS = 30
FEW_STEPS = 5  # of conjugate gradients, for the weights at which ADMM starts, and from those at which it ends
ADMM_STEPS = 18
RHO = 0.1  # first penalty, for a Gram matrix with unit diagonal
GROWTH, EVERY = 1.5, 3  # the penalty grows by this factor every so often; each time, a matrix is factorized anew
# SparseGPT compensates the columns to the right after every WIDTH columns. Without N:M, these are also its scopes.
WIDTH = 128
TOGETHER = 8  # without N:M, as many columns are compensated among themselves before those after them
WIDEST_SCOPE = 256  # columns that structured OBS prunes together; wider scopes are chosen at once


@dataclass(frozen=True, kw_only=True, eq=False)
class MatrixScopes:
    """Which elements of a weight matrix compete, and how many blocks of them are kept."""

    name: str  # of the weight, for errors
    # Saliencies [groups, outputs, inputs] and a norm -> the mask that keeps the highest blocks of every scope. A block
    # has the norm of its elements' saliencies, or with None their sum.
    project: Callable[[Tensor, float | None], Tensor]
    # Returns the scope and the block of each element, int64 [groups, outputs, inputs]; -1 if it is in none.
    labels: Callable[[], tuple[Tensor, Tensor]]
    keep: Tensor  # blocks that are kept in each scope, int64 [scopes]
    blocks_per_scope: int  # in a full scope
    is_plain: bool  # whether there is one stage, and no scope or block is smaller than the others
    allowed: Tensor | None = None  # the only elements that may be kept, bool [groups, outputs, inputs]; None is all


Gram = Tensor | RowGram
Solver = Callable[[Tensor, Gram, MatrixScopes], tuple[Tensor, Tensor]]


def relative_errors(weight: Tensor, gram: Gram, *solutions: Tensor) -> list[float]:
    """Return sqrt(tr((W - V) G (W - V)^T) / tr(W G W^T)) for each solution V; 0 where the layer's output is zero.

    >>> w, g = torch.ones(1, 1, 4), torch.eye(4)[None]
    >>> relative_errors(w, g, w * torch.tensor([1, 1, 0, 1]), w)
    [0.5, 0.0]
    """
    unit = power_of_two(weight)
    weight = divided(weight, unit)
    rests = (weight, *(weight - divided(solution, unit) for solution in solutions))
    total, *lost = ((rest @ gram).mul_(rest).sum(2).double().sum() for rest in rests)
    return [float((one.clamp(min=0) / total).sqrt()) if total > 0 else 0.0 for one in lost]


def least_squares(
    weight: Tensor, gram: Gram, mask: Tensor, steps: int = CG_STEPS, start: Tensor | None = None
) -> Tensor:
    """Return the best kept weights for a mask, zero where it drops, by conjugate gradients preconditioned by diag(G).

    >>> w, g = torch.tensor([[[1.0, 1.0]]]), torch.tensor([[[1.0, 1.0], [1.0, 1.0]]])  # two equal inputs
    >>> least_squares(w, g, torch.tensor([[[True, False]]]))
    tensor([[[2., 0.]]])
    """
    scale = gram.diagonal(dim1=1, dim2=2)[:, None, :]
    scale = scale.clamp(min=1e-12 * float(scale.mean()) or 1.0)
    # From here a singular G needs no damping: what the data does not determine stays.
    solution = (weight if start is None else start) * mask
    rest = ((weight - solution) @ gram).mul_(mask)
    columns = mask.any(1, keepdim=True)
    others = (mask != columns).any(2).any(0)  # the rows that drop more than whole columns
    if isinstance(gram, Tensor) and 2 * int(others.sum()) < len(others):  # such as after the removal of units
        root = scale.sqrt()
        kept = torch.where(columns & columns.mT, gram, 0.0).div_(root).div_(root.mT)
        kept.diagonal(dim1=1, dim2=2).masked_fill_(~columns[:, 0], 1.0)
        factor, failed = torch.linalg.cholesky_ex(kept)
        if not bool(failed.any()):  # otherwise G is singular
            exact = solution + torch.cholesky_solve((rest / root).mT, factor).mT / root
            if bool(others.any()):
                begun = solution[:, others]
                exact[:, others] = least_squares(weight[:, others], gram, mask[:, others], steps, begun)
            return exact
    direction = rest / scale
    size = (rest * direction).sum(2, keepdim=True)
    first = size.clone()
    for _ in range(steps):
        moved = (direction @ gram).mul_(mask)
        curvature = (direction * moved).sum(2, keepdim=True)
        step = torch.where((curvature > 0) & (size > 1e-14 * first), size / curvature, 0)
        solution.addcmul_(step, direction)
        rest.addcmul_(step, moved, value=-1)
        turned = rest / scale
        before, size = size, (rest * turned).sum(2, keepdim=True)
        direction.mul_(torch.where(before > 0, size / before, 0)).add_(turned)
    return solution


def admm(weight: Tensor, gram: Gram, scopes: MatrixScopes, steps: int = ADMM_STEPS) -> tuple[Tensor, Tensor]:
    """Return mask and weights by the alternating direction method of multipliers (ALPS, arXiv 2406.07831)."""
    scale = gram.diagonal(dim1=1, dim2=2)[:, None, :]
    scale = scale.clamp(min=1e-8 * float(scale.mean()) or 1.0).sqrt()
    first_mask = scopes.project(weight * scale, 2)  # an exact selection, so that any structure can be given
    first = least_squares(weight, gram, first_mask, FEW_STEPS)
    hessian = gram.scaled(scale) if isinstance(gram, RowGram) else gram / (scale.mT * scale)
    mask, kept = _admm_steps(weight * scale, hessian, first * scale, scopes, steps)
    del hessian
    solution = least_squares(weight, gram, mask, FEW_STEPS, kept.div_(scale))
    errors = relative_errors(weight, gram, solution, first)
    return (mask, solution) if errors[0] <= errors[1] else (first_mask, first)


def _admm_steps(weight: Tensor, hessian: Gram, kept: Tensor, scopes: MatrixScopes, steps: int) -> tuple[Tensor, Tensor]:
    """Return the mask and the kept weights after some steps from kept weights, for a Gram matrix H with unit diagonal.

    With the weight W, each step of ADMM for the error of D, which must fit a mask, is, with the dual variable Y:
    V = (W H - Y + rho D) (H + rho I)^-1, D = projection of V + Y / rho, and Y + rho (V - D) is the new Y.
    """
    target, rho = weight @ hessian, RHO
    dual = target - kept @ hessian  # what makes the start a fixed point, but for the projection
    for done in range(0, steps, EVERY):
        inverse = penalized_inverse(hessian, rho)
        for _ in range(min(EVERY, steps - done)):
            free = (target - dual).add_(kept, alpha=rho) @ inverse
            kept = torch.add(free, dual, alpha=1 / rho)
            mask = scopes.project(kept, 2)
            kept.mul_(mask)
            dual.add_(free.sub_(kept), alpha=rho)
        rho *= GROWTH
        del inverse  # the memory of the next one
    return mask, kept


def penalized_inverse(hessian: Gram, rho: float) -> Gram:
    """(H + rho I)^-1 of each group."""
    if isinstance(hessian, RowGram):
        return hessian.penalized_inverse(rho)
    inverse = hessian.mT.clone(memory_format=torch.preserve_format)  # in the order of LAPACK, which then works in place
    inverse.diagonal(dim1=1, dim2=2).add_(rho)
    torch.linalg.cholesky(inverse, out=inverse)
    return torch.cholesky_inverse(inverse, out=inverse)


def structured_obs(weight: Tensor, gram: Gram, scopes: MatrixScopes) -> tuple[Tensor, Tensor]:
    """Prune scope after scope, compensated in the columns after it, by structured OBS (S3, arXiv 2604.11315)."""
    inverse = damped_inverse(gram, 0.0, scopes.name)
    scope_ids, block_ids = scopes.labels()
    is_plain = scopes.is_plain and len(weight) == 1 and bool((block_ids >= 0).all())
    chunks = column_chunks(scope_ids[0]) if is_plain else []
    # scopes of several stages, or wide ones, are chosen at once
    if not is_plain or max(stop - start for start, stop in chunks) > WIDEST_SCOPE:
        joint = [joint_saliency(w, c, b) for w, c, b in zip(weight, inverse, block_ids, strict=True)]
        mask = scopes.project(torch.stack(joint), None)
        return mask, least_squares(weight, gram, mask)

    def choose(columns: Tensor, inverse: Tensor, start: int, stop: int) -> Tensor:
        labels = block_ids[0, :, start:stop]
        allowed = True if scopes.allowed is None else scopes.allowed[0, :, start:stop]
        saliency = joint_saliency(columns * allowed, inverse, labels)
        ids, element = labels.unique(return_inverse=True)
        scope_of = torch.empty_like(ids).scatter_(0, element.flatten(), scope_ids[0, :, start:stop].flatten())
        order = scope_of.argsort(stable=True)  # by scope, and in it by block
        sums = saliency.new_zeros(ids.numel()).index_add_(0, element.flatten(), saliency.flatten())
        competing = sums[order].unflatten(0, (-1, scopes.blocks_per_scope))
        kept = keep_mask(competing, scopes.keep[scope_of[order].view(competing.shape)[:, 0]])
        return torch.empty_like(kept.flatten()).scatter_(0, order, kept.flatten())[element] & allowed

    mask, _ = prune_chunks(weight[0], inverse[0], chunks, choose)
    return mask[None], least_squares(weight, gram, mask[None])


def prune_chunks(
    weight: Tensor,
    inverse: Tensor,
    chunks: list[tuple[int, int]],
    choose: Callable[[Tensor, Tensor, int, int], Tensor],
) -> tuple[Tensor, Tensor]:
    """Prune chunk after chunk, and compensate in the columns to the right; return the mask and the weights.

    `weight` is [outputs, inputs] and `inverse` is C = G^-1. `choose` gives the mask of a chunk from the present weights
    and C of its columns, and their range.
    """
    solution, mask = weight.clone(), torch.ones_like(weight, dtype=torch.bool)
    upper = torch.linalg.cholesky(inverse, upper=True)  # C of the columns from k on is upper[k:, k:]^T upper[k:, k:]
    runs: list[list[tuple[int, int]]] = [[]]  # after about WIDTH columns, all columns to the right are compensated
    for start, stop in chunks:
        if runs[-1] and stop - runs[-1][0][0] > WIDTH:
            runs.append([])
        runs[-1].append((start, stop))
    for run in runs:
        first, end = run[0][0], run[-1][1]
        errors = torch.zeros_like(weight[:, first:end])
        for start, stop in run:
            factor = upper[start:stop, start:stop]
            block = factor.mT @ factor
            keeps = choose(solution[:, start:stop], block, start, stop)
            drops = ~keeps
            system = torch.where(drops[:, :, None] & drops[:, None, :], block, torch.diag_embed(keeps.to(block.dtype)))
            lost = torch.linalg.solve(system, torch.where(drops, solution[:, start:stop], 0))
            solution[:, start:stop] = torch.where(keeps, solution[:, start:stop] - lost @ block, 0)
            error = lost @ factor.mT
            solution[:, stop:end] -= error @ upper[start:stop, stop:end]
            mask[:, start:stop], errors[:, start - first : stop - first] = keeps, error
        solution[:, end:] -= errors @ upper[first:end, end:]
    return mask, solution


def column_chunks(labels: Tensor) -> list[tuple[int, int]]:
    """Return the finest cut of columns into chunks that no scope crosses; `labels` are the scopes of all elements.

    >>> column_chunks(torch.tensor([[0, 0, 1, 1], [2, 2, 3, 3]]))
    [(0, 2), (2, 4)]
    """
    labels, columns = labels.cpu(), labels.shape[1]
    last = torch.zeros(int(labels.max()) + 1, dtype=torch.long, device="cpu")
    position = torch.arange(columns, device="cpu").expand_as(labels)
    last.scatter_reduce_(0, labels.reshape(-1), position.reshape(-1), "amax", include_self=False)
    reach = last[labels].amax(0)  # the last column of any scope that has an element in this one
    chunks, start, end = [], 0, 0
    for column, far in enumerate(reach.tolist()):
        end = max(end, far)
        if column == end:
            chunks.append((start, end + 1))
            start = end = end + 1
    return chunks


def sparsegpt(weight: Tensor, gram: Gram, scopes: MatrixScopes) -> tuple[Tensor, Tensor]:
    """Prune by SparseGPT (arXiv 2301.00774), column by column: the baseline of comparisons."""
    keep, m = _sparsegpt_budget(scopes)
    inverse = damped_inverse(gram, 0.0, scopes.name)
    solution = weight.mT.clone(memory_format=torch.contiguous_format)  # whose columns are rows
    # what may be kept, until a part of it is chosen
    mask = torch.ones_like(solution, dtype=torch.bool) if scopes.allowed is None else scopes.allowed.mT.clone()
    factors = torch.linalg.cholesky(inverse, upper=True)
    # Without N:M, every expert keeps the same share, and so do every WIDTH columns of an expert, except for rounding.
    for group, (w, kept, upper) in enumerate(zip(solution, mask, factors, strict=True)):
        columns, diagonal = len(w), upper.diagonal()[:, None]
        own = keep if m is not None else keep * (group + 1) // len(weight) - keep * group // len(weight)
        for start in range(0, columns, WIDTH):
            stop = min(start + WIDTH, columns)
            errors = torch.empty_like(w[start:stop])
            if m is None:
                share = round(own * stop / columns) - round(own * start / columns)
                saliency = (w[start:stop] / diagonal[start:stop]).square().mul_(kept[start:stop]).T
                kept[start:stop] &= keep_mask(saliency.reshape(1, -1), share).view_as(saliency).T
            for at in range(start, stop, m or TOGETHER):
                end = min(at + (m or TOGETHER), stop)
                if m is not None:
                    kept[at:end] &= keep_mask((w[at:end] / diagonal[at:end]).square().mul_(kept[at:end]).T, own).T
                dropped = ~kept[at:end] / diagonal[at:end]
                own_errors, factor = errors[at - start : end - start], upper[at:end, at:stop]
                torch.mul(w[at], dropped[0], out=own_errors[0])
                for k in range(1, end - at):  # by what the columns before leave of it
                    torch.addmv(w[at + k], own_errors[:k].T, factor[:k, k], alpha=-1, out=own_errors[k])
                    own_errors[k].mul_(dropped[k])
                w[at:stop].addmm_(factor.T, own_errors, alpha=-1)
            w[stop:].addmm_(upper[start:stop, stop:].T, errors, alpha=-1)
    mask = mask.mT.contiguous()
    return mask, solution.mT * mask


def _sparsegpt_budget(scopes: MatrixScopes) -> tuple[int, int | None]:
    """Return (n, m) of N:M along the inputs, or (elements that the whole tensor keeps, None)."""
    (labels, blocks), m = scopes.labels(), scopes.blocks_per_scope
    if scopes.is_plain and int(blocks.max()) + 1 == blocks.numel() and bool((scopes.keep == scopes.keep[0]).all()):
        if scopes.keep.numel() == 1:
            return int(scopes.keep), None
        runs = labels.unflatten(2, (-1, m)) if labels.shape[2] % m == 0 else None
        if runs is not None and bool((runs == runs[..., :1]).all()):
            if labels.shape[2] > WIDTH and WIDTH % m:
                raise SparsityError(f"sparsegpt: {int(scopes.keep[0])}:{m} does not divide {WIDTH} columns")
            return int(scopes.keep[0]), m
    raise SparsityError(
        f"{scopes.name}: compensate='sparsegpt' knows only N:M along the inputs, the same everywhere, and single "
        "elements over the whole tensor; use 'admm' or 'obs' for other structures"
    )


SOLVERS: dict[str, Solver] = {"sparsegpt": sparsegpt, "obs": structured_obs, "admm": admm}
