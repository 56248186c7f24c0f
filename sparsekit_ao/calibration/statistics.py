"""Statistics of one weight, and the weights whose statistics are recorded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed import is_sharded
from ..errors import SparsityError
from .adapters import LayerAdapter
from .gram import RowGram, divided, is_finite, power_of_two

INPUTS = ("input_square", "input_gram")
GRADIENTS = ("gradient", "gradient_square", "movement")
NEEDS = (*INPUTS, *GRADIENTS)
OF_GROUPS = "tokens_of_groups"  # a sum that is recorded with those of inputs, for packed experts
PRIOR = 0.1  # tokens for each input that an expert's Gram matrix takes from the mean of all experts


@dataclass(kw_only=True, eq=False)
class Statistics:
    """What was recorded for one weight: sums over tokens and backward passes, float32 on the inputs' device.

    Attributes:
        name, shape: The name and the shape of the weight.
        adapter: How the weight is a matrix; None if its inputs cannot be recorded.
        tokens, passes: The numbers of tokens and of backward passes that were summed.
        sums: {one of `NEEDS`: its sum}: "input_square" [groups, inputs], "input_gram" [groups, inputs, inputs],
            gradients in the weight's shape, and for packed experts "tokens_of_groups" [groups].
        dims: The weight's dimensions of inputs and groups, if inputs were recorded; a copy of an adapter takes them
            over.
        rows: The inputs [groups, tokens, inputs], kept instead of "input_gram" while tokens are fewer than inputs.
    """

    name: str
    shape: tuple[int, ...]
    adapter: LayerAdapter | None
    tokens: int = 0
    passes: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict)
    dims: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    rows: list[Tensor] = field(default_factory=list)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the adapter, which refers to the model; the recorder sets it again."""
        return {**self.__dict__, "adapter": None}

    def use(self, adapter: LayerAdapter | None) -> None:
        """Set the adapter; it takes over the dimensions of what was recorded unless it knows its own."""
        self.adapter = adapter
        if adapter is not None and not adapter.is_known and self.dims:
            (adapter.input_dims, adapter.group_dims), adapter.is_known = self.dims, True

    def matrix(self, weight: Tensor) -> Tensor:
        """Return the weight, or a tensor of its shape, as [groups, outputs, inputs]."""
        assert self.adapter is not None
        return self.adapter.matrix(weight)

    def from_matrix(self, matrix: Tensor) -> Tensor:
        """Return [groups, outputs, inputs], or what broadcasts to it, in the weight's shape; inverts `matrix`."""
        assert self.adapter is not None
        outputs, inputs = self.matrix(torch.empty(self.shape, device="meta")).shape[1:]
        return self.adapter.weight(matrix.expand(-1, outputs, inputs), self.shape)

    @property
    def input_square(self) -> Tensor:
        """The sum of squares of the input that each element multiplies, G_jj, in the weight's shape."""
        if self.rows:
            squares = torch.stack([rows.square().sum(1) for rows in self.rows]).sum(0)
        elif "input_gram" not in self.sums:
            squares = self._sum("input_square")
        else:  # a calibration records one of the two, so both are of different tokens
            squares = self.sums["input_gram"].diagonal(dim1=1, dim2=2) + self.sums.get("input_square", 0)
        return self.from_matrix(self._shared(squares)[:, None, :])

    @property
    def tokens_of_groups(self) -> Tensor | None:
        """The number of tokens of each expert, int64 [experts]; None for a weight that is not of packed experts."""
        counts = self.sums.get(OF_GROUPS)
        return None if counts is None else counts.round().long()

    @property
    def input_gram(self) -> Tensor:
        """G = X^T X, [groups, inputs, inputs], in the order of the columns of `matrix`.

        Each of packed experts has the matrix of its own tokens. The mean over the tokens of all experts is added to it
        with the weight of `PRIOR` tokens for each input, so that experts with few tokens or none can be solved too.
        """
        self.sum_rows()
        return self._shared(self._sum("input_gram"))

    @property
    def gram(self) -> "Tensor | RowGram | None":
        """Return G as `input_gram`, or by its rows if these were kept; None if neither was recorded.

        It is divided by a power of two if the inputs are so large or small that squares of outputs would not be right.
        """
        if not self.rows and "input_gram" not in self.sums:
            return None
        values = torch.cat(self.rows, 1) if self.rows else self.input_gram
        values = divided(values, power_of_two(values))
        return RowGram.of(values) if self.rows else values

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

    def _shared(self, sums: Tensor) -> Tensor:
        """Sums of groups; of packed experts with a share of all of them."""
        counts = self.sums.get(OF_GROUPS)
        if counts is None:
            return sums
        return sums + sums.sum(0) * (PRIOR * sums.shape[-1] / counts.sum().clamp(min=1))

    def add_to_group(self, need: str, group: int, increment: Tensor, tokens: int) -> None:
        """Add to the sums of one group, in place."""
        if need not in self.sums:
            for name in (need, OF_GROUPS):
                shape = self.shapes()[name]
                self.sums.setdefault(name, torch.zeros(shape, dtype=torch.float32, device=increment.device))
        self.sums[need][group] += increment
        self.sums[OF_GROUPS][group] += tokens
        self.tokens += tokens

    def add(self, increments: Mapping[str, Tensor], tokens: int = 0, passes: int = 0) -> None:
        """Add to the sums; rows that were kept are then summed too."""
        if "input_gram" in increments:
            self.sum_rows()
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
            self.sum_rows()

    def sum_rows(self) -> None:
        """Keep X^T X in place of the rows."""
        kept, self.rows = self.rows, []
        if kept:
            rows = torch.cat(kept, 1)
            self.add({"input_gram": rows.mT @ rows})

    def missing(self, needs: Sequence[str]) -> list[str]:
        """Return which of `needs` were not collected."""
        collected = {*self.sums, *(INPUTS if self.rows or "input_gram" in self.sums else ())}
        return [n for n in needs if n not in collected]

    def check(self) -> None:
        """Raise an error if sums of inputs, or rows, are not finite."""
        sums = [self.sums[need] for need in INPUTS if need in self.sums]
        if not all(map(is_finite, [*sums, *self.rows])):
            raise SparsityError(f"{self.name}: the inputs of this layer are not finite (NaN, inf or overflow)")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each sum that can be recorded."""
        shapes = dict.fromkeys(GRADIENTS, self.shape)
        if self.adapter is not None:
            groups, _, inputs = self.matrix(torch.empty(self.shape, device="meta")).shape
            shapes |= {"input_square": (groups, inputs), "input_gram": (groups, inputs, inputs), OF_GROUPS: (groups,)}
        return shapes

    def saved(self) -> dict[str, Any]:
        """As a plain dict of copies."""
        sums = {need: total.clone() for need, total in self.sums.items()}
        return {"tokens": self.tokens, "passes": self.passes, "sums": sums, "dims": self.dims}

    def _sum(self, need: str) -> Tensor:
        if need not in self.sums:
            raise SparsityError(f"{self.name}: {need} was not collected; list it in the score's `needs` and calibrate")
        return self.sums[need]


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
                f"{self.name}: an embedding has no input_gram (its inputs are one-hot); use a score of input_square"
            )
        if needs_gradients and is_sharded(self.parameter):
            raise SparsityError(
                f"{self.name}: gradient statistics need whole weights, and this one is sharded over ranks; calibrate "
                "before fully_shard, or use a score of inputs (wanda, ria, obd, obs)"
            )
        if needs_gradients and not self.parameter.requires_grad:
            raise SparsityError(f"{self.name}: gradient statistics need requires_grad, and this weight is frozen")
