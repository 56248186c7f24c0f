"""One forward without values: every tensor is fake. Then the rules of all operations are applied to their axes.

The model does not change: a copy runs whose parameters and buffers are fake (torch's FakeTensorMode: no memory). An
operator without a rule is replaced by torch's own decomposition; without one, everything that it reads is frozen.
"""

import contextlib
import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._decomp import get_decompositions
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from ...errors import SparsityError
from ..nested_tensors import arguments, opaque_in, tensors_in
from .axis_rules import attention_scale, filled, rule_of
from .factors import AxisFactor, Factor, every_factor, fixed, freeze, leaves
from .operation import AxisRule, Label, Operation


class Trace(TorchDispatchMode):
    """The axes of every tensor of one forward.

    Attributes:
        named: {name of a parameter or buffer: its axes}; a tensor with several names has the first.
        further: (name, dimension) of axes that an earlier dimension of the parameter has too: masks are on that one.
        seen: the axes of every result of an operation.
        names: names of parameters (whose units a mask may make zero) and buffers, by fake tensor.
        used: names of the parameters and buffers that were read.
        opaque: descriptions of objects in the output that are not inspected.
    """

    def __init__(self) -> None:
        super().__init__()
        self.named: dict[str, Label] = {}
        self.further: set[tuple[str, int]] = set()
        self.seen: list[Label] = []
        self.used: set[str] = set()
        self.opaque: list[str] = []
        self._labels = WeakIdKeyDictionary()
        self.names = WeakIdKeyDictionary()
        self._squares = WeakIdKeyDictionary()
        self._shared = WeakIdKeyDictionary()  # tensors that are views, or have some
        self._modules: list[tuple[str, nn.Module]] = []
        self._steps: list[tuple[AxisRule | None, Operation]] = []

    def fix(self, value: Any, why: str) -> None:
        """Freeze every dimension of the tensors in an input or output."""
        for place, tensor in tensors_in(why, value):
            for axis in self._labels.setdefault(tensor, tuple(fixed(n, place) for n in tensor.shape)):
                freeze(axis, place)

    def watch(self, model: nn.Module) -> None:
        """Record for each operation which module runs it."""
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda module, _, name=name: self._modules.append((name, module)))
            module.register_forward_hook(lambda *_: self._modules.pop() and None)  # the output stays as it is

    @property
    def where(self) -> str:
        """The name of the running module."""
        return self._modules[-1][0] or "the model" if self._modules else "the model"

    def label_of(self, tensor: Tensor) -> Label:
        """The axes of a tensor; an unknown one was created by the model itself, and is frozen."""
        if tensor in self.names:
            self.used.add(self.names[tensor])
        if tensor not in self._labels:
            self._labels[tensor] = tuple(fixed(n, f"a constant made in {self.where}") for n in tensor.shape)
        return self._labels[tensor]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a query of a tensor, such as its device
            return func(*args, **kwargs)
        rule, out = rule_of(func), NotImplemented
        reads_tensors = any(isinstance(leaf, Tensor) for leaf in _pytree.tree_leaves((args, kwargs)))
        if rule is None and reads_tensors:
            with self:
                out = func.decompose(*args, **kwargs)
                parts = get_decompositions([func]).get(func)
                out = parts(*args, **kwargs) if out is NotImplemented and parts else out
            if out is not NotImplemented and func.overloadpacket is not torch.ops.aten.scaled_dot_product_attention:
                return out
            rule = attention_scale if out is not NotImplemented else None
        out = func(*args, **kwargs) if out is NotImplemented else out
        if reads_tensors or rule is filled:
            is_norm = partial(self._is_norm, self._modules[-1][1] if self._modules else None)
            self._steps.append((rule, Operation(func, args, kwargs, out, self.where, self.label_of, is_norm)))
        return out

    def follow(self, inputs: Any, output: Any) -> None:
        """Apply the rules of all operations in their order; the output decides which results are used.

        Again where a parameter has an axis twice: its values along the second one are not zero then.
        """
        used = self._used_steps(output)
        while True:
            self._start(inputs)
            for (rule, op), is_used in zip(self._steps, used, strict=True):
                self._apply(rule, replace(op, is_used=is_used or op.func._schema.is_mutable))
            self.fix(output, "output")
            repeated = set(self._repeated())
            if repeated <= self.further:
                break
            self.further |= repeated
        self._steps = []
        for name, label in self.named.items():
            for axis in label if name not in self.used else ():
                freeze(axis, "not used in this forward")

    def _start(self, inputs: Any) -> None:
        """Give parameters and buffers new axes that are not frozen, and inputs frozen ones."""
        self.seen, self._labels = [], WeakIdKeyDictionary()
        for tensor, name in self.names.items():
            zero = [isinstance(tensor, nn.Parameter) and (name, d) not in self.further for d in range(tensor.dim())]
            sizes = zip(tensor.shape, zero, strict=True)
            self.named[name] = tuple(() if n == 1 else (AxisFactor(Factor(n), is_zero),) for n, is_zero in sizes)
            self._labels[tensor] = self.named[name]
        self.fix(inputs, "input")

    def _repeated(self) -> Iterator[tuple[str, int]]:
        for name, label in self.named.items():
            earlier: set[Factor] = set()
            for d, axis in enumerate(label):
                free = {factor for factor in every_factor(axis) if not factor.frozen}
                if free & earlier:
                    yield name, d
                earlier |= free

    def _used_steps(self, output: Any) -> list[bool]:
        needed = {id(tensor) for _, tensor in tensors_in("output", output)}
        used = []
        for _, op in reversed(self._steps):
            used.append(bool(needed.intersection(map(id, op.outs))))
            if used[-1]:
                needed.update(map(id, op.tensors))
        return used[::-1]

    def _apply(self, rule: AxisRule | None, op: Operation) -> None:
        if op.is_square:
            self._squares.update(dict.fromkeys(op.outs, True))
        before = self.label_of(op.tensors[0]) if op.func._schema.is_mutable else None
        labels = rule(op) if rule else self._not_understood(op)
        labels = labels if isinstance(labels, list) else [labels]
        shapes = [tuple(math.prod(part.factor.size for part in leaves(axis)) for axis in label) for label in labels]
        if any(shape != out.shape for out, shape in zip(op.outs, shapes, strict=False)):
            labels = self._not_understood(op)  # an overload that the rule was not written for
        for out, label in zip(op.outs, labels, strict=False):
            self._labels[out] = label
            self.seen.append(label)
        if before is not None and op.tensors[0] in self._shared:
            # Other views of the memory may still be recorded as zero where this one no longer is.
            for old, new in zip(before, self.label_of(op.tensors[0]), strict=True):
                zero = [part.factor for part in leaves(new) if part.zero]
                lost = [part for part in leaves(old) if part.zero and part.factor not in zero]
                op.freeze(lost, what="it writes into memory that other tensors share")
        if any(value.alias_info is not None and not value.alias_info.is_write for value in op.func._schema.returns):
            self._shared.update(dict.fromkeys((op.tensors[0], *op.outs), True))

    def _not_understood(self, op: Operation) -> list[Label]:
        if op.outs:  # an assertion, say, returns nothing
            op.freeze(*(axis for t in op.tensors for axis in self.label_of(t)), what="not understood")
        return [op.fixed(*out.shape) for out in op.outs]

    def _is_norm(self, module: nn.Module | None, squares: Tensor, axis: Sequence[AxisFactor]) -> bool:
        """Whether a module normalizes this axis of squares: it has a weight of its length, and an epsilon."""
        if squares not in self._squares:
            return False  # a mean that is subtracted, say
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or not (hasattr(module, "eps") or hasattr(module, "variance_epsilon")):
            return False
        return weight.dim() == 1 and math.prod(part.factor.size for part in leaves(axis)) == weight.shape[0]


