"""A block, or a whole model, is trained to give the dense model's outputs."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree

from .. import masking
from ..calibration import token_rows
from ..calibration.gram import is_finite
from ..distributed import full_tensor, has_process_group, rank
from ..errors import SparsityError
from ..models.progress import signs_of_life
from ..models.running import first_tensor, import_dynamo, keyed_generator
from .prune_report import BlockRow
from .solving import may_change

PASSES = 4  # passes over all batches for each block
RATE = 0.02  # the highest learning rate, as a fraction of the root mean square of a block's kept weights
WHOLE = 0.5  # a factor of the learning rate if the whole model is trained
WARM = 0.1  # the fraction of the steps in which the learning rate rises
LAST = 0.2  # the learning rate at the end, after a cosine, as a fraction of the highest one
MEASURED = 8  # the number of batches on which passes are compared
HELD_OUT = 8  # one in HELD_OUT rows of these batches is held out from training if they have at least ENOUGH rows
ENOUGH = 2048  # with fewer rows, an eighth is too few to measure an error, so none is held out
LARGE = 2  # rows of dense outputs with more than LARGE times the typical norm count as if they had no more
COMPARED = 1 << 23  # elements of logits that are compared at a time
EVERY = 2  # errors are measured after the last pass and every EVERY passes before it
PATIENCE = 4  # training ends if the error has not become smaller in PATIENCE passes


class Student(nn.Module):
    """A module whose weights are trained: those of 16 bits as float32 copies, and others in their own memory."""

    def __init__(self, module: nn.Module, run: Callable[[nn.Module, int], Any]) -> None:
        super().__init__()
        # `functional_call` can only replace parameters of the module that it calls, so the trained one is a child.
        self.module, self.run = module, run
        # Whether some sequences of a batch alone have the same outputs, and for which arguments this was checked.
        self.is_divisible, self.checked = True, set[tuple[bool, ...]]()
        embeddings = {id(p) for m in module.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
        parameters = [(n, p) for n, p in self.named_parameters() if p.is_floating_point() and id(p) not in embeddings]
        masks = {
            id(masking.parameters_under(m, name)[0]): full_tensor(mask.mask) != 0
            for m in module.modules()
            for name in masking.parametrized_names(m)
            if (mask := masking.find_mask(m, name)) is not None and masking.is_parameter(m, name)
        }
        # By name: the parameters, the tensors that are trained for them (which may share their memory), bool masks of
        # the elements that may change, and copies of the trained tensors after the best pass so far.
        self.originals, self.weights, self.kept, self.saved = dict(parameters), {}, {}, {}
        for name, p in parameters:
            self.weights[name] = p.detach().to(torch.promote_types(p.dtype, torch.float32)).requires_grad_()
            self.saved[name] = self.weights[name].detach().clone()
            if p.ndim > 1:
                self.kept[name] = may_change(p) & masks.get(id(p), True)

    def forward(self, k: int) -> Tensor:
        """Return the output for a batch."""
        return output_tensor(self.run(self.module, k))

    def output(self, k: int) -> Tensor:
        """Return the output for a batch, computed with the trained weights in the dtypes of the parameters."""
        weights = {name: weight.to(self.originals[name].dtype) for name, weight in self.weights.items()}
        return functional_call(self, weights, (k,))

    def part(self, k: int, kept: slice, expected: Tensor) -> Tensor | None:
        """Return the output for some sequences of a batch; None if it cannot be divided into sequences."""
        if not self.is_divisible or expected.ndim < 2 or len(expected) < kept.step:
            return None
        cuts: list[bool] = []  # which of the arguments have a row for each sequence

        def cut(module: nn.Module, args: Any, kwargs: Any) -> Any:
            leaves, tree = _pytree.tree_flatten((args, kwargs))
            cuts.extend(isinstance(x, Tensor) and x.ndim > 0 and len(x) == len(expected) for x in leaves)
            leaves = [x[kept] if is_cut else x for x, is_cut in zip(leaves, cuts[-len(leaves) :], strict=True)]
            return _pytree.tree_unflatten(leaves, tree)

        try:
            with self.module.register_forward_pre_hook(cut, with_kwargs=True):
                actual = self.output(k)
            if tuple(cuts) not in self.checked:
                with torch.no_grad():
                    whole = self.output(k)[kept].float()
                most = torch.finfo(actual.dtype).eps ** 0.5 * whole.norm()
                self.is_divisible = actual.shape == whole.shape and bool((actual - whole).norm() <= most)
                self.checked.add(tuple(cuts))
        except Exception:  # such as one of shapes that do not fit
            self.is_divisible = False
        return actual if self.is_divisible else None

    def weight_rms(self) -> float:
        """Return the root mean square of the kept elements of weights with two or more dimensions, or 1 if it is 0."""
        count = sum(int(kept.count_nonzero()) for kept in self.kept.values())
        squares = sum(float(self.weights[name].detach().mul(kept).square().sum()) for name, kept in self.kept.items())
        return math.sqrt(squares / max(count, 1)) or 1.0

    def set_gradients(self, loss: Tensor) -> bool:
        """Set the gradients of a loss, summed over ranks and zero for dropped elements; return False if not finite."""
        if not loss.requires_grad:
            raise SparsityError("recover: forward runs without gradients; leave out no_grad and detach")
        found = list(torch.autograd.grad(loss, list(self.weights.values()), allow_unused=True))
        gradients = list[Tensor]()
        for name, weight in self.weights.items():
            # In the memory format of the weight, as fused optimizers require; zeros, since every rank must reduce it.
            gradients.append(torch.zeros_like(weight))
            if (gradient := found.pop(0)) is not None:  # popped, so that its memory is freed in this iteration
                gradients[-1].copy_(gradient * self.kept[name] if name in self.kept else gradient)
        if has_process_group():  # one message takes a fraction of the time of one for each weight
            for device in dict.fromkeys(gradient.device for gradient in gradients):
                own = [gradient for gradient in gradients if gradient.device == device]
                summed = over_ranks(torch.cat([gradient.flatten() for gradient in own]))
                for gradient, part in zip(own, summed.split([g.numel() for g in own]), strict=True):
                    gradient.copy_(part.view_as(gradient))
        if not all(map(is_finite, gradients)):
            return False
        for weight, gradient in zip(self.weights.values(), gradients, strict=True):
            weight.grad = gradient
        return True

    def save(self) -> None:
        """Keep a copy of the trained weights as the best so far."""
        for name, weight in self.weights.items():
            self.saved[name].copy_(weight)

    def write(self) -> None:
        """Write the best weights so far into the parameters."""
        for name, weight in self.saved.items():
            self.originals[name].detach().copy_(weight)


class Training:
    """The training of a block, or the whole model (named ""), to give `target(k)` for batch k.

    Steps are those of one process that has all batches, each of which is a step: batch k of rank r is its batch
    k * ranks + r. Sequences of a batch are divided into a part for each rank.
    """

    def __init__(
        self,
        name: str,
        student: Student,
        target: Callable[[int], Tensor],
        masks: Sequence[Tensor | None],  # which rows of the outputs for each batch count
        metric: str,
        *,
        passes: int,
        rate: float,
        seed: int,
        at: int,  # the number of the block
    ) -> None:
        self.name, self.student, self.target, self.masks, self.metric = name, student, target, masks, metric
        self.passes, self.rate, self.seed = passes, rate, seed
        self.batches, self.draws = len(masks), torch.Generator().manual_seed(seed + at)
        self.own, self.ranks = rank(), torch.distributed.get_world_size() if has_process_group() else 1
        whole = self.batches * self.ranks
        # The middles of MEASURED equal parts of the batches; some of their rows are held out if they have enough.
        middles = {(2 * k + 1) * whole // (2 * MEASURED) for k in range(MEASURED)}
        self.compared = sorted(k // self.ranks for k in middles if k % self.ranks == self.own)
        self.device, self.orders = target(0).device, set[bool]()
        counted, self.typical = self._counted()
        self.holds_out = counted >= ENOUGH
        scaled = rate * student.weight_rms() * (1 if name else WHOLE)
        self.optimizer, self.schedule = _optimizer(student, scaled, passes * whole)

    def _counted(self) -> tuple[float, float]:
        """Return how many rows are compared, and the typical squared norm of a row."""
        norms = torch.zeros(3, dtype=torch.float64, device=self.device)
        for k in dict.fromkeys((0, *self.compared)):  # the first batch may tell the order of dimensions
            expected = self.target(k)
            rows = token_rows(expected, self.masks[k], self.orders) if expected.ndim else norms[:0, None]
            squares = rows.double().square().sum(-1)
            if k in self.compared:
                logs = squares[squares > 0].log()
                norms += torch.stack((norms.new_tensor(len(squares)), norms.new_tensor(len(logs)), logs.sum()))
        counted, nonzero, total = over_ranks(norms).tolist()
        return counted, math.exp(total / max(nonzero, 1))

    def error(self, k: int, held_out: bool, part: int | None = None) -> tuple[Tensor, Tensor]:
        """As `_error`, of the rows of batch k that are held out or not, or of those in a part of it."""
        with torch.no_grad():
            expected = self.target(k)
        kept = slice(part, None, self.ranks)
        actual = None if part is None else self.student.part(k, kept, expected)
        is_divided = actual is not None
        actual = self.student.output(k) if actual is None else actual
        refuse_unfit(actual, expected[kept] if is_divided else expected, self.name or "the model")
        places = torch.arange(expected[..., 0].numel(), device=self.device).view(*expected.shape[:-1], 1)
        places = token_rows(places, self.masks[k], self.orders)[:, 0]  # of the rows that count
        if k in self.compared and self.holds_out:
            generator = keyed_generator(self.seed, k * self.ranks + self.own)
            order = torch.randperm(len(places), generator=generator, device="cpu").to(self.device)
            places = places[order[: len(order) // HELD_OUT] if held_out else order[len(order) // HELD_OUT :]]
        if part is not None and not is_divided:
            places = places[kept]
        counts = torch.zeros(expected.shape[:-1], dtype=torch.bool, device=self.device)
        counts.view(-1)[places] = True
        if is_divided:
            expected, counts = expected[kept], counts[kept]
        # Logits of large vocabularies take much memory, so they are copied only if some rows do not count.
        all_count = bool(counts.all())
        actual, expected = (t.reshape(-1, t.shape[-1]) if all_count else t[counts] for t in (actual, expected))
        return _error(actual, expected, self.metric, self.typical)

    def measured(self) -> float:
        """Return the error of all compared batches and ranks, as `BlockRow` has it."""
        errors = torch.zeros(2, dtype=torch.float64, device=self.device)
        for k in self.compared:
            errors += torch.stack(self.error(k, held_out=True))
        loss, divisor = over_ranks(errors).tolist()
        if not math.isfinite(loss):
            lower = f"; call recover(pruned, dense, batches, rate=r) with r below {self.rate:g}"
            raise SparsityError(
                f"recover: the outputs of {self.name or 'the model'} are not finite"
                f"{lower if self.optimizer.state else ' before it is trained'}"
            )
        return (math.sqrt if self.metric == "mse" else float)(loss / (divisor or 1))

    @torch.no_grad()
    def _renew_statistics(self, error: float) -> float:
        """Estimate the running statistics of batch norms anew on all batches if the error becomes smaller; return it.

        Batches that do not run in training mode are left out, such as one with a single value of a channel.
        """
        if not (norms := batch_norms(self.student)):
            return error
        before, momenta, renewed = _statistics(norms), [norm.momentum for norm in norms], math.inf
        try:
            for norm in norms:
                norm.train().momentum = None  # the mean over all batches
            for *_, count, _ in before[2::3]:
                count.zero_()  # so that the first batch replaces the old statistics
            for k in range(self.batches):
                last = _statistics(norms)
                try:
                    self.student.output(k)
                except (TypeError, ValueError):  # torch's for such a channel, and of norms that need a momentum
                    _restore(last)
            for norm in norms:
                _, _, count = found = [t for *_, t, _ in _statistics([norm.eval()])]
                total = over_ranks(count.clone())
                for statistic in found[:2] if self.ranks > 1 else ():
                    statistic.copy_(over_ranks(statistic.float() * count) / total.clamp(min=1))
                count.copy_(total)
            _restore([one for one in before if not one[0].num_batches_tracked])  # of norms that no batch reached
            with suppress(SparsityError):  # outputs that are not finite
                renewed = self.measured()
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.eval().momentum = momentum
            if not renewed < error:
                _restore(before)
        return min(renewed, error)

    def step(self, k: int, scale: float) -> None:
        """Change the weights by the gradients of a part of a batch."""
        self.optimizer.zero_grad()
        with torch.enable_grad():
            part = (k + self.own) % self.ranks if self.ranks > 1 else None
            loss = self.error(k // self.ranks, False, part)[0] / scale
        if not self.student.set_gradients(loss):  # beyond the range of 16 bits: the step changes nothing
            self._refuse_infinite(k // self.ranks)
        self.optimizer.step()
        self.schedule.step()

    def _refuse_infinite(self, k: int) -> None:
        """Raise an error if the dense outputs of a batch are not finite on any rank; logits of a class may be -inf."""
        with torch.no_grad():
            expected = token_rows(self.target(k), self.masks[k], self.orders)
        is_wrong = expected.isnan() if self.metric == "kl" else ~expected.isfinite()
        if over_ranks(is_wrong.any().float()):
            raise SparsityError(
                f"recover: the outputs of {self.name or 'the model'} in the dense model are not finite for a batch; "
                "leave this batch out"
            )

    def run(self) -> BlockRow:
        """Train, and keep the best weights."""
        start, before = time.perf_counter(), self.measured()
        best, best_pass = before if self.name else self._renew_statistics(before), 0
        renewed = best if best < before else math.nan
        # A loss is a sum over the rows of a batch. It is divided by the initial loss of one row, so that gradients are
        # in the range of 16 bits.
        first = self.error(0, held_out=False)[0]
        total, rows = over_ranks(torch.stack((first, first.new_tensor(self.target(0).shape[:-1].numel()))))
        if not torch.isfinite(total):
            self._refuse_infinite(0)
        scale = float(total / rows.clamp(min=1)) or 1.0
        whole, after = self.batches * self.ranks, best
        is_shown = not self.name and rank() == 0  # a block is a step of a walk, which shows its own progress
        try:
            with signs_of_life("recover", "step", self.passes * whole, is_shown) as done:
                for number in range(1, self.passes + 1):
                    for k in torch.randperm(whole, generator=self.draws, device="cpu").tolist():
                        self.step(k, scale)
                        done(f"pass {number}", after)
                    if (self.passes - number) % EVERY:  # counted from the end, so that the last pass is measured
                        continue
                    after = self.measured()
                    if after < best:
                        best, best_pass = after, number
                        self.student.save()
                    elif number - best_pass >= PATIENCE:
                        break
        finally:  # also after an error: write the best weights so far
            self.student.write()
            # Schedules make a reference cycle with the optimizer, which would keep all of its memory for a while.
            self.optimizer.zero_grad()
            self.optimizer.state.clear()
            self.optimizer.param_groups.clear()
        seconds = time.perf_counter() - start
        return BlockRow(block=self.name, before=before, after=best, passes=best_pass, seconds=seconds, renewed=renewed)


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """Return the batch norms of a model that have running statistics, and count the batches of these."""
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    return [m for m in norms if not any(t is None for t in (m.running_mean, m.running_var, m.num_batches_tracked))]


def _statistics(norms: Sequence[_BatchNorm]) -> list[tuple[_BatchNorm, str, Tensor, Tensor]]:
    """Return the running statistics of batch norms as (norm, name, tensor, copy), three for each norm."""
    names = ("running_mean", "running_var", "num_batches_tracked")
    return [(m, name, tensor, tensor.clone()) for m in norms for name in names for tensor in [getattr(m, name)]]


def _restore(statistics: Iterable[tuple[_BatchNorm, str, Tensor, Tensor]]) -> None:
    """Put statistics back, also where a norm has replaced the tensors."""
    for norm, name, tensor, value in statistics:
        setattr(norm, name, tensor.copy_(value))


def _optimizer(student: Student, rate: float, count: int) -> tuple[torch.optim.Optimizer, Any]:
    """Return Adam and its schedule, in which the learning rate rises linearly and then falls to `LAST` by a cosine."""
    import_dynamo()
    weights = list(student.weights.values())
    # The fused optimizer takes a fraction of the time, but on a CPU it reads weights without gaps in their memory.
    has_gaps = any(torch.empty_like(w, device="meta").stride() != w.stride() for w in weights)
    is_fused = not has_gaps and all(w.device.type in ("cpu", "cuda") for w in weights)
    optimizer = torch.optim.Adam(weights, lr=rate, fused=is_fused)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda k: min(1, (k + 1) / (WARM * count)) * (LAST + (1 - LAST) * (1 + math.cos(math.pi * k / count)) / 2),
    )
    return optimizer, schedule


def output_tensor(output: Any) -> Tensor:
    """Return the first tensor of nested outputs."""
    if (tensor := first_tensor(output)) is None:
        raise SparsityError(f"recover: the model or forward must return a tensor, got {type(output).__name__}")
    return tensor


def refuse_unfit(output: Any, dense_output: Any, name: str) -> None:
    """Raise an error unless an output can be matched to the dense model's output."""
    actual, expected = output_tensor(output), output_tensor(dense_output)
    if not actual.is_floating_point() or actual.ndim == 0:
        raise SparsityError(
            f"recover: the first output of {name} is {actual.dtype} of shape {tuple(actual.shape)}, which has no rows "
            "to match; give forward=lambda model, batch: ... that returns floating-point outputs, such as logits"
        )
    if actual.shape != expected.shape:
        raise SparsityError(
            f"recover: {name} returns {tuple(actual.shape)}, but the dense model returns {tuple(expected.shape)}; "
            "only outputs of the same shape can be matched. Call shrink with recover=True, or with "
            "exclude=['width'], which both keep what passes between blocks"
        )


