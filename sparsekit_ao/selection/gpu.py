"""The backend "triton", kernels for NVIDIA GPUs; triton is imported only when it may be used."""

import importlib.util
from collections.abc import Sequence

import torch

from .work import Scores, Threshold, Update, Work

name = "triton"


def reasons(work: Work) -> list[str]:
    """Why the kernels cannot take the work; see `backend.Backend`."""
    device = work.device
    if importlib.util.find_spec("triton") is None:
        return ['triton is not installed (pip install "sparsekit_ao[triton]")']
    if device.type == "cuda" and (torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0)):
        return [f"kernels are tested for NVIDIA GPUs of compute capability 8.0 and above, not for {device}"]
    from . import triton

    if device.type != "cuda" and not triton.INTERPRETED:
        return [f"it works on CUDA tensors (on others with TRITON_INTERPRET=1 set before the start), got {device}"]
    if isinstance(work, Scores):
        return triton.score_reasons(work.members, work.norm, work.as_mean)
    if isinstance(work, Threshold):
        if work.newton is None:
            return triton.threshold_reasons(work.scopes)
        return triton.condition_reasons(work.scopes, work.newton.atol)
    return triton.rows_reasons(work.members[0].window) if _is_rows(work) else triton.reasons_of(work)


def run(work: Sequence[Work]) -> None:
    """Launch kernels; updates share launches. Nothing waits for the device."""
    from . import triton

    updates = [one for one in work if isinstance(one, Update)]
    alone = [one for one in updates if len(updates) == 1 and _is_rows(one)]
    if updates and not alone:
        triton.scope_masks(updates)
    for one in work:
        if isinstance(one, Scores):
            assert one.norm is not None
            one.out.copy_(triton.block_scores(one.members, one.norm, one.out.ndim))
        elif isinstance(one, Threshold):
            _threshold(one)
    for one in alone:
        (member,) = one.members
        assert member.values is not None and member.mask is not None
        candidates = member.mask if one.among_kept else None
        budget = one.keep.reshape(-1) if isinstance(one.keep, torch.Tensor) else one.keep
        member.mask.copy_(triton.keep_mask(member.values, budget, candidates, magnitude=False))


def _is_rows(update: Update) -> bool:
    """Whether these are rows of given scores, as `keep_mask` takes them. Alone, they need no table of addresses."""
    first, *more = update.members
    if update.norm is not None or more or first.window.ndim != 2 or first.mask is None:
        return False
    scopes = update.scopes[0]
    plain = first.shape == (1, 1) and scopes.shape == (1, first.window.shape[1])
    return plain and not first.order and not scopes.order and first.mask.dtype == torch.bool


def _threshold(work: Threshold) -> None:
    from . import triton

    if work.newton is None:
        triton.threshold(work.scopes, work.thresholds, soft=work.soft, factor=work.factor)
        return
    n, both = work.newton, (work.scopes, work.thresholds)
    misses = triton.condition(*both, factor=work.factor, eps=n.eps, atol=n.atol, max_iter=n.max_iter)
    if work.missed is not None:
        work.missed.copy_(misses.max())
