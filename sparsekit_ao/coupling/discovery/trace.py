"""One forward without values: every tensor is a fake one, every operation leaves its rule on the axes.

The model itself is not touched: a copy of its modules runs, whose parameters and buffers are fake (torch's
FakeTensorMode: shapes and types on the meta device, no memory).
"""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._decomp import get_decompositions
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from ...errors import SparsityError
from ..values import opaque_in, tensors_in
from .call import Call, Label
from .factors import Factor, Part, fixed, freeze, leaves
from .rules import rule_of

__all__ = ["Trace", "arguments", "trace"]


class Trace(TorchDispatchMode):
    """What one forward said about the axes of every tensor.

    Attributes:
        named: {name of a parameter or buffer: its axes}; a tensor with several names has the first.
        seen: the axes of every tensor that came up.
        used: names of the tensors that took part.
        opaque: objects in the output that are not looked into, in words.
    """

    def __init__(self) -> None:
        super().__init__()
        self.named: dict[str, Label] = {}
        self.seen: list[Label] = []
        self.used: set[str] = set()
        self.opaque: list[str] = []
        self._labels = WeakIdKeyDictionary()
        self._names = WeakIdKeyDictionary()
        self._squares = WeakIdKeyDictionary()
        self._shared = WeakIdKeyDictionary()  # tensors that are views, or have some
        self._modules: list[tuple[str, nn.Module]] = []

    def name(self, name: str, tensor: Tensor, *, zero: bool) -> None:
        """Give a parameter (`zero`: a mask may make its units zero) or buffer axes of its own, free as yet."""
        if tensor not in self._labels:
            label = tuple(() if n == 1 else (Part(Factor(n), zero),) for n in tensor.shape)
            self.named[name] = self._labels[tensor] = label
            self._names[tensor] = name

    def fix(self, value: Any, why: str) -> None:
        """Freeze every dimension of the tensors in an input or output."""
        for place, tensor in tensors_in(why, value):
            for axis in self._labels.setdefault(tensor, tuple(fixed(n, place) for n in tensor.shape)):
                freeze(axis, place)

    def freeze_unused(self) -> None:
        """Freeze the parameters and buffers that took no part, since nothing is known of them."""
        for name, label in self.named.items():
            for axis in label if name not in self.used else ():
                freeze(axis, "not used in this forward")

    def watch(self, model: nn.Module) -> None:
        """Know at each operation which module runs it."""
        for name, module in model.named_modules():
            module.register_forward_pre_hook(partial(self._enter, name))
            module.register_forward_hook(self._leave)

    @property
    def where(self) -> str:
        """The module that runs."""
        return self._modules[-1][0] or "the model" if self._modules else "the model"

    def _enter(self, name: str, module: nn.Module, _: Any) -> None:
        self._modules.append((name, module))

    def _leave(self, *_: Any) -> None:
        self._modules.pop()

    def label_of(self, tensor: Tensor) -> Label:
        """The axes of a tensor; one that nothing is known of was made by the model itself, and is frozen."""
        if tensor in self._names:
            self.used.add(self._names[tensor])
        if tensor not in self._labels:
            self._labels[tensor] = tuple(fixed(n, f"a constant made in {self.where}") for n in tensor.shape)
        return self._labels[tensor]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a question about a tensor, such as its device
            return func(*args, **kwargs)
        rule = rule_of(func)
        touched = [t for t in _pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if rule is None and touched and (out := self._taken_apart(func, args, kwargs)) is not NotImplemented:
            return out
        out = func(*args, **kwargs)
        if touched:
            self._apply(rule, Call(func, args, kwargs, out, self.where, self.label_of, self._is_norm))
        return out

    def _taken_apart(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operation by the smaller ones that torch says it is made of; NotImplemented if it says nothing."""
        if func.overloadpacket is torch.ops.aten.scaled_dot_product_attention and kwargs.get("scale") is None:
            why = f"attention in {self.where}: its scale follows from the size of a head"
            freeze(self.label_of(args[0])[-1], why)
        with self:
            out = func.decompose(*args, **kwargs)
            parts = get_decompositions([func]).get(func)
            return parts(*args, **kwargs) if out is NotImplemented and parts else out

    def _apply(self, rule: Callable[[Call], Label | list[Label]] | None, call: Call) -> None:
        if call.is_square:
            self._squares.update(dict.fromkeys(call.outs, True))
        before = self.label_of(call.tensors[0]) if call.func._schema.is_mutable else None
        labels = rule(call) if rule else self._not_understood(call)
        labels = labels if isinstance(labels, list) else [labels]
        if any(_shape(label) != out.shape for out, label in zip(call.outs, labels, strict=False)):
            labels = self._not_understood(call)  # an overload that the rule was not written for
        for out, label in zip(call.outs, labels, strict=False):
            self._labels[out] = label
            self.seen.append(label)
        if before is not None and call.tensors[0] in self._shared:
            self._overwritten(call, before)
        if any(value.alias_info is not None and not value.alias_info.is_write for value in call.func._schema.returns):
            self._shared.update(dict.fromkeys((call.tensors[0], *call.outs), True))

    def _overwritten(self, call: Call, before: Label) -> None:
        """Other views of the memory may still be held to be zero where this one no longer is."""
        for old, new in zip(before, self.label_of(call.tensors[0]), strict=True):
            zero = [part.factor for part in leaves(new) if part.zero]
            lost = [part for part in leaves(old) if part.zero and part.factor not in zero]
            call.freeze(lost, "it writes into memory that other tensors share")

    def _not_understood(self, call: Call) -> list[Label]:
        if call.outs:  # others are assertions, say
            self._freeze_all(call, "not understood")
        return [tuple(call.fixed(n) for n in out.shape) for out in call.outs]

    def _freeze_all(self, call: Call, what: str) -> None:
        for tensor in call.tensors:
            for axis in self.label_of(tensor):
                call.freeze(axis, what)

    def _is_norm(self, squares: Tensor, axis: Sequence[Part]) -> bool:
        """Whether the running module norms this axis of squares: it has a weight along exactly it, and an epsilon."""
        if squares not in self._squares:
            return False  # a mean that is subtracted, say
        module = self._modules[-1][1] if self._modules else None
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or not (hasattr(module, "eps") or hasattr(module, "variance_epsilon")):
            return False
        return weight.dim() == 1 and math.prod(part.factor.size for part in leaves(axis)) == weight.shape[0]


def trace(model: nn.Module, example_inputs: Any) -> Trace:
    """Run the model once on fake tensors.

    Args:
        model: not touched; it runs as in eval mode.
        example_inputs: a tensor, a tuple or list of positional arguments, or a dict of keyword arguments.

    Raises:
        SparsityError: a parametrized or lazy module; a forward that needs values or does not run.
    """
    _check(model)
    found, mode, memo = Trace(), FakeTensorMode(allow_non_fake_inputs=True), {}
    args, kwargs = arguments(example_inputs)
    with torch.inference_mode(), _plain_attention():  # in which composite operations are seen
        for name, tensor, zero in _tensors(model):
            memo[id(tensor)] = fake = _fake(tensor, mode)
            found.name(name, fake, zero=zero)
        twin = _copied(model, memo).eval()
        found.watch(twin)
        args, kwargs = _pytree.tree_map_only(Tensor, lambda t: _fake(t, mode), (args, kwargs))
        found.fix(args or kwargs, "input")  # arguments() gives one of both
        with mode, found:
            out = _forward(twin, args, kwargs, found)
        found.fix(out, "output")
        found.opaque = opaque_in("output", out)
    found.freeze_unused()
    return found


def arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a forward.

    >>> arguments({"x": 1}), arguments([1, 2]), arguments(3)
    (((), {'x': 1}), ((1, 2), {}), ((3,), {}))
    """
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    return (tuple(example_inputs) if isinstance(example_inputs, (tuple, list)) else (example_inputs,)), {}


def _shape(label: Label) -> tuple[int, ...]:
    return tuple(math.prod(part.factor.size for part in leaves(axis)) for axis in label)


@contextlib.contextmanager
def _plain_attention() -> Iterator[None]:
    """Attention as the products and the softmax that it is, not as one fused operation."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _tensors(model: nn.Module) -> list[tuple[str, Tensor, bool]]:
    own = [(name, p, True) for name, p in model.named_parameters()]
    return own + [(name, b, False) for name, b in model.named_buffers()]


def _fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """A stand-in on the CPU, whatever device the tensor is on."""
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return nn.Parameter(fake, requires_grad=False) if isinstance(tensor, nn.Parameter) else fake


def _check(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if parametrize.is_parametrized(module):
            raise SparsityError(
                f"discover: {name or 'the model'} is parametrized, so its axes are not those of a plain tensor. Call "
                "discover before prepare, or after squash_mask."
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise SparsityError(f"discover: {name} has no shape yet; run one forward of the lazy module first")


def _copied(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    try:
        return copy.deepcopy(model, memo)
    except Exception as e:
        raise SparsityError(
            f"discover: the model cannot be copied: {type(e).__name__}: {e}. Take away first what cannot be: weights "
            "that are computed (torch.nn.utils.remove_weight_norm), open files, locks."
        ) from e


def _forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], found: Trace) -> Any:
    try:
        return model(*args, **kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException) as e:
        raise SparsityError(
            f"discover: {found.where} runs {e.func}, whose result depends on values, and the forward has none (it runs "
            "on the meta device). Leave out of example_inputs what makes the model look at values, or write the "
            "groups by hand (Coupling)."
        ) from None
    except Exception as e:
        raise SparsityError(
            f"discover: the forward on the meta device failed in {found.where}: {type(e).__name__}: {e}. Check that "
            "model(*example_inputs), or model(**example_inputs) for a dict, runs."
        ) from e
