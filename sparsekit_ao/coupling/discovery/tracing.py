"""One forward without values: every tensor is fake. Then the rules of all operations are applied to their axes.

The model does not change: a copy runs whose parameters and buffers are fake (torch's FakeTensorMode: no memory). An
operator without a rule is replaced by torch's own decomposition; without one, everything that it reads is frozen. Where
the forward needs values (`.item()`, `nonzero`), a copy with values runs instead, and what it reads is recorded.
"""

import contextlib
import copy
import functools
import inspect
import itertools
import linecache
import logging
import math
import os
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._decomp import get_decompositions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from ...errors import SparsityError
from ...masking import find_mask, parametrized_names
from ...masking.normalized import computed_tensors
from ...models.running import arguments, import_dynamo, opaque_in, seeded, tensors_in, unfused_attention
from .axis_rules import attention_scale, combined, filled, rule_of
from .factors import AxisFactor, Factor, fixed, freeze, leaves
from .operation import AxisRule, Label, Operation

NOT_UNDERSTOOD = "not understood"
COMPUTED = "is computed by a parametrization; torch.nn.utils.parametrize.remove_parametrizations makes it plain"
BY_HOOK = "is computed by a hook; torch.nn.utils.remove_spectral_norm or remove_weight_norm makes it plain"
UNUSED = "not used in this forward"
NOT_RUN = "give example inputs for which it runs, or remove it from the model"


