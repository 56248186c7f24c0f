"""One operation of a forward, as a rule of `axis_rules` receives it; the rule returns the axes of the result."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor
from torch.utils import _pytree

from .factors import Axis, AxisFactor, fixed, freeze

Label = tuple[Axis, ...]  # one axis a dimension


@dataclass(frozen=True)
class Operation:
    """An operation that has run: the operator, its arguments, and what it returned (one tensor or several)."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    module: str
    label_of: Callable[[Tensor], Label]
    is_norm: Callable[[Tensor, Sequence[AxisFactor]], bool]  # whether the module normalizes this axis of squares
    is_used: bool = True  # if not, only the shape of the result matters (as of attention weights that nobody reads)

    @property
    def name(self) -> str:
        """The operator's name without its overload: `add_`, `mm`."""
        return str(self.func.overloadpacket.__name__)

    @property
    def why(self) -> str:
        """The reason given for what the operation freezes."""
        return f"{self.name} in {self.module}"

    @property
    def is_square(self) -> bool:
        """Whether it squares a tensor: `x**2`, `x.square()`, `x * x`."""
        if self.name == "mul":
            return self["self"] is self["other"]
        exponent = self["exponent"]
        return self.name == "square" or (self.name == "pow" and not isinstance(exponent, Tensor) and exponent == 2)

    @cached_property
    def _bound(self) -> dict[str, Any]:
        schema = self.func._schema.arguments
        values = dict(zip((a.name for a in schema), self.args, strict=False)) | self.kwargs
        return {a.name: values.get(a.name, a.default_value if a.has_default_value() else None) for a in schema}

    def __getitem__(self, name: str) -> Any:
        """An argument; None if this overload does not have it."""
        return self._bound.get(name)

    def label(self, name: str) -> Label:
        """Return the axes of a tensor argument."""
        return self.label_of(self[name])

    def labels(self, *names: str) -> list[Label]:
        """Return the axes of those tensor arguments that are not None."""
        return [self.label(name) for name in names if self[name] is not None]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensor arguments, in order."""
        return [t for t in _pytree.tree_leaves((self.args, self.kwargs)) if isinstance(t, Tensor)]

    @property
    def written(self) -> list[Tensor]:
        """The tensor arguments that it writes to, in order."""
        infos = {a.name: a.alias_info for a in self.func._schema.arguments}
        values = [self[name] for name, info in infos.items() if info is not None and info.is_write]
        return [t for t in _pytree.tree_leaves(values) if isinstance(t, Tensor)]

    @property
    def outs(self) -> list[Tensor]:
        """All tensors that it returned, in order."""
        return [t for t in _pytree.tree_leaves(self.out) if isinstance(t, Tensor)]

    def dims(self, name: str, ndim: int) -> list[int]:
        """Return a dimension argument as non-negative ints; None or an empty list is every dimension."""
        dims = self[name]
        if dims is None or (isinstance(dims, (list, tuple)) and not dims):
            return list(range(ndim))
        return [d % ndim for d in ([dims] if isinstance(dims, int) else dims)] if ndim else []

    def dim(self, name: str, ndim: int) -> int:
        """Return a single dimension argument as a non-negative int."""
        return int(self[name]) % max(ndim, 1)

    def fixed(self, *sizes: int) -> Label:
        """Return new axes that are frozen."""
        return tuple(fixed(n, self.why) for n in sizes)

    def freeze_value(self, *axes: Sequence[AxisFactor], what: str = "") -> None:
        """Freeze axes without which the values of the result change, unless nothing depends on it."""
        self.freeze(*(axes if self.is_used else ()), what=what)

    def freeze(self, *axes: Sequence[AxisFactor], what: str = "") -> None:
        """Freeze axes, with this operation as the reason."""
        for axis in axes:
            freeze(axis, f"{self.why}{what and ': '}{what}")


AxisRule = Callable[[Operation], Label | list[Label]]
