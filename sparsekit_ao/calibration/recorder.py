"""Recording statistics of layers while the user's model runs, by hooks that are removed even on an error."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType, TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from .. import masking
from ..distributed import full_tensor, has_process_group
from ..errors import SparsityError
from ..models.names import parameter_of
from ..models.progress import progress_bar
from ..models.running import Forward, TokenMask, call, check_batch, check_batches, eval_mode, token_mask_of
from .adapters import LayerAdapter, adapter_of
from .statistics import GRADIENTS, INPUTS, Statistics, Target, loaded_statistics


class Recording:
    """A context in which forward (and backward) passes of the model are recorded; see `ScopeSparsifier.calibrate`.

    Args:
        targets: The weights, and what is recorded for each.
        on_success: Called with the statistics when the context ends without an error.
        keep_rows: Keep inputs instead of X^T X where they have fewer tokens than inputs; not over ranks.

    Attributes:
        token_mask: Which tokens count, bool [batch, tokens] such as an attention mask, or None for all. Set it before
            each forward pass. Layers that read a tensor of another leading shape take all of it.
        statistics: {tensor_fqn: Statistics}, of the layers that were reached.
    """

    def __init__(
        self,
        targets: Iterable[Target],
        on_success: Callable[[Mapping[str, Statistics]], None] = lambda _: None,
        *,
        keep_rows: bool = False,
    ) -> None:
        self.token_mask: Tensor | None = None
        self.statistics: dict[str, Statistics] = {}
        self._targets, self._on_success = list(targets), on_success
        self._keep_rows = keep_rows and not has_process_group()
        for target in self._targets:
            target.check()
        self._hooks = ExitStack()
        self._last_read: tuple[Tensor, int, Tensor | None, dict[str, Any]] | None = None

    @property
    def needs_gradients(self) -> bool:
        """Whether a backward pass is needed."""
        return any(n in GRADIENTS for t in self._targets for n in t.needs)

    def __enter__(self) -> Self:
        self.statistics = {}
        with ExitStack() as self._hooks:
            for target in self._targets:
                self._observe(target)
            self._hooks = self._hooks.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.close()
        self._last_read = None
        if kind is None:
            if has_process_group():
                self._sum_over_ranks()
            self._on_success(self.statistics)

    def _observe(self, target: Target) -> None:
        adapter = target.adapter
        if adapter is not None and any(n in INPUTS for n in target.needs):
            need = "input_gram" if "input_gram" in target.needs else "input_square"

            def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                with torch.no_grad():
                    self._take_inputs(target, adapter, adapter.inputs(args, kwargs), need)

            self._hooks.enter_context(adapter.module.register_forward_pre_hook(before, with_kwargs=True))
        needs = [n for n in target.needs if n in GRADIENTS]
        if needs:
            hook = target.parameter.register_hook(lambda g: self._take_gradient(target, g.detach(), needs))
            self._hooks.enter_context(hook)

    def _statistics_of(self, target: Target) -> Statistics:
        if target.name not in self.statistics:
            self.statistics[target.name] = target.blank()
        return self.statistics[target.name]

    def _take_inputs(self, target: Target, adapter: LayerAdapter, x: Tensor, need: str) -> None:
        """Add sums of a layer's input; layers that read one tensor, one after the other, share them."""
        if x.is_nested:
            raise SparsityError(
                f"{target.name}: inputs of this layer are a nested tensor, of which nothing can be recorded; build "
                "nn.TransformerEncoder with enable_nested_tensor=False"
            )
        last, version = self._last_read, -1 if x.is_inference() else x._version  # inference tensors have none
        if last is None or last[0] is not x or last[1] != version or version < 0 or last[2] is not self.token_mask:
            last = self._last_read = (x, version, self.token_mask, {})
        sums = last[3] if adapter.reads_rows else {}
        statistics = self._statistics_of(target)
        take = adapter.gram if need == "input_gram" else adapter.squares
        for_rows = self._keep_rows and take == adapter.gram and need not in statistics.sums
        with torch.autocast(x.device.type, enabled=False):  # sums are float32
            if for_rows and "rows" not in sums:
                sums["rows"] = adapter.few_rows(x.detach(), self.token_mask)
            for_rows = for_rows and sums["rows"] is not None
            if not for_rows and need not in sums:
                sums[need] = take(x.detach(), self.token_mask)
        total, tokens = (sums["rows"], 0) if for_rows else sums[need]
        if not bool(torch.isfinite(total).all()):
            raise SparsityError(f"{target.name}: the inputs of this layer are not finite (NaN, inf or overflow)")
        if for_rows:
            statistics.add_rows(total)
        else:
            statistics.add({need: total}, tokens=tokens)

    @torch.no_grad()
    def _take_gradient(self, target: Target, gradient: Tensor, needs: Sequence[str]) -> None:
        g = full_tensor(gradient).float()
        if not bool(torch.isfinite(g).all()):
            raise SparsityError(f"{target.name}: the gradient is not finite; check the loss")
        increments = {
            "gradient": lambda: g,
            "gradient_square": lambda: g.square(),
            "movement": lambda: -full_tensor(target.parameter.detach()).float() * g,
        }
        self._statistics_of(target).add({n: increments[n]() for n in needs}, passes=1)

    def _sum_over_ranks(self) -> None:
        """Sum over all ranks of the default process group; a rank that did not reach a layer adds zero."""
        by_rank: list[Any] = [None] * torch.distributed.get_world_size()
        counts = {
            name: (s.tokens, s.passes, {need: tuple(v.shape) for need, v in s.sums.items()})
            for name, s in self.statistics.items()
        }
        torch.distributed.all_gather_object(by_rank, counts)
        for target in self._targets:
            reached = [ranks_counts[target.name] for ranks_counts in by_rank if target.name in ranks_counts]
            if not reached:
                continue
            statistics = self._statistics_of(target)
            statistics.tokens, statistics.passes = sum(r[0] for r in reached), sum(r[1] for r in reached)
            for need, shape in sorted(reached[0][2].items()):
                total = statistics.sums.get(need, torch.zeros(shape, device=target.parameter.device))
                torch.distributed.all_reduce(total)
                statistics.sums[need] = total


