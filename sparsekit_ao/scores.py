"""Scores, which tell how much every weight matters, from the weight and from statistics of calibration data.

A score is a function `(weight, name) -> saliency`, or an object with `needs` (some of `calibration.NEEDS`), which is
called as `(weight, statistics) -> saliency`. It returns the saliency of every element, in the parameter's own shape,
whatever view, axes or blocks the pattern has. A block's score is the sum of the saliencies of its elements (the mean if
blocks differ in size). The scores of this module can be given by name: `score="wanda"`. If a score needs statistics,
calibrate before `step`:

>>> import sparsekit_ao
>>> model = torch.nn.Sequential(torch.nn.Linear(4, 2, bias=False))
>>> sparsifier = sparsekit_ao.ScopeSparsifier(score="wanda", nnz=2, scope_shape=(1, 4))  # 2:4
>>> sparsifier.prepare(model)
>>> sparsifier.calibrate([torch.eye(4) * torch.tensor([1.0, 1e6, 1.0, 1e6])])
>>> sparsifier.step()
>>> sparsifier.mask("0.weight").int()
tensor([[0, 1, 0, 1],
        [0, 1, 0, 1]], dtype=torch.int32)
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .calibration import NEEDS, Statistics, damped_inverse
from .errors import SparsityError
from .models.running import keyed_generator

__all__ = ["NAMES", "Score", "fisher", "lamp", "magnitude", "movement", "obd", "obs", "obs_block", "random", "ria"]
__all__ += ["saliency_of", "scale", "taylor", "wanda"]

Score = Callable[..., Tensor]  # (weight, statistics or name) -> saliency; also (weight, statistics, blocks)
Blocks = Callable[[], Tensor]  # gives the block of each element of a weight
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_AT_ONCE = 1 << 24  # elements of inverses of blocks that are stored at once


class BuiltInScore:
    """Base class of the scores of this module, which are called as `score(weight, statistics)`.

    A score of your own needs no base class, only `needs`:

    >>> class Activation:
    ...     needs = ("input_square",)
    ...
    ...     def __call__(self, weight, statistics):
    ...         return statistics.input_square.expand_as(weight)
    """

    needs: ClassVar[tuple[str, ...]] = ()  # the statistics to collect, from `calibration.NEEDS`
    uses_blocks: ClassVar[bool] = False  # whether the block of each element is given as a third argument

    def __call__(self, weight: Tensor, statistics: Statistics) -> Tensor:
        """Return saliencies in the weight's shape."""
        return self._saliency(weight, statistics)

    def _saliency(self, weight: Tensor, statistics: Statistics) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class magnitude(BuiltInScore):
    """Score a weight by its absolute value, |w|.

    >>> sparsekit_ao.scores.saliency_of(magnitude(), torch.tensor([1.0, -3.0]), "fc.weight")
    tensor([1., 3.])
    """

    def _saliency(self, weight: Tensor, statistics: Statistics) -> Tensor:
        return weight.abs()


@dataclass(frozen=True)
class random(BuiltInScore):
    """Score at random, uniformly in [0, 1); the same on every device and rank for one seed and tensor name.

    >>> a, b = (sparsekit_ao.scores.saliency_of(random(seed=1), torch.ones(3), "fc.weight") for _ in range(2))
    >>> torch.equal(a, b)
    True
    """

    seed: int = 0

    def _saliency(self, weight: Tensor, statistics: Statistics) -> Tensor:
        generator = keyed_generator(self.seed, statistics.name)
        return torch.rand(weight.shape, generator=generator, dtype=torch.float32, device="cpu").to(weight.device)


@dataclass(frozen=True)
class scale(BuiltInScore):
    """Score a unit by the absolute scale of its norm layer, such as BatchNorm (Network Slimming, arXiv 1708.06519).

    The score is |w| for vectors other than biases, and 0 for all other tensors. Units without a norm layer score 0.

    >>> sparsekit_ao.scores.saliency_of(scale(), torch.tensor([1.0, -3.0]), "norm.weight")
    tensor([1., 3.])
    >>> sparsekit_ao.scores.saliency_of(scale(), torch.tensor([1.0, -3.0]), "norm.bias")
    tensor([0., 0.])
    """

    def _saliency(self, weight: Tensor, statistics: Statistics) -> Tensor:
        is_scale = weight.ndim == 1 and not statistics.name.endswith("bias")
        return weight.abs() if is_scale else torch.zeros_like(weight)


