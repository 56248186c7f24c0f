"""Common structures by name. They adapt to the class of a module and the shape of its weight.

A pattern can be given in a config entry or as a sparsifier's default, either as `pattern=` or unpacked (`**`), with the
same effect. It knows which dimension of a weight holds outputs and which holds inputs in Linear layers, convolutions,
transposed convolutions and transformers' `Conv1D` (both stored transposed), and packed experts `(experts, out, in)`.
Functions with a `sparsity_level` take the fraction of blocks to drop, in [0, 1]; None takes that of the entry or the
sparsifier.

>>> from sparsekit_ao import patterns
>>> {"tensor_fqn": "fc.weight", **patterns.n_m(2, 4)}
{'tensor_fqn': 'fc.weight', 'pattern': patterns.n_m(2, 4)}
>>> patterns.n_m(2, 4).resolve(torch.nn.ConvTranspose2d(8, 3, 3), "weight")
{'block_shape': (1, 1, 1, 1), 'scope_shape': (4, 1, 1, 1), 'nnz': 2}
"""

import numbers
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from .calibration.adapters import CONVOLUTIONS, TRANSPOSED_CONVOLUTIONS, is_transposed
from .errors import SparsityError
from .models.names import is_of_transformers
from .structure import checked_level

__all__ = ["Pattern", "blocks", "columns", "filters", "heads", "n_m", "parse", "rows", "unstructured", "v_n_m"]

Keys = dict[str, Any]


@dataclass(frozen=True)
class Pattern:
    """A structure that adapts to each weight; the functions of this module return it.

    Attributes:
        kind: The name of the function.
        arguments: The whole numbers that the function was called with.
        sparsity_level: Fraction of blocks dropped, in [0, 1]; None takes that of the config entry or the sparsifier.
        is_transposed: Whether the weight is stored as (..., inputs, outputs), for modules whose class does not tell.

    >>> pattern = unstructured(0.9)
    >>> pattern.resolve(nn.Linear(8, 4), "weight")
    {'block_shape': (), 'scope_shape': (), 'sparsity_level': 0.9}
    """

    kind: str
    arguments: tuple[int, ...] = ()
    sparsity_level: float | None = None
    is_transposed: bool = False

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise SparsityError(f"unknown pattern {self.kind!r}; known: {', '.join(_KINDS)}")
        for n in self.arguments:
            if isinstance(n, bool) or not isinstance(n, numbers.Integral):
                raise SparsityError(f"{self} needs whole numbers, got {n!r}")
        count = {"n_m": 2, "blocks": 2, "heads": 1, "v_n_m": 3}.get(self.kind, 0)
        if len(self.arguments) != count:
            raise SparsityError(f"arguments of a pattern {self.kind!r} must have length {count}, got {self.arguments}")
        match self.kind, self.arguments:
            case "n_m", (n, m) if not 0 <= n <= m or m < 1:
                raise SparsityError(f"n_m keeps n of m, so 0 <= n <= m and m >= 1; got n={n}, m={m}")
            case "v_n_m", (_, n, m) if not 0 <= n <= 4 <= m:
                raise SparsityError(f"v_n_m keeps n of 4 of m columns, so 0 <= n <= 4 <= m; got n={n}, m={m}")
            case "v_n_m", (v, _, _) if v < 1 and v != -1:
                raise SparsityError(f"v_n_m needs a positive number of rows (or -1 for all), got v={v}")
            case "blocks", sizes if any(n < 1 and n != -1 for n in sizes):
                raise SparsityError(f"blocks needs positive sizes (or -1 for all), got {sizes[0]} x {sizes[1]}")
            case "heads", (heads,) if heads < 1:
                raise SparsityError(f"heads needs at least one head, got {heads}")
        if self.sparsity_level is not None:
            checked_level(self.sparsity_level, f"{self}: ")

    @property
    def budget_key(self) -> str | None:
        """The config key that specifies how much the pattern keeps, or None."""
        level = None if self.sparsity_level is None else "sparsity_level"
        return {"n_m": "nnz", "v_n_m": "stages"}.get(self.kind, level)

    def resolve(self, module: nn.Module, tensor_name: str, tensor: Tensor | None = None, where: str = "") -> Keys:
        """Return the config keys that the pattern stands for on one tensor.

        Args:
            module: The tensor's module, whose class determines the order of the dimensions.
            tensor_name: The tensor's name in the module.
            tensor: The tensor itself, if the module does not hold it under that name.
            where: The first words of error messages.

        Raises:
            SparsityError: The tensor has no such dimension, or the numbers do not fit it.
        """
        weight = getattr(module, tensor_name) if tensor is None else tensor
        dimensions = _dimensions(module, tuple(weight.shape))
        if self.is_transposed and dimensions.input is not None:
            dimensions = replace(dimensions, output=len(weight.shape) - 1, input=len(weight.shape) - 2)
        keys = _KINDS[self.kind](dimensions, f"{where}{self}: ", *self.arguments)
        return keys if self.sparsity_level is None else {**keys, "sparsity_level": self.sparsity_level}

    def keys(self) -> Iterator[str]:
        """What `**pattern` unpacks into a dict: the pattern itself, under one key."""
        return iter(("pattern",))

    __iter__ = keys

    def __getitem__(self, key: str) -> "Pattern":
        if key != "pattern":
            raise KeyError(key)
        return self

    def __repr__(self) -> str:
        level = [] if self.sparsity_level is None else [self.sparsity_level]
        text = f"patterns.{self.kind}({', '.join(map(repr, [*self.arguments, *level]))})"
        return f"replace({text}, is_transposed=True)" if self.is_transposed else text


