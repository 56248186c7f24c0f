"""Coupling: which tensors are pruned together, as name patterns with stars and axes in einops notation.

A `Coupling` refers to no model: `bind` matches it against one, `entries` returns config dicts for a sparsifier.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..errors import SparsityError, checked_model
from ..sparsifiers.config import named_tensors
from ..structure import AxisPattern, dimensions_of
from .bound import BoundCoupling, Member, count_stars, fill_stars, match_names, occurrences, solve_sizes
from .listed import find_lists, listed_entries, with_lists

_OWN_KEYS = ("tensor_fqn", "axes", "unit", "scope", "sizes", "block_coupling", "member_scores")
_LIST_KEYS = ("block_shape", "scope_coupling")


@dataclass(frozen=True)
class Coupling:
    """Units that several tensors share: kept together, dropped together, removed together.

    Names of tensors may contain stars. `*` matches one part of a dotted name, and the coupling is bound once for each
    of its values, so `"layers.*.mlp.up_proj.weight"` is one coupling a layer. `**` matches any text, and all tensors
    that it matches belong to one coupling, as all layers do that write and read one residual stream.

    Args:
        members: {name of a parameter or buffer: its axes}; the unit is what it has at one index of the unit axis (and
            of the scope axes), whole along all others. Axes other than unit, scope and those of `sizes` may have
            another length in each member. Of a concatenation, `"o (8 + u + 4)"` has units between the first 8 and the
            last 4 entries. Where a tensor has the unit in two dimensions (`"(g u) u"`, recurrent weights), the mask
            is on the first one, and `compact` removes both.
        unit: the one axis that is kept or dropped.
        scope: axes within which the unit is chosen, an equal number in each: the query heads of every key head.
        sizes: {axis: length}, as far as the shapes leave them open.
        scores: how the scores of members make a unit's: `"sum"`, `"mean"` or `"consumers"`, as `member_scores` of
            `ScopeSparsifier`.
        name: for errors and reports, with as many `*`s as the members or none; by default the first member.
        attrs: {integer attribute: the axes whose product it holds}, such as `{"layers.*.attn.num_heads": "u"}`, for
            `compact` to update; attributes of torch.nn's own layers need not be listed.
        lists: names of `nn.ModuleList`s whose module k belongs to unit k, as each expert does to a row of its router;
            units are counted one scope after the other. Masks are then on all parameters of these modules (modules of
            two units may share none); what members have of a unit is removed without a mask.

    Raises:
        SparsityError: members differ in their `*`s, a member lacks an axis, an argument has the wrong type or value.

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
    sizes: Mapping[str, int] = field(default_factory=dict, kw_only=True)
    scores: str = field(default="sum", kw_only=True)
    name: str = field(default="", kw_only=True)
    attrs: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    lists: Sequence[str] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.members, Mapping) or not self.members:
            raise SparsityError(f"Coupling: members must be a dict {{name: axes}}, got {self.members!r}")
        for key in ("unit", "scope", "name"):
            if not isinstance(getattr(self, key), str):
                raise SparsityError(f"Coupling: {key} must be a str, got {getattr(self, key)!r}")
        object.__setattr__(self, "name", self.name or str(next(iter(self.members))))
        check_attrs(self._where, self.attrs)
        if not isinstance(self.lists, (list, tuple)) or not all(isinstance(one, str) for one in self.lists):
            raise SparsityError(f"{self._where}lists must be a list of names of nn.ModuleLists, got {self.lists!r}")
        object.__setattr__(self, "lists", tuple(self.lists))
        if not isinstance(self.sizes, Mapping):
            raise SparsityError(f"{self._where}sizes must be a dict {{axis: length}}, got {self.sizes!r}")
        for key in ("members", "sizes", "attrs"):
            object.__setattr__(self, key, dict(getattr(self, key)))
        if self.scores not in ("sum", "mean", "consumers"):
            raise SparsityError(f"{self._where}scores must be 'sum', 'mean' or 'consumers', got {self.scores!r}")
        if len(self.unit.split()) != 1 or self.unit in self.scope.split():
            raise SparsityError(f"{self._where}unit must be one axis that is not in scope, got {self.unit!r}")
        self._check_sizes(sorted({axis for item in self.members.items() for axis in self._axes_of(*item)}))
        self._check_stars()

    def __hash__(self) -> int:
        return hash((tuple(self.members.items()), self.unit, self.scope, self.scores, self.name, self.lists))

    def bind(self, model: nn.Module) -> list[BoundCoupling]:
        """The coupling in a model: one for each value of the `*`s, in the model's order.

        Raises:
            SparsityError: a name matches nothing, a member is missing for some value, a pattern does not fit.
            CouplingError: members have different numbers of units.

        >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(2, 5))
        >>> [(bound.name, bound.grid) for bound in Coupling({"*.weight": "u i", "*.bias": "u"}).bind(layers)]
        [('0.weight', (3,)), ('1.weight', (5,))]
        """
        tensors = dict(_tensors(checked_model(model, f"coupling {self.name!r}")))
        found = {member: match_names(member, tensors) for member in self.members}
        for member, matches in found.items():
            if not matches:
                raise SparsityError(f"{self._where}{member!r} matches no parameter or buffer of the model")
        captures = {captured: None for matches in found.values() for captured in matches}
        lists = find_lists(model, self.lists, self._where)
        bounds = [self._bind(captured, found, tensors) for captured in captures]
        return [with_lists(bound, lists, model, tensors) for bound in bounds] if lists else bounds

    def of_layers(self, model: nn.Module) -> list["Coupling"]:
        """One coupling for each that `bind` returns, without stars, so that each may keep another number of units.

        >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(2, 5))
        >>> [one.members for one in Coupling({"*.weight": "u i", "*.bias": "u"}).of_layers(layers)]
        [{'0.weight': 'u i', '0.bias': 'u'}, {'1.weight': 'u i', '1.bias': 'u'}]
        """
        names = dict(_tensors(model))
        found = {member: match_names(member, names) for member in self.members}
        return [
            replace(
                self,
                members={fqn: axes for member, axes in self.members.items() for fqn in found[member][bound.captured]},
                name=bound.name,
                attrs={fill_stars(path, bound.captured): axes for path, axes in self.attrs.items()},
                lists=bound.lists,
            )
            for bound in self.bind(model)
        ]

    def entries(self, model: nn.Module, **keys: Any) -> list[dict[str, Any]]:
        """Config dicts for a sparsifier, one for each parameter of the coupling; they can be mixed with any others.

        Buffers have no mask and no entry. A tensor may be named once in a config: for couplings that share one (the
        heads and the residual stream, in a query projection) use `joint_entries`.

        Args:
            model: where the names are looked up.
            keys: further keys of every entry: `sparsity_level` or `nnz` (of each scope), `norm`.

        Raises:
            SparsityError: as `bind`; a key that follows from the coupling; no member is a parameter.
        """
        return [entry for entries in self.bound_entries(model, **keys) for entry in entries]

    def bound_entries(self, model: nn.Module, **keys: Any) -> list[list[dict[str, Any]]]:
        """`entries`, as one list for each coupling that `bind` returns."""
        for key in keys:
            if key in (*_OWN_KEYS, *(_LIST_KEYS if self.lists else ())):
                raise SparsityError(f"{self._where}entries sets {key!r} from the coupling; do not pass it")
        bounds = self.bind(model)
        if self.lists:
            tensors = dict(named_tensors(model))
            return [list(listed_entries(bound, self.scores, tensors, keys)) for bound in bounds]
        return [list(self._entries(bound, keys)) for bound in bounds]

    @property
    def _where(self) -> str:
        return f"coupling {self.name!r}: "

    def _axes_of(self, member: object, axes: object) -> list[str]:
        """The axes of a member, checked."""
        if not isinstance(member, str) or not isinstance(axes, str):
            raise SparsityError(f"{self._where}a member is a name and its axes, two strs, got {member!r}: {axes!r}")
        patterns = occurrences(axes, self.unit)
        names = [axis for text in patterns for dimension in dimensions_of(text, f"{member}: ") for axis in dimension]
        for axis in (*self.scope.split(), self.unit):
            if axis not in names:
                raise SparsityError(
                    f"{self._where}{member} {axes!r} lacks the axis {axis!r}; every member needs the unit axis and the "
                    "scope axes"
                )
        if len(patterns) > 1 and self.scope:
            raise SparsityError(
                f"{self._where}{member} {axes!r} has the unit axis twice, so the coupling can have no scope"
            )
        return names

    def _check_sizes(self, known: list[str]) -> None:
        for axis, size in self.sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise SparsityError(f"{self._where}sizes[{axis!r}] must be a positive int, got {size!r}")
            if axis not in known:
                raise SparsityError(
                    f"{self._where}unknown axis {axis!r} in sizes; the members' axes are {', '.join(known)}"
                )

    def _check_stars(self) -> None:
        first = next(iter(self.members))
        for pattern in (*self.members, *self.lists, *self.attrs):
            count = count_stars(pattern)
            if count != count_stars(first) and (pattern not in self.attrs or count):
                raise SparsityError(
                    f"{self._where}{pattern!r} has {count} '*', but {first!r} has {count_stars(first)}. There is one "
                    "coupling for each value of '*', so all members need the same number; write '**' where all that "
                    "matches belongs to one coupling."
                )

    def _bind(
        self, captured: tuple[str, ...], found: Mapping[str, Mapping], tensors: Mapping[str, tuple[Tensor, bool]]
    ) -> BoundCoupling:
        name = fill_stars(self.name, captured) if count_stars(self.name) else " ".join((self.name, *captured))
        rows = list(self._rows(captured, found))
        shapes = {fqn: tuple(tensors[fqn][0].shape) for fqn, _, _ in rows}
        scope = tuple(self.scope.split())
        whole = [(fqn, axes, shapes[fqn]) for fqn, axes, _ in rows]
        sizes = solve_sizes(name, whole, {*scope, self.unit}, self.sizes)
        members: tuple[Member, ...] = ()
        first: dict[int, Member] = {}
        for fqn, axes, is_further in rows:
            own = {axis: sizes[axis] for dimension in dimensions_of(axes) for axis in dimension if axis in sizes}
            pattern = AxisPattern(axes=axes, unit=(*scope, self.unit), scope=scope, sizes=own, where=f"{fqn}: ")
            pattern.check_shape(shapes[fqn])
            tensor, is_parameter = tensors[fqn]
            same = None if is_further else first.get(id(tensor))
            tied_to = same.fqn if same is not None else ""
            has_mask = is_parameter and not is_further and not self.lists
            members += (Member(fqn=fqn, pattern=pattern, is_parameter=has_mask, tied_to=tied_to),)
            first.setdefault(id(tensor), members[-1])
            if same is not None and same.pattern.dimension_of(self.unit) != pattern.dimension_of(self.unit):
                raise SparsityError(
                    f"{self._where}{fqn} and {same.fqn} are one tensor, but have the unit in other dimensions: "
                    f"{axes!r} and {same.pattern.axes!r}"
                )
        return BoundCoupling(
            name=name, captured=captured, members=members, unit=self.unit, scope=scope, sizes=sizes, attrs=self.attrs
        )

    def _rows(self, captured: tuple[str, ...], found: Mapping[str, Mapping]) -> Iterator[tuple[str, str, bool]]:
        """(name, axes, whether an earlier dimension of the tensor has the unit too) of all tensors."""
        source: dict[str, str] = {}
        for member, axes in self.members.items():
            if captured not in found[member]:
                raise SparsityError(
                    f"{self._where}{', '.join(captured) or 'the model'} has no tensor {fill_stars(member, captured)!r}."
                    " Every member must exist for every value of *; leave the member out, or write two couplings."
                )
            for fqn in found[member][captured]:
                if fqn in source:
                    raise SparsityError(f"{self._where}{fqn} matches both {source[fqn]!r} and {member!r}")
                source[fqn] = member
                for at, text in enumerate(occurrences(axes, self.unit)):
                    yield fqn, text, at > 0

    def _entries(self, bound: BoundCoupling, keys: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        masked = [member for member in bound.members if member.is_parameter and not member.tied_to]
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
    """Raise unless attributes are a dict {name: axes}; the error begins with `where`."""
    if not isinstance(attrs, Mapping) or not all(isinstance(text, str) for pair in attrs.items() for text in pair):
        raise SparsityError(f"{where}attrs must be a dict {{name of an attribute: axes}} of strs, got {attrs!r}")


def _tensors(model: nn.Module) -> Iterator[tuple[str, tuple[Tensor, bool]]]:
    """Every parameter and buffer by its name before `prepare`, and whether it is a parameter."""
    for name, parameter in named_tensors(model):
        yield name, (parameter, True)
    for prefix, module in model.named_modules():
        if not isinstance(module, parametrize.ParametrizationList) and ".parametrizations." not in f".{prefix}.":
            for name, buffer in module.named_buffers(prefix, recurse=False):
                yield name, (buffer, False)