@dataclass(frozen=True)
class lamp(BuiltInScore):
    """Score by LAMP: w^2, divided by the sum of the squares of all weights at least as large (arXiv 2010.07611).

    The sum is over the weights of one tensor. Among equal weights, the first counts as the larger one.

    >>> sparsekit_ao.scores.saliency_of(lamp(), torch.tensor([1.0, -3.0, 2.0]), "fc.weight")
    tensor([0.0714, 1.0000, 0.3077])
    """

    def _saliency(self, weight: Tensor, statistics: Statistics) -> Tensor:
        magnitudes = weight.double().abs().flatten()
        ordered, order = magnitudes.nan_to_num(0.0, 0.0).sort(descending=True, stable=True)
        exponent = ordered[:1].frexp().exponent.clamp(-1000, 1000)  # so that squares stay in the range of float64
        ordered = (ordered * torch.exp2(-exponent.double())).square()
        shares = ordered / ordered.cumsum(0).clamp(min=torch.finfo(ordered.dtype).tiny)
        shares = torch.empty_like(shares).scatter_(0, order, shares)
        return torch.where(magnitudes.isfinite(), shares, magnitudes).view(weight.shape).float()


@dataclass(frozen=True)
class wanda(BuiltInScore):
    """Score by Wanda: |w_ij| * sqrt(G_jj), where G = X^T X for the inputs X of the layer (arXiv 2306.11695).

    In the paper, every row of the weight is a scope.

    >>> sparsekit_ao.ScopeSparsifier(score=wanda()).defaults["score"].needs
    ('input_square',)
    """

    needs: ClassVar[tuple[str, ...]] = ("input_square",)

    def _saliency(self, weight: Tensor, statistics: Statistics) -> Tensor:
        return weight.float().abs() * statistics.input_square.sqrt()


@dataclass(frozen=True)
class ria(BuiltInScore):
    """Score by relative importance and activations, RIA (ICLR 2024, OpenReview Tr0lPx9woF).

    The score is (|w| / sum of |w| in its row + |w| / sum of |w| in its column) * sqrt(G_jj)^alpha, G as in `wanda`.

    >>> sparsekit_ao.ScopeSparsifier(score=ria(alpha=0.5)).defaults["score"].needs
    ('input_square',)
    """

    alpha: float = 0.5
    needs: ClassVar[tuple[str, ...]] = ("input_square",)

    def _saliency(self, weight: Tensor, statistics: Statistics) -> Tensor:
        size = statistics.matrix(weight.float().abs())
        tiny = torch.finfo(size.dtype).tiny
        relative = size / size.sum(2, keepdim=True).clamp(min=tiny) + size / size.sum(1, keepdim=True).clamp(min=tiny)
        return statistics.from_matrix(relative) * statistics.input_square.pow(self.alpha / 2)


@dataclass(frozen=True)
class obd(BuiltInScore):
    """Score by Optimal Brain Damage: w^2 G_jj / 2, with G as in `wanda` (LeCun et al. 1989).

    >>> sparsekit_ao.ScopeSparsifier(score=obd()).defaults["score"].needs
    ('input_square',)
    """

    needs: ClassVar[tuple[str, ...]] = ("input_square",)

    def _saliency(self, weight: Tensor, statistics: Statistics) -> Tensor:
        return weight.float().square() * statistics.input_square / 2


@dataclass(frozen=True)
class obs(BuiltInScore):
    """Score by Optimal Brain Surgeon (Hassibi and Stork 1992).

    The score is w^2 / (2 C_jj), where C = (G + damp * mean(diag G) I)^-1, with G as in `wanda`.

    >>> sparsekit_ao.ScopeSparsifier(score=obs(damp=0.01)).defaults["score"].needs
    ('input_gram',)
    """

    damp: float = 0.01
    needs: ClassVar[tuple[str, ...]] = ("input_gram",)

    def _saliency(self, weight: Tensor, statistics: Statistics) -> Tensor:
        diagonal = damped_inverse(statistics.input_gram, self.damp, statistics.name).diagonal(dim1=1, dim2=2)
        return weight.float().square() / (2 * statistics.from_matrix(diagonal[:, None, :]))