@dataclass(frozen=True, kw_only=True)
class _Dimensions:
    """Which dimension of a weight holds outputs, inputs (None of a 1-D tensor) and experts; groups of a convolution."""

    shape: tuple[int, ...]
    output: int
    input: int | None
    experts: int | None = None
    groups: int = 1

    def tile(self, default: int, **sizes: int) -> tuple[int, ...]:
        """A shape with `default` everywhere but at the named dimensions (`output`, `input`, `experts`)."""
        at = {getattr(self, name): size for name, size in sizes.items()}
        return tuple(at.get(k, default) for k in range(len(self.shape)))

    def needs_input(self, where: str) -> None:
        if self.input is None:
            raise SparsityError(f"{where}needs a weight with inputs and outputs, got shape {self.shape}")


def _dimensions(module: nn.Module, shape: tuple[int, ...]) -> _Dimensions:
    groups = getattr(module, "groups", 1) if isinstance(module, (*TRANSPOSED_CONVOLUTIONS, *CONVOLUTIONS)) else 1
    if len(shape) < 2:
        return _Dimensions(shape=shape, output=0, input=None)
    if isinstance(module, TRANSPOSED_CONVOLUTIONS) or is_of_transformers(module, "Conv1D"):
        return _Dimensions(shape=shape, output=1, input=0, groups=groups)
    if len(shape) == 3 and not isinstance(module, (*CONVOLUTIONS, nn.Bilinear)):
        output, input_ = (2, 1) if is_transposed(module) else (1, 2)
        return _Dimensions(shape=shape, output=output, input=input_, experts=0)
    if len(shape) == 2 and hasattr(module, "is_transposed"):  # the experts' biases, (experts, out)
        return _Dimensions(shape=shape, output=1, input=None, experts=0)
    return _Dimensions(shape=shape, output=0, input=1, groups=groups)


