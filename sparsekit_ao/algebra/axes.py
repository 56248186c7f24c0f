"""Axis patterns: view, block and scope said in one line of einops notation.

Name the factors of every dimension; `unit` axes index what is kept or dropped as one, `scope` axes (some of them)
index independent budgets, every other axis lies inside the block. einops reads the notation and makes the view.
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

__all__ = ["AxisPattern", "dimensions_of"]


@dataclass(frozen=True, kw_only=True)
class AxisPattern:
    """A view function that also knows the block and the scope.

    Args:
        axes: one entry a dimension of the tensor, factors in brackets: `"o (s m)"`.
        unit: axes that index blocks, in the order that ties go by; a str of names or a sequence.
        scope: those of them that index scopes; none is one scope for the whole tensor.
        sizes: {axis: its length}, as far as the tensor's shape leaves it open.
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
        for key in ("unit", "scope"):
            found = getattr(self, key)
            if not isinstance(found, (str, Sequence)):
                raise SparsityError(f"{self._said}{key} must be names of axes, got {found!r}")
            object.__setattr__(self, key, tuple(found.split() if isinstance(found, str) else found))
            for axis in getattr(self, key):
                self._must_be_one_of(axis, names, key)
            if len(set(getattr(self, key))) != len(getattr(self, key)):
                raise SparsityError(f"{self._said}{key} names an axis twice: {' '.join(getattr(self, key))}")
        if not self.unit:
            raise SparsityError(f"{self._said}unit is empty; name the axes that index what is kept or dropped")
        for axis in self.scope:
            if axis not in self.unit:
                raise SparsityError(
                    f"{self._said}scope axis {axis!r} is not one of unit ({' '.join(self.unit)}): a block cannot be "
                    "in several scopes"
                )
        if not isinstance(self.sizes, Mapping):
            raise SparsityError(f"{self._said}sizes must be a dict {{axis: length}}, got {self.sizes!r}")
        for axis, size in self.sizes.items():
            self._must_be_one_of(axis, names, "sizes")
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise SparsityError(f"{self._said}sizes[{axis!r}] must be a positive int, got {size!r}")

    def __call__(self, weight: Tensor) -> Tensor:
        """The weight as a torch view: unit axes first, in their order, then the axes inside the block."""
        self.check_shape(tuple(weight.shape))
        seen: Tensor = einops.rearrange(weight, f"{self.axes} -> {' '.join((*self.unit, *self._inner))}", **self.sizes)
        return seen

    def undo(self, view: Tensor) -> Tensor:
        """The tensor that a view is of; its axes may have other lengths by now."""
        back: Tensor = einops.rearrange(view, f"{' '.join((*self.unit, *self._inner))} -> {self.axes}")
        return back

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
        """The dimension of the tensor in which an axis lies."""
        return next(k for k, axes in enumerate(self.dimensions) if axis in axes)

    def leading(self, product: int) -> list[str] | None:
        """The first axes of the first dimension whose sizes make a product; None where none do (or one is open)."""
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
        """One unit, whole along every other axis."""
        return (1,) * len(self.unit) + (-1,) * len(self._inner)

    @property
    def scope_shape(self) -> Shape:
        """Whole along the unit axes that are not scope axes."""
        return tuple(1 if axis in self.scope else -1 for axis in self.unit)

    @property
    def _said(self) -> str:
        return f"{self.where}axes {self.axes!r}: "

    @cached_property
    def dimensions(self) -> list[list[str]]:
        """The axes of every dimension, outermost first."""
        return dimensions_of(self.axes, self.where)

    @cached_property
    def _inner(self) -> list[str]:
        return [axis for dimension in self.dimensions for axis in dimension if axis not in self.unit]

    def _must_be_one_of(self, axis: object, names: Sequence[str], key: str) -> None:
        if axis not in names:
            raise SparsityError(f"{self._said}{key} speaks of {axis!r}, but the axes are {', '.join(names)}")

    def check_shape(self, shape: Shape) -> None:
        """Raise unless the pattern fits a tensor of this shape."""
        if len(shape) != len(self.dimensions):
            raise SparsityError(
                f"{self._said}there are {len(self.dimensions)} dimensions in it, but the tensor has {len(shape)}: "
                f"{shape}"
            )
        for k, (size, axes) in enumerate(zip(shape, self.dimensions, strict=True)):
            known = {axis: self.sizes[axis] for axis in axes if axis in self.sizes}
            product, unknown = math.prod(known.values()), [axis for axis in axes if axis not in known]
            asked = f"{' * '.join(f'{axis}={n}' for axis, n in known.items())}" or "1"
            asked += f" = {product}" if len(known) > 1 else ""
            if len(unknown) > 1:
                raise SparsityError(
                    f"{self._said}dimension {k} of size {size} is ({' '.join(axes)}); give the sizes of all but one "
                    f"of {', '.join(unknown)}"
                )
            if not unknown and size != product:
                raise SparsityError(f"{self._said}dimension {k} ({' '.join(axes)}) has size {size}, not {asked}")
            if unknown and size % product:
                raise SparsityError(
                    f"{self._said}dimension {k} ({' '.join(axes)}) has size {size}, which is not a multiple of {asked}"
                )


def dimensions_of(axes: object, where: str = "") -> list[list[str]]:
    """The axes of every dimension of a pattern, outermost first.

    Raises:
        SparsityError: it is no pattern.

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
        raise SparsityError(f"{where}axes {axes!r}: give every axis a name (its length goes into sizes)")
    return [list(dimension) for dimension in parsed.composition]
