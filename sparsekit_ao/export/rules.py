"""Rules that several export targets share.

Each takes a `Layer` and returns its violations as text: what is required, what was found, and the first place.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.ao.pruning import FakeSparsity

from ..patterns import is_of_transformers
from .layers import DENSE, Layer

Found = list[str]


def is_a(layer: Layer, *kinds: type[nn.Module]) -> Found:
    """The weight must be that of a module of one of these classes."""
    if isinstance(layer.module, kinds) and layer.tensor_name == "weight":
        return []
    hint = "; Conv1D stores its weight transposed" if is_of_transformers(layer.module, "Conv1D") else ""
    return [
        f"needs the weight of {' or '.join(k.__name__ for k in kinds)}, got {layer.tensor_name} of {layer.kind}{hint}"
    ]


def has_dtype(layer: Layer, dtypes: Iterable[torch.dtype]) -> Found:
    """The weight must have one of these dtypes."""
    dtypes, found = list(dtypes), layer.weight.dtype
    return [] if found in dtypes else [f"needs {' or '.join(map(_short, dtypes))}, got {_short(found)}"]


def has_multiples(layer: Layer, *sizes: int) -> Found:
    """Each dimension must be a positive multiple of its size; a weight of another rank violates this as well."""
    shape = tuple(layer.weight.shape)
    if len(shape) != len(sizes):
        return [f"needs {len(sizes)} dimensions, got shape {shape}"]
    wrong = [k for k, (n, size) in enumerate(zip(shape, sizes, strict=True)) if n == 0 or n % size]
    return [f"needs dimension {k} to be a multiple of {sizes[k]}, got {shape[k]}" for k in wrong]


def is_finite(layer: Layer) -> Found:
    """Neither nan nor inf: a kernel that leaves out zeros treats 0 * inf differently, and nan equals nothing."""
    weight = layer.weight
    if not weight.is_floating_point() or not weight.numel():
        return []
    wide = weight.float() if weight.itemsize == 1 else weight
    if all(bool(end.isfinite()) for end in wide.aminmax()):  # a nan is both ends
        return []
    at = first(~wide.isfinite())
    assert at is not None
    return [f"needs finite values, got {float(weight[at])} at {list(at)}"]


def is_not_shared(layer: Layer) -> Found:
    """No other module may use the same parameter, since it is replaced."""
    others = layer.names[1:]
    return [f"needs a weight of its own, but it is shared with {', '.join(others)}; untie them first"] if others else []


def is_not_parametrized(layer: Layer) -> Found:
    """Nothing but the mask may compute the weight."""
    chain = getattr(layer.module, "parametrizations", {})
    found = [p for name in chain if name == layer.tensor_name for p in chain[name]]
    others = [type(p).__name__ for p in found if not isinstance(p, FakeSparsity)]
    if not others:
        return []
    return [f"is computed by {', '.join(others)}; call torch.nn.utils.parametrize.remove_parametrizations first"]


def computes_as(layer: Layer, kind: type[nn.Module]) -> Found:
    """The module must compute what its base class does and nothing besides, since another module replaces it."""
    module = layer.module
    if type(module).forward is not kind.forward or "forward" in vars(module):
        return [f"needs the forward of {kind.__name__}, but {layer.kind} has its own, which would not run"]
    if module._forward_hooks or module._forward_pre_hooks:
        return ["has forward hooks, which the converted layer would not run; remove them first"]
    return []


def has_zeros(layer: Layer, least: float) -> Found:
    """More than a fraction of the values must be zero, so that leaving out zeros saves more than it costs."""
    zeros = 1 - layer.density
    return [] if zeros > least else [f"needs more than {least:.2%} of zeros to be smaller, got {zeros:.2%}"]


def keeps_n_of_m(layer: Layer, n: int, m: int, dim: int = 1) -> Found:
    """At most n of every m consecutive elements of a dimension are not zero."""
    kept, shape = layer.kept, tuple(layer.weight.shape)
    if not -kept.ndim <= dim < kept.ndim or shape[dim] % m:
        return [f"needs dimension {dim} in groups of {m}, got shape {shape}"]
    counts = _counts(kept, m, dim)
    at = first(counts > n)
    if at is None:
        return []
    place = [f"{i * m}:{i * m + m}" if k == dim else str(i) for k, i in enumerate(at)]
    text = (
        f"needs at most {n} nonzeros in every {m} along dimension {dim}, got {int(counts[at])} at [{', '.join(place)}]"
    )
    others = [
        k for k, size in enumerate(shape) if k != dim and size % m == 0 and bool((_counts(kept, m, k) <= n).all())
    ]
    if layer.density > DENSE:
        return [f"{text}: the weight is dense"]
    return [text + "".join(f"; it is {n}:{m} along dimension {k}" for k in others[:1])]


def _counts(kept: Tensor, m: int, dim: int) -> Tensor:
    """Nonzeros in every m consecutive elements of a dimension."""
    return kept.unflatten(dim, (-1, m)).sum(dim + 1, dtype=torch.uint8 if m < 256 else torch.int32)


def first(wrong: Tensor) -> tuple[int, ...] | None:
    """The index of the first True, or None."""
    flat = wrong.flatten()
    if not flat.numel() or not bool(flat.any()):
        return None
    return tuple(int(i) for i in torch.unravel_index(flat.to(torch.uint8).argmax(), wrong.shape))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
