"""Whether the GPU path takes a piece of work; imports triton only once it may."""

import importlib.util
from collections.abc import Callable
from types import ModuleType

import torch

from ..errors import SparsityError

__all__ = ["gpu_path"]


def gpu_path(impl: str, device: torch.device, reasons_of: Callable[[ModuleType], list[str]]) -> ModuleType | None:
    """The GPU path where it is to be used, else None.

    Args:
        impl: as the caller asked.
        device: where the tensors lie.
        reasons_of: says why the path (given to it) cannot take the work; empty if it can.

    Raises:
        SparsityError: triton was asked for by name, and is not installed, or the work is not for it.
    """
    if impl != "triton" and (impl != "auto" or device.type != "cuda"):
        return None
    if impl == "auto" and not _is_served(device):
        return None
    if importlib.util.find_spec("triton") is None:
        if impl == "auto":
            return None
        raise SparsityError(
            'impl="triton" needs triton, which is not installed. '
            'Install it (pip install "sparsekit_ao[triton]"), or use impl="auto".'
        )
    from . import triton as path

    reasons = reasons_of(path)
    if device.type == "cuda" and not _is_served(device):
        reasons = [f"kernels are checked for NVIDIA GPUs of compute capability 8.0 and above, not for {device}"]
    if device.type != "cuda" and not path.INTERPRETED:
        reasons = [f"it works on CUDA tensors (on others with TRITON_INTERPRET=1 set before the start), got {device}"]
    if reasons and impl == "triton":
        raise SparsityError(f'impl="triton" cannot take this: {"; ".join(reasons)}. Use impl="auto".')
    return None if reasons else path


def _is_served(device: torch.device) -> bool:
    """Whether kernels are compiled ahead of time, in tests, for a GPU of its kind."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