def _error(actual: Tensor, expected: Tensor, metric: str, typical: float) -> tuple[Tensor, Tensor]:
    """Return the loss summed over some rows, in nats for "kl", and the number that it is divided by in reports.

    Of rows with far more than the typical squared norm the relative error counts, so that no single token rules, as the
    first one of a text does in many language models.
    """
    if metric == "kl":
        return _Divergence.apply(actual, expected), torch.tensor(float(len(actual)), device=actual.device)
    actual, expected = actual.float(), expected.float()
    squares, most = expected.square().sum(-1), LARGE**2 * typical
    weights = most / squares.clamp(min=most)
    return ((actual - expected).square().sum(-1) * weights).sum(), (squares * weights).sum()


class _Divergence(torch.autograd.Function):
    """The divergence of the model's logits from the dense ones [rows, classes], in nats, summed over rows.

    Autograd would hold several tensors of the size of the logits. This holds the gradient alone, for one backward pass.
    """

    @staticmethod
    def forward(ctx: Any, actual: Tensor, expected: Tensor) -> Tensor:
        gradient = torch.empty_like(actual, dtype=torch.float32) if ctx.needs_input_grad[0] else None
        nats = torch.zeros((), device=actual.device)
        size = max(COMPARED // max(actual.shape[-1], 1), 1)
        for start in range(0, len(actual), size):
            rows = slice(start, start + size)
            log_q, log_p = (logits[rows].float().log_softmax(-1) for logits in (actual, expected))
            p = log_p.exp()
            nats += (p * (log_p - log_q)).masked_fill_(log_p == -math.inf, 0).sum()
            if gradient is not None:
                torch.sub(log_q.exp_(), p, out=gradient[rows])
        ctx.gradient, ctx.dtype = gradient, actual.dtype
        return nats

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient.mul_(factor).to(ctx.dtype), None


def over_ranks(total: Tensor) -> Tensor:
    """Sum a tensor over all ranks, in place, and return it."""
    if has_process_group():
        torch.distributed.all_reduce(total)
    return total
