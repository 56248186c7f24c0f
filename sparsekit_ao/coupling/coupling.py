"""`Coupling`, which describes by name patterns and einops axes which units of several tensors are pruned together.

A `Coupling` does not refer to a model; `bind` matches it against one, and returns a `BoundCoupling` for each layer.
"""

import copy
import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from string import ascii_letters
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SparsityError, checked_model
from ..models.names import named_tensors, owner_of, parameter_of
from ..structure import AxisPattern, dimensions_of
from ..structure.tiles import Shape
from .bound import (
    BoundCoupling,
    Matches,
    Member,
    count_stars,
    fill_stars,
    match_lists,
    match_names,
    occurrences,
    solve_sizes,
    with_lists,
)

_ENTRY_KEYS = ("tensor_fqn", "axes", "unit", "scope", "sizes", "block_coupling", "member_scores")  # `entries` sets them
_LIST_KEYS = ("block_shape", "scope_coupling")  # and these, for a coupling with `lists`
_Rows = list[tuple[str, dict[str, Any]]]  # (name of a parameter, config keys that define its blocks)


@dataclass(frozen=True)
class Coupling:
    """Describe units that several tensors share, and that are kept, dropped or removed in all of them together.

    A unit is a hidden unit of an MLP, an attention head, a channel, and so on. Names of tensors may contain stars. A
    `*` matches one part of a dotted name, and there is one coupling for each of its values:
    `"layers.*.mlp.up_proj.weight"` stands for one coupling in each layer. A `**` matches any text, and all tensors that
    it matches belong to the same coupling, such as all layers that write and read one residual stream.

    Args:
        members: {name of a parameter or buffer: its axes}. A unit consists of the elements at one index of the unit
            axis and of the scope axes. The unit axis, the scope axes and those of `sizes` have the same length in all
            members; other axes may have another length in each. `"o (8 + u + 4)"` describes a concatenation whose units
            lie between the first 8 and the last 4 entries. If a tensor has the unit in two dimensions (`"(g u) u"`, as
            recurrent weights do), the mask drops units along the first of them, and `compact` removes both.
        unit: The name of the axis that is kept or dropped; "u" by default.
        scope: Names of axes, in one str. The same number of units is kept at each index of these axes, for example in
            each key head if the units are query heads.
        sizes: {axis: length}, for axes whose length the shapes do not determine.
        member_scores: How the scores of the members are combined: `"sum"`, `"mean"` or `"consumers"`, as for
            `ScopeSparsifier`.
        name: The name in errors and reports; by default the name of the first member. If it has no `*`, the text that
            the `*`s of the members match is appended to it. Otherwise its `*`s are replaced by this text, and it needs
            at least as many of them as a member has.
        attrs: {name of an integer attribute: the axes whose product it holds}, such as
            `{"layers.*.attn.num_heads": "u"}`. `compact` updates these attributes. Attributes of torch.nn's own layers
            need not be listed.
        lists: Names of `nn.ModuleList`s whose module k belongs to unit k, as an expert belongs to a row of its router;
            units are counted one scope after the other. All parameters of these modules then have masks (modules of two
            units may not share a parameter). The members themselves (such as the router) then have no masks; `compact`
            removes the elements of a unit from them without one.

    Raises:
        SparsityError: Members or the name differ in their `*`s, a member lacks an axis, or an argument has a wrong type
            or value.

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
    member_scores: str = field(default="sum", kw_only=True)
    name: str = field(default="", kw_only=True)
    attrs: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    lists: Sequence[str] = field(default=(), kw_only=True)
    #: the name of the coupling that this one is a layer of, or ""
    layer_of: str = field(default="", repr=False, compare=False, kw_only=True)
    #: False if repeated modules that share the units are branches, none of which reads what another one has written
    passes_on: bool = field(default=True, repr=False, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.members, Mapping) or not self.members:
            raise SparsityError(f"Coupling: members must be a dict {{name: axes}}, got {self.members!r}")
        for key in ("unit", "scope", "name"):
            if not isinstance(getattr(self, key), str):
                raise SparsityError(f"Coupling: {key} must be a str, got {getattr(self, key)!r}")
        object.__setattr__(self, "name", self.name or str(next(iter(self.members))))
        check_attrs(self._where, self.attrs)
        if not isinstance(self.lists, (list, tuple)) or not all(isinstance(name, str) for name in self.lists):
            raise SparsityError(f"{self._where}lists must be a list of names of nn.ModuleLists, got {self.lists!r}")
        object.__setattr__(self, "lists", tuple(self.lists))
        if not isinstance(self.sizes, Mapping):
            raise SparsityError(f"{self._where}sizes must be a dict {{axis: length}}, got {self.sizes!r}")
        for key in ("members", "sizes", "attrs"):
            object.__setattr__(self, key, dict(getattr(self, key)))
        if self.member_scores not in ("sum", "mean", "consumers"):
            raise SparsityError(
                f"{self._where}member_scores must be 'sum', 'mean' or 'consumers', got {self.member_scores!r}"
            )
        if len(self.unit.split()) != 1 or self.unit in self.scope.split():
            raise SparsityError(f"{self._where}unit must be one axis that is not in scope, got {self.unit!r}")
        known = sorted({axis for item in self.members.items() for axis in self._axes_of(*item)})
        for axis, size in self.sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise SparsityError(f"{self._where}sizes[{axis!r}] must be a positive int, got {size!r}")
            if axis not in known:
                axes = ", ".join(known)
                raise SparsityError(f"{self._where}unknown axis {axis!r} in sizes; the members' axes are {axes}")
        first = next(iter(self.members))
        for pattern in (*self.members, *self.lists, *self.attrs):
            count = count_stars(pattern)
            if count != count_stars(first) and (pattern not in self.attrs or count):
                raise SparsityError(
                    f"{self._where}{pattern!r} has {count} '*', but {first!r} has {count_stars(first)}. There is one "
                    "coupling for each value of '*', so all members need the same number; write '**' where all that "
                    "matches belongs to one coupling."
                )
        if 0 < count_stars(self.name) < count_stars(first):
            raise SparsityError(
                f"{self._where}the name has {count_stars(self.name)} '*', but {first!r} has {count_stars(first)}, so "
                f"several couplings would have the same name; write {count_stars(first)} '*' in the name, or none"
            )

    def __hash__(self) -> int:
        return hash((frozenset(self.members.items()), self.unit, self.scope, self.member_scores, self.name, self.lists))

    @property
    def kind(self) -> str:
        """Return what the units are, judged by names and axes.

        It is "heads", "key heads", "query heads", "head size", "mlp", "experts" (whole ones), "expert units" (inside
        each expert) or "width", which means the hidden size that passes from one repeated module to the next. Modules
        of a list that are branches of one input are no such modules, if `discover` has found the coupling. Other units
        are named by their module, such as "conv2 channels" or "gate units".

        >>> Coupling({"blocks.*.attn.qkv.weight": "(g u d) i", "blocks.*.attn.proj.weight": "o (u d)"}).kind
        'heads'
        """
        if self.lists:
            return "experts"
        first = next(iter(self.members))
        path = [part for part in first.split(".")[:-1] if not part.isdigit() and set(part) != {"*"}]
        shapes = [dimensions_of(occurrences(axes, self.unit)[0]) for axes in self.members.values()]
        divided = [d for shape in shapes for d in shape if self.unit in d]
        inside = [len(d) - 1 - d.index(self.unit) for d in divided]  # the number of axes inside of a unit
        if len(divided[0]) > 1 and re.search("attn|attention", first, re.IGNORECASE):
            # A unit that is a key head has more axes in query and output weights, where it has a group of heads:
            # "(u g d)" beside "(u d)".
            all_heads = "key heads" if 0 < min(inside) < inside[0] == inside[-1] else "heads"
            return "head size" if not inside[0] else "query heads" if self.scope else all_heads
        # Units are shared by many layers if matrices with the same axes differ only in the numbers of their layers. In
        # a plain chain of layers, one matrix writes the units (first axis) and the next one reads them (second axis).
        # Depthwise convolutions and norms do neither.
        matrices = [
            (re.sub(r"(?<![^.])\d+(?=\.[^.]+\.)", "*", member), [self.unit in d for d in shape[:2]])
            for member, shape in zip(self.members, shapes, strict=True)
            if len(shape) > 1 and not all(axis.isdigit() for axis in shape[1])
        ]
        if self.passes_on and any("**" in name or matrices.count((name, at)) > 1 for name, at in matrices):
            return "width"
        if "experts" in path:
            is_packed = first.split(".")[-2:-1] == ["experts"] and len(shapes[0]) > 2
            return "experts" if is_packed and self.unit in shapes[0][0] else "expert units"
        if len(shapes[0]) > 2:
            return " ".join([*path[-1:], "channels"])
        is_mlp = re.search(r"mlp|ffn|pwconv|feed_?forward|fc\d?\b|dense|intermediate|linear", first, re.IGNORECASE)
        return "mlp" if is_mlp or not path else f"{path[-1]} units"

    def bind(self, model: nn.Module) -> list[BoundCoupling]:
        """Return a bound coupling for each value of the `*`s in the names of a model, in the order of the model.

        Raises:
            SparsityError: A name matches nothing, a member is missing for one value of the `*`s, or axes do not fit.
            CouplingError: Members have different numbers of units.

        >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(2, 5))
        >>> [(bound.name, bound.grid) for bound in Coupling({"*.weight": "u i", "*.bias": "u"}).bind(layers)]
        [('0.weight', (3,)), ('1.weight', (5,))]
        """
        parameters = dict(named_tensors(checked_model(model, f"coupling {self.name!r}")))
        modules = [(p, module) for p, module in model.named_modules() if ".parametrizations." not in f".{p}."]
        buffers = {f"{p}.{key}".lstrip("."): b for p, m in modules for key, b in m._buffers.items() if b is not None}
        tensors = parameters | buffers
        matches = {member: match_names(member, tensors) for member in self.members}
        for member, names in matches.items():
            if not names:
                path, _, last = member.rpartition(".")
                shared = dict(model.named_modules(remove_duplicate=False)).get(path)
                first = next((f"{p}.{last}".lstrip(".") for p, module in modules if module is shared), "")
                missing = "matches no parameter or buffer of the model"
                why = f"is a second name of {first!r}; use that one" if first in tensors else missing
                raise SparsityError(f"{self._where}{member!r} {why}")
        lists = match_lists(model, self.lists, self._where)
        values = dict.fromkeys(captured for names in matches.values() for captured in names)
        bound_couplings = [self._bind(captured, matches, tensors, parameters) for captured in values]
        return [with_lists(b, lists, model, parameters) for b in bound_couplings] if lists else bound_couplings

    def of_layers(self, model: nn.Module) -> list["Coupling"]:
        """Return a coupling without stars for each bound coupling, so that each may keep its own number of units.

        >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(2, 5))
        >>> [c.members for c in Coupling({"*.weight": "u i", "*.bias": "u"}).of_layers(layers)]
        [{'0.weight': 'u i', '0.bias': 'u'}, {'1.weight': 'u i', '1.bias': 'u'}]
        """
        return [self.of_layer(bound) for bound in self.bind(model)]

    def of_layer(self, bound: BoundCoupling) -> "Coupling":
        """Return a coupling without stars for one of the bound couplings."""
        names = [member.fqn for member in bound.members]
        pairs = [(match_names(member, names)[bound.captured], axes) for member, axes in self.members.items()]
        members = {fqn: axes for fqns, axes in pairs for fqn in fqns}
        attrs = {fill_stars(path, bound.captured): axes for path, axes in self.attrs.items()}
        origin = self.layer_of or self.name
        return replace(self, members=members, name=bound.name, attrs=attrs, lists=bound.lists, layer_of=origin)

    def entries(self, model: nn.Module, **keys: Any) -> list[dict[str, Any]]:
        """Return config dicts for a sparsifier, one for each parameter. A config may also have further entries.

        Buffers have no mask and no entry. A config may name a tensor only once. For couplings that share a tensor, as
        heads and the residual stream share a query projection, use `joint_entries`.

        Args:
            model: The model in which names are looked up.
            keys: Further keys of every entry, such as `norm`, and `sparsity_level` or `nnz` of each scope.

        Raises:
            SparsityError: As for `bind`, or a key is given that the coupling sets itself, or no member is a parameter.
        """
        return [entry for entries in self._entries(model, keys) for entry in entries]

    def _entries(self, model: nn.Module, keys: Mapping[str, Any]) -> Iterator[list[dict[str, Any]]]:
        """Yield the entries of each bound coupling."""
        for key in keys:
            if key in (*_ENTRY_KEYS, *(_LIST_KEYS if self.lists else ())):
                raise SparsityError(f"{self._where}entries sets {key!r} from the coupling; do not pass it")
        for bound in self.bind(model):
            rows_of = _module_rows(bound, model) if bound.lists else {bound.name: _member_rows(bound)}
            if not all(rows_of.values()):
                raise SparsityError(f"{self._where}no member is a parameter, so there is nothing to put a mask on")
            entries = []
            for name, rows in rows_of.items():
                shared: dict[str, Any] = {"block_coupling": name} if len(rows) > 1 else {}
                shared |= {"member_scores": self.member_scores} if shared and self.member_scores != "sum" else {}
                entries += [{"tensor_fqn": fqn, **block, **shared, **keys} for fqn, block in rows]
            yield entries

    def name_of(self, captured: tuple[str, ...]) -> str:
        """Return the name of the bound coupling for these values of the `*`s."""
        return fill_stars(self.name, captured) if count_stars(self.name) else " ".join((self.name, *captured))

    @property
    def _where(self) -> str:
        return f"coupling {self.name!r}: "

    def _axes_of(self, member: object, axes: object) -> list[str]:
        """Return the names of the axes of a member; raise an error if it lacks one that every member needs."""
        if not isinstance(member, str) or not isinstance(axes, str):
            raise SparsityError(
                f"{self._where}members must map names to axes, both of type str, got {member!r}: {axes!r}"
            )
        patterns = occurrences(axes, self.unit)
        names = [axis for text in patterns for dimension in dimensions_of(text, f"{member}: ") for axis in dimension]
        for axis in (*self.scope.split(), self.unit):
            if axis not in names:
                need = "every member needs the unit axis and the scope axes"
                raise SparsityError(f"{self._where}{member} {axes!r} lacks the axis {axis!r}; {need}")
        if len(patterns) > 1 and self.scope:
            why = "has the unit axis twice, so the coupling can have no scope"
            raise SparsityError(f"{self._where}{member} {axes!r} {why}")
        return names

    def _bind(
        self,
        captured: tuple[str, ...],
        matches: Mapping[str, Matches],
        tensors: Mapping[str, Tensor],
        parameters: Collection[str],
    ) -> BoundCoupling:
        """Return the coupling of the members whose `*`s match the values in `captured`, one for each `*`."""
        name = self.name_of(captured)
        rows: list[tuple[str, str, bool]] = []  # (name, axes, whether an earlier dimension has the unit)
        source: dict[str, str] = {}
        for member, axes in self.members.items():
            if captured not in matches[member]:
                raise SparsityError(
                    f"{self._where}the model has no tensor {fill_stars(member, captured)!r}, but other members have "
                    f"{', '.join(captured)} in place of '*'. Every member must exist for every value of '*'; leave the "
                    "member out, or write two couplings."
                )
            for fqn in matches[member][captured]:
                if fqn in source:
                    raise SparsityError(f"{self._where}{fqn} matches both {source[fqn]!r} and {member!r}")
                source[fqn] = member
                rows += [(fqn, text, at > 0) for at, text in enumerate(occurrences(axes, self.unit))]
        scope = tuple(self.scope.split())
        shapes = [(fqn, axes, tuple(tensors[fqn].shape)) for fqn, axes, _ in rows]
        sizes = solve_sizes(name, shapes, {*scope, self.unit}, self.sizes)
        members: tuple[Member, ...] = ()
        first_of: dict[int, Member] = {}  # {id of a tensor: its first member}
        for fqn, axes, is_further in rows:
            known = {axis: sizes[axis] for dimension in dimensions_of(axes) for axis in dimension if axis in sizes}
            try:
                shared = _fitted(axes, (*scope, self.unit), scope, tuple(known.items()), tuple(tensors[fqn].shape))
            except SparsityError as e:
                raise SparsityError(f"{fqn}: {e}") from None
            pattern = copy.copy(shared)  # the cached pattern, with the name of this tensor in its errors
            object.__setattr__(pattern, "where", f"{fqn}: ")
            tied = None if is_further else first_of.get(id(tensors[fqn]))
            has_mask = fqn in parameters and not is_further and not self.lists
            members += (Member(fqn=fqn, pattern=pattern, is_parameter=has_mask, tied_to=tied.fqn if tied else ""),)
            first_of.setdefault(id(tensors[fqn]), members[-1])
            shape = tuple(tensors[fqn].shape)
            if tied and _places(tied.pattern, shape) != _places(pattern, shape):
                raise SparsityError(
                    f"{self._where}{fqn} and {tied.fqn} are one tensor, but have the units in different places: "
                    f"{axes!r} and {tied.pattern.axes!r}"
                )
        keys: dict[str, Any] = {"members": members, "unit": self.unit, "scope": scope, "sizes": sizes}
        return BoundCoupling(name=name, captured=captured, attrs=self.attrs, kind=self.kind, **keys)


@lru_cache(maxsize=4096)
def _fitted(
    axes: str, unit: tuple[str, ...], scope: tuple[str, ...], sizes: tuple[tuple[str, int], ...], shape: Shape
) -> AxisPattern:
    """Return a pattern that was checked to fit a shape; the layers of a deep model share few patterns and shapes."""
    pattern = AxisPattern(axes=axes, unit=unit, scope=scope, sizes=dict(sizes))
    pattern.check_shape(shape)
    return pattern


def _places(pattern: AxisPattern, shape: Shape) -> tuple[Any, ...]:
    """Return where the units of a pattern begin in memory, and their strides."""
    view = pattern(torch.empty(shape, device="meta"))
    return view.storage_offset(), view.stride()[: len(pattern.unit)]


def check_attrs(where: str, attrs: object) -> None:
    """Raise an error that begins with `where` unless `attrs` is a dict {name of an attribute: axes}."""
    if not isinstance(attrs, Mapping) or not all(isinstance(text, str) for pair in attrs.items() for text in pair):
        raise SparsityError(f"{where}attrs must be a dict {{name of an attribute: axes}} of strs, got {attrs!r}")


def _member_rows(bound: BoundCoupling) -> _Rows:
    """Return parameters of a coupling without lists and keys of their coupled blocks, each of which is one unit."""
    rows = []
    for member in bound.members:
        if member.is_parameter and not member.tied_to:
            pattern = member.pattern
            block: dict[str, Any] = {"axes": pattern.axes, "unit": " ".join(pattern.unit)}
            block |= {"scope": " ".join(pattern.scope)} if pattern.scope else {}
            # The shape itself determines the length of an axis that is a whole dimension.
            packed = {axis for dimension in pattern.dimensions if len(dimension) > 1 for axis in dimension}
            sizes = {axis: size for axis, size in pattern.sizes.items() if axis in packed}
            rows.append((member.fqn, block | ({"sizes": sizes} if sizes else {})))
    return rows


def _module_rows(bound: BoundCoupling, model: nn.Module) -> dict[str, _Rows]:
    """Return {name of a unit: parameters of its modules, with keys of their blocks} of a coupling with lists."""
    rows_of = {}
    for at, names in enumerate(bound.listed):
        scope = f"{bound.name}, scope {at // bound.scope_units}" if bound.scope else bound.name
        parameters = {fqn: parameter_of(*owner_of(model, fqn)) for fqn in names}
        first_name = {id(parameters[fqn]): fqn for fqn in reversed(names)}  # a tied parameter has only one entry
        # The parameters of one unit are one coupled block, and the units of a scope share its budget.
        rows_of[f"{bound.name}, unit {at}"] = [
            (fqn, {"block_shape": (-1,) * parameters[fqn].ndim, "scope_coupling": scope})
            for fqn in names
            if first_name[id(parameters[fqn])] == fqn
        ]
    return rows_of


def joint_entries(couplings: Sequence[Coupling], model: nn.Module, **keys: Any) -> list[dict[str, Any]]:
    """Return config dicts for one sparsifier of several couplings, so that one schedule changes the levels of all.

    If couplings share a tensor, as heads and the residual stream share a query projection, the entry of this tensor has
    `stages`, and its mask drops what any of the couplings drops. A coupling has the first stage that is free in all of
    its tensors, so couplings of the same tensors have the stages in their order. A scheduler that writes
    `sparsity_level` changes the level of every coupling, except where the entry of a tensor has `stages` and a coupling
    has its own budget (a dict, see `keys`).

    Args:
        couplings: A sequence of couplings with different names.
        model: The model in which names are looked up.
        keys: Further keys of every entry, as for `Coupling.entries`. `sparsity_level` and `nnz` may also be a dict
            {name of a coupling: number}; a coupling without a number has the sparsifier's default.

    Raises:
        SparsityError: As for `Coupling.entries`, or two couplings have the same name, or a budget names an unknown
            coupling.

    >>> from sparsekit_ao import ScopeSparsifier
    >>> model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 8), nn.Linear(8, 2))
    >>> couplings = [Coupling({f"{k}.weight": "u i", f"{k + 1}.weight": "o u"}) for k in (0, 1)]
    >>> sparsifier = ScopeSparsifier()
    >>> sparsifier.prepare(model, joint_entries(couplings, model, sparsity_level=0.5))
    >>> sparsifier.step()
    >>> mask = sparsifier.mask("1.weight")  # half of its rows, and half of its columns
    >>> int(mask.any(1).sum()), int(mask.any(0).sum()), int(mask.sum())
    (4, 3, 12)
    """
    checked_model(model, "joint_entries")
    if not isinstance(couplings, (list, tuple)) or not all(isinstance(c, Coupling) for c in couplings):
        raise SparsityError(f"joint_entries: couplings must be a list of Coupling, got {type(couplings).__name__}")
    names = [coupling.name for coupling in couplings]
    if twice := [name for name in names if names.count(name) > 1]:
        advice = "give them names: Coupling(name=...)"
        raise SparsityError(f"joint_entries: two couplings have the name {twice[0]!r}; {advice}")
    budgets = {key: value for key, value in keys.items() if isinstance(value, Mapping)}
    for key, value in budgets.items():
        for name in set(value) - set(names):
            raise SparsityError(f"joint_entries: {key} names {name!r}, but the couplings are {', '.join(names)}")
    # A budget of all couplings stays outside of the stages, where schedulers change it.
    common: dict[str, Any] = {key: keys[key] for key in ("sparsity_level", "nnz") if key in keys and key not in budgets}
    other_keys = {key: value for key, value in keys.items() if key not in common and key not in budgets}
    stages: dict[str, dict[int, dict[str, Any]]] = {}  # {parameter: {stage: the keys of this stage}}
    first_name: dict[int, str] = {}  # {id of a parameter: its name that comes first}
    for coupling in couplings:
        budget = {key: value[coupling.name] for key, value in budgets.items() if coupling.name in value}
        for entries in coupling._entries(model, other_keys | budget):
            fqns = [entry.pop("tensor_fqn") for entry in entries]
            fqns = [first_name.setdefault(id(parameter_of(*owner_of(model, fqn))), fqn) for fqn in fqns]
            taken = {stage for fqn in fqns for stage in stages.get(fqn, ())}
            free = next(stage for stage in itertools.count() if stage not in taken)  # coupled tensors share a stage
            for fqn, entry in zip(fqns, entries, strict=True):
                stages.setdefault(fqn, {})[free] = entry
    joint = []
    for fqn, of_tensor in stages.items():
        shape = (-1,) * parameter_of(*owner_of(model, fqn)).ndim
        # A stage that drops nothing: the whole tensor is one block, which is kept. It fills gaps before later stages.
        kept = {"block_shape": shape, "nnz": 1, "norm": 2, "member_scores": "sum", "scope_coupling": None}
        joined = {"stages": [of_tensor.get(stage, kept) for stage in range(max(of_tensor) + 1)]}
        joint.append({"tensor_fqn": fqn, **(of_tensor[0] if set(of_tensor) == {0} else joined), **common})
    return joint


def merged_couplings(first: Coupling, second: Coupling, model: nn.Module) -> Coupling | None:
    """Return one coupling in place of two, or None if they cannot be merged.

    A unit of the result is one unit of the coupling with fewer units, together with an equal share of the units of the
    other: in a rotary attention, a pair of numbers of the queries and keys belongs with two numbers of the values.

    >>> model = nn.ModuleDict({"q": nn.Linear(3, 8), "v": nn.Linear(3, 8)})
    >>> pairs, single = Coupling({"q.weight": "(d u) i"}, sizes={"d": 2}), Coupling({"v.weight": "u i"})
    >>> merged_couplings(pairs, single, model).members
    {'q.weight': '(d u) i', 'v.weight': '(a u) i'}
    """
    texts = [(axes, coupling.unit) for coupling in (first, second) for axes in coupling.members.values()]
    if any("+" in axes or len(occurrences(axes, unit)) > 1 for axes, unit in texts):
        return None
    if count_stars(next(iter(first.members))) != count_stars(next(iter(second.members))):
        first, second = _of_all_layers(first), _of_all_layers(second)
    try:
        ours, theirs = first.bind(model), second.bind(model)
    except SparsityError:  # layers of different sizes cannot have the same units
        return None
    first_names, second_names = ({m.fqn for bound in bounds for m in bound.members} for bounds in (ours, theirs))
    if [bound.captured for bound in ours] != [bound.captured for bound in theirs] or first_names & second_names:
        return None
    if ours[0].scope_units > theirs[0].scope_units:  # the first is to be the one with fewer units
        first, second, ours, theirs = second, first, theirs, ours
    ratios = {b.scope_units / a.scope_units for a, b in zip(ours, theirs, strict=True)}
    if len(ratios) > 1 or not (ratio := ratios.pop()).is_integer():
        return None
    if ours[0].grid[:-1] != theirs[0].grid[:-1]:
        first, second = (  # without scopes, so that the same units are kept at every index of the scope axes
            replace(c, scope="", sizes={**{axis: bound.sizes[axis] for axis in bound.scope}, **c.sizes})
            for c, (bound, *_) in ((first, ours), (second, theirs))
        )
    return _joined(first, second, int(ratio))


def _of_all_layers(coupling: Coupling) -> Coupling:
    """Return a coupling that has the same units in all layers: every `*` becomes a `**`."""
    members, attrs = (
        {text.replace("**", "*").replace("*", "**"): axes for text, axes in texts.items()}
        for texts in (coupling.members, coupling.attrs)
    )
    return replace(coupling, members=members, attrs=attrs, passes_on=True)


def _joined(first: Coupling, second: Coupling, ratio: int) -> Coupling:
    """Return the first coupling with the members of the second, of which `ratio` units make one unit of the first."""
    used, added = (
        {axis: None for text in c.members.values() for d in dimensions_of(text) for axis in d} for c in (first, second)
    )
    unused = (letter for letter in ascii_letters if letter not in used | added)
    scopes = dict(zip(second.scope.split(), first.scope.split(), strict=True))
    # {axis of the second coupling: its new names}; the unit becomes two axes if `ratio` is above 1.
    sized = {*second.scope.split(), *second.sizes, *first.scope.split(), *first.sizes, first.unit} - {second.unit}
    new_names = {axis: [scopes.get(axis) or next(unused)] for axis in added if axis in sized}
    factors = [next(unused)] if ratio > 1 else []
    new_names[second.unit] = [*factors, first.unit]
    sizes = {new_names[axis][0]: size for axis, size in second.sizes.items()} | dict.fromkeys(factors, ratio)

    def renamed(axes: list[str]) -> list[str]:
        return [name for axis in axes for name in new_names.get(axis, [axis])]

    members = dict(first.members)
    for member, text in second.members.items():
        dimensions = map(renamed, dimensions_of(text))
        members[member] = " ".join("1" if not d else d[0] if len(d) == 1 else f"({' '.join(d)})" for d in dimensions)
    attrs = {path: " ".join(renamed(text.split())) for path, text in second.attrs.items()}
    return replace(first, members=members, sizes={**sizes, **first.sizes}, attrs={**attrs, **first.attrs})
