"""Thresholding of blocks in place, where the GPU path takes it: one read and one write of the weight."""

from collections.abc import Sequence

from torch import Tensor

from .gpu import gpu_path
from .tiling import Blocks

__all__ = ["threshold_blocks"]


def threshold_blocks(
    members: Sequence[Blocks],
    thresholds: Tensor,
    *,
    ndim: int,
    soft: bool,
    factor: float = 1.0,
    as_mean: bool | None = None,
    impl: str = "auto",
) -> bool:
    """Shrink blocks, or zero those whose 2-norm is strictly below the threshold.

    Args:
        members: windows on the values that are changed.
        thresholds: of the aligned grid's shape, not negative.
        ndim: dimensions of the aligned grid.
        soft: shrink by the prox of `thresholds * factor` times the norm; else zero.
        factor: see there.
        as_mean: whether norms are power means, which kernels do not take.
        impl: `"auto"`, or `"triton"` to have an error instead of False.

    Returns:
        Whether it was done; if not, nothing has changed.
    """
    device = members[0].window.device
    path = gpu_path(impl, device, lambda gpu: gpu.threshold_reasons(members, as_mean))
    if path is None:
        return False
    if soft:
        path.soft_threshold(members, thresholds, ndim, factor=factor)
    else:
        path.hard_threshold(members, thresholds, ndim)
    return True
