"""The public functions of selection: they check arguments, choose a backend and hand it the requests.

A backend is a module with `name` (its key in `BACKENDS`), `refusals(work)`, `run(requests)` and `keep_rows(scores,
keep, candidates)`. With `impl="auto"`, it is the first backend for the device that gives no refusal. An implementation
requested by name is used, or an error lists its refusals.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import SparsityError
from ..structure import write_back
from ..structure.rule import KEY_DTYPES
from . import cpu, reference, triton
from .request import Request

Backend = Any  # a module or an object
BACKENDS: dict[str, Backend] = {"reference": reference, "cpu": cpu, "triton": triton}
ORDER = {"cpu": ("cpu",), "cuda": ("triton",)}  # tried before the reference


def keep_mask(scores: Tensor, keep: int | Tensor, *, candidates: Tensor | None = None, impl: str = "auto") -> Tensor:
    """Choose exactly `keep` slots of every scope: the one selection rule of the library.

    The highest scores are kept; among equal scores the lower index wins; NaN ranks highest, so that pruning never
    hides a diverged weight; -0.0 equals 0.0. Every implementation returns the same bits.

    Args:
        scores: [scopes, slots], float16, bfloat16, float32 or float64.
        keep: The number of slots kept in each scope, in [0, slots]: an int, or an integer tensor [scopes].
        candidates: bool [scopes, slots]. A False slot is never kept. A scope with fewer candidates than `keep`
            keeps them all.
        impl: `"auto"`, or the name of a backend: `"reference"`, `"cpu"`, `"triton"`.

    Returns:
        bool [scopes, slots], True = keep.

    Raises:
        SparsityError: A rank, dtype, budget or implementation does not fit.

    >>> keep_mask(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), 1)
    tensor([[False,  True, False, False]])
    """
    if not isinstance(scores, Tensor):
        raise SparsityError(f"keep_mask: scores must be a tensor [scopes, slots], got {type(scores).__name__}")
    if scores.ndim != 2 or scores.dtype not in KEY_DTYPES:
        raise SparsityError(
            f"keep_mask: scores must be float16, bfloat16, float32 or float64 [scopes, slots], "
            f"got {scores.dtype} {tuple(scores.shape)}"
        )
    if candidates is not None:
        is_tensor = isinstance(candidates, Tensor)
        if not is_tensor or candidates.shape != scores.shape or candidates.dtype != torch.bool:
            found = f"{candidates.dtype} {tuple(candidates.shape)}" if is_tensor else type(candidates).__name__
            raise SparsityError(f"keep_mask: candidates must be bool {tuple(scores.shape)}, got {found}")
    _check_budget(keep, *scores.shape)
    if isinstance(keep, Tensor):
        keep = keep.to(scores.device, torch.int64, non_blocking=True).expand(len(scores))
    return _backend(scores, impl).keep_rows(scores.detach(), keep, candidates)


@torch.no_grad()
def fill_masks(requests: Sequence[Request], *, impl: str = "auto") -> None:
    """Fill the masks of independent requests of whole tensors, in place; `impl` as in `keep_mask`."""
    shared: dict[str, list[Request]] = {}
    for request in requests:
        shared.setdefault(_backend(request, impl).name, []).append(request)
    for name, chosen in shared.items():
        BACKENDS[name].run(chosen)
    for request in requests:
        write_back(request.scope_windows, request.scope, request.masks)


def _backend(work: Request | Tensor, impl: str) -> Backend:
    """The backend for a request, or for rows of scores."""
    if impl == "auto":
        for name in ORDER.get(work.device.type, ()):
            if not BACKENDS[name].refusals(work):
                return BACKENDS[name]
        return reference
    if not isinstance(impl, str) or impl not in BACKENDS:
        raise SparsityError(f"impl must be one of {('auto', *BACKENDS)}, got {impl!r}")
    refusals = BACKENDS[impl].refusals(work)
    if refusals:
        raise SparsityError(f'impl="{impl}" cannot take this: {"; ".join(refusals)}. Use impl="auto".')
    return BACKENDS[impl]


def _check_budget(keep: object, scopes: int, slots: int) -> None:
    """Refuse a budget of a wrong kind, shape or size (where reading it needs no wait for a device)."""
    if isinstance(keep, Tensor):
        if tuple(keep.shape) not in ((), (scopes,)) or keep.is_floating_point() or keep.dtype == torch.bool:
            raise SparsityError(
                f"keep must be an int or an integer tensor [{scopes}], got {keep.dtype} {tuple(keep.shape)}"
            )
        low, high = (0, 0) if keep.device.type != "cpu" or not keep.numel() else map(int, keep.aminmax())
    elif isinstance(keep, bool) or not isinstance(keep, int):
        raise SparsityError(f"keep must be an int or an integer tensor [{scopes}], got {keep!r}")
    else:
        low = high = keep
    if low < 0 or high > slots:
        raise SparsityError(f"keep must be in 0 .. {slots} (the slots of a scope), got {low} .. {high}")