def parse(text: Any, where: str = "") -> Pattern:
    """Return the pattern that a text names: "2:4", "32:2:8" (V:N:M), "4x1" (blocks), or a name such as "rows".

    >>> parse("2:4"), parse("32:2:8"), parse("16x16"), parse("rows")
    (patterns.n_m(2, 4), patterns.v_n_m(32, 2, 8), patterns.blocks(16, 16), patterns.rows())
    """
    for separator, makers in ((":", {2: n_m, 3: v_n_m}), ("x", {2: blocks})) if isinstance(text, str) else ():
        numbers = text.split(separator)
        if len(numbers) in makers and all(n.isdecimal() for n in numbers):
            return makers[len(numbers)](*map(int, numbers))  # type: ignore[operator]
    if isinstance(text, str) and text in ("unstructured", "rows", "columns", "filters"):
        return Pattern(text)
    raise SparsityError(
        f"{where}pattern must be one of `sparsekit_ao.patterns`, or a text such as '2:4', '32:2:8', '16x16', 'rows', "
        f"'columns', 'filters' or 'unstructured', got {text!r}"
    )


def unstructured(sparsity_level: float | None = None) -> Pattern:
    """Drop single elements, which compete over the whole tensor of any rank.

    >>> unstructured(0.9).resolve(nn.Conv2d(3, 8, 3), "weight")
    {'block_shape': (), 'scope_shape': (), 'sparsity_level': 0.9}
    """
    return Pattern("unstructured", (), sparsity_level)


def n_m(n: int, m: int) -> Pattern:
    """Keep n of every m consecutive inputs (2:4, 1:4, ...); in a convolution, n of every m input channels.

    >>> n_m(2, 4).resolve(nn.Linear(8, 4), "weight")
    {'block_shape': (1, 1), 'scope_shape': (1, 4), 'nnz': 2}
    """
    return Pattern("n_m", (n, m))


def blocks(rows: int, columns: int, sparsity_level: float | None = None) -> Pattern:
    """Drop blocks of rows x columns (outputs x inputs), which compete over the whole tensor.

    In a convolution, there are such blocks at each kernel position.

    >>> blocks(4, 2).resolve(nn.Linear(8, 4), "weight")
    {'block_shape': (4, 2), 'scope_shape': ()}
    """
    return Pattern("blocks", (rows, columns), sparsity_level)


def rows(sparsity_level: float | None = None) -> Pattern:
    """Drop whole output units: rows of a Linear, filters of a convolution. In packed experts, each expert is a scope.

    >>> rows(0.5).resolve(nn.Linear(8, 4), "weight")
    {'block_shape': (1, -1), 'scope_shape': (), 'sparsity_level': 0.5}
    """
    return Pattern("rows", (), sparsity_level)


def columns(sparsity_level: float | None = None) -> Pattern:
    """Drop whole inputs: columns of a Linear, input channels of a convolution. In packed experts, each is a scope.

    >>> columns(0.5).resolve(nn.Linear(8, 4), "weight")
    {'block_shape': (-1, 1), 'scope_shape': (), 'sparsity_level': 0.5}
    """
    return Pattern("columns", (), sparsity_level)


def filters(sparsity_level: float | None = None) -> Pattern:
    """Drop whole filters (output channels) of a convolution, and rows of a Linear, as `rows` does.

    >>> filters().resolve(nn.Conv2d(3, 8, 3), "weight")
    {'block_shape': (1, -1, -1, -1), 'scope_shape': ()}
    """
    return Pattern("filters", (), sparsity_level)


def heads(count: int, sparsity_level: float | None = None) -> Pattern:
    """Drop whole attention heads of one projection, whose outputs are `count` heads of equal size.

    >>> heads(4).resolve(nn.Linear(8, 16), "weight")["block_shape"]  # of the view (4 heads, 4 rows, 8 inputs)
    (1, -1, -1)
    """
    return Pattern("heads", (count,), sparsity_level)


