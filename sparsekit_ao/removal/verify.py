"""Compare a smaller model with the model that it was made from: both run on the example inputs.

The larger one is called the masked model, since the units that the smaller one lacks are usually zero in it.
"""

import contextlib
import copy
import itertools
import math
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from ..errors import SparsityError
from ..masking.normalized import Normed
from ..models.flops import flop_counter
from ..models.running import arguments, opaque_in, seeded, tensors_in, unfused_attention

Outputs = list[tuple[str, Tensor]]  # (place in the output, tensor)
Arguments = tuple[tuple[Any, ...], dict[str, Any]]

LARGE = 1 << 16  # tensors of at least this many elements are not stored, but computed when they are read
_PART = 1 << 20  # how many elements of a weight are converted at a time
_EXACT = 1e-4  # with a larger tolerance, outputs may change, so it does not matter what zeros change
_HIDDEN = 0.5  # a parameter is hidden if more than this part of its rows or columns is; a ReLU stops fewer
_BY_BLOCK = ("output_hidden_states", "output_attentions", "output_router_logits")
_ROUNDINGS = 16  # differences of at most this many times the model's own rounding error are computed again in float64


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How the outputs of a smaller model differ from those of the masked one.

    `difference` is the largest of an output tensor, relative to the largest of its values that differ or, if it is
    smaller, to the largest change that the zeros of the masked model make; inf if shapes, integers, nan or inf differ.
    """

    difference: float = math.inf
    in_float64: float | None = None  # of float64 copies, if one ran and rounding explains `difference`
    flops: int = 0  # of one forward of the smaller model
    problem: str = ""  # what is wrong with the smaller model

    @property
    def decisive(self) -> float:
        """The difference that is compared with the tolerance: that of float64 copies if there is one."""
        return self.difference if self.in_float64 is None else self.in_float64


class Reference:
    """The masked model and its outputs on the example inputs, with which outputs of smaller models are compared.

    Copies run, so neither models nor inputs change; models of 16-bit floats run in float32, because their rounding
    would hide errors. With `dense`, the model without the zeros, a difference is small only if it is also small beside
    what the zeros change, which shows wrong removals in branches that contribute little to large outputs. With
    `acting`, this copy of the model runs instead, whose hooks make it act without units that are not zero.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        tolerance: float = 1e-5,
        normed: Normed = (),
        *,
        fused: bool = False,
        dense: nn.Module | None = None,
        acting: nn.Module | None = None,
    ) -> None:
        self._acting, self._by_block = model if acting is None else acting, acting is None
        self.model, self.example_inputs, self.tolerance, self.normed = model, inputs, tolerance, normed
        self.dtype, self._fused = run_dtype(model), fused
        self._inputs = arguments(inputs)
        # {parameter: its values before rounding to 16 bits}, set by whoever makes a smaller model
        self.unrounded: Mapping[str, Tensor] = {}
        self._dense = dense if tolerance <= _EXACT else None
        self._exact: tuple[Outputs, Sequence[float]] | None = None  # outputs of a float64 copy, and what zeros change
        # The last outputs that were compared in float64, and the result, which is that of the same outputs again.
        self._compared: tuple[Outputs, float | None] = [], None
        try:
            run = self._run(self._acting, self.dtype)
        except Exception as e:
            raise SparsityError(f"the model does not run on example_inputs: {e}") from e
        self._outputs, self.opaque, self.flops, self.uncounted = run
        if not self._outputs:
            raise SparsityError("the model returned no tensor, so there is nothing to compare")
        for place, tensor in self._outputs:
            if bool(tensor.isnan().any()):
                raise SparsityError(
                    f"the model's {place} contains nan on example_inputs, and nan equals nothing. Pass inputs and "
                    "attention masks for which every output is a number."
                )
        if not any(bool(tensor.any()) for _, tensor in self._outputs):
            zero = [name for name, p in model.named_parameters() if p.ndim > 1 and not bool(p.any())]
            why = f"{zero[-1]} is all zeros: initialize that layer" if zero else "pass typical inputs"
            raise SparsityError(f"the model returns only zeros on example_inputs, so nothing is compared; {why}")
        self._changes = self._changed_by_zeros(self._outputs, self.dtype)

    def _run(self, model: nn.Module, dtype: torch.dtype | None, **keys: Any) -> "_Run":
        return _run(model, self._inputs, dtype, fused=self._fused, by_block=self._by_block, **keys)

    def compare(self, small: nn.Module, *, single_use: bool = False) -> Comparison:
        """Run a smaller model and compare its outputs, also in float64 if they differ by more than the tolerance.

        With `single_use`, only copies of the model may run afterwards: it runs without being copied, so it must have
        the dtype of the comparison, and its FLOPs are not counted.
        """
        values = None if single_use else self.unrounded
        run = self._run(small, self.dtype, values=values, single_use=single_use)
        difference, in_float64 = output_difference(self._outputs, run.outputs, self._changes), None
        if self.tolerance < difference < float("inf"):
            if output_difference(self._compared[0], run.outputs) > 0:
                self._compared = run.outputs, self._in_float64(small, run.outputs)
            in_float64 = self._compared[1]
        return Comparison(difference=difference, in_float64=in_float64, flops=run.flops)

    def not_trainable(self, small: nn.Module) -> str:
        """Return why a smaller model does not run in training mode, or "" if it does or the masked one does not."""
        problem = ""
        for model in (small, self._acting):
            try:
                with warnings.catch_warnings(action="ignore"):
                    _run(model, self._inputs, self.dtype, fused=True, training=True)
                return problem
            except Exception as e:  # the forward of both may need labels in training mode
                problem = problem or f"does not run in training mode: {e}"
        return ""

    def check_repeats(self) -> None:
        """Raise an error if the masked model gives other outputs when it runs once more."""
        again = self._run(self._acting, self.dtype)
        if not (error := output_difference(self._outputs, again.outputs)) <= self.tolerance:
            raise SparsityError(
                f"the model itself gives two answers to the same example_inputs (a relative difference of {error:.1e})"
                ", by a clock or random numbers that no seed of torch, numpy or random determines. Give a seed to the "
                "generator in its forward, or pass such values as inputs"
            )

    def check_lengths(self) -> None:
        """Raise an error if inputs have one entry in a dimension along which the model combines entries."""
        # Attention over one token gives the same outputs whatever its queries and keys are, so it hides wrong removals.
        tensors = dict.fromkeys(t for t in _pytree.tree_leaves(self._inputs) if isinstance(t, Tensor))
        single = [(t, d) for t in tensors for d, n in enumerate(t.shape) if n == 1]
        runs = False
        # Inputs are extended in one dimension at a time. All dimensions (None) are extended together only if the model
        # has run with none of these inputs.
        for dimension in (*dict.fromkeys(d for _, d in single), None):
            longer = [(t, d) for t, d in single if dimension in (d, None)]
            for tensor, d in longer if dimension is not None or not runs else ():
                other = self._outputs_for(longer, tensor)
                runs |= other is not None
                if other is None or not _last_differs(self._outputs, self._outputs, other, 1e-4):
                    continue
                # Compare with inputs of the same shape, which round in the same way, to exclude that rounding differs.
                same = self._outputs_for(longer, None)
                if (same is None or _last_differs(self._outputs, same, other, 1e-6)) and self._hides(longer, tensor):
                    args, kwargs = self._inputs
                    places = {id(t): place for place, t in tensors_in("example_inputs", kwargs or args)}
                    raise SparsityError(
                        f"{places.get(id(tensor), 'an example input')} has one entry in dimension {d}, but the model "
                        "combines entries along it, for example by attention or a recurrence. With one entry, a wrong "
                        "removal may not be seen. Pass at least 2 entries there, or better as many as are typical."
                    )

    def with_other_inputs(self) -> "Reference | None":
        """Return a reference with random values where inputs repeat along a dimension; None if none do, or it fails."""

        def other(tensor: Tensor) -> Tensor:
            repeated = (tensor.narrow(d, 0, 1).expand_as(tensor) for d, n in enumerate(tensor.shape) if n > 1)
            if tensor.dtype == torch.bool or not any(map(tensor.equal, repeated)):
                return tensor
            changed.append(tensor)
            if tensor.is_floating_point() or tensor.is_complex():
                return _other_values(tensor)
            generator, most = torch.Generator().manual_seed(0), max(int(tensor.max()), 1)
            return torch.randint(0, most + 1, tensor.shape, generator=generator, device="cpu").to(tensor)

        changed: list[Tensor] = []
        args, kwargs = _pytree.tree_map_only(Tensor, other, self._inputs)
        return self._with(kwargs or args) if changed else None

    def with_fused_attention(self) -> "Reference | None":
        """Return a reference that lets torch fuse attention, as in inference, or None if torch would not fuse it."""
        may_fuse = torch.backends.mha.get_fastpath_enabled()
        if not may_fuse or not any(isinstance(module, nn.MultiheadAttention) for module in self.model.modules()):
            return None
        return self._with(self.example_inputs, fused=True)

    def _with(self, inputs: Any, *, fused: bool = False) -> "Reference | None":
        """Return a reference of the same model with these inputs, or None if the model does not run with them."""
        try:
            with warnings.catch_warnings(action="ignore"):
                acting = None if self._by_block else self._acting
                keys: dict[str, Any] = {"fused": fused, "dense": self._dense, "acting": acting}
                reference = Reference(self.model, inputs, self.tolerance, self.normed, **keys)
        except SparsityError:
            return None
        reference.unrounded = self.unrounded
        return reference

    def _hides(self, longer: Sequence[tuple[Tensor, int]], changed: Tensor) -> bool:
        """Return whether gradients are missing, or show parts of a parameter for longer inputs but no single entry."""
        shares, alone = list[Tensor](), list[Tensor]()  # gradients of rows and columns; the largest of single entries
        try:
            for entry in (0, 1, 2, None):
                model = plain_weights(light_copy(self._acting if self._dense is None else self._dense, self.dtype))
                inputs = self._extended(longer, changed, entry)
                with torch.enable_grad(), warnings.catch_warnings(action="ignore"):
                    outputs = _run(model, inputs, self.dtype, single_use=True, gradients=True).outputs
                    read = (t for _, t in outputs if t.requires_grad)
                    sums = [(_real(t) * _real(_other_values(t.detach()))).sum() for t in read]
                    if not sums:
                        return True
                    weights = [p for p in model.parameters() if p.requires_grad and p.numel()]
                    gradients = torch.autograd.grad(sums, weights, materialize_grads=True)
                sizes = [g[..., None, None].abs().movedim(d, 0).flatten(1).amax(1) for g in gradients for d in range(2)]
                shares = [size / max(float(size.max()) for size in sizes) for size in sizes]
                alone = alone if entry is None else [*map(torch.maximum, alone or shares, shares)]
        except Exception:
            return True
        shown = [(one[all_ > 1e-5], all_[all_ > 1e-5]) for one, all_ in zip(alone, shares, strict=True)]
        return any(int((one < 1e-3 * all_).sum()) > _HIDDEN * len(all_) for one, all_ in shown)

    def _outputs_for(self, longer: Sequence[tuple[Tensor, int]], changed: Tensor | None) -> Outputs | None:
        """Return the outputs for inputs as of `_extended`, or None if the model does not run with them."""
        try:
            with warnings.catch_warnings(action="ignore"):
                return _run(self._acting, self._extended(longer, changed), self.dtype).outputs
        except Exception:  # the model fixes the size of the dimension, or does not take a new value
            return None

    def _extended(
        self, longer: Sequence[tuple[Tensor, int]], changed: Tensor | None, entry: int | None = None
    ) -> Arguments:
        """Return inputs with two more entries in each (tensor, dimension), or with one of these three, `entry`.

        New entries repeat the tensor's values, or have other ones in `changed`.
        """

        def extended(tensor: Tensor) -> Tensor:
            is_changed = tensor is changed  # asked before `tensor` is a longer one
            for d in [d for t, d in longer if t is tensor]:
                other = _other_values(tensor) if is_changed else tensor
                tensor = torch.cat([other, other.flatten().roll(1).view(other.shape), tensor], d)
                tensor = tensor if entry is None else tensor.narrow(d, entry, 1)
            return tensor

        return _pytree.tree_map_only(Tensor, extended, self._inputs)

    def _in_float64(self, small: nn.Module, outputs: Outputs) -> float | None:
        """Return the difference of float64 copies; None if they do not run or rounding does not explain `outputs`."""
        try:
            if self._exact is None:
                exact = self._run(self._acting, torch.float64).outputs
                self._exact = exact, self._changed_by_zeros(exact, torch.float64)
            exact, changes = self._exact
            small_exact = self._run(small, torch.float64, values=self.unrounded).outputs
        except Exception:  # the device or the model has no float64, so that float32 decides
            return None
        triples = zip(self._outputs, outputs, exact, strict=True)
        is_rounding = all(_is_rounding(a, b, wide) for (_, a), (_, b), (_, wide) in triples)
        return output_difference(exact, small_exact, changes) if is_rounding else None

    def _changed_by_zeros(self, outputs: Outputs, dtype: torch.dtype | None) -> Sequence[float]:
        """Return by how much each output of the masked model differs at most from that of the dense one."""
        if self._dense is None:
            return ()
        dense = _run(self._dense, self._inputs, dtype, fused=self._fused).outputs
        pairs = zip(outputs, dense, strict=False)  # outputs of other shapes are of another kind, and do not count
        return [_largest(a, b)[0] if a.shape == b.shape and a.is_floating_point() else 0.0 for (_, a), (_, b) in pairs]


