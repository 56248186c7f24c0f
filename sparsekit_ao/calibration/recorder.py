"""Records statistics of weights while a model runs. All hooks are removed in the end, even after an error."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .. import masking
from ..distributed import full_tensor, has_process_group, of_all_ranks
from ..errors import SparsityError
from ..models.names import parameter_of
from ..models.progress import progress_bar
from ..models.running import (
    Forward,
    TokenMask,
    call,
    check_batches,
    checked_batch,
    copied_tensors,
    eval_mode,
    token_masks_of,
)
from .adapters import LayerAdapter, Read, adapter_of
from .gram import is_finite
from .products import Place, Product, Products
from .statistics import GRADIENTS, INPUTS, NEEDS, OF_GROUPS, Statistics, Target

_NOT_CALLED = (nn.ParameterList, nn.ParameterDict, nn.ModuleList, nn.ModuleDict)


class _LastRead(NamedTuple):
    """The tensor that the last product read, and its sums; layers that read the same inputs of it share the sums."""

    tensor: Tensor
    version: int
    token_mask: Tensor | None
    sums: dict[Any, dict[str, Any]]  # {how the inputs lie in the tensor: sums}


class Recording:
    """Context in which forward (and backward) passes of the model are recorded; see `ScopeSparsifier.calibrate`.

    Attributes:
        token_mask: Which tokens count: bool [batch, tokens], such as an attention mask, `TokenMasks`, or None for all.
            Set it before each forward pass. If the leading shape of a layer's input differs, all of the input counts,
            unless the model gathered its tokens by index, as for experts: then the mask is gathered too.
        statistics: {tensor_fqn: Statistics}, of the layers that were reached.
    """

    def __init__(
        self,
        targets: Iterable[Target],  # the weights, and which statistics are recorded for each
        on_success: Callable[[Mapping[str, Statistics]], None] = lambda _: None,  # called at the end without an error
        *,
        take: Callable[[Target, Product, Place], None] | None = None,  # called in place of recording what is read
        keep_rows: bool = False,  # keep inputs X, not X^T X, while tokens are fewer than inputs; only on one rank
    ) -> None:
        self._take, self._records = take or self._take_product, take is None
        self.token_mask: Any = None
        self.statistics: dict[str, Statistics] = {}
        self._targets, self._on_success = list(targets), on_success
        self._keep_rows = keep_rows and not has_process_group()
        for target in self._targets:
            target.check()
        self._observers = ExitStack()
        self._last_read: _LastRead | None = None

    @property
    def needs_gradients(self) -> bool:
        """Whether a backward pass is needed."""
        return any(n in GRADIENTS for t in self._targets for n in t.needs)

    def __enter__(self) -> Self:
        self.statistics = {}
        inputs = {target.name: target for target in self._targets if any(n in INPUTS for n in target.needs)}
        with ExitStack() as stack:
            products = Products(
                {name: (target.module, target.tensor_name) for name, target in inputs.items()},
                lambda product, place: self._take(inputs[place.name], product, place),
                lambda: self.token_mask,
            )
            for target in inputs.values():
                if parametrize.is_parametrized(target.module, target.tensor_name):
                    chain: Any = target.module.parametrizations
                    hook = chain[target.tensor_name].register_forward_hook
                    stack.enter_context(hook(lambda *given, name=target.name: products.tie(name, given[-1])))
            for target in self._targets:
                if needs := [n for n in target.needs if n in GRADIENTS]:
                    take = partial(self._take_gradient, target, needs)
                    stack.enter_context(target.parameter.register_hook(take))
            if inputs and "torch._dynamo" in sys.modules:  # compiled modules would run without being observed
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            if inputs:
                stack.enter_context(products)
            self._observers = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._observers.close()
        self._last_read = None
        if kind is None:
            if has_process_group() and self._records:
                self._sum_over_ranks()
            for statistics in self.statistics.values():
                statistics.check()  # once, since sums keep what is not finite
            self._on_success(self.statistics)

    def _statistics_of(self, target: Target) -> Statistics:
        if target.name not in self.statistics:
            self.statistics[target.name] = target.blank()
        return self.statistics[target.name]

    @torch.no_grad()
    def _take_product(self, target: Target, product: Product, place: Place) -> None:
        """Add the inputs of a product to the sums of a weight, or of the groups of the weight that it multiplies."""
        if product.read.is_nested:
            raise SparsityError(
                f"{target.name}: inputs of this layer are a nested tensor, which cannot be recorded; build "
                "nn.TransformerEncoder with enable_nested_tensor=False"
            )
        adapter = target.adapter
        assert adapter is not None
        with torch.autocast(product.read.device.type, enabled=False):  # sums are float32
            read = adapter.reads(product, place, target.shape)
            if read is None:
                return
            self._statistics_of(target).dims = (adapter.input_dims, adapter.group_dims)
            if adapter.group_dims:
                self._take_groups(target, adapter, product, read)
            else:
                self._take_inputs(target, adapter, product, read)

    def _take_groups(self, target: Target, adapter: LayerAdapter, product: Product, read: Read) -> None:
        """Add sums of the inputs of packed experts, one by one."""
        need, statistics = _need(target), self._statistics_of(target)
        for group, rows in adapter.rows_of_groups(product, read, product.token_mask):
            rows = rows.float()
            total = rows.mT @ rows if need == "input_gram" else rows.square().sum(0)
            statistics.add_to_group(need, group, total, int(rows.any(1).sum()))

    def _take_inputs(self, target: Target, adapter: LayerAdapter, product: Product, read: Read) -> None:
        """Add sums of a layer's input; consecutive layers that read the same tensor share the sums."""
        x, need, mask = product.read, _need(target), product.token_mask
        version = -1 if x.is_inference() else x._version  # inference tensors have none
        last = self._last_read
        is_same = last is not None and last.tensor is x and last.version == version and last.token_mask is mask
        if last is None or not is_same or version < 0:
            last = self._last_read = _LastRead(x, version, mask, {})
        sums: dict[str, Any] = {}
        if adapter.kind == "matrix" and not product.is_computed and read.is_whole:
            inputs = product.inputs()  # a view; products along other dimensions of one tensor have other inputs
            sums = last.sums.setdefault((inputs.shape, inputs.stride(), inputs.storage_offset()), {})
        statistics = self._statistics_of(target)
        for_rows = self._keep_rows and need == "input_gram" and need not in statistics.sums and read.is_whole
        for_rows &= adapter.parts == 1
        if for_rows and "rows" not in sums:
            sums["rows"] = adapter.few_rows(product, mask)
        for_rows = for_rows and sums["rows"] is not None
        if not for_rows and need not in sums:
            take = adapter.gram if need == "input_gram" else adapter.squares
            sums[need] = take(read.filled(product), mask)
        total, tokens = (sums["rows"], 0) if for_rows else sums[need]
        if for_rows:
            statistics.add_rows(total)
        elif read.is_whole:
            statistics.add({need: total.expand(statistics.shapes()[need])}, tokens=tokens)
        else:
            of_groups = torch.zeros(statistics.shapes()[need], device=total.device)
            of_groups[read.groups] = total * read.share
            statistics.add({need: of_groups}, tokens=tokens if read.is_first else 0)

    @torch.no_grad()
    def _take_gradient(self, target: Target, needs: Sequence[str], gradient: Tensor) -> None:
        g = full_tensor(gradient.detach()).float()
        if not is_finite(g):
            raise SparsityError(f"{target.name}: the gradient is not finite; check the loss, and use no GradScaler")
        increments = {
            "gradient": lambda: g,
            "gradient_square": lambda: g.square(),
            "movement": lambda: -full_tensor(target.parameter.detach()).float() * g,
        }
        self._statistics_of(target).add({n: increments[n]() for n in needs}, passes=1)

    def _sum_over_ranks(self) -> None:
        """Sum over all ranks of the default process group; a rank that did not reach a layer adds zero."""
        counts = {
            name: (s.tokens, s.passes, {need: tuple(v.shape) for need, v in s.sums.items()}, s.dims)
            for name, s in self.statistics.items()
        }
        by_rank = of_all_ranks(counts)
        for target in self._targets:
            reached = [ranks_counts[target.name] for ranks_counts in by_rank if target.name in ranks_counts]
            if not reached:
                continue
            statistics = self._statistics_of(target)
            statistics.tokens, statistics.passes = sum(r[0] for r in reached), sum(r[1] for r in reached)
            statistics.dims = next(filter(None, (r[3] for r in reached)), None)
            for need, shape in sorted(reached[0][2].items()):
                total = statistics.sums.get(need, torch.zeros(shape, device=target.parameter.device))
                torch.distributed.all_reduce(total)
                statistics.sums[need] = total


