"""Axis patterns, which describe view, block and scope in one line of einops notation.

The factors of every dimension are named. The `unit` axes index blocks, which are kept or dropped as one. Some of them,
the `scope` axes, index independent budgets. Every other axis is inside the block. A dimension may be a concatenation of
which only one part is viewed: in `(8 + u + 4)`, the first 8 and last 4 entries are outside of the view.
"""

import itertools
import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import einops
from einops.parsing import ParsedExpression
from torch import Tensor

from ..errors import SparsityError
from .tiles import Shape


@dataclass(frozen=True, kw_only=True)
class AxisPattern:
    """Describe view, block and scope of a tensor by naming the factors of its dimensions.

    Args:
        axes: One entry for each dimension of the tensor, several factors of one in brackets: `"o (s m)"`.
        unit: The axes that index blocks, as a str or a sequence of names. Their order breaks ties of equal blocks.
        scope: Those unit axes that index scopes. If there are none, the whole tensor is one scope.
        sizes: {axis: its length}, for axes whose length the tensor's shape does not determine.
        where: The first words of error messages.

    Raises:
        SparsityError: The pattern, an axis name or a size does not fit.

    >>> n_m = AxisPattern(axes="o (s m)", unit="o s m", scope="o s", sizes={"m": 4})
    >>> n_m(torch.zeros(2, 8)).shape, n_m.block_shape, n_m.scope_shape
    (torch.Size([2, 2, 4]), (1, 1, 1), (1, 1, -1))
    >>> AxisPattern(axes="o (8 + u)", unit="u")(torch.zeros(2, 12)).shape  # the last 4 columns, a row each
    torch.Size([4, 2])
    >>> tiles = AxisPattern(axes="(r a) (c b)", unit="r c", sizes={"a": 32, "b": 32})
    >>> tiles(torch.zeros(64, 96)).shape, tiles.block_shape, tiles.scope_shape
    (torch.Size([2, 3, 32, 32]), (1, 1, -1, -1), (-1, -1))
    """

    axes: str
    unit: str | Sequence[str]
    scope: str | Sequence[str] = ()
    sizes: Mapping[str, int] = field(default_factory=dict, hash=False)
    where: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        names = [axis for dimension in self.dimensions for axis in dimension]
        if not isinstance(self.sizes, Mapping):
            raise self._error(f"sizes must be a dict {{axis: length}}, got {self.sizes!r}")
        for key in ("unit", "scope", "sizes"):
            axes = getattr(self, key)
            if not isinstance(axes, (str, Sequence, Mapping)):
                raise self._error(f"{key} must be names of axes, got {axes!r}")
            axes = axes.split() if isinstance(axes, str) else axes
            for axis in axes:
                if axis not in names:
                    raise self._error(f"unknown axis {axis!r} in {key}; the axes are {', '.join(names)}")
            if len(set(axes)) != len(axes):
                raise self._error(f"{key} names an axis twice: {' '.join(axes)}")
            object.__setattr__(self, key, dict(self.sizes) if key == "sizes" else tuple(axes))
        if not self.unit:
            raise self._error("unit is empty; name the axes that index what is kept or dropped")
        for axis in self.scope:
            if axis not in self.unit:
                raise self._error(
                    f"scope axis {axis!r} is not one of unit ({' '.join(self.unit)}): a block cannot be in several "
                    "scopes"
                )
        for axis, size in self.sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise self._error(f"sizes[{axis!r}] must be a positive int, got {size!r}")

    def __call__(self, weight: Tensor) -> Tensor:
        """The weight as a torch view: unit axes first, in their order, then the axes inside the block."""
        self.check_shape(tuple(weight.shape))
        text = f"{_parsed(self.axes, self.where)[0]} -> {' '.join((*self.unit, *self._inner))}"
        view: Tensor = einops.rearrange(self.window(weight), text, **self.sizes)
        return view

    def undo(self, view: Tensor) -> Tensor:
        """Return a view with its axes back in the order of the window; they may have other lengths by now."""
        text = f"{' '.join((*self.unit, *self._inner))} -> {_parsed(self.axes, self.where)[0]}"
        tensor: Tensor = einops.rearrange(view, text)
        return tensor

    def window(self, weight: Tensor) -> Tensor:
        """Return the part of the weight that is viewed: all of it, except in concatenated dimensions."""
        for dimension, (before, after) in self.outside.items():
            weight = weight.narrow(dimension, before, weight.shape[dimension] - before - after)
        return weight

    def lengths(self, shape: Shape) -> dict[str, int]:
        """Return {axis: its length} in a tensor of this shape."""
        self.check_shape(shape)
        lengths: dict[str, int] = {}
        for size, axes in zip(window_shape(self.axes, shape), self.dimensions, strict=True):
            rest = size // math.prod(self.sizes.get(axis, 1) for axis in axes)
            lengths |= {axis: self.sizes.get(axis, rest) for axis in axes}
        return lengths

    def dimension_of(self, axis: str) -> int:
        """Return the dimension of the tensor of which an axis is a factor."""
        return next(k for k, axes in enumerate(self.dimensions) if axis in axes)

    def leading(self, product: int) -> list[str] | None:
        """Return the first axes of dimension 0 whose sizes multiply to `product`, or None if there are none."""
        first = self.dimensions[0]
        products = itertools.accumulate((self.sizes.get(axis, 0) for axis in first), operator.mul, initial=1)
        return next((first[:count] for count, n in enumerate(products) if n == product), None)

    @property
    def block_shape(self) -> Shape:
        """The block shape: 1 along unit axes, and the whole length (-1) along all others."""
        return (1,) * len(self.unit) + (-1,) * len(self._inner)

    @property
    def scope_shape(self) -> Shape:
        """The scope shape: 1 along scope axes, and the whole length (-1) along the other unit axes."""
        return tuple(1 if axis in self.scope else -1 for axis in self.unit)

    @cached_property
    def dimensions(self) -> list[list[str]]:
        """The axes of every dimension, outermost first."""
        return dimensions_of(self.axes, self.where)

    @cached_property
    def outside(self) -> dict[int, tuple[int, int]]:
        """For concatenated dimensions, {dimension: entries before and after the part that is viewed}."""
        return _parsed(self.axes, self.where)[1]

    @cached_property
    def _inner(self) -> list[str]:
        return [axis for dimension in self.dimensions for axis in dimension if axis not in self.unit]

    def check_shape(self, shape: Shape) -> None:
        """Raise unless the pattern fits a tensor of this shape."""
        if len(shape) != len(self.dimensions):
            raise self._error(f"it has {len(self.dimensions)} dimensions, but the tensor has {len(shape)}: {shape}")
        for d, (before, after) in self.outside.items():
            if shape[d] <= before + after:
                raise self._error(f"dimension {d} has size {shape[d]}, so nothing is left beside {before} + {after}")
        for k, (size, axes) in enumerate(zip(window_shape(self.axes, shape), self.dimensions, strict=True)):
            known = {axis: self.sizes[axis] for axis in axes if axis in self.sizes}
            product, unknown = math.prod(known.values()), [axis for axis in axes if axis not in known]
            dimension, wanted = f"dimension {k} ({' '.join(axes)})", " * ".join(f"{a}={n}" for a, n in known.items())
            wanted = f"{wanted} = {product}" if len(known) > 1 else wanted or "1"
            if len(unknown) > 1:
                raise self._error(f"{dimension} has size {size}; give the sizes of all but one of {', '.join(unknown)}")
            if not unknown and size != product:
                raise self._error(f"{dimension} has size {size}, not {wanted}")
            if unknown and size % product:
                raise self._error(f"{dimension} has size {size}, which is not a multiple of {wanted}")

    def _error(self, text: str) -> SparsityError:
        return SparsityError(f"{self.where}axes {self.axes!r}: {text}")