def count_flops(model: nn.Module, inputs: Any) -> int:
    """Count the FLOPs of one forward in eval mode, as `Reference` counts them."""
    return _run(model, arguments(inputs), run_dtype(model)).flops


def _other_values(tensor: Tensor) -> Tensor:
    """Return other values for an input. Integers, which may be indices, do not exceed the largest one, or 1."""
    if tensor.dtype == torch.bool:
        return ~tensor
    if tensor.is_floating_point() or tensor.is_complex():
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
        return tensor + noise.to(tensor) * (1 + tensor.abs().nan_to_num(posinf=0.0).max())
    return (tensor + 1) % (tensor.max().clamp(min=1) + 1)


def _last_differs(short: Outputs, same: Outputs, other: Outputs, tolerance: float) -> bool:
    """Return whether two outputs for longer inputs differ in their last entries, as many as `short` has."""
    has_arrays = any(t.ndim for _, t in same)  # a scalar beside arrays is a loss over the batch, and does not count
    for (_, few), (_, a), (_, b) in zip(short[::-1], same[::-1], other[::-1], strict=False):
        if few.ndim != a.ndim or a.ndim != b.ndim:
            return True
        for d, n in enumerate(few.shape):
            a, b = (t.narrow(d, max(t.shape[d] - n, 0), min(n, t.shape[d])) for t in (a, b))
        a, b = _real(a), _real(b)
        # If shapes differ, the error is inf or nan, neither of which is within the bound.
        error = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs()) if a.shape == b.shape else a / 0
        bound = tolerance * float(a.nan_to_num(0.0, 0.0, 0.0).abs().max()) if a.numel() else 0.0
        if (a.ndim or not has_arrays) and not bool((error <= bound).all()):
            return True
    return False