def trace(model: nn.Module, example_inputs: Any) -> Trace:
    """Run a copy of the model in eval mode once on fake tensors; arguments and errors are those of `discover`."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise SparsityError(
                f"discover: {name or 'the model'} is scripted or traced, so its operations cannot be recorded; give "
                "the model that was passed to torch.jit"
            )
        if parametrize.is_parametrized(module):
            raise SparsityError(
                f"discover: {name or 'the model'} is parametrized, so its axes are not those of a plain tensor. Call "
                "discover before prepare, or after squash_mask."
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise SparsityError(f"discover: {name} has no shape yet; run one forward of the lazy module first")
    recorded, mode, memo = Trace(), FakeTensorMode(allow_non_fake_inputs=True), {}
    args, kwargs = arguments(example_inputs)
    with torch.inference_mode(), _plain_attention():  # inference mode dispatches composite operations here
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            memo[id(tensor)] = fake = _fake(tensor, mode)
            recorded.names.setdefault(fake, name)
        try:
            copied: Any = copy.deepcopy(model, memo).eval()
        except Exception as e:
            raise SparsityError(
                f"discover: the model cannot be copied: {type(e).__name__}: {e}. Remove what cannot be copied: "
                "computed weights (torch.nn.utils.remove_weight_norm), open files, locks."
            ) from e
        if hasattr(copied, "set_experts_implementation"):  # transformers' experts, else with shapes that values decide
            copied.set_experts_implementation("batched_mm")
        recorded.watch(copied)
        args, kwargs = _pytree.tree_map_only(Tensor, lambda t: _fake(t, mode), (args, kwargs))
        try:
            with mode, recorded:
                output = copied(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as e:
            raise SparsityError(
                f"discover: {recorded.where} runs {e.func}, whose result depends on values, but the forward runs on "
                "fake tensors without values. Leave out of example_inputs what makes the model read values, or write "
                "the couplings by hand (Coupling)."
            ) from None
        except Exception as e:
            raise SparsityError(
                f"discover: the forward on fake tensors failed in {recorded.where}: {type(e).__name__}: {e}. Check "
                "that model(*example_inputs), or model(**example_inputs) for a dict, runs."
            ) from e
        recorded.follow(args or kwargs, output)  # one of both is empty
        recorded.opaque = opaque_in("output", output)
    return recorded


@contextlib.contextmanager
def _plain_attention() -> Iterator[None]:
    """Compute attention by products and a softmax, not by one fused operation."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """A fake tensor on the CPU, for a tensor on any device."""
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return nn.Parameter(fake, requires_grad=False) if isinstance(tensor, nn.Parameter) else fake
