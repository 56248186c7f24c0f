"""Helpers to run a model on example inputs, and to find tensors in tuples, mappings and dataclasses.

Objects of other types (a cache, say) are not inspected; `opaque_in` lists them.
"""

import contextlib
import dataclasses
import enum
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, type, torch.dtype, torch.device, torch.Size)


def arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of a forward."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    return (tuple(example_inputs) if isinstance(example_inputs, (tuple, list)) else (example_inputs,)), {}


@contextlib.contextmanager
def seeded(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Seed the generators of the CPU and of the tensors' devices; their states are restored afterwards."""
    devices = sorted({tensor.device.index for tensor in tensors if tensor.is_cuda})
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(0)
        for device in devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(0)
        yield


@contextlib.contextmanager
def unfused_attention() -> Iterator[None]:
    """Run the single operations of torch.nn's attention inside, and no fused one of them all."""
    is_fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(is_fused)


def tensors_in(place: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor, with its place: `output.a[0]`."""
    return ((at, leaf) for at, leaf in _leaves(place, value) if isinstance(leaf, Tensor))


def opaque_in(place: str, value: Any) -> list[str]:
    """Describe the objects that are not inspected and may contain tensors: `output[2], a list_iterator`."""
    leaves = ((at, leaf) for at, leaf in _leaves(place, value) if not isinstance(leaf, (Tensor, *_PLAIN)))
    return [f"{at}, a {type(leaf).__name__}" for at, leaf in leaves]


def _leaves(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{place}.{key}", item)
    elif isinstance(value, (tuple, list)):
        for at, item in enumerate(value):
            yield from _leaves(f"{place}[{at}]", item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for f in dataclasses.fields(value):
            yield from _leaves(f"{place}.{f.name}", getattr(value, f.name))
    else:
        yield place, value
