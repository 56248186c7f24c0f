"""The backend "triton", kernels for NVIDIA GPUs; triton is imported only when it may be used."""

from collections.abc import Sequence

from torch import Tensor

from .request import Request

name = "triton"


def refusals(work: Request | Tensor) -> list[str]:
    """Return why the kernels cannot take a request, or rows of scores."""
    return ["it is being rewritten"]


def run(requests: Sequence[Request]) -> None:
    """Launch kernels."""


def keep_rows(scores: Tensor, keep: int | Tensor, candidates: Tensor | None = None) -> Tensor:
    """Keep rows."""
    raise NotImplementedError