def dimensions_of(axes: object, where: str = "") -> list[list[str]]:
    """The axes of every dimension of a pattern, outermost first; raises an error if the text is not a pattern."""
    if not isinstance(axes, str):
        raise SparsityError(f"{where}axes must be a str such as 'o (s m)', got {axes!r}")
    text, _ = _parsed(axes, where)
    try:
        parsed = _expression(text)
    except einops.EinopsError as e:
        raise SparsityError(f"{where}axes {axes!r}: {e}") from None
    if parsed.has_ellipsis or parsed.has_non_unitary_anonymous_axes:
        raise SparsityError(f"{where}axes {axes!r}: give every axis a name (and its length in sizes)")
    return [list(dimension) for dimension in parsed.composition]


_DIMENSION = r"\([^()]*\)|[^\s()]+"
_expression = lru_cache(maxsize=1024)(ParsedExpression)  # couplings of deep models parse few texts often


def window_shape(axes: str, shape: Shape) -> Shape:
    """The shape of what a pattern views of a tensor of this shape."""
    _, outside = _parsed(axes, "")
    return tuple(size - sum(outside.get(d, ())) for d, size in enumerate(shape))


def _parsed(axes: str, where: str) -> tuple[str, dict[int, tuple[int, int]]]:
    """The pattern without the lengths of concatenations, and these: {dimension: (before, after)}."""
    if "+" not in axes:
        return axes, {}
    window, outside = [], {}
    if re.search(r"[()]", re.sub(_DIMENSION, "", axes)):
        raise SparsityError(f"{where}axes {axes!r}: every bracket must be closed, and none is inside of another")
    for d, dimension in enumerate(re.findall(_DIMENSION, axes)):
        parts = [part.strip() for part in dimension.strip("()").split("+")]
        named = [at for at, part in enumerate(parts) if not part.isdecimal()]
        if "+" in dimension and (len(named) != 1 or dimension[0] != "("):
            raise SparsityError(
                f"{where}axes {axes!r}: {dimension} must be one part with names and lengths of the others, in brackets"
            )
        if len(parts) > 1:
            before, after = parts[: named[0]], parts[named[0] + 1 :]
            outside[d] = sum(map(int, before)), sum(map(int, after))
            dimension = f"({parts[named[0]]})"
        window.append(dimension)
    return " ".join(window), outside
