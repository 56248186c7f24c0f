"""Axis patterns: view, block and scope in one line of einops notation.

The factors of every dimension are named; `unit` axes index what is kept or dropped as one, `scope` axes (some of them)
index independent budgets, every other axis is inside the block. einops parses the notation and makes the view.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import einops
from einops.parsing import ParsedExpression
from torch import Tensor

from ..errors import SparsityError
from ..selection.strides import Shape


@dataclass(frozen=True, kw_only=True)
class AxisPattern:
    """A view function that also gives the block and the scope.

    Args:
        axes: one entry a dimension of the tensor, factors in brackets: `"o (s m)"`.
        unit: axes that index blocks, in the order that ties are broken by; a str of names or a sequence.
        scope: those of them that index scopes; none is one scope for the whole tensor.
        sizes: {axis: its length}, as far as the tensor's shape does not determine it.
        where: opening words of error messages.

    Raises:
        SparsityError: the pattern, an axis name or a size does not fit.

    >>> n_m = AxisPattern(axes="o (s m)", unit="o s m", scope="o s", sizes={"m": 4})
    >>> n_m(torch.zeros(2, 8)).shape, n_m.block_shape, n_m.scope_shape
    (torch.Size([2, 2, 4]), (1, 1, 1), (1, 1, -1))
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
            given = getattr(self, key)
            if not isinstance(given, (str, Sequence, Mapping)):
                raise self._error(f"{key} must be names of axes, got {given!r}")
            given = given.split() if isinstance(given, str) else given
            for axis in given:
                if axis not in names:
                    raise self._error(f"unknown axis {axis!r} in {key}; the axes are {', '.join(names)}")
            if len(set(given)) != len(given):
                raise self._error(f"{key} names an axis twice: {' '.join(given)}")
            object.__setattr__(self, key, given if key == "sizes" else tuple(given))
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
        view: Tensor = einops.rearrange(weight, f"{self.axes} -> {' '.join((*self.unit, *self._inner))}", **self.sizes)
        return view

    def undo(self, view: Tensor) -> Tensor:
        """The inverse of a call: a view's axes back in the tensor's order; they may have other lengths by now."""
        tensor: Tensor = einops.rearrange(view, f"{' '.join((*self.unit, *self._inner))} -> {self.axes}")
        return tensor

    def lengths(self, shape: Shape) -> dict[str, int]:
        """Every axis and its length in a tensor of this shape.

        >>> AxisPattern(axes="(three u d) i", unit="u", sizes={"three": 3, "d": 4}).lengths((24, 5))
        {'three': 3, 'u': 2, 'd': 4, 'i': 5}
        """
        self.check_shape(shape)
        found: dict[str, int] = {}
        for size, axes in zip(shape, self.dimensions, strict=True):
            rest = size // math.prod(self.sizes.get(axis, 1) for axis in axes)
            found |= {axis: self.sizes.get(axis, rest) for axis in axes}
        return found

    def dimension_of(self, axis: str) -> int:
        """The dimension of the tensor that an axis is a factor of."""
        return next(k for k, axes in enumerate(self.dimensions) if axis in axes)

    def leading(self, product: int) -> list[str] | None:
        """The first axes of the first dimension whose sizes multiply to `product`; None if there are none."""
        found: list[str] = []
        for axis in self.dimensions[0]:
            if product == 1:
                break
            size = self.sizes.get(axis, 0)
            if not size or product % size:
                return None
            product //= size
            found.append(axis)
        return found if product == 1 else None

    @property
    def block_shape(self) -> Shape:
        """One along unit axes, whole along every other."""
        return (1,) * len(self.unit) + (-1,) * len(self._inner)

    @property
    def scope_shape(self) -> Shape:
        """Whole along the unit axes that are not scope axes."""
        return tuple(1 if axis in self.scope else -1 for axis in self.unit)

    @cached_property
    def dimensions(self) -> list[list[str]]:
        """The axes of every dimension, outermost first."""
        return dimensions_of(self.axes, self.where)

    @cached_property
    def _inner(self) -> list[str]:
        return [axis for dimension in self.dimensions for axis in dimension if axis not in self.unit]

    def check_shape(self, shape: Shape) -> None:
        """Raise unless the pattern fits a tensor of this shape."""
        if len(shape) != len(self.dimensions):
            raise self._error(f"it has {len(self.dimensions)} dimensions, but the tensor has {len(shape)}: {shape}")
        for k, (size, axes) in enumerate(zip(shape, self.dimensions, strict=True)):
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
    """The axes of every dimension of a pattern, outermost first.

    Raises:
        SparsityError: the text is no pattern.

    >>> dimensions_of("(three u d) i")
    [['three', 'u', 'd'], ['i']]
    """
    if not isinstance(axes, str):
        raise SparsityError(f"{where}axes must be a str such as 'o (s m)', got {axes!r}")
    try:
        parsed = ParsedExpression(axes)
    except einops.EinopsError as e:
        raise SparsityError(f"{where}axes {axes!r}: {e}") from None
    if parsed.has_ellipsis or parsed.has_non_unitary_anonymous_axes:
        raise SparsityError(f"{where}axes {axes!r}: give every axis a name (and its length in sizes)")
    return [list(dimension) for dimension in parsed.composition]