class Trace(TorchDispatchMode):
    """The axes of every tensor of one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.named: dict[str, Label] = {}  # of parameters and buffers, by the first of their names
        self.further: set[tuple[str, int]] = set()  # (name, dimension) of axes that an earlier one has, with the mask
        self.seen: list[Label] = []  # the axes of every result of an operation
        self.used: set[str] = set()  # names of the parameters and buffers that were read
        self.branches: set[str] = set()  # paths of lists of modules, none of which reads what another has written
        self.opaque: list[str] = []  # descriptions of objects in the output that are not inspected
        self.values: dict[str, list[str]] = {}  # {line of code in a module: values that it read from the inputs}
        self._labels = WeakIdKeyDictionary()
        self.names = WeakIdKeyDictionary()  # of parameters (whose units a mask may make zero) and buffers
        self._squares = WeakIdKeyDictionary()
        self._shared = WeakIdKeyDictionary()  # tensors that are views, or have some
        self._reads: dict[int, int] = {}  # {id of a tensor: the last step that reads it}
        self._normed: dict[str, str] = {}  # {parameter: the plain attribute that a hook computes from it}
        self._running: list[tuple[str, nn.Module]] = []
        self._passed: list[tuple[str, Any]] = []  # (module, arguments or results that its forward has)
        self._steps: list[tuple[AxisRule | None, Operation]] = []
        self._lines: dict[int, str] = {}  # {number of a step that reads values: the line of code}

    def fix(self, value: Any, why: str) -> None:
        """Freeze every dimension of the tensors in an input or output."""
        for place, tensor in tensors_in(why, value):
            for axis in self._labels.setdefault(tensor, tuple(fixed(n, place) for n in tensor.shape)):
                freeze(axis, place)

    def watch(self, model: nn.Module) -> None:
        """Record for each operation which module runs it."""
        for name, module in model.named_modules():
            # A hook computes `weight` from `weight_g` and `weight_v`, or from `weight_orig`, as a plain attribute.
            computed = [key for key, value in vars(module).items() if isinstance(value, Tensor)]
            parts = [p for p in module._parameters if module._forward_pre_hooks]
            dotted = f"{name}.".lstrip(".")
            self._normed |= {dotted + p: dotted + key for key in computed for p in parts if p.startswith(f"{key}_")}
            module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True)
            module.register_forward_hook(self._leave)

    def _enter(self, name: str, module: nn.Module, *inputs: Any) -> None:
        self._running.append((name, module))
        self._passed.append((self.where, inputs))

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._running.pop()
        self._passed.append((self.where, output))

    @property
    def where(self) -> str:
        """The name of the running module."""
        return self._running[-1][0] or "the model" if self._running else "the model"

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
        rule, out = rule_of(func, args), NotImplemented
        reads_tensors = any(isinstance(leaf, Tensor) for leaf in _pytree.tree_leaves((args, kwargs)))
        if rule is None and reads_tensors:
            with self:
                out = func.decompose(*args, **kwargs)
                parts = _decomposition(func)
                out = parts(*args, **kwargs) if out is NotImplemented and parts else out
            if out is not NotImplemented and func.overloadpacket is not torch.ops.aten.scaled_dot_product_attention:
                return out
            rule = attention_scale if out is not NotImplemented else None
        out = func(*args, **kwargs) if out is NotImplemented else out
        if _reads_values(func, args):
            line, first = _reading_line(), next(iter(out), None) if isinstance(out, tuple) else out
            value = f"shape {tuple(first.shape)}" if isinstance(first, Tensor) else repr(first)
            values = self.values.setdefault(line, [])
            values += [value] if value not in values else []
            self._lines[len(self._steps)] = line
        if reads_tensors or rule is filled:
            is_norm = partial(self._is_norm, self._running[-1][1] if self._running else None)
            self._steps.append((rule, Operation(func, args, kwargs, out, self.where, self.label_of, is_norm)))
        return out

    def train(self, model: nn.Module, run: Callable[[], Any]) -> Any:
        """Run the model in training mode too if parameters were not read; return its output, or None if that fails."""
        read = {id(tensor) for _, op in self._steps for tensor in op.tensors}
        if all(id(tensor) in read for tensor in self.names if isinstance(tensor, nn.Parameter)):
            return None
        steps, passed = len(self._steps), len(self._passed)
        try:
            model.train()
            return run()
        except Exception:  # it needs labels, for example
            del self._steps[steps:], self._passed[passed:], self._running[:]

    def follow(self, inputs: Any, outputs: dict[str, Any]) -> None:
        """Apply the rules of all operations in their order; the outputs decide which results are used."""
        used = self._used_steps(outputs)
        self._reads = {id(tensor): at for at, (_, op) in enumerate(self._steps) for tensor in op.tensors}
        self._reads |= {id(tensor): len(used) for _, tensor in tensors_in("output", outputs)}
        while True:
            self._start(inputs)
            for at, ((rule, op), is_used) in enumerate(zip(self._steps, used, strict=True)):
                self._apply(rule, replace(op, is_used=is_used), at)
            for place, output in outputs.items():
                self.fix(output, place)
            repeated = set(self._repeated())
            if repeated <= self.further:
                break
            self.further |= repeated  # their values are not zero along these in the next round
        self._keep_readable()
        self.branches = self._find_branches()
        self._steps, self._passed = [], []
        for name, label in self.named.items():
            for axis in label if name not in self.used else ():
                freeze(axis, UNUSED)

    def _find_branches(self) -> set[str]:
        """Return the paths of lists of modules that ran, but none of them on what another one of the list wrote."""
        ran, chained = set[str](), set[str]()
        # The modules (path of a list, number) that have contributed to a tensor, or to memory that is written in place.
        of_tensor, of_memory = (defaultdict[int, set[tuple[str, str]]](set) for _ in range(2))
        for _, op in self._steps:
            parts = op.module.split(".")
            inside = {".".join(parts[:at]): part for at, part in enumerate(parts) if part.isdecimal()}
            sources = {*inside.items()}
            for tensor in op.tensors:
                sources |= of_tensor[id(tensor)] | of_memory[_memory_of(tensor)]
            ran |= inside.keys()
            chained |= {path for path, number in sources if inside.get(path, number) != number}
            for tensor in op.outs:
                of_tensor[id(tensor)] |= sources
            for tensor in op.written:
                of_memory[_memory_of(tensor)] |= sources
        return ran - chained

    def _keep_readable(self) -> None:
        """Freeze axes that layers which did not run could read: of tensors around them, with the sizes of a weight."""
        around = defaultdict[str, list[Tensor]](list)  # {module: the tensors of its forward}
        for module, value in [*self._passed, *((op.module, [op.tensors, op.outs]) for _, op in self._steps)]:
            around[module] += [tensor for _, tensor in tensors_in("", value)]
        read = {(name.rpartition(".")[0], t.shape) for t, name in self.names.items() if name in self.used}
        for parameter, name in self.names.items():
            path, is_buffer = name.rpartition(".")[0], not isinstance(parameter, nn.Parameter)
            # A buffer that was not read counts too, unless one like it was, as of rotary embeddings, which have copies.
            if (
                name in self.used
                or (is_buffer and (path, parameter.shape) in read)
                or not (parameter.is_floating_point() or parameter.is_complex())
            ):
                continue
            sizes = {*parameter.shape[: None if parameter.ndim < 4 else 2]} - {1}
            caller = max((m for m in around if f"{path}.".startswith(f"{m}.")), key=len, default="the model")
            for tensor in around[caller]:
                for start, stop in itertools.combinations(range(tensor.dim() + 1), 2):
                    if math.prod(tensor.shape[start:stop]) in sizes:
                        for axis in self._labels.get(tensor, ())[start:stop]:
                            freeze(axis, f"{path or name}, which did not run, may read it; {NOT_RUN}")

    def _start(self, inputs: Any) -> None:
        """Give parameters and buffers new axes that are not frozen, and inputs frozen ones."""
        self.seen, self._labels, self._shared = [], WeakIdKeyDictionary(), WeakIdKeyDictionary()
        for tensor, name in self.names.items():
            zero = [isinstance(tensor, nn.Parameter) and (name, d) not in self.further for d in range(tensor.dim())]
            sizes = zip(tensor.shape, zero, strict=True)
            self.named[name] = tuple(() if n == 1 else (AxisFactor(Factor(n), is_zero),) for n, is_zero in sizes)
            self._labels[tensor] = self.named[name]
            path, separator, rest = f".{name}".rpartition(".parametrizations.")
            why = f"{path}.{rest.split('.')[0]} {COMPUTED}".lstrip(".") if separator else ""
            why = f"{self._normed[name]} {BY_HOOK}" if name in self._normed else why
            for axis in self.named[name] if why else ():
                freeze(axis, why)
        self.fix(inputs, "input")

    def _repeated(self) -> Iterator[tuple[str, int]]:
        for name, label in self.named.items():
            earlier: set[Factor] = set()
            for d, axis in enumerate(label):
                pieces = [piece for part in leaves(axis) for piece in part.factor.pieces]
                free = {factor for piece in pieces for factor in piece if not factor.frozen}
                if free & earlier:
                    yield name, d
                earlier |= free

    def _used_steps(self, output: Any) -> list[bool]:
        results = [tensor for _, tensor in tensors_in("output", output)]
        needed, memory, used = {*map(id, results)}, {*map(_memory_of, results)}, []
        for at, (_, op) in reversed([*enumerate(self._steps)]):
            is_read = bool(needed.intersection(map(id, op.outs)) or memory.intersection(map(_memory_of, op.written)))
            used.append(is_read or self._lines.get(at) in self.values)
            if used[-1]:
                needed.update(map(id, op.tensors))
                memory.update(map(_memory_of, op.tensors))
        return used[::-1]

    def _apply(self, rule: AxisRule | None, op: Operation, at: int) -> None:
        if op.is_square or op.name == "linalg_vector_norm":
            self._squares.update(dict.fromkeys(op.outs, True))
        written = [] if torch.Tag.inplace_view in op.func.tags else op.written  # else only its shape changes
        before = [self.label_of(tensor) for tensor in written]
        labels = rule(op) if rule else self._not_understood(op)
        labels = labels if isinstance(labels, list) else [labels]
        shapes = [tuple(math.prod(part.factor.size for part in leaves(axis)) for axis in label) for label in labels]
        if any(shape != out.shape for out, shape in zip(op.outs, shapes, strict=False)):
            labels = self._not_understood(op)  # an overload that the rule was not written for
        for out, label in zip(op.outs, labels, strict=False):
            self._labels[out] = label
            self.seen.append(label)
        for tensor, label in zip(written, before, strict=True):
            kept = combined(op, [label, self.label_of(tensor)])  # other views of the memory have the axes from before
            # They are recorded as zero where this one no longer is.
            for old, new in zip(label, kept, strict=False) if self._is_read_later(tensor, at) else ():
                zero = [part.factor for part in leaves(new) if part.zero]
                lost = [part for part in leaves(old) if part.zero and part.factor not in zero]
                op.freeze(lost, what="it writes into memory that other tensors share")
        if any(value.alias_info is not None and not value.alias_info.is_write for value in op.func._schema.returns):
            self._shared.update(dict.fromkeys((op.tensors[0], *op.outs), True))

    def _is_read_later(self, written: Tensor, at: int) -> bool:
        """Whether another tensor that shares the memory of a written one is read after this step."""
        later = (t for t in self._shared if t is not written and self._reads.get(id(t), -1) > at)
        return any(_memory_of(t) == _memory_of(written) for t in later)

    def _not_understood(self, op: Operation) -> list[Label]:
        if op.outs or op.written:  # an assertion, for example, has neither
            freeze_read = op.freeze if len(op.tensors) > 1 else op.freeze_value  # several may have to agree in size
            freeze_read(*(axis for t in op.tensors for axis in self.label_of(t)), what=NOT_UNDERSTOOD)
        return [op.fixed(*out.shape) for out in op.outs]

    def _is_norm(self, module: nn.Module | None, squares: Tensor, axis: Sequence[AxisFactor]) -> bool:
        """Whether a module normalizes this axis of squares: it has a weight of its length, and an epsilon."""
        if squares not in self._squares:
            return False  # a mean that is subtracted, say; where it is a gate, trials find out
        weight = getattr(module, "weight", None)
        size = math.prod(part.factor.size for part in leaves(axis))
        if not isinstance(weight, Tensor) or weight.shape[-1:] != (size,) or weight.numel() != size:
            return False
        # A global response norm, with a weight of [1, 1, 1, units], may have the epsilon in its code.
        return weight.dim() > 2 or hasattr(module, "eps") or hasattr(module, "variance_epsilon")


class _Probe(TorchDispatchMode):
    """What a forward does, while one line of code reads other values than those of the tensors."""

    def __init__(self, known: Iterable[Tensor], line: str = "", which: int = 0, most: float = math.inf) -> None:
        super().__init__()
        self.done, self._line, self._which, self._most = list[Any](), line, which, most
        self._numbers, self._count = WeakIdKeyDictionary(), itertools.count()
        self.number(known)

    def number(self, value: Any) -> list[Any]:
        """Return numbers in place of tensors, and texts in place of other leaves."""
        leaves, count = _pytree.tree_leaves(value), self._count
        return [self._numbers.setdefault(x, next(count)) if isinstance(x, Tensor) else repr(x) for x in leaves]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:
            out = func.decompose(*args, **(kwargs or {}))
        if out is not NotImplemented:  # `is_nonzero`, for example, whose parts have been seen
            return out
        out = func(*args, **(kwargs or {}))
        is_read = _reads_values(func, args) and isinstance(out, (bool, int, float))
        made = args[0].tolist() if func.overloadpacket is torch.ops.aten.lift_fresh else None  # `torch.tensor(1.0)`
        self.done.append((func, made, self.number((args, kwargs, None if is_read else out))))
        if len(self.done) > self._most:
            raise RuntimeError("it does more than the forward that reads its own values")
        if is_read and _reading_line() == self._line:
            others = (0.0, 1e12, -1e12, out) if isinstance(out, float) else (out + 1, out + 100, 0, out)
            return out != (self._which == 3) if isinstance(out, bool) else others[self._which]
        return out


def trace(model: nn.Module, example_inputs: Any) -> Trace:
    """Run a copy of the model in eval mode once, on fake tensors or else with values; errors are as of `discover`."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise SparsityError(
                f"discover: {name or 'the model'} is scripted or traced, so its operations cannot be recorded; give "
                "the model that was passed to torch.jit"
            )
        if any(find_mask(module, tensor) is not None for tensor in parametrized_names(module)):
            raise SparsityError(
                f"discover: {name or 'the model'} is masked, so its axes are not those of a plain tensor. Call "
                "discover before prepare, or after squash_mask."
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise SparsityError(f"discover: {name} has no shape yet; run one forward of the lazy module first")
    import_dynamo()
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addFilter(_drop)  # torch logs a traceback of the operation that fails, before the error below says where
    try:
        return _traced(model, example_inputs, FakeTensorMode(allow_non_fake_inputs=True))
    except _ForwardError:
        if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            raise
    finally:
        log.removeFilter(_drop)
    return _traced(model, example_inputs, None)


@functools.cache
def _decomposition(func: Any) -> Any:
    """Torch's decomposition of an operator or None; it looks through all of them."""
    return get_decompositions([func]).get(func)


def _drop(record: logging.LogRecord) -> bool:
    return False


class _ForwardError(SparsityError):
    """The forward failed."""


def _traced(model: nn.Module, example_inputs: Any, mode: FakeTensorMode | None) -> Trace:
    """Run a copy of the model on fake tensors of a mode; without one, with values."""
    recorded, memo = Trace(), {}
    plain_attention = sdpa_kernel(SDPBackend.MATH)  # products and a softmax
    # Inference mode dispatches composites here.
    with torch.inference_mode(), unfused_attention(), plain_attention, seeded(model.parameters()):
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            memo[id(tensor)] = copied = _copied(tensor, mode)
            recorded.names.setdefault(copied, name)
        memo |= {id(tensor): _copied(tensor, mode) for tensor in computed_tensors(model)}

        def copied_model() -> Any:
            running: Any = copy.deepcopy(model, dict(memo)).eval()
            if hasattr(running, "set_experts_implementation"):  # experts with shapes that values do not decide
                running.set_experts_implementation("batched_mm")
            return running

        try:
            running = copied_model()
        except Exception as e:
            raise SparsityError(
                f"discover: the model cannot be copied: {type(e).__name__}: {e}. Remove what cannot be copied: open "
                "files, locks."
            ) from e
        recorded.watch(running)
        args, kwargs = _pytree.tree_map_only(Tensor, lambda t: _copied(t, mode), arguments(example_inputs))

        def run() -> Any:
            with mode or contextlib.nullcontext(), recorded:
                return running(*args, **kwargs)

        try:
            output = run()
        except Exception as e:
            remedy = "; if it reads values, move it from the meta device to one that has them" if mode else ""
            remedy += "; if the list is one argument, give a tuple: (images,)" * isinstance(example_inputs, list)
            raise _ForwardError(
                f"discover: the forward failed in {recorded.where}: {type(e).__name__}: {e}. Check that "
                f"model(*example_inputs), or model(**example_inputs) for a dict, runs{remedy}."
            ) from e
        for line, values in () if mode else [*recorded.values.items()]:
            if not any("shape" in value for value in values) and _changes_nothing(copied_model, args, kwargs, line):
                del recorded.values[line]
        outputs = {"output": output, "output in training": recorded.train(running, run)}
        recorded.follow(args or kwargs, outputs)  # one of both is empty
        recorded.opaque = opaque_in("output", output)
    return recorded


def _changes_nothing(make: Callable[[], Any], args: Any, kwargs: Any, line: str) -> bool:
    """Whether a forward does the same whatever this line of code reads, or else only raises an error of its own."""

    def done(*altered: Any) -> list[Any]:
        model = make()
        probe = _Probe([*model.parameters(), *model.buffers(), args, kwargs], *altered)
        with probe:
            output = model(*args, **kwargs)
        return [*probe.done, probe.number([tensor for _, tensor in tensors_in("output", output)])]

    expected = done()
    for which in range(4):
        try:
            if done(line, which, len(expected)) != expected:
                return False
        except Exception as e:
            last = traceback.extract_tb(e.__traceback__)[-1]
            is_own = last.filename != __file__ and "raise " in (last.line or "")
            if not is_own and not isinstance(e, AssertionError):
                return False
    return True


def _reads_values(func: Any, args: Sequence[Any]) -> bool:
    """Whether Python, or the shape of the result, depends on the values that an operator reads."""
    if func.overloadpacket is torch.ops.aten.index:  # a mask, or integers
        return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    is_packing = func.overloadpacket is torch.ops.aten._pack_padded_sequence
    return is_packing or bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags))


