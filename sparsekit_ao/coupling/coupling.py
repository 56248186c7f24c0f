"""Coupling: tensors that are pruned together, named with stars and said in einops notation.

A group is a value: it knows names and axes, no model. `bind` finds it in one, `entries` are config dicts as any other.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..algebra import dimensions_of
from ..errors import SparsityError
from ..sparsifiers.config import named_tensors
from .bound import BoundCoupling, bind, lacking
from .names import filled, matched, stars

__all__ = ["Coupling", "check_attrs"]

_OWN_KEYS = ("tensor_fqn", "axes", "unit", "scope", "sizes", "block_coupling", "member_scores")


@dataclass(frozen=True)
class Coupling:
    """Units that several tensors share: kept together, dropped together, removed together.

    Names of tensors may hold stars. `*` stands for one part of a dotted name: there is one coupled group for each of
    its values, so `"layers.*.mlp.up_proj.weight"` is one group a layer. `**` stands for any text and makes no groups:
    all that it matches belongs together, as all layers do that read and write one residual stream.

    Args:
        members: {name of a parameter or buffer: its axes}; the unit is what it has at the unit axis (and the scope
            axes), whole along all others. Axes other than unit, scope and those of `sizes` are the member's own.
        unit: the one axis that is kept or dropped.
        scope: axes within which the unit is chosen, an equal number in each: the query heads of every key head.
        sizes: {axis: length} as far as shapes leave it open.
        scores: how a unit's score is made of its members': `"sum"`, or `"mean"` (see `ScopeSparsifier.member_scores`).
        name: for errors and reports, with as many `*`s as the members or none; by default the first member.
        attrs: {integer attribute: the axes whose product it holds}, such as `{"layers.*.attn.num_heads": "u"}`, for
            `compact` to update; those of torch.nn's own layers need not be listed.

    Raises:
        SparsityError: members differ in their `*`s, a member lacks an axis, an argument of a wrong kind.

    >>> mlp = Coupling({"up.weight": "u i", "up.bias": "u", "down.weight": "o u"})
    >>> model = torch.nn.ModuleDict({"up": torch.nn.Linear(4, 6), "down": torch.nn.Linear(6, 4)})
    >>> for entry in mlp.entries(model, nnz=2):
    ...     print(entry)
    {'tensor_fqn': 'up.weight', 'axes': 'u i', 'unit': 'u', 'block_coupling': 'up.weight', 'nnz': 2}
    {'tensor_fqn': 'up.bias', 'axes': 'u', 'unit': 'u', 'block_coupling': 'up.weight', 'nnz': 2}
    {'tensor_fqn': 'down.weight', 'axes': 'o u', 'unit': 'u', 'block_coupling': 'up.weight', 'nnz': 2}
    """

    members: Mapping[str, str]
    unit: str = field(default="u", kw_only=True)
    scope: str = field(default="", kw_only=True)
    sizes: Mapping[str, int] = field(default_factory=dict, kw_only=True, hash=False)
    scores: str = field(default="sum", kw_only=True)
    name: str = field(default="", kw_only=True)
    attrs: Mapping[str, str] = field(default_factory=dict, kw_only=True, hash=False)

    def __post_init__(self) -> None:
        if not isinstance(self.members, Mapping) or not self.members:
            raise SparsityError(f"a group's members must be a dict {{name: axes}}, got {self.members!r}")
        for key in ("unit", "scope", "name"):
            if not isinstance(getattr(self, key), str):
                raise SparsityError(f"a group's {key} must be a str, got {getattr(self, key)!r}")
        object.__setattr__(self, "name", self.name or str(next(iter(self.members))))
        check_attrs(self._where, self.attrs)
        if not isinstance(self.sizes, Mapping):
            raise SparsityError(f"{self._where}sizes must be a dict {{axis: length}}, got {self.sizes!r}")
        for key in ("members", "sizes", "attrs"):
            object.__setattr__(self, key, dict(getattr(self, key)))
        if self.scores not in ("sum", "mean"):
            raise SparsityError(f"{self._where}scores must be 'sum' or 'mean', got {self.scores!r}")
        for axis, size in self.sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise SparsityError(f"{self._where}sizes[{axis!r}] must be a positive int, got {size!r}")
        if len(self.unit.split()) != 1 or self.unit in self.scope.split():
            raise SparsityError(f"{self._where}unit must be one axis that scope has not, got {self.unit!r}")
        for member, axes in self.members.items():
            self._check_member(member, axes)
        self._check_sizes()
        first = next(iter(self.members))
        for pattern in (*self.members, *self.attrs):
            if stars(pattern) != stars(first) and (pattern in self.members or stars(pattern)):
                raise SparsityError(
                    f"{self._where}{pattern!r} has {stars(pattern)} '*', but {first!r} has {stars(first)}. There is "
                    "one group for each value of '*', so all members need the same; write '**' where all that matches "
                    "belongs to one group."
                )

    def __hash__(self) -> int:
        return hash((tuple(self.members.items()), self.unit, self.scope, self.scores, self.name))

    def bind(self, model: nn.Module) -> list[BoundCoupling]:
        """The group in a model: one for each value of the `*`s, in the model's order.

        Raises:
            SparsityError: a name matches nothing, a member is missing for some value, a pattern does not fit.
            CouplingError: members count different numbers of units.

        >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(2, 5))
        >>> [(g.name, g.grid) for g in Coupling({"*.weight": "u i", "*.bias": "u"}).bind(layers)]
        [('0.weight', (3,)), ('1.weight', (5,))]
        """
        tensors = dict(_tensors(model))
        found = {member: matched(member, tensors) for member in self.members}
        for member, groups in found.items():
            if not groups:
                raise SparsityError(f"{self._where}{member!r} matches no parameter or buffer of the model")
        every = {captured: None for groups in found.values() for captured in groups}
        return [self._bound(captured, found, tensors) for captured in every]

    def entries(self, model: nn.Module, **keys: Any) -> list[dict[str, Any]]:
        """Config dicts for a sparsifier, one for each parameter of the group; they mix with any others.

        Buffers take no mask and have no entry. A tensor may be named once in a config, so groups that share one (the
        heads and the residual stream, in a query projection) are pruned one after the other.

        Args:
            model: where the names are looked up.
            keys: what every entry says besides: `sparsity_level` or `nnz` (of each scope), `norm`.

        Raises:
            SparsityError: as `bind`; a key that the group says itself; no member is a parameter.
        """
        own = [key for key in keys if key in _OWN_KEYS]
        if own:
            raise SparsityError(f"{self._where}{own[0]!r} is what the group says itself")
        return [entry for bound in self.bind(model) for entry in self._entries(bound, keys)]

    @property
    def _where(self) -> str:
        return f"group {self.name!r}: "

    def _check_sizes(self) -> None:
        known = {axis for axes in self.members.values() for dimension in dimensions_of(axes) for axis in dimension}
        for axis in self.sizes:
            if axis not in known:
                raise SparsityError(
                    f"{self._where}sizes has {axis!r}, but no member has that axis; the members' are "
                    f"{', '.join(sorted(known))}"
                )

    def _check_member(self, member: object, axes: object) -> None:
        if not isinstance(member, str) or not isinstance(axes, str):
            raise SparsityError(f"{self._where}a member is a name and its axes, two strs, got {member!r}: {axes!r}")
        names = [axis for dimension in dimensions_of(axes, f"{member}: ") for axis in dimension]
        for axis in (*self.scope.split(), self.unit):
            if axis not in names:
                raise SparsityError(
                    f"{self._where}{member} {axes!r} lacks the axis {axis!r}; every member has the unit axis and the "
                    "scope axes"
                )

    def _bound(
        self, captured: tuple[str, ...], found: Mapping[str, Mapping], tensors: Mapping[str, tuple[Tensor, bool]]
    ) -> BoundCoupling:
        name = filled(self.name, captured) if stars(self.name) else " ".join((self.name, *captured))
        rows: list[tuple[str, str, tuple[int, ...], bool]] = []
        owner: dict[str, str] = {}
        for member, axes in self.members.items():
            if captured not in found[member]:
                raise lacking(self.name, captured, filled(member, captured))
            for fqn in found[member][captured]:
                if fqn in owner:
                    raise SparsityError(f"{self._where}{fqn} is named by {owner[fqn]!r} and by {member!r}")
                owner[fqn] = member
                tensor, is_parameter = tensors[fqn]
                rows.append((fqn, axes, tuple(tensor.shape), is_parameter))
        scope = tuple(self.scope.split())
        return bind(name, captured, rows, unit=self.unit, scope=scope, sizes=self.sizes, attrs=self.attrs)

    def _entries(self, bound: BoundCoupling, keys: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        masked = [member for member in bound.members if member.is_parameter]
        if not masked:
            raise SparsityError(f"{self._where}no member is a parameter, so there is nothing to put a mask on")
        for member in masked:
            pattern = member.pattern
            entry: dict[str, Any] = {"tensor_fqn": member.fqn, "axes": pattern.axes, "unit": " ".join(pattern.unit)}
            packed = {a for d in pattern.dimensions if len(d) > 1 for a in d}
            sizes = {axis: size for axis, size in pattern.sizes.items() if axis in packed}
            entry |= {"scope": " ".join(pattern.scope)} if pattern.scope else {}
            entry |= {"sizes": sizes} if sizes else {}
            entry |= {"block_coupling": bound.name} if len(masked) > 1 else {}
            entry |= {"member_scores": self.scores} if self.scores != "sum" and len(masked) > 1 else {}
            yield entry | dict(keys)


def check_attrs(where: str, attrs: object) -> None:
    """Whether attributes are said as {name: axes}; `where` begins the error."""
    if not isinstance(attrs, Mapping) or not all(isinstance(text, str) for pair in attrs.items() for text in pair):
        raise SparsityError(f"{where}attrs must be a dict {{name of an attribute: axes}} of strs, got {attrs!r}")


def _tensors(model: nn.Module) -> Iterator[tuple[str, tuple[Tensor, bool]]]:
    """Every parameter and buffer by the name users know it by, and whether it is a parameter."""
    for name, parameter in named_tensors(model):
        yield name, (parameter, True)
    for prefix, module in model.named_modules():
        if not isinstance(module, parametrize.ParametrizationList) and ".parametrizations." not in f".{prefix}.":
            for name, buffer in module.named_buffers(prefix, recurse=False):
                yield name, (buffer, False)