def run_dtype(model: nn.Module) -> torch.dtype | None:
    """Return the dtype in which a model runs to be compared, or None if it runs as it is."""
    is_16_bit = any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters())
    return torch.float32 if is_16_bit else None


class _Run(NamedTuple):
    """What a model returned, and what is known of that."""

    outputs: Outputs
    opaque: list[str]  # objects in the output that are not inspected
    flops: int  # 0 with `single_use`, or if attention is fused
    uncounted: tuple[str, ...]  # operators that may multiply but have no formula


@torch.no_grad()
def _run(
    model: nn.Module,
    inputs: Arguments,
    dtype: torch.dtype | None,
    values: Mapping[str, Tensor] | None = None,  # of parameters, in place of theirs if there is a `dtype`
    single_use: bool = False,
    fused: bool = False,
    training: bool = False,
    gradients: bool = False,
    by_block: bool = True,  # else the model returns nothing by block or expert, such as all hidden states
) -> _Run:
    """Run a copy of a model, or with `single_use` the model itself, whose mode, parameters and buffers may change."""
    model = model if single_use else light_copy(model, dtype)
    # `deepcopy` copies only leaf tensors.
    inputs = copy.deepcopy(_pytree.tree_map_only(Tensor, lambda t: t if t.is_leaf else t.detach(), inputs))
    model.train().eval().train(training)  # each call may drop what a module remembers of its weights
    for p in model.parameters():  # the counter cannot hook views of parameters that were made without gradients
        p.requires_grad_(gradients and p.is_floating_point())
    if dtype is not None:
        for name, exact in (values or {}).items():
            model.get_parameter(name).data = exact.to(dtype)
        inputs = _pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, inputs)
    args, kwargs = inputs
    if not by_block:
        kwargs = {key: value for key, value in kwargs.items() if key not in _BY_BLOCK}
        configs = [vars(module).get("config") for module in model.modules()]
        for config, key in ((c, key) for c in configs for key in _BY_BLOCK if getattr(c, key, None) is True):
            setattr(config, key, False)
    count = flop_counter()
    tensors = [*model.parameters(), *model.buffers(), *(tensor for _, tensor in tensors_in("input", inputs))]
    nothing = contextlib.nullcontext()
    # The counter has no formula for fused attention.
    unfused, counting = nothing if fused else unfused_attention(), nothing if single_use or fused else count
    with seeded(tensors), unfused, counting, torch.set_grad_enabled(gradients):
        output = model(*args, **kwargs)
    outputs = list(tensors_in("output", output))
    return _Run(outputs, opaque_in("output", output), count.get_total_flops(), tuple(count.uncounted))


