"""The parametrization that masks a weight: how it is registered and removed, and how a masked weight is computed.

A masked element is exactly zero in forward and backward, even where the weight is NaN or infinite: elements are
selected, not multiplied. Compiled, and on other devices, that is one `where`, which is fused. In eager mode on CPU
`where` on a bool mask takes three times as long as a product; there the mask is converted to the weight's dtype and
`threshold_backward` selects.
"""

import ctypes
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.pruning import FakeSparsity
from torch.nn.utils import parametrize

from ..distributed import is_placed_like, is_sharded, placed_like, refuse_gathered, without_fsdp_class
from ..errors import SparsityError
from .saved import is_intercepted, keep_saved, saving

FROM = 1 << 15  # elements from which `where` is slower
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LARGE = 1 << 22  # bytes from which a system call for large pages is worth its time
PAGE = 4096
MADV_HUGEPAGE = 14


class WeightMask(FakeSparsity):
    """Masked weight: a `torch.ao.pruning.FakeSparsity` that compiles, keeps dtypes and saves its mask.

    Args:
        mask: of the weight's shape; bool, or 0 and 1 in the weight's dtype. It becomes the buffer `mask` and is only
            ever filled in place.
    """

    mask: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """The weight with dropped elements exactly zero; shape and dtype as given."""
        if self.mask.shape != x.shape:
            raise SparsityError(f"mask {tuple(self.mask.shape)} does not fit the weight {tuple(x.shape)}")
        with saving(self, [self.mask], x):
            return select(x, placed_like(self.mask, x))

    def _apply(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        """As any module's; a mask that is moved from the meta device keeps everything, since it had no values there."""
        was_meta = self.mask.is_meta
        super()._apply(*args, **kwargs)
        if was_meta and not self.mask.is_meta:
            self.mask.fill_(True)
        return self

    def _load_from_state_dict(self, state_dict, prefix, *args):  # type: ignore[no-untyped-def]
        """As any module's; a whole mask can be loaded into a sharded one, and the reverse."""
        for name, own in self.named_buffers():
            saved = state_dict.get(f"{prefix}{name}")
            if isinstance(saved, Tensor) and saved.shape == own.shape:
                state_dict = {**state_dict, f"{prefix}{name}": placed_like(saved, own)}
        super()._load_from_state_dict(state_dict, prefix, *args)

    def shard_like(self, weight: Tensor) -> None:
        """Shard the mask over the ranks as its weight is."""
        self.mask = placed_like(self.mask, weight)

    def right_inverse(self, x: Tensor) -> Tensor:
        """Assigning to the masked weight sets the dense one."""
        return x

    def state_dict(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        """As any module's (torch.ao's leaves the mask out, so its checkpoints cannot be loaded strictly)."""
        return nn.Module.state_dict(self, *args, **kwargs)


def find_mask(module: nn.Module, tensor_name: str) -> WeightMask | None:
    """The mask on a tensor, or None."""
    if not parametrize.is_parametrized(module, tensor_name):
        return None
    return next((p for p in _chain(module, tensor_name) if isinstance(p, WeightMask)), None)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause garbage collection: full collections would take half of the time of preparing some thousand layers."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def installed(masks: Sequence[tuple[nn.Module, str, WeightMask]]) -> Iterator[None]:
    """Register masks, (module, tensor name, mask) each, on top of what parametrizes the tensors already.

    If anything fails inside, none of them is registered.
    """
    order = [(module._parameters, list(module._parameters)) for module, _, _ in masks]
    try:
        for module, name, mask in masks:
            parametrize.register_parametrization(module, name, mask, unsafe=True)
        yield
    except BaseException:
        for module, name, mask in masks:
            if find_mask(module, name) is mask:
                remove_mask(module, name)
        for parameters, names in order:
            for name in names:
                parameters[name] = parameters.pop(name)
        raise


def live_mask(module: nn.Module, tensor_name: str, tensor_fqn: str) -> WeightMask | None:
    """The mask on a tensor, or None, to be read or written.

    It is first sharded like the tensor, if that was sharded since; backward passes that need its present values keep
    them.

    Raises:
        SparsityError: the tensor is sharded, and another parametrization is below its mask; or it is gathered at
            the moment.
    """
    found = find_mask(module, tensor_name)
    if found is None:
        return None
    chain = _chain(module, tensor_name)
    weight = _originals(chain)[0]
    refuse_gathered(tensor_fqn, weight, found.mask)
    if is_sharded(weight) and not is_placed_like(found.mask, weight):
        if _below(chain):
            raise SparsityError(
                f"{tensor_fqn}: {type(_below(chain)[0]).__name__} is below its mask, and its parameters are sharded "
                "over ranks. Remove that parametrization before fully_shard, or leave the tensor out."
            )
        found.shard_like(weight)
    keep_saved(found)
    return found


def dense_weight(module: nn.Module, tensor_name: str) -> Tensor:
    """What the mask is applied to: the parameter itself, or what parametrizations below the mask make of it."""
    chain = _chain(module, tensor_name)
    below = _below(chain)
    return _through(below, _originals(chain)).detach()


def parameter_under(module: nn.Module, tensor_name: str) -> Tensor:
    """The parameter of a masked tensor; the first one where parametrizations below the mask have several."""
    return _originals(_chain(module, tensor_name))[0]


def is_on_parameter(module: nn.Module, tensor_name: str) -> bool:
    """Whether the mask is on the parameter itself, with no other parametrization below it."""
    return not _below(_chain(module, tensor_name))


def rebuilt_originals(module: nn.Module, tensor_name: str) -> list[Tensor]:
    """New values of the parameters under the mask, such that the tensor is masked without the mask.

    Returns:
        Nothing where the mask is on the parameter itself, which `squash` then masks in place.

    Raises:
        SparsityError: a parametrization below the mask cannot express the masked weight. Nothing is changed.
    """
    chain = _chain(module, tensor_name)
    mask = find_mask(module, tensor_name)
    below = _below(chain)
    if mask is None or not below:
        return []
    masked = select(dense_weight(module, tensor_name), mask.mask)
    back: tuple[Tensor, ...] = (masked,)
    for p in reversed(below):
        if not hasattr(p, "right_inverse"):
            raise SparsityError(_cannot(tensor_name, p, "it has no right_inverse"))
        found: Tensor | Sequence[Tensor] = p.right_inverse(*back)  # type: ignore[operator]
        back = (found,) if isinstance(found, Tensor) else tuple(found)
    again = _through(below, list(back))
    close = torch.allclose(again, masked, rtol=8 * torch.finfo(masked.dtype).eps, atol=1e-6)
    if not close or not torch.equal(again != 0, masked != 0):
        raise SparsityError(_cannot(tensor_name, below[-1], "its right_inverse does not give the masked weight"))
    return list(back)


def squash(module: nn.Module, tensor_name: str, rebuilt: Sequence[Tensor] = ()) -> None:
    """Write zeros (or `rebuilt_originals`) into the parameters and remove the mask; others stay."""
    chain = _chain(module, tensor_name)
    originals = _originals(chain)
    mask = find_mask(module, tensor_name)
    assert mask is not None
    with torch.no_grad():
        for parameter, value in zip(originals, rebuilt or [select(originals[0], mask.mask)], strict=True):
            parameter.copy_(value)
    remove_mask(module, tensor_name)


def remove_mask(module: nn.Module, tensor_name: str) -> None:
    """Take the mask away and leave the parameters as they are."""
    chain = _chain(module, tensor_name)
    if len(chain) > 1:
        del chain[len(_below(chain))]
        return
    # Deep copies share the class that parametrize made for the module, and removing edits it: copy the class first.
    with without_fsdp_class(module):
        kind = type(module)
        namespace = {k: v for k, v in vars(kind).items() if k not in ("__dict__", "__weakref__")}
        module.__class__ = type(kind.__name__, kind.__bases__, namespace)
        parametrize.remove_parametrizations(module, tensor_name, leave_parametrized=False)


def _chain(module: nn.Module, tensor_name: str) -> parametrize.ParametrizationList:
    chain = module.parametrizations[tensor_name]  # type: ignore[index]
    assert isinstance(chain, parametrize.ParametrizationList)
    return chain


def _below(chain: parametrize.ParametrizationList) -> list[nn.Module]:
    layers = list(chain)
    return layers[: next(i for i, p in enumerate(layers) if isinstance(p, WeightMask))]


def _originals(chain: parametrize.ParametrizationList) -> list[Tensor]:
    if chain.is_tensor:
        return [chain.original]
    return [getattr(chain, f"original{i}") for i in range(chain.ntensors)]


def _through(layers: list[nn.Module], originals: list[Tensor]) -> Tensor:
    if not layers:
        return originals[0]
    training = [layer.training for layer in layers]
    try:  # eval mode, since spectral_norm changes its state in train mode
        with torch.no_grad():
            x: Tensor = layers[0].eval()(*originals)
            for layer in layers[1:]:
                x = layer.eval()(x)
    finally:
        for layer, mode in zip(layers, training, strict=True):
            layer.train(mode)
    return x


def _cannot(tensor_name: str, layer: nn.Module, why: str) -> str:
    return (
        f"{tensor_name}: cannot squash the mask through {type(layer).__name__}: {why}. Remove that parametrization "
        "first (torch.nn.utils.parametrize.remove_parametrizations)."
    )


def select(weight: Tensor, mask: Tensor) -> Tensor:
    """The weight where the mask is True (or positive), exactly 0 elsewhere; differentiable in the weight.

    >>> select(torch.tensor([1.0, float("nan")]), torch.tensor([True, False]))
    tensor([1., 0.])
    """
    floats = mask.dtype != torch.bool
    mask = mask.to(weight.dtype) if floats else mask
    if not torch.compiler.is_compiling() and _is_plain(weight, mask):
        return _Select.apply(weight, mask)
    return torch.ops.aten.threshold_backward(weight, mask, 0) if floats else torch.where(mask, weight, 0)


def _is_plain(weight: Tensor, mask: Tensor) -> bool:
    """Whether both are large CPU tensors of no special kind, and no mode or transform intercepts the operations."""
    return (
        weight.numel() >= FROM
        and weight.device.type == mask.device.type == "cpu"
        and weight.dtype in FLOATS
        and type(weight) in (Tensor, torch.nn.Parameter)
        and type(mask) is Tensor
        and weight.shape == mask.shape
        and not torch.jit.is_tracing()
        and not any(is_intercepted(t) for t in (weight, mask))
    )


class _Select(torch.autograd.Function):
    """`where(mask, weight, 0)` at the speed of a product; its backward is `select`, which is differentiable again."""

    @staticmethod
    def forward(weight: Tensor, mask: Tensor) -> Tensor:
        """Convert a bool mask to the weight's dtype, then select in one pass."""
        if mask.dtype == torch.bool:
            held = out = _empty_in_large_pages(mask, weight.dtype).copy_(mask.view(torch.uint8))
        else:
            held, out = mask, _empty_in_large_pages(weight)
        torch.ops.aten.threshold_backward.grad_input(weight, held, 0, grad_input=out)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        """Both derivatives need the mask alone."""
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The gradient where the mask is set."""
        return select(grad, ctx.saved_tensors[0]), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        """The tangent where the mask is set."""
        return select(tangent, ctx.saved_tensors[0])


def _empty_in_large_pages(t: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """As `torch.empty_like` for CPU tensors, with a hint to Linux to use large pages.

    Page faults of a fresh 64 MiB tensor take longer than what is then done with it; without the hint masking takes two
    to three times as long. torch itself asks for large pages only where THP_MEM_ALLOC_ENABLE is set.
    """
    out = torch.empty_like(t, dtype=dtype)
    advise = _madvise()
    size = out.untyped_storage().nbytes()
    if advise is not None and size >= LARGE:
        start = -(-out.data_ptr() // PAGE) * PAGE  # whole pages inside the tensor
        advise(start, (out.data_ptr() + size - start) // PAGE * PAGE, MADV_HUGEPAGE)
    return out


@cache
def _madvise() -> Callable[..., Any] | None:
    """The C library's function, or None outside Linux."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
