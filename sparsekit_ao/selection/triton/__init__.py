"""The backend "triton": kernels for NVIDIA GPUs, imported when they may be used. See README.md beside this."""

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from ..request import Request
from .lowering import lower, lower_rows, refused_dtypes

name = "triton"


def refusals(work: Request | Tensor) -> list[str]:
    """Return why the kernels cannot take a request, or rows of scores."""
    if importlib.util.find_spec("triton") is None:
        return ["triton is not installed (pip install triton)"]
    device = work.device
    if device.type == "cuda" and (torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0)):
        return [f"kernels are tested for NVIDIA GPUs of compute capability 8.0 and above, not for {device}"]
    from .launches import INTERPRETED

    if device.type != "cuda" and not INTERPRETED:
        return [f"it works on CUDA tensors (on others with TRITON_INTERPRET=1 set before the start), got {device}"]
    return list(lower(work).refusals) if isinstance(work, Request) else refused_dtypes("scores are", [work])


def run(requests: Sequence[Request]) -> None:
    """Fill the masks of requests, one after the other. Nothing waits for the device."""
    from .launches import launch

    for request in requests:
        launch(lower(request))


def keep_rows(scores: Tensor, keep: int | Tensor, candidates: Tensor | None = None) -> Tensor:
    """Keep exactly `keep` of each row of scores [rows, members], of the `candidates` alone if given."""
    from .launches import launch

    selection = lower_rows(scores, keep, candidates)
    launch(selection)
    return selection.parts[0][0].mask.view(torch.bool)