class Computed(Tensor):
    """A part of a tensor of the user's model, possibly with zeros, which each operation that reads it computes."""

    source: Tensor
    kept: dict[int, Tensor]  # {dimension: indices of the source that this tensor has}; it has all of other dimensions
    zero: dict[int, Tensor]  # {dimension: bool, for which indices of the source the entries are zero}
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(
        cls, tensor: Tensor, dtype: torch.dtype | None = None, kept: Mapping[int, Tensor] | None = None
    ) -> "Computed":
        """Return a tensor, plain or computed, as a computed one with fewer indices or another dtype."""
        whole = tensor if isinstance(tensor, cls) else cls._made(tensor, tensor.dtype, {}, {})
        fewer = {d: whole.kept[d][at] if d in whole.kept else at for d, at in (kept or {}).items()}
        return cls._made(whole.source, dtype or tensor.dtype, whole.kept | fewer, dict(whole.zero))

    @classmethod
    def _made(cls, source: Tensor, dtype: torch.dtype, kept: dict[int, Tensor], zero: dict[int, Tensor]) -> "Computed":
        shape = [len(kept[d]) if d in kept else n for d, n in enumerate(source.shape)]
        self: Computed = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=source.device)
        self.source, self.kept, self.zero = source, kept, zero
        return self

    def compute(self) -> Tensor:
        """Return a plain copy, in the memory format of the source."""
        data = self.source.detach()
        for d, indices in sorted(self.kept.items()):
            data = data.index_select(d, indices)
        data = match_format(self.source, data.to(self.dtype, copy=not self.kept))
        for d, mask in self.zero.items():
            inside = mask[self.kept[d]] if d in self.kept else mask
            data.index_fill_(d, inside.nonzero()[:, 0], 0)
        return data

    def _product(self, x: Tensor) -> Tensor:
        """Return `x @ self`, computed in parts that fit a processor's cache.

        The source's rows that are zero or gone here are multiplied by zeros, which x gets in their places.
        """
        if 0 in self.kept:
            x = x.new_zeros(len(x), len(self.source)).index_copy_(1, self.kept[0], x)
        if 0 in self.zero:
            x = x.masked_fill(self.zero[0], 0)
        rows = self.source.detach().t()
        size, kept = max(1, _PART // rows.shape[1]), self.kept.get(1)
        parts = rows.split(size) if kept is None else (rows.index_select(0, some) for some in kept.split(size))
        out = x.new_empty(len(x), self.shape[1])  # columns of logits are many, so they are written only once
        for columns, part in zip(out.split(size, 1), parts, strict=True):
            torch.mm(x, part.to(self.dtype).t(), out=columns)
        if 1 in self.zero:
            out.masked_fill_(self.zero[1] if kept is None else self.zero[1][kept], 0)
        return out

    @classmethod
    def __torch_dispatch__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        aten, kwargs = torch.ops.aten, kwargs or {}
        computed = [at for at, arg in enumerate(args) if isinstance(arg, cls)]
        if func is aten.detach.default:
            return cls.of(args[0])
        if func is aten.t.default and args[0].ndim == 2:
            self = args[0]
            kept, zero = ({1 - d: t for d, t in by.items()} for by in (self.kept, self.zero))
            return cls._made(self.source.detach().t(), self.dtype, kept, zero)
        if func is aten.mm.default and computed == [1]:
            return args[1]._product(args[0])
        if func is aten.addmm.default and computed == [2] and not kwargs:
            return args[2]._product(args[1]) + args[0]
        if func is aten.embedding.default and computed == [0] and 0 not in {**args[0].kept, **args[0].zero}:
            read = func(args[0].source.detach(), *args[1:], **kwargs)  # only these rows are converted
            kept, zero = (dict.fromkeys((read.ndim - 1,), by[1]) if by else {} for by in (args[0].kept, args[0].zero))
            return cls._made(read, args[0].dtype, kept, zero).compute()
        args, kwargs = _pytree.tree_map_only(cls, lambda t: t.compute(), (args, kwargs))
        return func(*args, **kwargs)


def match_format(tensor: Tensor, data: Tensor) -> Tensor:
    """Return the data in the memory format of the tensor: channels-last, or contiguous for all others."""
    last = torch.channels_last if tensor.ndim == 4 else torch.channels_last_3d
    is_last = tensor.ndim in (4, 5) and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=last)
    return data.contiguous(memory_format=last if is_last else torch.contiguous_format)


