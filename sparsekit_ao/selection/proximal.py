"""Which kernels threshold blocks in place: one read and one write of the weight."""

from collections.abc import Callable, Sequence
from types import ModuleType

from ..errors import SparsityError
from .gpu import gpu_path
from .tiling import Scopes

__all__ = ["check_impl", "condition_path", "threshold_path"]

IMPLS = ("auto", "reference", "triton")


def check_impl(impl: str) -> None:
    """Refuse what names no way to threshold."""
    if impl not in IMPLS:
        raise SparsityError(f"thresholding: impl must be one of {IMPLS}, got {impl!r}")


def threshold_path(groups: Sequence[Scopes], impl: str = "auto") -> ModuleType | None:
    """What shrinks the blocks of all groups, or zeroes them (`threshold(group, ...)`); None where no kernel does.

    Args:
        groups: windows on the values that are changed; the blocks of a scope share a threshold.
        impl: `"auto"`, `"reference"` for None, `"triton"` for an error that says why instead of None.

    Raises:
        SparsityError: another `impl`, or triton asked for by name and not for these blocks.
    """
    return _path(groups, impl, lambda gpu: [r for g in groups for r in gpu.threshold_reasons(g)])


def condition_path(groups: Sequence[Scopes], *, atol: float, impl: str = "auto") -> ModuleType | None:
    """The same for thresholds under a positive diagonal (`condition(group, ...)`), which stands where masks do."""
    return _path(groups, impl, lambda gpu: [r for g in groups for r in gpu.condition_reasons(g, atol)])


def _path(groups: Sequence[Scopes], impl: str, reasons_of: Callable[[ModuleType], list[str]]) -> ModuleType | None:
    check_impl(impl)
    return gpu_path(impl, groups[0].members[0].window.device, reasons_of)
