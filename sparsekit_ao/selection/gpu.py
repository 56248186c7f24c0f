"""The backend "triton", kernels for NVIDIA GPUs; triton is imported only when it may be used."""

import importlib.util
from collections.abc import Sequence

import torch

from .work import Update, Work

name = "triton"


def reasons(work: Work) -> list[str]:
    """Why the kernels cannot take the work; see `backend.Backend`."""
    if importlib.util.find_spec("triton") is None:
        return ['triton is not installed (pip install "sparsekit_ao[triton]")']
    device = work.device
    if device.type == "cuda" and (torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0)):
        return [f"kernels are tested for NVIDIA GPUs of compute capability 8.0 and above, not for {device}"]
    from . import triton

    if device.type != "cuda" and not triton.INTERPRETED:
        return [f"it works on CUDA tensors (on others with TRITON_INTERPRET=1 set before the start), got {device}"]
    if not isinstance(work, Update):
        return ["it fills masks; block scores and thresholds are left to the reference"]
    return list(triton.lower(work).refusals)


def run(work: Sequence[Work]) -> None:
    """Fill the masks, one update after the other. Nothing waits for the device."""
    from . import triton

    for update in work:
        assert isinstance(update, Update)
        triton.fill_masks(triton.lower(update))