def light_copy(model: nn.Module, dtype: torch.dtype | None = None, shared: Collection[int] = ()) -> nn.Module:
    """Copy a model; large parameters become `Computed`, and those with `shared` ids stay the model's own."""
    tensors: dict[int, Any] = {id(p): p for p in model.parameters() if id(p) in shared}
    for p in (p for p in model.parameters() if id(p) not in shared):
        to = dtype if dtype is not None and p.is_floating_point() else p.dtype
        is_plain = type(p) is nn.Parameter and type(p.detach()) is Tensor
        if isinstance(p, Computed) or (is_plain and p.numel() >= LARGE and p.ndim > 1):
            tensors[id(p)] = Computed.of(p, to)
        elif dtype is not None:
            tensors[id(p)] = nn.Parameter(p.detach().to(to, copy=True), p.requires_grad)
    for buffer in model.buffers() if dtype is not None else ():
        tensors[id(buffer)] = buffer.to(dtype if buffer.is_floating_point() else buffer.dtype, copy=True)
    return copy.deepcopy(model, tensors)


def plain_weights(model: nn.Module) -> nn.Module:
    """Replace the `Computed` parameters of a model by plain ones, in place, and return the model."""
    computed = [p for p in model.parameters() if isinstance(p, Computed)]
    replace_tensors(model, {id(p): nn.Parameter(p.compute(), p.source.requires_grad) for p in computed})
    return model


