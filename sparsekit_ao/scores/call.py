"""Calling scores: which one a config value means, which statistics it needs, and whether what it returns fits."""

import inspect

import torch
from torch import Tensor

from ..calibration import NEEDS, Statistics
from ..errors import SparsityError
from .built_in import NAMES, BuiltInScore, Score

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def parse_score(given: object, where: str) -> Score | None:
    """The score of a config value: a name, a function, an object with `needs`, or None.

    Raises:
        SparsityError: an unknown name, not callable, or unknown needs.
    """
    if given is None:
        return None
    if isinstance(given, str) and given in NAMES:
        return NAMES[given]
    if isinstance(given, type) and issubclass(given, BuiltInScore):
        raise SparsityError(f"{where}score={given.__name__} is a class; call it, score={given.__name__}()")
    if not callable(given):
        raise SparsityError(
            f"{where}score must be one of {', '.join(map(repr, NAMES))}, a function (weight, name) -> saliency or an "
            f"object with `needs`, got {given!r}"
        )
    try:
        _ = inspect.signature(given).bind(None, None) if inspect.isfunction(given) else None
    except TypeError:
        text = f"{where}score must be a function (weight, name) -> saliency, got one of {inspect.signature(given)}"
        raise SparsityError(text) from None
    if isinstance(getattr(given, "needs", ()), str):
        raise SparsityError(f"{where}score: needs must be a tuple of names, got {given.needs!r}")  # type: ignore[attr-defined]
    for need in needs_of(given):
        if need not in NEEDS:
            raise SparsityError(f"{where}score: needs are some of {', '.join(map(repr, NEEDS))}, got {need!r}")
    return given


def needs_of(score: object) -> tuple[str, ...]:
    """The statistics that a score needs."""
    return tuple(getattr(score, "needs", ()))


def saliency_of(score: Score, weight: Tensor, name: str, statistics: Statistics | None = None) -> Tensor:
    """Call a score for one weight and check what it returns.

    Args:
        score: called as `score(weight, name)`, or as `score(weight, statistics)` if it has `needs`; it must not change
            the weight.
        weight: the dense weight, whole, detached.
        name: its `tensor_fqn`.
        statistics: of this weight, if there are any.

    Returns:
        A floating-point tensor (16 bits or more) of the weight's shape on the weight's device; the highest saliencies
        are kept. They may be negative; NaN ranks highest.

    Raises:
        SparsityError: the score returned something else, or statistics that it needs are missing.

    >>> saliency_of(lambda weight, name: weight.abs() * 2, torch.tensor([1.0, -3.0]), "fc.weight")
    tensor([2., 6.])
    """
    if hasattr(score, "needs"):
        statistics = statistics or Statistics(name=name, shape=tuple(weight.shape), form=None)
        missing = statistics.missing(needs_of(score))
        if missing:
            raise SparsityError(
                f"{name}: {score} needs {', '.join(missing)}, and calibration data did not reach this layer or there "
                "was none: run sparsifier.calibrate(batches) before step, or give the layer another score"
            )
        found = score(weight, statistics)
    else:
        found = score(weight, name)
    if not isinstance(found, Tensor) or found.shape != weight.shape or found.dtype not in _FLOATS:
        what = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise SparsityError(
            f"{name}: score must return a floating-point tensor of the weight's shape {tuple(weight.shape)}, got {what}"
        )
    if found.device != weight.device:
        raise SparsityError(
            f"{name}: score must return a tensor on the weight's device {weight.device}, got {found.device}"
        )
    return found.detach()
