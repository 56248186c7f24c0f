"""Removing masks for good: values of the parameters that need no mask, and masks removed together or not at all."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..distributed import is_sharded, without_fsdp_class
from ..errors import SparsityError
from .weight_mask import (
    WeightMask,
    apply_parametrizations,
    below,
    find_mask,
    parameters_under,
    register,
    remove_mask,
    select,
)


def rebuilt_originals(
    module: nn.Module, tensor_name: str, originals: Sequence[Tensor] = (), mask: Tensor | None = None
) -> list[Tensor]:
    """Return parameters with which a tensor is masked without its mask; [] if `write_zeros` can mask them in place.

    Other values of its parameters may be given as `originals`, and of its mask as `mask`.
    """
    weight_mask = find_mask(module, tensor_name)
    layers = [] if weight_mask is None else below(module, tensor_name)
    if weight_mask is None or not layers:
        return []
    values = [*originals] or parameters_under(module, tensor_name)
    masked = select(apply_parametrizations(layers, values).detach(), weight_mask.mask if mask is None else mask)
    try:
        return _inverted(layers, values, masked)
    except SparsityError as e:
        raise SparsityError(
            f"{tensor_name}: cannot squash the mask through {e}. Leave the tensor out (exclude=[...]) when you prepare "
            "the dense model again."
        ) from None


def refuse_uninvertible(module: nn.Module, tensor_name: str, where: str) -> None:
    """Raise if the parametrizations of a tensor cannot express it with zeros, as `squash_mask` will need."""
    originals = parameters_under(module, tensor_name)
    if any(p.is_meta or is_sharded(p) for p in originals):
        return
    layers = copy.deepcopy(list(module.parametrizations[tensor_name]))  # type: ignore  # inverting may change buffers
    weight = apply_parametrizations(layers, originals)
    half = torch.arange(weight.numel(), device=weight.device).view(weight.shape) % 2 == 0
    try:
        _inverted(layers, originals, select(weight, half).detach())
    except SparsityError as e:
        raise SparsityError(
            f"{where}squash_mask could not write zeros through {e}. Remove that parametrization first "
            f"(torch.nn.utils.parametrize.remove_parametrizations(module, {tensor_name!r})), or leave the tensor out "
            "(exclude=[...])."
        ) from None


@torch.no_grad()
def _inverted(layers: list[nn.Module], originals: Sequence[Tensor], masked: Tensor) -> list[Tensor]:
    """Values of the originals for which parametrizations give the masked weight; raises if there are none."""
    back: tuple[Tensor, ...] = (masked,)
    for p in reversed(layers):
        if not hasattr(p, "right_inverse"):
            raise SparsityError(f"{type(p).__name__}: it has no right_inverse")
        try:
            found: Tensor | Sequence[Tensor] = p.right_inverse(*back)  # type: ignore[operator]
        except (NotImplementedError, RuntimeError, ValueError) as e:
            raise SparsityError(f"{type(p).__name__}: its right_inverse says {e}") from None
        back = (found,) if isinstance(found, Tensor) else tuple(found)
    # A row of zeros has no direction: weight_norm then keeps the old one.
    lost = apply_parametrizations(layers, list(back)).isnan()
    kept = [torch.where(lost, o, b) if b.shape == lost.shape else b for o, b in zip(originals, back, strict=True)]
    again = apply_parametrizations(layers, kept)
    close = torch.allclose(again, masked, rtol=8 * torch.finfo(masked.dtype).eps, atol=1e-6)
    if not close or not torch.equal(again != 0, masked != 0):
        raise SparsityError(f"{type(layers[-1]).__name__}: its right_inverse does not give the masked weight")
    return kept


@torch.no_grad()
def write_zeros(parameters: Sequence[Tensor], mask: Tensor, rebuilt: Sequence[Tensor]) -> None:
    """Write zeros where the mask drops, or `rebuilt_originals`, into the parameters of a tensor."""
    for parameter, value in zip(parameters, rebuilt or [select(parameters[0], mask)], strict=True):
        parameter.copy_(value)


def write_masked(module: nn.Module, tensor_name: str, mask: Tensor) -> None:
    """Write zeros into a parametrized tensor without a mask; raise if a parametrization cannot express the result."""
    register(module, tensor_name, WeightMask(mask))
    try:
        originals, values = parameters_under(module, tensor_name), rebuilt_originals(module, tensor_name)
    finally:
        remove_mask(module, tensor_name)
    write_zeros(originals, mask, values)


@contextmanager
def removed(tensors: Sequence[tuple[nn.Module, str]]) -> Iterator[None]:
    """Remove masks, (module, tensor name) each; if anything fails, inside too, all of them are registered again."""
    before: list[tuple[nn.Module, str, WeightMask, int]] = []
    try:
        for module, name in tensors:
            mask = find_mask(module, name)
            assert mask is not None
            before.append((module, name, mask, len(below(module, name))))
            remove_mask(module, name)
        yield
    except BaseException:
        for module, name, mask, at in reversed(before):
            if find_mask(module, name) is None:
                with without_fsdp_class(module):
                    register(module, name, mask, at)
        raise
