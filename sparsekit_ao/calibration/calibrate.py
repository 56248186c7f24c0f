"""Statistics of layers, collected while the user's model runs: hooks that are removed afterwards, even on an error."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from ..distributed import full_tensor, has_process_group, is_sharded
from ..errors import SparsityError
from .adapters import LayerAdapter

INPUTS = ("input_square", "input_gram")
GRADIENTS = ("gradient", "gradient_square", "movement")
NEEDS = (*INPUTS, *GRADIENTS)
Forward = Callable[[nn.Module, Any], Any]
TokenMask = str | Callable[[Any], Tensor] | Literal[False] | None  # a key or function of a batch; False: all count


@dataclass(kw_only=True, eq=False)
class Statistics:
    """Sums over calibration tokens and backward passes, for one weight. Float32, on the device of the inputs.

    Attributes:
        name, shape: The weight's.
        adapter: How the weight is a matrix; None for parameters whose inputs cannot be recorded.
        tokens, passes: Input rows and backward passes that were summed.
        sums: {one of `NEEDS`: its sum}: "input_square" [groups, inputs], "input_gram" [groups, inputs, inputs],
            gradients in the weight's shape.
        rows: Inputs [groups, tokens, inputs], kept instead of "input_gram" while there are fewer tokens than inputs.
        blocks: The block of each element, int64 in the weight's shape, for scores with `uses_blocks`.
    """

    name: str
    shape: tuple[int, ...]
    adapter: LayerAdapter | None
    tokens: int = 0
    passes: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict)
    rows: list[Tensor] = field(default_factory=list)
    blocks: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the adapter, which refers to the model; the sparsifier sets it again."""
        return {**self.__dict__, "adapter": None}

    def matrix(self, weight: Tensor) -> Tensor:
        """The weight, or anything of its shape, as [groups, outputs, inputs]."""
        assert self.adapter is not None
        return self.adapter.matrix(weight)

    def from_matrix(self, matrix: Tensor) -> Tensor:
        """The inverse of `matrix`: [groups, outputs, inputs], or broadcast to it, in the weight's shape."""
        assert self.adapter is not None
        outputs, inputs = self.matrix(torch.empty(self.shape, device="meta")).shape[1:]
        return self.adapter.weight(matrix.expand(-1, outputs, inputs), self.shape)

    @property
    def input_square(self) -> Tensor:
        """Each weight's sum of squares of its input, G_jj; in the weight's shape."""
        if self.rows:
            squares = torch.stack([rows.square().sum(1) for rows in self.rows]).sum(0)
        elif "input_gram" not in self.sums:
            squares = self._sum("input_square")
        else:  # a calibration records one of the two, so both are of different tokens
            squares = self.sums["input_gram"].diagonal(dim1=1, dim2=2) + self.sums.get("input_square", 0)
        return self.from_matrix(squares[:, None, :])

    @property
    def input_gram(self) -> Tensor:
        """G = X^T X, [groups, inputs, inputs], in the order of the columns of `matrix`."""
        self._sum_rows()
        return self._sum("input_gram")

    @property
    def gram(self) -> "Tensor | RowGram | None":
        """G as `input_gram`, or by its rows where these are kept; None where neither was recorded."""
        return RowGram.of(torch.cat(self.rows, 1)) if self.rows else self.sums.get("input_gram")

    @property
    def gradient(self) -> Tensor:
        """The sum of gradients over backward passes, in the weight's shape."""
        return self._sum("gradient")

    @property
    def gradient_square(self) -> Tensor:
        """The mean of squared gradients over backward passes, in the weight's shape."""
        return self._sum("gradient_square") / max(self.passes, 1)

    @property
    def movement(self) -> Tensor:
        """The sum of -weight * gradient over backward passes, in the weight's shape."""
        return self._sum("movement")

    def add(self, increments: Mapping[str, Tensor], tokens: int = 0, passes: int = 0) -> None:
        """Add to the sums, which rows that were kept join then."""
        if "input_gram" in increments:
            self._sum_rows()
        for need, increment in increments.items():
            total = self.sums.get(need)
            self.sums[need] = increment.clone() if total is None else total.add_(increment.to(total.device))
        self.tokens += tokens
        self.passes += passes

    def add_rows(self, rows: Tensor) -> None:
        """Keep rows [groups, tokens, inputs]; sum them once there are as many as inputs."""
        self.rows.append(rows)
        self.tokens += rows.shape[1]
        if sum(r.shape[1] for r in self.rows) >= rows.shape[2]:
            self._sum_rows()

    def _sum_rows(self) -> None:
        kept, self.rows = self.rows, []
        for rows in kept:
            self.add({"input_gram": rows.mT @ rows})

    def missing(self, needs: Sequence[str]) -> list[str]:
        """Those of `needs` that were not collected."""
        collected = {*self.sums, *(INPUTS if self.rows or "input_gram" in self.sums else ())}
        return [n for n in needs if n not in collected]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each sum that can be recorded."""
        shapes = dict.fromkeys(GRADIENTS, self.shape)
        if self.adapter is not None:
            groups, _, inputs = self.matrix(torch.empty(self.shape, device="meta")).shape
            shapes |= {"input_square": (groups, inputs), "input_gram": (groups, inputs, inputs)}
        return shapes

    def saved(self) -> dict[str, Any]:
        """As a plain dict of copies."""
        return {"tokens": self.tokens, "passes": self.passes, "sums": {k: v.clone() for k, v in self.sums.items()}}

    def _sum(self, need: str) -> Tensor:
        if need not in self.sums:
            raise SparsityError(f"{self.name}: {need} was not collected; list it in the score's `needs` and calibrate")
        return self.sums[need]


def loaded_statistics(
    saved: object, blanks: Mapping[str, Statistics], devices: Mapping[str, torch.device]
) -> dict[str, Statistics]:
    """Check {tensor name: what `Statistics.saved` gives}, and copy it to the devices.

    `blanks` are statistics without sums, which are filled; nothing is loaded for tensors that it does not have.
    """
    prefix = "load_state_dict: "
    if not isinstance(saved, Mapping):
        raise SparsityError(f"{prefix}'statistics' must be a dict, got {type(saved).__name__}")
    loaded = {}
    for name, entry in saved.items():
        entry = entry if isinstance(entry, Mapping) else {}
        counts: list[Any] = [entry.get(k) for k in ("tokens", "passes")]
        sums = entry.get("sums")
        if not isinstance(sums, Mapping) or not all(type(n) is int and n >= 0 for n in counts):
            raise SparsityError(f"{prefix}{name}: statistics need counts 'tokens' and 'passes' and a dict 'sums'")
        blank = blanks.get(name)
        for need, value in sums.items():
            is_known = need in NEEDS and isinstance(value, Tensor) and value.is_floating_point()
            if not is_known or (blank is not None and tuple(value.shape) != blank.shapes().get(need)):
                text = f"statistics have an unknown entry, or one of a wrong shape: {need!r}"
                raise SparsityError(f"{prefix}{name}: {text}")
        if blank is not None:
            blank.add({need: value.to(devices[name]) for need, value in sums.items()}, *counts)
            loaded[name] = blank
    return loaded


@dataclass(frozen=True, eq=False)
class RowGram:
    """The matrix X^T A X + diag(d) of each group, with fewer rows than columns in X: products with it cost rows only.

    A Gram matrix has A = I and d = 0. This class has those operations of a tensor that the solvers use.

    Attributes:
        rows: X, [groups, tokens, inputs].
        core: A, [groups, tokens, tokens], or None for the identity.
        added: d, [groups, 1, inputs].

    >>> x = torch.tensor([[[1.0, 2.0, 0.0]]])
    >>> gram, dense = damped_gram(RowGram.of(x), 0.6), x.mT @ x + torch.eye(3)
    >>> torch.equal(torch.eye(3)[None] @ gram, dense)
    True
    >>> torch.allclose(dense @ gram.penalized_inverse(0.5), dense @ (dense + 0.5 * torch.eye(3)).inverse())
    True
    """

    rows: Tensor
    core: Tensor | None
    added: Tensor

    @classmethod
    def of(cls, rows: Tensor) -> Self:
        """X^T X."""
        return cls(rows, None, rows.new_zeros(len(rows), 1, rows.shape[2]))

    def __rmatmul__(self, matrix: Tensor) -> Tensor:
        of_rows = matrix @ self.rows.mT
        return ((of_rows if self.core is None else of_rows @ self.core) @ self.rows).addcmul_(matrix, self.added)

    def to(self, dtype: torch.dtype) -> Self:
        """Convert to another dtype."""
        return replace(self, rows=self.rows.to(dtype), added=self.added.to(dtype))

    def diagonal(self, dim1: int = 1, dim2: int = 2) -> Tensor:
        """Return the diagonal of a Gram matrix, [groups, inputs]."""
        return self.rows.square().sum(1) + self.added[:, 0]

    def scaled(self, scale: Tensor) -> Self:
        """Divide rows and columns of a Gram matrix by a scale, [groups, 1, inputs]."""
        return replace(self, rows=self.rows / scale, added=self.added / scale.square())

    def penalized_inverse(self, rho: float) -> Self:
        """Invert a Gram matrix after adding rho to its diagonal, by an inverse of as many rows as X has (Woodbury)."""
        added = self.added + rho
        rows = self.rows / added
        small = rows @ self.rows.mT
        small.diagonal(dim1=1, dim2=2).add_(1)
        return type(self)(rows, -torch.cholesky_inverse(torch.linalg.cholesky(small)), 1 / added)


def damped_gram(gram: Tensor | RowGram, damp: float) -> Any:
    """G + damp * mean(diag G) I of each group, as a tensor or by rows as `gram` is."""
    scale = damp * gram.diagonal(dim1=1, dim2=2).mean(1)[:, None]
    if isinstance(gram, RowGram):
        return replace(gram, added=gram.added + scale[:, None])
    damped = gram.clone()
    damped.diagonal(dim1=1, dim2=2).add_(scale)
    return damped


def damped_inverse(gram: Tensor | RowGram, damp: float, name: str) -> Tensor:
    """(G + damp * mean(diag G) I)^-1 of each group, by way of float64 where the Cholesky factor of float32 fails.

    Raises:
        SparsityError: All inputs are zero.
    """
    if isinstance(gram, RowGram):
        gram = torch.eye(gram.added.shape[2], dtype=gram.added.dtype, device=gram.added.device) @ gram
    if not bool((gram.diagonal(dim1=1, dim2=2).mean(1) > 0).all()):
        raise SparsityError(f"{name}: all inputs of this layer are zero in the calibration data")
    damped = damped_gram(gram, damp)
    factor, failed = torch.linalg.cholesky_ex(damped)
    if bool(failed.any()):
        factor, failed = torch.linalg.cholesky_ex(damped.double())
        if bool(failed.any()):
            raise SparsityError(f"{name}: X^T X is singular; use more calibration tokens or a larger damp than {damp}")
    return torch.cholesky_inverse(factor).to(gram.dtype)


@dataclass(frozen=True, kw_only=True, eq=False)
class Target:
    """One weight whose statistics are collected, and which of `NEEDS`."""

    name: str
    module: nn.Module
    tensor_name: str
    parameter: Tensor
    shape: tuple[int, ...]
    needs: tuple[str, ...]
    adapter: LayerAdapter | None

    def blank(self) -> Statistics:
        """Return statistics without sums."""
        return Statistics(name=self.name, shape=self.shape, adapter=self.adapter)

    def check(self) -> None:
        """Raise where these statistics cannot be collected for this weight."""
        needs_inputs, needs_gradients = (any(n in kind for n in self.needs) for kind in (INPUTS, GRADIENTS))
        if self.adapter is None and needs_inputs:
            raise SparsityError(
                f"{self.name}: inputs cannot be recorded for {self.tensor_name!r} of {type(self.module).__name__}; "
                "give it a score without input statistics (magnitude, taylor, fisher) or leave it out (exclude=[...])"
            )
        if self.adapter is not None and not self.adapter.has_gram and "input_gram" in self.needs:
            raise SparsityError(
                f"{self.name}: an embedding has no input_gram (its inputs are one-hot); take a score of input_square"
            )
        if needs_gradients and is_sharded(self.parameter):
            raise SparsityError(
                f"{self.name}: gradient statistics need whole weights, and this one is sharded over ranks; calibrate "
                "before fully_shard, or take a score of inputs (wanda, ria, obd, obs)"
            )
        if needs_gradients and not self.parameter.requires_grad:
            raise SparsityError(f"{self.name}: gradient statistics need requires_grad, and this weight is frozen")


class Calibration:
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


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Set eval mode inside; afterwards every module is in the mode that it had."""
    modes = [(m, m.training) for m in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def progress_bar(items: Iterable[Any] | None, name: str, progress: bool, *, unit: str, total: int | None = None) -> Any:
    """Show a tqdm bar over the items on a terminal, unless `progress` is False."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    return tqdm(items, desc=name, unit=unit, total=total, disable=None if progress else True)


def run_batches(
    calibration: Calibration, model: nn.Module, batches: Iterable[Any], forward: Forward | None, token_mask: TokenMask
) -> None:
    """Run the model on every batch inside an entered calibration, in eval mode; see `ScopeSparsifier.calibrate`."""
    count = 0
    with eval_mode(model):
        for count, batch in enumerate(batches, 1):
            check_batch(batch, forward, "calibrate")
            calibration.token_mask = token_mask_of(batch, token_mask, "calibrate")
            with torch.set_grad_enabled(calibration.needs_gradients):
                output = call(model, batch) if forward is None else forward(model, batch)
                if calibration.needs_gradients:
                    _backward(output, [p for p in model.parameters() if p.requires_grad], count - 1)
    if count == 0:
        raise SparsityError("calibrate: there are no batches; an iterator that was used up before gives none")


def call(model: nn.Module, batch: Any) -> Any:
    """The model on one batch: dicts are keyword arguments, tuples and lists positional ones.

    Raises:
        SparsityError: The model does not take such arguments, as where a data loader gives labels too.
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


def checked_batches(batches: Any, token_mask: TokenMask, forward: object, caller: str) -> None:
    """Raise unless batches can be iterated over, and `token_mask` and `forward` are of the right kinds."""
    if isinstance(batches, Tensor):
        raise SparsityError(
            f"{caller}: batches must be a list of batches, got one tensor {tuple(batches.shape)}, whose rows would be "
            "taken one by one; give [batch]"
        )
    is_iterable = hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")
    if not is_iterable or isinstance(batches, (str, bytes, Mapping)):
        raise SparsityError(
            f"{caller}: batches must be a list of batches or a data loader, got {type(batches).__name__}"
        )
    if token_mask not in (None, False) and not isinstance(token_mask, str) and not callable(token_mask):
        raise SparsityError(
            f"{caller}: token_mask must be a key of the batches, a function, or False, got {token_mask!r}"
        )
    if forward is not None and not callable(forward):
        raise SparsityError(f"{caller}: forward must be a function (model, batch) -> output, got {forward!r}")


def check_batch(batch: Any, forward: Forward | None, caller: str) -> None:
    """Raise where a batch has no rows, or numbers in place of tensors."""
    leaves = _pytree.tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
    if tensors and not any(tensor.numel() for tensor in tensors):
        shapes = " and ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise SparsityError(f"{caller}: a batch has no rows, only tensors of shape {shapes}; leave empty batches out")
    if forward is None and leaves and all(isinstance(leaf, (int, float)) for leaf in leaves):
        what = f"the number {batch}" if leaves == [batch] else f"a {type(batch).__name__} of numbers"
        raise SparsityError(
            f"{caller}: a batch must have tensors, got {what}; give token ids as "
            "batches=[torch.tensor([ids])], a tensor [batch, tokens] for each batch"
        )


def _has_attention_mask(batch: Any) -> bool:
    """Whether a batch has an attention mask of zeros and ones, and another entry of its shape [batch, tokens]."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if not isinstance(mask, Tensor) or mask.ndim != 2 or not bool(((mask == 0) | (mask == 1)).all()):
        return False
    others = [x for key, x in batch.items() if key != "attention_mask" and isinstance(x, Tensor)]
    return any(x.shape[:2] == mask.shape for x in others)


def token_mask_of(batch: Any, token_mask: TokenMask, caller: str) -> Tensor | None:
    """The tokens of a batch that count, bool [batch, tokens] (or [tokens]), or None for all."""
    if token_mask is False or (token_mask is None and not _has_attention_mask(batch)):
        return None
    token_mask = "attention_mask" if token_mask is None else token_mask
    if isinstance(token_mask, str):
        try:
            mask = batch[token_mask]
        except (KeyError, IndexError, TypeError):
            keys = f"with {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else "and no dict"
            kind = type(batch).__name__
            raise SparsityError(
                f"{caller}: token_mask={token_mask!r} is a key of each batch, but a batch is a {kind} {keys}"
            ) from None
    else:
        mask = token_mask(batch)
    if mask is not None and not (isinstance(mask, Tensor) and mask.ndim in (1, 2) and bool(mask.any())):
        what = f"one of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        empty = ", of which no token counts" if isinstance(mask, Tensor) and not mask.any() else ""
        raise SparsityError(f"{caller}: a token mask must be a tensor [batch, tokens], got {what}{empty}")
    return mask


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