def _need(target: Target) -> str:
    return "input_gram" if "input_gram" in target.needs else "input_square"


class Recorder:
    """Record statistics of some tensors of a model, and hold them.

    >>> model = nn.Sequential(nn.Linear(4, 2))
    >>> recorder = Recorder(model, {"0.weight": (model[0], "weight")})
    >>> recorder.run([torch.ones(3, 4)], {"0.weight": ["input_square"]})
    >>> recorder.of("0.weight").sums["input_square"]
    tensor([[3., 3., 3., 3.]])
    """

    def __init__(
        self,
        model: nn.Module | None,  # it runs while statistics are recorded
        tensors: Mapping[str, tuple[nn.Module, str]],  # {name: (module, name of the tensor in it)}
        collected: Mapping[str, Statistics] = MappingProxyType({}),  # {name: what was recorded before}
    ) -> None:
        self.model, self.tensors = model, dict(tensors)
        self.collected: dict[str, Statistics] = dict(collected)
        callers: dict[int, nn.Module] = {}
        for m in () if model is None else model.modules():
            for child in m.children():
                if isinstance(child, _NOT_CALLED) or isinstance(m, nn.MultiheadAttention):
                    callers[id(child)] = callers.get(id(m), m)
        self._adapters = {name: adapter_of(*tensor, callers) for name, tensor in self.tensors.items()}

    def __getstate__(self) -> dict[str, Any]:
        """Return only the statistics; the sparsifier makes a new recorder for its model."""
        return {"model": None, "tensors": {}, "collected": self.collected, "_adapters": {}}

    def adapter(self, name: str) -> LayerAdapter | None:
        """Return the adapter that sees a tensor as a matrix, or None if its inputs cannot be recorded."""
        return self._adapters[name]

    def of(self, name: str) -> Statistics:
        """Return what was recorded for a tensor, or statistics without sums."""
        statistics = self.collected.get(name) or self.target(name, ()).blank()
        statistics.use(self._adapters[name])  # a copy of statistics has none
        return statistics

    def target(self, name: str, needs: Iterable[str]) -> Target:
        """Return a tensor with the statistics to record for it."""
        module, tensor_name = self.tensors[name]
        return Target(
            name=name,
            module=module,
            tensor_name=tensor_name,
            parameter=parameter_of(module, tensor_name),
            shape=masking.shape_of(module, tensor_name),
            needs=tuple(dict.fromkeys(needs)),
            adapter=self._adapters[name],
        )

    def recording(self, needs: Mapping[str, Iterable[str]]) -> Recording:
        """Return a context in which these statistics, {name: some of `NEEDS`}, are recorded."""
        return Recording([self.target(name, of_tensor) for name, of_tensor in needs.items()], self._add)

    def run(
        self,
        batches: Iterable[Any],
        needs: Mapping[str, Iterable[str]],
        forward: Forward | None = None,
        token_mask: TokenMask = None,
    ) -> None:
        """Record statistics while the model runs on every batch in eval mode; see `ScopeSparsifier.calibrate`."""
        assert self.model is not None
        check_batches(batches, token_mask, forward, "calibrate")
        count = 0
        with self.recording(needs) as recording, eval_mode(self.model):
            for count, batch in enumerate(progress_bar(batches, "calibrate", "batch"), 1):
                batch = checked_batch(batch, forward, "calibrate")
                recording.token_mask = token_masks_of(batch, token_mask, "calibrate")
                with torch.set_grad_enabled(recording.needs_gradients):
                    output = (forward or call)(self.model, copied_tensors(batch))  # it may change inputs in place
                    if recording.needs_gradients:
                        _backward(output, [p for p in self.model.parameters() if p.requires_grad], count - 1)
            if count == 0:
                raise SparsityError("calibrate: there are no batches; an iterator that was used up before gives none")

    def _add(self, recorded: Mapping[str, Statistics]) -> None:
        for name, statistics in recorded.items():
            if name in self.collected:
                self.collected[name].add(statistics.sums, statistics.tokens, statistics.passes)
            else:
                self.collected[name] = statistics

    def saved(self) -> dict[str, Any]:
        """Return {name: its statistics} as plain dicts of copies."""
        return {name: statistics.saved() for name, statistics in self.collected.items()}

    def loaded(self, saved: object) -> dict[str, Statistics]:
        """Check what `saved` returned, and return statistics of the recorder's own tensors, on their devices."""
        if not isinstance(saved, Mapping):
            raise SparsityError(f"load_state_dict: 'statistics' must be a dict, got {type(saved).__name__}")
        loaded = {}
        for name, entry in saved.items():
            where, entry = f"load_state_dict: {name}: ", entry if isinstance(entry, Mapping) else {}
            counts: list[Any] = [entry.get(k) for k in ("tokens", "passes")]
            sums = entry.get("sums")
            if not isinstance(sums, Mapping) or not all(type(n) is int and n >= 0 for n in counts):
                raise SparsityError(f"{where}statistics need counts 'tokens' and 'passes' and a dict 'sums'")
            own = self.target(name, ()).blank() if name in self.tensors else None
            if own is not None:
                own.dims = entry.get("dims")
                own.use(own.adapter)
            for need, value in sums.items():
                is_known = need in (*NEEDS, OF_GROUPS) and isinstance(value, Tensor) and value.is_floating_point()
                if not is_known or (own is not None and tuple(value.shape) != own.shapes().get(need)):
                    raise SparsityError(f"{where}statistics have an unknown entry, or one of a wrong shape: {need!r}")
            if own is not None:
                device = parameter_of(*self.tensors[name]).device
                own.add({need: value.to(device) for need, value in sums.items()}, *counts)
                loaded[name] = own
        return loaded


def _backward(loss: Any, parameters: Sequence[Tensor], batch: int) -> None:
    """Compute gradients for the hooks, without changing `.grad`."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise SparsityError(
            f"calibrate: a score of gradients needs forward(model, batch) -> loss, a scalar; got {what}"
        )
    if not bool(torch.isfinite(loss)):
        raise SparsityError(f"calibrate: the loss of batch {batch} is {loss.item()}, but it must be finite")
    torch.autograd.grad(loss.reshape(()), parameters, allow_unused=True)