def _reading_line() -> str:
    """Return the line of code in a model that runs now."""
    frames = traceback.walk_stack(inspect.currentframe())
    return code_line(itertools.takewhile(lambda row: row[0].f_code is not _traced.__code__, frames))


def code_line(frames: Iterable[tuple[Any, int]]) -> str:
    """Describe the first of frames, innermost first, that is code of a model, else of torch.nn: `file.py:12: x = y`."""
    torchs, ours = os.path.dirname(torch.__file__), os.path.abspath(os.path.join(os.path.dirname(__file__), "../.."))
    texts = {False: "", True: ""}  # by whether the file is one of torch
    for frame, line in frames:
        name = frame.f_code.co_filename
        is_torch = name.startswith(torchs)
        if not name.startswith(ours) and (not is_torch or os.path.join("nn", "modules") in name):
            text = f"{os.path.basename(name)}:{line}: {linecache.getline(name, line).strip().rstrip(':')}"
            texts[is_torch] = texts[is_torch] or text
    return texts[False] or texts[True]


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)


def _copied(tensor: Tensor, mode: FakeTensorMode | None) -> Tensor:
    """A copy with the same values; with a mode, a fake tensor on the CPU, for a tensor on any device."""
    if mode is None:
        copied = tensor.detach().clone()
    else:
        with mode:
            copied = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return nn.Parameter(copied, requires_grad=False) if isinstance(tensor, nn.Parameter) else copied
