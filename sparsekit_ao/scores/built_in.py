"""The built-in scores, each a frozen dataclass that is called with a weight and its statistics."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..calibration import Statistics
from ..calibration.gram import damped_inverse, joint_saliency

Score = Callable[[Tensor, Any], Tensor]


class BuiltInScore:
    """Base class of the scores of this module, which are called with the statistics of their weight.

    A score of your own needs no base class, only `needs`:

    >>> class Activation:
    ...     needs = ("input_square",)
    ...
    ...     def __call__(self, weight, statistics):
    ...         return statistics.input_square.expand_as(weight)

    Attributes:
        needs: the statistics to collect, some of `calibration.NEEDS`.
        uses_blocks: whether `statistics.blocks` must hold each element's block.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    uses_blocks: ClassVar[bool] = False

    def __call__(self, weight: Tensor, statistics: Statistics) -> Tensor:
        """Saliencies in the weight's shape."""
        return self._saliency(weight, statistics)

    def _saliency(self, weight: Tensor, statistics: Statistics) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class magnitude(BuiltInScore):
    """|w|.

    >>> sparsekit_ao.scores.saliency_of(magnitude(), torch.tensor([1.0, -3.0]), "fc.weight")
    tensor([1., 3.])
    """

    def _saliency(self, weight: Tensor, statistics: Statistics) -> Tensor:
        return weight.abs()


@dataclass(frozen=True)
class random(BuiltInScore):
    """Uniform in [0, 1), by seed and tensor name: the same on every device and every rank.

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
    """|w| of vectors other than biases, 0 elsewhere: units score by their BatchNorm's scale (arXiv 1708.06519).

    Of units without a norm all scores are 0.

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
    """w^2 / (the sum of the squares of the tensor's weights that are at least as large) (arXiv 2010.07611).

    Of equal weights the first counts as the larger one.

    >>> sparsekit_ao.scores.saliency_of(lamp(), torch.tensor([1.0, -3.0, 2.0]), "fc.weight")
    tensor([0.0714, 1.0000, 0.3077])
    """

    def _saliency(self, weight: Tensor, statistics: Statistics) -> Tensor:
        square, order = weight.double().square().flatten().sort(descending=True, stable=True)
        shares = square / square.cumsum(0).clamp(min=torch.finfo(square.dtype).tiny)
        return torch.empty_like(shares).scatter_(0, order, shares).view(weight.shape).float()


@dataclass(frozen=True)
class wanda(BuiltInScore):
    """|w_ij| * sqrt(G_jj), G = X^T X of the layer's inputs (arXiv 2306.11695, where a scope is a row).

    >>> sparsekit_ao.ScopeSparsifier(score=wanda()).defaults["score"].needs
    ('input_square',)
    """

    needs: ClassVar[tuple[str, ...]] = ("input_square",)

    def _saliency(self, weight: Tensor, statistics: Statistics) -> Tensor:
        return weight.float().abs() * statistics.input_square.sqrt()


@dataclass(frozen=True)
class ria(BuiltInScore):
    """(|w| / its row's sum + |w| / its column's sum) * sqrt(G_jj)^alpha (ICLR 2024, OpenReview Tr0lPx9woF).

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
    """w^2 G_jj / 2 (Optimal Brain Damage, LeCun et al. 1989).

    >>> sparsekit_ao.ScopeSparsifier(score=obd()).defaults["score"].needs
    ('input_square',)
    """

    needs: ClassVar[tuple[str, ...]] = ("input_square",)

    def _saliency(self, weight: Tensor, statistics: Statistics) -> Tensor:
        return weight.float().square() * statistics.input_square / 2


@dataclass(frozen=True)
class obs(BuiltInScore):
    """w^2 / (2 C_jj), C = (G + damp * mean(diag G) I)^-1 (Optimal Brain Surgeon, Hassibi and Stork 1992).

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
    """Sum over rows of w_b^T (C_bb)^-1 w_b / 2 for the columns b of a block: its joint saliency (S3, arXiv 2604.11315).

    An element's share is w_i ((C_bb)^-1 w_b)_i / 2, which may be negative; blocks sum them up.

    >>> sparsekit_ao.ScopeSparsifier(score=obs_block()).defaults["score"].needs
    ('input_gram',)
    """

    damp: float = 0.01
    needs: ClassVar[tuple[str, ...]] = ("input_gram",)
    uses_blocks: ClassVar[bool] = True

    def _saliency(self, weight: Tensor, statistics: Statistics) -> Tensor:
        inverse = damped_inverse(statistics.input_gram, self.damp, statistics.name)
        assert statistics.blocks is not None
        rows, labels = statistics.matrix(weight.float()), statistics.matrix(statistics.blocks)
        found = [joint_saliency(w, c, block) for w, c, block in zip(rows, inverse, labels, strict=True)]
        return statistics.from_matrix(torch.stack(found))


@dataclass(frozen=True)
class taylor(BuiltInScore):
    """|w * g|, g summed over batches (arXiv 1906.10771).

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False))
    >>> model[0].weight = torch.nn.Parameter(torch.tensor([[2.0, 1.0]]))
    >>> sparsifier = sparsekit_ao.ScopeSparsifier(nnz=1, score=taylor())
    >>> sparsifier.prepare(model)
    >>> sparsifier.calibrate([torch.tensor([[1.0, 5.0], [0.0, 5.0]])], lambda model, x: model(x).sum())
    >>> sparsifier.step()
    >>> sparsifier.mask("0.weight")  # saliencies 2 * 1 and 1 * 10
    tensor([[False,  True]])
    """

    needs: ClassVar[tuple[str, ...]] = ("gradient",)

    def _saliency(self, weight: Tensor, statistics: Statistics) -> Tensor:
        return (weight.float() * statistics.gradient).abs()


@dataclass(frozen=True)
class fisher(BuiltInScore):
    """w^2 * E[g^2], the mean over batches: the diagonal of the empirical Fisher information.

    >>> sparsekit_ao.ScopeSparsifier(score=fisher()).defaults["score"].needs
    ('gradient_square',)
    """

    needs: ClassVar[tuple[str, ...]] = ("gradient_square",)

    def _saliency(self, weight: Tensor, statistics: Statistics) -> Tensor:
        return weight.float().square() * statistics.gradient_square


@dataclass(frozen=True)
class movement(BuiltInScore):
    """-w * g summed over training steps, `with sparsifier.calibrate():` around them (arXiv 2005.07683).

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
    "magnitude": magnitude(),
    "random": random(),
    "scale": scale(),
    "lamp": lamp(),
    "wanda": wanda(),
    "ria": ria(),
    "obd": obd(),
    "obs": obs(),
    "obs_block": obs_block(),
    "taylor": taylor(),
    "fisher": fisher(),
    "movement": movement(),
}


def keyed_generator(*key: object) -> torch.Generator:
    """A CPU generator that depends on the key alone: all ranks draw the same numbers, and so does a resumed run.

    >>> a, b = keyed_generator(0, "fc.weight", 100), keyed_generator(0, "fc.weight", 100)
    >>> bool(torch.rand((), generator=a) == torch.rand((), generator=b))
    True
    """
    text = "\0".join(map(str, key)).encode()
    number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
    return torch.Generator().manual_seed(number)
