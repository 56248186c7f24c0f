"""Collects statistics of layers while the user's model runs: hooks that are removed afterwards, even on an error."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..distributed import full_tensor, has_process_group, is_sharded
from ..errors import SparsityError
from .forms import Form
from .statistics import GRADIENTS, INPUTS, Statistics

Forward = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Target:
    """One weight whose statistics are collected, and which of `NEEDS`."""

    name: str
    module: nn.Module
    tensor_name: str
    parameter: Tensor
    shape: tuple[int, ...]
    needs: tuple[str, ...]
    form: Form | None


class Calibration:
    """A context in which forward (and backward) passes of the model are recorded; see `CalibratedSparsifier.calibrate`.

    Attributes:
        where: which tokens count, bool [batch, tokens] such as an attention mask, or None for all. Set it before each
            forward pass. Layers that read a tensor of another leading shape take all of it.
        statistics: {tensor_fqn: Statistics}, of the layers that were reached.
    """

    def __init__(
        self, targets: Iterable[Target], done: Callable[[Mapping[str, Statistics]], None] = lambda found: None
    ) -> None:
        self.where: Tensor | None = None
        self.statistics: dict[str, Statistics] = {}
        self._targets, self._done = list(targets), done
        for target in self._targets:
            _check(target)
        self._handles: list[RemovableHandle] = []
        self._last: tuple[Tensor, int, Tensor | None, dict[str, Any]] | None = None

    @property
    def needs_gradients(self) -> bool:
        """Whether a backward pass is needed."""
        return any(n in GRADIENTS for t in self._targets for n in t.needs)

    def __enter__(self) -> Self:
        self.statistics = {}
        try:
            for target in self._targets:
                self._observe(target)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()
        if kind is None:
            if has_process_group():
                _sum_over_ranks(self._targets, self.statistics)
            self._done(self.statistics)

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._last = [], None

    def _observe(self, target: Target) -> None:
        form = target.form
        inputs = [n for n in target.needs if n in INPUTS]
        if form is not None and inputs:
            need = "input_gram" if "input_gram" in inputs else "input_square"

            def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                with torch.no_grad():
                    self._take_inputs(target, form, form.inputs(args, kwargs), need)

            self._handles.append(form.module.register_forward_pre_hook(before, with_kwargs=True))
        gradients = [n for n in target.needs if n in GRADIENTS]
        if gradients:
            self._handles.append(
                target.parameter.register_hook(lambda g: self._take_gradient(target, g.detach(), gradients))
            )

    def _own(self, target: Target) -> Statistics:
        if target.name not in self.statistics:
            self.statistics[target.name] = Statistics(name=target.name, shape=target.shape, form=target.form)
        return self.statistics[target.name]

    def _take_inputs(self, target: Target, form: Form, x: Tensor, need: str) -> None:
        """Layers that read one tensor, one after the other, share its sums."""
        if x.is_nested:
            raise SparsityError(
                f"{target.name}: inputs of this layer are a nested tensor, of which nothing can be recorded; build "
                "nn.TransformerEncoder with enable_nested_tensor=False"
            )
        last, version = self._last, -1 if x.is_inference() else x._version  # inference tensors have none
        if last is None or last[0] is not x or last[1] != version or version < 0 or last[2] is not self.where:
            last = self._last = (x, version, self.where, {})
        shared = last[3] if form.reads_rows else {}
        if need not in shared:
            with torch.autocast(x.device.type, enabled=False):  # sums are float32
                found, tokens = (form.gram if need == "input_gram" else form.squares)(x.detach(), self.where)
            if not bool(torch.isfinite(found).all()):
                raise SparsityError(f"{target.name}: the inputs of this layer are not finite (NaN, inf or overflow)")
            shared[need] = (found, tokens)
        self._own(target).add({need: shared[need][0]}, tokens=shared[need][1])

    @torch.no_grad()
    def _take_gradient(self, target: Target, gradient: Tensor, needs: Sequence[str]) -> None:
        g = full_tensor(gradient).float()
        if not bool(torch.isfinite(g).all()):
            raise SparsityError(f"{target.name}: the gradient is not finite; check the loss")
        of = {
            "gradient": lambda: g,
            "gradient_square": lambda: g.square(),
            "movement": lambda: -full_tensor(target.parameter.detach()).float() * g,
        }
        self._own(target).add({n: of[n]() for n in needs}, passes=1)


def shown(batches: Iterable[Any], name: str, progress: bool) -> Iterable[Any]:
    """The batches, with a progress bar on a terminal; without one where there is none, or `progress` is False."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    return tqdm(batches, desc=name, unit="batch", disable=None if progress else True)


def run_batches(
    calibration: Calibration,
    model: nn.Module,
    batches: Iterable[Any],
    forward: Forward | None,
    where: str | Callable[[Any], Tensor] | None,
) -> None:
    """Run the model on every batch inside an entered calibration.

    Args:
        calibration: it records; with gradients, `forward` must return the loss.
        model: in eval mode for the time of the run, then as before.
        batches: dicts are passed as keyword arguments, tuples and lists as positional ones.
        forward: `(model, batch) -> anything` instead.
        where: a key of the batches or a function of a batch that gives the tokens that count.
    """
    training, count = model.training, 0
    modes = [(m, m.training) for m in model.modules()]
    try:
        model.eval()
        for batch in batches:
            count += 1
            calibration.where = tokens_of(batch, where, "calibrate")
            with torch.set_grad_enabled(calibration.needs_gradients):
                found = call(model, batch) if forward is None else forward(model, batch)
                if calibration.needs_gradients:
                    _backward(found, [t for t in model.parameters() if t.requires_grad], count - 1)
    finally:
        for module, mode in modes:
            module.training = mode
    assert model.training == training
    if count == 0:
        raise SparsityError("calibrate: there are no batches; an iterator that was used up before gives none")