def replace_tensors(model: nn.Module, tensors: Mapping[int, Tensor]) -> None:
    """Replace parameters and buffers in all modules of a model, in place; `tensors` is {id of the old one: new one}."""
    for module in model.modules():
        for registered in (module._parameters, module._buffers):
            registered.update({name: tensors[id(t)] for name, t in registered.items() if id(t) in tensors})  # type: ignore


def output_difference(wanted: Outputs, outputs: Outputs, changes: Sequence[float] = ()) -> float:
    """Return the `Comparison.difference` of outputs; `changes` are the largest changes that the zeros make in each."""
    if [(place, t.shape) for place, t in wanted] != [(place, t.shape) for place, t in outputs]:
        return float("inf")
    triples = itertools.zip_longest(wanted, outputs, changes, fillvalue=0.0)
    return max(_relative(a, b, change) for (_, a), (_, b), change in triples)  # type: ignore[misc]


def _relative(wanted: Tensor, output: Tensor, change: float) -> float:
    """Return the largest difference, relative to the largest value that differs or, if smaller, to the change."""
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return 0.0 if torch.equal(wanted, output) else float("inf")
    worst, largest = _largest(wanted, output)
    scale = min(largest, change) if change else largest
    return worst / scale if scale else worst


def _largest(wanted: Tensor, output: Tensor) -> tuple[float, float]:
    """Return the largest difference of two tensors (inf if it is not finite), and the largest value that differs."""
    worst = largest = 0.0
    for a, b in _parts(wanted, output):
        error = torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(torch.inf, torch.inf)
        differing = torch.where(a.isfinite() & (a != b), a.abs(), 0.0)
        worst, largest = max(worst, float(error.max())), max(largest, float(differing.max()))
    return worst, largest


def _is_rounding(wanted: Tensor, output: Tensor, exact: Tensor) -> bool:
    """Return whether two outputs differ by at most `_ROUNDINGS` times the rounding error of the first one."""
    worst, largest = _largest(wanted, output)
    # Values larger than all that differ do not count, since rounding errors grow with values.
    errors = (torch.where(a.abs() <= largest, (a - wide).abs(), 0.0).max() for a, wide in _parts(wanted, exact))
    return worst <= _ROUNDINGS * max(map(float, errors), default=0.0)


def _parts(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the same part of both tensors in float64, part by part, which takes little memory."""
    pairs = zip(*(tensor.reshape(-1).split(_PART) for tensor in (a, b)), strict=True)
    return ((_real(x), _real(y)) for x, y in pairs if x.numel())


def _real(tensor: Tensor) -> Tensor:
    """Return a tensor in float64, with real and imaginary parts of complex numbers in a further dimension."""
    return torch.view_as_real(tensor.resolve_conj()).double() if tensor.is_complex() else tensor.double()