class Recorder:
    """Statistics of some tensors of a model: how each is a matrix, what was recorded for it, and how to record more.

    Args:
        model: The model, which runs while statistics are recorded.
        tensors: {name: (module, name of the tensor in it)}.
        collected: Statistics that were recorded before.

    Attributes:
        collected: {name: statistics} of the tensors for which something was recorded.

    >>> model = nn.Sequential(nn.Linear(4, 2))
    >>> recorder = Recorder(model, {"0.weight": (model[0], "weight")})
    >>> recorder.run([torch.ones(3, 4)], {"0.weight": ["input_square"]})
    >>> recorder.of("0.weight").sums["input_square"]
    tensor([[3., 3., 3., 3.]])
    """

    def __init__(
        self,
        model: nn.Module | None,
        tensors: Mapping[str, tuple[nn.Module, str]],
        collected: Mapping[str, Statistics] = MappingProxyType({}),
    ) -> None:
        self.model, self.tensors = model, dict(tensors)
        self.collected: dict[str, Statistics] = dict(collected)
        modules = () if model is None else model.modules()
        attentions = {id(m.out_proj): m for m in modules if isinstance(m, nn.MultiheadAttention)}
        self._adapters = {name: adapter_of(*tensor, attentions) for name, tensor in self.tensors.items()}

    def __getstate__(self) -> dict[str, Any]:
        """The statistics alone; the sparsifier makes a recorder of its model again."""
        return {"model": None, "tensors": {}, "collected": self.collected, "_adapters": {}}

    def adapter(self, name: str) -> LayerAdapter | None:
        """How a tensor is a matrix that multiplies inputs, or None where its inputs cannot be recorded."""
        return self._adapters[name]

    def of(self, name: str) -> Statistics:
        """What was recorded for a tensor, or statistics without sums."""
        statistics = self.collected.get(name) or self.target(name, ()).blank()
        statistics.adapter = self._adapters[name]  # which a copy does not have
        return statistics

    def target(self, name: str, needs: Iterable[str]) -> Target:
        """A tensor, and what is to be recorded for it."""
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
        """A context in which these statistics are recorded: {name: some of `NEEDS`}."""
        return Recording([self.target(name, of_tensor) for name, of_tensor in needs.items()], self._add)

    def run(
        self,
        batches: Iterable[Any],
        needs: Mapping[str, Iterable[str]],
        forward: Forward | None = None,
        token_mask: TokenMask = None,
        progress: bool = False,
    ) -> None:
        """Record statistics while the model runs on every batch in eval mode; see `ScopeSparsifier.calibrate`."""
        assert self.model is not None
        check_batches(batches, token_mask, forward, "calibrate")
        count = 0
        with self.recording(needs) as recording, eval_mode(self.model):
            for count, batch in enumerate(progress_bar(batches, "calibrate", "batch", progress=progress), 1):
                check_batch(batch, forward, "calibrate")
                recording.token_mask = token_mask_of(batch, token_mask, "calibrate")
                with torch.set_grad_enabled(recording.needs_gradients):
                    output = call(self.model, batch) if forward is None else forward(self.model, batch)
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
        """Check what `saved` has returned, and return it as statistics on the devices of the tensors.

        Tensors that this recorder does not have are left out.
        """
        return loaded_statistics(saved, {name: self.target(name, ()) for name in self.tensors if saved})


def _backward(loss: Any, parameters: Sequence[Tensor], batch: int) -> None:
    """Compute gradients, which reach the hooks; `.grad` stays as it is."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise SparsityError(
            f"calibrate: a score of gradients needs forward(model, batch) -> loss, a scalar; got {what}"
        )
    if not bool(torch.isfinite(loss)):
        raise SparsityError(f"calibrate: the loss of batch {batch} is {loss.item()}")
    torch.autograd.grad(loss.reshape(()), parameters, allow_unused=True)