def v_n_m(v: int, n: int, m: int) -> Pattern:
    """Keep 4 of every m columns for v rows together, then n of those 4 in each row: V:N:M (arXiv 2310.02065).

    >>> v_n_m(2, 2, 8).resolve(nn.Linear(8, 4), "weight")["stages"][0]
    {'block_shape': (2, 1), 'scope_shape': (1, 8), 'nnz': 4}
    """
    return Pattern("v_n_m", (v, n, m))


@dataclass(frozen=True)
class SplitDimension:
    """A view function that splits one dimension of the weight into `count` equal parts."""

    count: int
    dim: int

    def __call__(self, weight: Tensor) -> Tensor:
        """The weight as (..., count, size of a part, ...)."""
        return weight.unflatten(self.dim, (self.count, -1))


def _n_m(d: _Dimensions, where: str, n: int, m: int) -> Keys:
    d.needs_input(where)
    return {"block_shape": d.tile(1), "scope_shape": _inside_groups(d, where, d.tile(1, input=m)), "nnz": n}


def _inside_groups(d: _Dimensions, where: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape; raise where it would cross groups of a convolution, which follow each other in dimension 0."""
    size, part = shape[0] if shape[0] > 0 else d.shape[0], d.shape[0] // d.groups
    if d.groups > 1 and part % size:
        what = "outputs" if d.output == 0 else "inputs"
        raise SparsityError(f"{where}needs the {what} of each group divisible by {size}, got {part}")
    return shape


def _blocks(d: _Dimensions, where: str, rows: int, columns: int) -> Keys:
    d.needs_input(where)
    return {"block_shape": _inside_groups(d, where, d.tile(1, output=rows, input=columns)), "scope_shape": ()}


def _units(unit: str, other: str, d: _Dimensions, where: str) -> Keys:
    """Make a block of each index of a dimension, over everything else; each group and each expert by itself."""
    if unit == "input":
        d.needs_input(where)
    # Dimension 0 of a convolution with groups holds the units of all groups one after another, dimension 1 one group's.
    if d.groups > 1 and getattr(d, other) == 0:
        rest = " ".join(f"k{i}" for i in range(len(d.shape) - 2))
        return {"axes": f"(g a) u {rest}", "unit": "g u", "sizes": {"g": d.groups}}
    if d.experts is None:
        return {"block_shape": d.tile(-1, **{unit: 1}), "scope_shape": ()}
    return {"block_shape": d.tile(-1, **{unit: 1, "experts": 1}), "scope_shape": d.tile(-1, experts=1)}


def _heads(d: _Dimensions, where: str, count: int) -> Keys:
    if not d.shape:
        raise SparsityError(f"{where}needs a weight with outputs, got shape ()")
    size = d.shape[d.output]
    if d.groups > 1 and d.output != 0:
        raise SparsityError(f"{where}the outputs of a transposed convolution with {d.groups} groups are not in one row")
    if size % count:
        raise SparsityError(f"{where}needs dimension {d.output} (outputs) divisible by {count}, got {size}")
    block = [-1] * (len(d.shape) + 1)
    block[d.output] = 1
    scope = [-1] * len(block)
    if d.experts is not None:
        block[d.experts] = scope[d.experts] = 1
    view = SplitDimension(count, d.output)
    return {"view": view, "block_shape": tuple(block), "scope_shape": tuple(scope)}


def _v_n_m(d: _Dimensions, where: str, v: int, n: int, m: int) -> Keys:
    fine = _n_m(d, where, n, m)
    rows = {**fine, "block_shape": _inside_groups(d, where, d.tile(1, output=v)), "nnz": 4}
    return {"stages": [rows, fine]}


_KINDS: dict[str, Callable[..., Keys]] = {
    "unstructured": lambda d, where: {"block_shape": (), "scope_shape": ()},
    "n_m": _n_m,
    "blocks": _blocks,
    "rows": partial(_units, "output", "input"),
    "columns": partial(_units, "input", "output"),
    "filters": partial(_units, "output", "input"),
    "heads": _heads,
    "v_n_m": _v_n_m,
}