@dataclass(frozen=True)
class obs_block(BuiltInScore):
    """Score a block by the joint error of dropping all of it, a block form of `obs` (S3, arXiv 2604.11315).

    For the columns b of a block, it is the sum over rows of w_b^T (C_bb)^-1 w_b / 2, with C as in `obs`. The share of
    one element is w_i ((C_bb)^-1 w_b)_i / 2, which may be negative.

    >>> sparsekit_ao.ScopeSparsifier(score=obs_block()).defaults["score"].needs
    ('input_gram',)
    """

    damp: float = 0.01
    needs: ClassVar[tuple[str, ...]] = ("input_gram",)
    uses_blocks: ClassVar[bool] = True

    def __call__(self, weight: Tensor, statistics: Statistics, blocks: Tensor | None = None) -> Tensor:
        """Return saliencies in the weight's shape; `blocks` is the block of each element, int64 in that shape."""
        assert blocks is not None
        inverse = damped_inverse(statistics.input_gram, self.damp, statistics.name)
        rows, labels = statistics.matrix(weight.float()), statistics.matrix(blocks)
        shares = [joint_saliency(w, c, block) for w, c, block in zip(rows, inverse, labels, strict=True)]
        return statistics.from_matrix(torch.stack(shares))


def joint_saliency(rows: Tensor, inverse: Tensor, labels: Tensor) -> Tensor:
    """Return each element's share of its block's loss, see `obs_block`.

    Weights and int64 labels of blocks are [outputs, inputs], C is [inputs, inputs]; a negative label is in no block.
    """
    alone = labels.max() + 1 + torch.arange(labels.shape[1], device=labels.device)
    labels = torch.where(labels < 0, alone, labels)
    order = labels.argsort(dim=1, stable=True)
    ordered, position = labels.gather(1, order), torch.arange(labels.shape[1], device=labels.device).expand_as(labels)
    starts = torch.cat([torch.ones_like(labels[:, :1]), (ordered[:, 1:] != ordered[:, :-1]).long()], 1)
    within = position - (starts * position).cummax(1).values  # in the block's run of sorted columns
    size = int(within.max()) + 1
    if size == 1:
        return rows.square() / (2 * inverse.diagonal())
    run = starts.cumsum(1) - 1
    columns = torch.full((len(rows), (int(run.max()) + 1) * size), -1, device=labels.device)  # -1: a smaller block
    columns = columns.scatter_(1, run * size + within, order).unflatten(1, (-1, size))
    is_same = bool((columns == columns[:1]).all())
    step = len(rows) if is_same else max(1, _AT_ONCE // max(columns[0].numel() * size, 1))
    out, identity = torch.zeros_like(rows), torch.eye(size, dtype=rows.dtype, device=rows.device)
    for start in range(0, len(rows), step):
        some = slice(start, start + step)
        of_inverse = columns[:1] if is_same else columns[some]
        is_real, at = of_inverse >= 0, of_inverse.clamp(min=0)
        both = is_real[..., :, None] & is_real[..., None, :]
        joint = torch.where(both, inverse[at[..., :, None], at[..., None, :]], identity)
        at = columns[some].clamp(min=0).flatten(1)
        values = (rows[some].gather(1, at) * (columns[some] >= 0).flatten(1)).unflatten(1, (-1, size))
        share = values * torch.linalg.solve(joint, values[..., None])[..., 0] / 2
        out[some] = out[some].scatter_add(1, at, share.flatten(1))
    return out


@dataclass(frozen=True)
class taylor(BuiltInScore):
    """Score by the first-order Taylor term |w * g|, where g is the gradient summed over batches (arXiv 1906.10771).

    >>> sparsekit_ao.ScopeSparsifier(score=taylor()).defaults["score"].needs
    ('gradient',)
    """

    needs: ClassVar[tuple[str, ...]] = ("gradient",)

    def _saliency(self, weight: Tensor, statistics: Statistics) -> Tensor:
        return (weight.float() * statistics.gradient).abs()


@dataclass(frozen=True)
class fisher(BuiltInScore):
    """Score by the diagonal of the empirical Fisher information: w^2 * E[g^2], with the mean over batches.

    >>> sparsekit_ao.ScopeSparsifier(score=fisher()).defaults["score"].needs
    ('gradient_square',)
    """

    needs: ClassVar[tuple[str, ...]] = ("gradient_square",)

    def _saliency(self, weight: Tensor, statistics: Statistics) -> Tensor:
        return weight.float().square() * statistics.gradient_square


@dataclass(frozen=True)
class movement(BuiltInScore):
    """Score by movement pruning: -w * g, summed over training steps (arXiv 2005.07683).

    Put the training steps inside `with sparsifier.calibrate():`, as here:

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False))
    >>> model[0].weight = torch.nn.Parameter(torch.tensor([[2.0, 1.0]]))
    >>> sparsifier = sparsekit_ao.ScopeSparsifier(nnz=1, score=movement())
    >>> sparsifier.prepare(model)
    >>> with sparsifier.calibrate():
    ...     model(torch.tensor([[1.0, -5.0]])).sum().backward()
    >>> sparsifier.step()
    >>> sparsifier.mask("0.weight")  # saliencies -2 * 1 and -1 * -5
    tensor([[False,  True]])
    """

    needs: ClassVar[tuple[str, ...]] = ("movement",)

    def _saliency(self, weight: Tensor, statistics: Statistics) -> Tensor:
        return statistics.movement


#: scores by name
NAMES: dict[str, Score] = {
    score.__name__: score()
    for score in (magnitude, random, scale, lamp, wanda, ria, obd, obs, obs_block, taylor, fisher, movement)
}


def parse_score(value: object, where: str) -> Score | None:
    """Return the score of a config value (a name, a function, an object with `needs`, or None), or raise an error."""
    if value is None:
        return None
    if isinstance(value, str) and value in NAMES:
        return NAMES[value]
    if isinstance(value, type) and issubclass(value, BuiltInScore):
        raise SparsityError(f"{where}score={value.__name__} is a class; call it, score={value.__name__}()")
    if not callable(value):
        raise SparsityError(
            f"{where}score must be one of {', '.join(map(repr, NAMES))}, a function (weight, name) -> saliency or an "
            f"object with `needs`, got {value!r}"
        )
    try:
        _ = inspect.signature(value).bind(None, None) if inspect.isfunction(value) else None
    except TypeError:
        text = f"{where}score must be a function (weight, name) -> saliency, got one of {inspect.signature(value)}"
        raise SparsityError(text) from None
    needs = getattr(value, "needs", ())
    if isinstance(needs, str):
        raise SparsityError(f"{where}score: needs must be a tuple of names, got {needs!r}")
    for need in needs:
        if need not in NEEDS:
            raise SparsityError(f"{where}score: needs are some of {', '.join(map(repr, NEEDS))}, got {need!r}")
    return value


def needs_of(score: object) -> tuple[str, ...]:
    """Return the names of the statistics that a score needs."""
    return tuple(getattr(score, "needs", ()))


def saliency_of(
    score: Score, weight: Tensor, name: str, statistics: Statistics | None = None, blocks: Blocks | None = None
) -> Tensor:
    """Call a score for one weight and check what it returns.

    Args:
        score: Called as `score(weight, name)`, or as `score(weight, statistics)` if it has `needs`. A score that is not
            built in gets a copy of the weight, so it may work in place.
        weight, name: The whole dense weight, detached, and its `tensor_fqn`.
        statistics: What was recorded for this weight, if anything was.
        blocks: A function that returns the number of the block of each element, int64 in the weight's shape; the third
            argument of a score with `uses_blocks`.

    Returns:
        A floating-point tensor (16 bits or more) of the weight's shape on the weight's device; the highest saliencies
        are kept. They may be negative; NaN ranks highest.

    Raises:
        SparsityError: The score returned something else, or statistics that it needs are missing.

    >>> saliency_of(lambda weight, name: weight.abs() * 2, torch.tensor([1.0, -3.0]), "fc.weight")
    tensor([2., 6.])
    """
    if hasattr(score, "needs"):
        statistics = statistics or Statistics(name=name, shape=tuple(weight.shape), adapter=None)
        if missing := statistics.missing(needs_of(score)):
            raise SparsityError(
                f"{name}: {score} needs {', '.join(missing)}, and calibration data did not reach this layer or there "
                "was none: run sparsifier.calibrate(batches) before step, or give the layer another score"
            )
    argument = weight if isinstance(score, BuiltInScore) else weight.clone()
    labels = (blocks().to(weight.device),) if blocks is not None and getattr(score, "uses_blocks", False) else ()
    saliency = score(argument, statistics if hasattr(score, "needs") else name, *labels)
    if not isinstance(saliency, Tensor) or saliency.shape != weight.shape or saliency.dtype not in _FLOATS:
        what = f"{saliency.dtype} {tuple(saliency.shape)}" if isinstance(saliency, Tensor) else type(saliency).__name__
        raise SparsityError(
            f"{name}: score must return a floating-point tensor of the weight's shape {tuple(weight.shape)}, got {what}"
        )
    if saliency.device != weight.device:
        raise SparsityError(
            f"{name}: score must return a tensor on the weight's device {weight.device}, got {saliency.device}"
        )
    return saliency.detach()
