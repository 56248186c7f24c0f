"""Statistics of one layer over calibration data: sums that scores and compensation read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import SparsityError
from .forms import Form

INPUTS = ("input_square", "input_gram")
GRADIENTS = ("gradient", "gradient_square", "movement")
NEEDS = (*INPUTS, *GRADIENTS)


@dataclass(kw_only=True, eq=False)
class Statistics:
    """Sums over calibration tokens and backward passes, for one weight. Float32, on the device of the inputs.

    Attributes:
        name: the weight's `tensor_fqn`.
        shape: the weight's shape.
        form: how the weight is a matrix; None for parameters whose inputs cannot be recorded.
        tokens: input rows that were summed.
        passes: backward passes that were summed.
        sums: {one of `NEEDS`: its sum}: "input_square" [groups, inputs], "input_gram" [groups, inputs, inputs],
            gradients in the weight's shape.
        blocks: int64 in the weight's shape, the block of each element, for scores with `uses_blocks`.
    """

    name: str
    shape: tuple[int, ...]
    form: Form | None
    tokens: int = 0
    passes: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict)
    blocks: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without the form, which refers to the model; the sparsifier sets it again."""
        return {**self.__dict__, "form": None}

    def matrix(self, weight: Tensor) -> Tensor:
        """The weight, or anything of its shape, as [groups, outputs, inputs]."""
        assert self.form is not None
        return self.form.matrix(weight)

    def from_matrix(self, matrix: Tensor) -> Tensor:
        """The inverse of `matrix`: [groups, outputs, inputs], or broadcast to it, in the weight's shape."""
        assert self.form is not None
        outputs, inputs = self.form.matrix(torch.empty(self.shape, device="meta")).shape[1:]
        return self.form.weight(matrix.expand(-1, outputs, inputs), self.shape)

    def shape_of(self, need: str) -> tuple[int, ...] | None:
        """The shape of a sum; None where the weight has no inputs that can be recorded."""
        if need in GRADIENTS:
            return self.shape
        if self.form is None:
            return None
        groups, _, inputs = self.matrix(torch.empty(self.shape, device="meta")).shape
        return (groups, inputs) if need == "input_square" else (groups, inputs, inputs)

    @property
    def input_square(self) -> Tensor:
        """Each weight's sum of squares of its input, G_jj; in the weight's shape."""
        if "input_gram" not in self.sums:
            return self.from_matrix(self._sum("input_square")[:, None, :])
        diagonal = self.sums["input_gram"].diagonal(dim1=1, dim2=2)
        if "input_square" in self.sums:  # of other tokens: a calibration records one of the two
            diagonal = diagonal + self.sums["input_square"]
        return self.from_matrix(diagonal[:, None, :])

    @property
    def input_gram(self) -> Tensor:
        """G = X^T X, [groups, inputs, inputs], in the order of the columns of `matrix`."""
        return self._sum("input_gram")

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
        """Add to the sums."""
        for need, increment in increments.items():
            own = self.sums.get(need)
            self.sums[need] = increment.clone() if own is None else own.add_(increment.to(own.device))
        self.tokens += tokens
        self.passes += passes

    def missing(self, needs: Sequence[str]) -> list[str]:
        """Those of `needs` that were not collected."""
        has = {*self.sums, *(["input_square"] if "input_gram" in self.sums else [])}
        return [n for n in needs if n not in has]

    def saved(self) -> dict[str, Any]:
        """As a plain dict of copies."""
        return {"tokens": self.tokens, "passes": self.passes, "sums": {k: v.clone() for k, v in self.sums.items()}}

    def _sum(self, need: str) -> Tensor:
        if need not in self.sums:
            raise SparsityError(f"{self.name}: {need} was not collected; list it in the score's `needs` and calibrate")
        return self.sums[need]


def check_statistics(saved: object, own: Mapping[str, Statistics], where: str) -> None:
    """Raise unless this is {tensor name: what `Statistics.saved` gives}, of the shapes of `own` for tensors in it."""
    if not isinstance(saved, Mapping):
        raise SparsityError(f"{where}'statistics' must be a dict, got {type(saved).__name__}")
    for name, found in saved.items():
        counts = [found.get(key) for key in ("tokens", "passes")] if isinstance(found, Mapping) else []
        sums = found.get("sums") if isinstance(found, Mapping) else None
        if not isinstance(sums, Mapping) or not all(type(n) is int and n >= 0 for n in counts):
            raise SparsityError(f"{where}{name}: statistics need counts 'tokens' and 'passes' and a dict 'sums'")
        for need, value in sums.items():
            is_known = need in NEEDS and isinstance(value, Tensor) and value.is_floating_point()
            if not is_known or (name in own and tuple(value.shape) != own[name].shape_of(need)):
                raise SparsityError(
                    f"{where}{name}: statistics have an unknown entry, or one of a wrong shape: {need!r}"
                )
