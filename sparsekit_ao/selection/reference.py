"""The reference: scoring, selection and filling in the plainest torch, on any device.

Every other backend writes these masks, given the same scores. The rule itself is `structure.rule.keep_rows`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..structure.rule import keep_rows
from ..structure.windows import Window, block_scores, fill_mask, from_scopes, kept_grid, real_slots, to_scopes
from .request import Request

name = "reference"


def refusals(work: Request | Tensor) -> list[str]:
    """Return why the reference cannot take a request, or rows of scores: it takes all."""
    return []


def run(requests: Sequence[Request]) -> None:
    """Fill the masks of requests, one after the other."""
    for request in requests:
        fill(request, block_scores, keep_rows)


def fill(request: Request, score: Callable[..., Tensor], select: Callable[..., Tensor]) -> None:
    """Fill masks with `score` (called as `block_scores`) and `select` (called as `keep_rows`)."""
    budget, scopes = request.budget, request.scope_windows
    as_mean = request.scope.as_mean  # all competitors are scored in the same way
    scores = []
    for s in scopes:
        members: Sequence[Window] = s.windows
        if request.masked or request.within_mask:
            members = [replace(m, under=m.mask) for m in members]
        scores.append(to_scopes(score(members, request.norm, len(s.shape), as_mean), s, 0.0))
    candidates = real_slots(scopes)
    if request.within_mask:
        candidates = torch.cat([to_scopes(kept_grid(s), s, False) for s in scopes], dim=1)
    chosen = select(torch.cat(scores, dim=1), budget.reshape(-1) if isinstance(budget, Tensor) else budget, candidates)
    rows = chosen.split([math.prod(s.shape) for s in scopes], dim=1)
    grids = [from_scopes(kept, s) for s, kept in zip(scopes, rows, strict=True)]
    of_windows = [grid for s, grid in zip(scopes, grids, strict=True) for _ in s.windows]
    fill_mask(request.windows, of_windows, within_mask=request.within_mask)