def call(model: nn.Module, batch: Any) -> Any:
    """The model on one batch: dicts are keyword arguments, tuples and lists positional ones.

    Raises:
        SparsityError: the model does not take such arguments, as where a data loader gives labels too.
    """
    args, kwargs = ((), batch) if isinstance(batch, Mapping) else ((batch,), {})
    if isinstance(batch, (tuple, list)):
        args = tuple(batch)
    try:
        inspect.signature(getattr(model, "forward", model)).bind(*args, **kwargs)  # an exported model is no module
    except TypeError as e:
        how = f"the keyword arguments {', '.join(map(str, kwargs))}" if kwargs else f"{len(args)} positional arguments"
        raise SparsityError(
            f"calibration data: a batch (a {type(batch).__name__}) is passed to {type(model).__name__} as {how}, which "
            f"its forward does not take ({e}). Give forward, such as forward=lambda model, batch: model(batch[0])"
        ) from None
    except ValueError:  # no signature is known
        pass
    return model(*args, **kwargs)


def checked_batches(batches: Any, where: str | Callable[[Any], Tensor] | None, forward: object, caller: str) -> None:
    """Raise unless batches can be iterated over, and `where` and `forward` are of the right kinds."""
    is_iterable = hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")
    if not is_iterable or isinstance(batches, (str, bytes, Mapping)):
        raise SparsityError(
            f"{caller}: batches must be a list of batches or a data loader, got {type(batches).__name__}"
        )
    if where is not None and not isinstance(where, str) and not callable(where):
        raise SparsityError(f"{caller}: where must be a key of the batches or a function, got {where!r}")
    if forward is not None and not callable(forward):
        raise SparsityError(f"{caller}: forward must be a function (model, batch) -> output, got {forward!r}")


def tokens_of(batch: Any, where: str | Callable[[Any], Tensor] | None, caller: str) -> Tensor | None:
    """The tokens of a batch that count."""
    if not isinstance(where, str):
        return where(batch) if where else None
    try:
        found: Tensor = batch[where]
    except (KeyError, IndexError, TypeError):
        keys = f"with {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else "and no dict"
        raise SparsityError(
            f"{caller}: where={where!r} is a key of each batch, but a batch is a {type(batch).__name__} {keys}"
        ) from None
    return found


def _backward(loss: Any, parameters: Sequence[Tensor], batch: int) -> None:
    """Gradients reach the hooks; `.grad` stays as it is."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise SparsityError(
            f"calibrate: a score of gradients needs forward(model, batch) -> loss, a scalar; got {what}"
        )
    if not bool(torch.isfinite(loss)):
        raise SparsityError(f"calibrate: the loss of batch {batch} is {loss.item()}")
    torch.autograd.grad(loss.reshape(()), parameters, allow_unused=True)


def _check(target: Target) -> None:
    if target.form is None and any(n in INPUTS for n in target.needs):
        raise SparsityError(
            f"{target.name}: inputs cannot be recorded for {target.tensor_name!r} of {type(target.module).__name__}; "
            "give it a score without input statistics (magnitude, taylor, fisher) or leave it out (exclude=[...])"
        )
    if target.form is not None and not target.form.has_gram and "input_gram" in target.needs:
        raise SparsityError(
            f"{target.name}: an embedding has no input_gram (its inputs are one-hot); take a score of input_square"
        )
    if any(n in GRADIENTS for n in target.needs) and is_sharded(target.parameter):
        raise SparsityError(
            f"{target.name}: gradient statistics need whole weights, and this one is sharded over ranks; calibrate "
            "before fully_shard, or take a score of inputs (wanda, ria, obd, obs)"
        )
    if any(n in GRADIENTS for n in target.needs) and not target.parameter.requires_grad:
        raise SparsityError(f"{target.name}: gradient statistics need requires_grad, and this weight is frozen")


def _sum_over_ranks(targets: Sequence[Target], found: dict[str, Statistics]) -> None:
    """Sum over all ranks of the default process group; a rank that did not reach a layer adds zero."""
    shapes: list[Any] = [None] * torch.distributed.get_world_size()
    own = {
        name: (s.tokens, s.passes, {k: (tuple(v.shape), str(v.device.type)) for k, v in s.sums.items()})
        for name, s in found.items()
    }
    torch.distributed.all_gather_object(shapes, own)
    for target in targets:
        parts = [one[target.name] for one in shapes if target.name in one]
        if not parts:
            continue
        statistics = found.setdefault(target.name, Statistics(name=target.name, shape=target.shape, form=target.form))
        statistics.tokens, statistics.passes = sum(p[0] for p in parts), sum(p[1] for p in parts)
        for need, (shape, _) in sorted(parts[0][2].items()):
            value = statistics.sums.get(need, torch.zeros(shape, device=target.parameter.device))
            torch.distributed.all_reduce(value)
            statistics.sums[need] = value
