"""Integers outside of torch.nn's layers that hold a removed size: `num_heads` of a module, fields of a config.

Those that a coupling lists in `attrs` are changed; others that seem to hold one are only reported.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from ..coupling import Coupling
from ..coupling.bound import count_stars, fill_stars, match_names
from ..coupling.coupling import check_attrs
from ..errors import SparsityError
from ..sparsifiers.names import owner_of
from .removal import Removal, plain_tensors, sizes_of


@dataclass(frozen=True, kw_only=True)
class Change:
    """A new value of one attribute.

    Attributes:
        path: relative to the model, `layers.0.attention.num_heads` or `config.hidden_size`.
        was, now: its values.
    """

    path: str
    was: Any
    now: Any


def assign_attrs(couplings: Sequence[Coupling], attrs: Mapping[str, str]) -> list[Coupling]:
    """The couplings, with every attribute added to the one that has its axes.

    Raises:
        SparsityError: no coupling has them, or several.
    """
    out = list(couplings)
    check_attrs("", attrs)
    for path, axes in attrs.items():
        fits = [at for at, coupling in enumerate(out) if _fits(coupling, path, axes.split())]
        if len(fits) != 1:
            names = ", ".join(repr(out[at].name) for at in fits) or "none"
            raise SparsityError(
                f"attrs[{path!r}] = {axes!r} must name the unit axis of one coupling, its scope axes and its sizes, "
                f"but fits {names}. Pass it to its coupling: Coupling(..., attrs={{...}}), or name units differently."
            )
        at = fits[0]
        out[at] = replace(out[at], attrs={**out[at].attrs, path: axes})
    return out


def _fits(coupling: Coupling, path: str, axes: Sequence[str]) -> bool:
    known = {coupling.unit, *coupling.scope.split(), *coupling.sizes}
    captures = count_stars(next(iter(coupling.members)))
    return coupling.unit in axes and set(axes) <= known and count_stars(path) in (0, captures)


def find_changes(model: nn.Module, removals: Sequence[Removal]) -> list[Change]:
    """New values of all attributes that the couplings list.

    Couplings that share a tensor each shrink a factor of their own. Those that share none and list the same axes are
    layers that hold the same number: they must agree, and it shrinks once.

    Raises:
        SparsityError: there is no such attribute, it holds another number, layers need different ones, or several
            couplings of one tensor count the same factor of it.
    """
    found: dict[tuple[int, str], Change] = {}
    counted: dict[tuple[int, str], list[tuple[Removal, str]]] = {}
    listed = [(removal, *item) for removal in removals for item in removal.coupling.attrs.items()]
    for removal, pattern, axes in listed:
        path = fill_stars(pattern, removal.coupling.captured)
        name, where = removal.coupling.name, f"coupling {removal.coupling.name!r}: attrs "
        for full, holder, attribute in _existing(model, path, where):
            was, key = value_of(holder, attribute), (id(holder), attribute)
            _check_value(full, was, holder, axes, removal, where)
            first = _counted_by(model, counted.setdefault(key, []), removal, axes)
            if first.kept * removal.of != removal.kept * first.of:
                raise SparsityError(
                    f"{where}{full!r} is one number for several layers, but {first.coupling.name!r} keeps {first.kept} "
                    f"of {first.of} and {name!r} {removal.kept} of {removal.of}. Keep equal numbers, or do not list it."
                )
            if first is removal:
                now = found[key].now if key in found else was
                if now % removal.of:
                    raise SparsityError(
                        f"{where}{full!r} is {was}, and other couplings that list it leave {now}, no multiple of the "
                        f"{removal.of} units here. Each coupling must count a factor of its own; if all hold the same "
                        "number, list it in one of them."
                    )
                change = found.setdefault(key, Change(path=full, was=was, now=now))
                found[key] = replace(change, now=now // removal.of * removal.kept)
    return list(found.values())


def _counted_by(model: nn.Module, counted: list[tuple[Removal, str]], removal: Removal, axes: str) -> Removal:
    """The removal that shrinks the factor counted by this one: an earlier one of another layer, or itself."""
    for first, listed in counted:
        same_axes = listed == axes and not _tensor_ids(model, first) & _tensor_ids(model, removal)
        if first.source == removal.source or same_axes:
            return first
    counted.append((removal, axes))
    return removal


def _tensor_ids(model: nn.Module, removal: Removal) -> set[int]:
    return {id(tensor) for tensor in plain_tensors(model, [m.fqn for m in removal.coupling.members]).values()}


def check_old_values(model: nn.Module, changes: Sequence[Change]) -> None:
    """Check that every attribute is an integer of a module, or of a module's config, of the value that it had.

    Raises:
        SparsityError: there is no such attribute, it is none that can be set, or it has another value.
    """
    for change in changes:
        for full, holder, name in _existing(model, change.path, "cut_to: "):
            is_config = change.path.rpartition(".")[0].endswith("config")
            descriptor = getattr(type(holder), name.partition("[")[0], None)
            is_fixed = isinstance(descriptor, property) and descriptor.fset is None
            if not (isinstance(holder, nn.Module) or is_config) or is_fixed:
                raise SparsityError(f"cut_to: {full!r} is no integer of a module or its config that can be set")
            if type(value_of(holder, name)) is not type(change.was) or value_of(holder, name) != change.was:
                raise SparsityError(
                    f"cut_to: {full!r} is {value_of(holder, name)!r}, but was {change.was!r} in the dense model; "
                    "construct the model as the dense one was constructed"
                )


def apply_changes(model: nn.Module, changes: Sequence[Change]) -> None:
    """Set the attributes."""
    for change in changes:
        (_, holder, name), *_ = _existing(model, change.path, "")
        _set(holder, name, change.now)


def unlisted_sizes(small: nn.Module, removals: Sequence[Removal], done: Sequence[Change]) -> list[str]:
    """Integers, in the modules around smaller tensors and in the model's config, that still equal a removed size."""
    known = {change.path for change in done}
    found: dict[str, str] = {}
    for removal in removals:
        coupling = removal.coupling
        old = {removal.of, math.prod(coupling.grid)}
        for pattern in (member.pattern for member in coupling.members):
            dimension = pattern.dimensions[pattern.dimension_of(coupling.unit)]
            old.add(math.prod(pattern.sizes.get(axis, 0) for axis in dimension))
        for path, value, least in () if removal.is_empty else _integers_near(small, removal):
            if value in old and value >= least and path not in known:
                found.setdefault(path, f"{path} = {value}, as {coupling.name!r} had")
    return list(found.values())


def _integers_near(model: nn.Module, removal: Removal) -> Iterator[tuple[str, int, int]]:
    """Integers of the modules that hold members, of the modules around those, and of the config; no layer's own.

    Also of their siblings that hold no tensor (a GroupNorm without weights). Those, as a config, hold many small
    numbers that are no sizes (2 layers, a stride of 2), so each comes with the least value that is considered.
    """
    holders: dict[str, set[str]] = {"config": set()} if hasattr(model, "config") else {}
    for member in removal.coupling.members:
        prefix = member.fqn.rpartition(".")[0]
        tensor = _reached(model, member.fqn)
        if not isinstance(tensor, Tensor):
            continue  # in a module that was dropped from its list, perhaps with another one in its place
        module, name = owner_of(model, member.fqn)
        holders.setdefault(prefix, set()).update(sizes_of(module, name, tensor, ()))
        holders.setdefault(prefix.rpartition(".")[0], set())
    empty = {name for name, module in model.named_modules() if not [*module.parameters(), *module.buffers()]}
    siblings = {name for name in empty if name.rpartition(".")[0] in holders} - holders.keys()
    for prefix, own in (holders | {name: set() for name in siblings}).items():
        for name, value in getattr(_reached(model, prefix), "__dict__", {}).items():
            if isinstance(value, int) and not isinstance(value, bool) and name not in own and not name.startswith("_"):
                yield f"{prefix}.{name}".removeprefix("."), value, 4 if prefix in {"config", *siblings} else 0


def _check_value(path: str, value: object, holder: object, axes: str, removal: Removal, where: str) -> None:
    sizes, names = removal.coupling.sizes, axes.split()
    descriptor = getattr(type(holder), path.rpartition(".")[2].partition("[")[0], None)
    if isinstance(descriptor, property) and descriptor.fset is None:
        raise SparsityError(f"{where}{path!r} is a property that cannot be set; list what it is computed from")
    for axis in names:
        if axis not in sizes:
            raise SparsityError(
                f"{where}{path!r} = {axes!r}: unknown axis {axis!r}; the coupling has sizes of {', '.join(sizes)}"
            )
    if removal.coupling.unit not in names:
        raise SparsityError(
            f"{where}{path!r} = {axes!r} lacks the unit axis {removal.coupling.unit!r}, so it would not change"
        )
    product = math.prod(sizes[axis] for axis in names)
    if isinstance(value, bool) or not isinstance(value, int) or value != product:
        factors = " * ".join(f"{axis}={sizes[axis]}" for axis in names)
        raise SparsityError(f"{where}{path!r} is {value!r}, but {factors} is {product}; name other axes")


def _existing(model: nn.Module, path: str, where: str) -> list[tuple[str, Any, str]]:
    """`holders`; a SparsityError if there are none."""
    found = list(holders(model, path))
    if not found:
        raise SparsityError(f"{where}the model has no attribute {path!r}")
    return found


def holders(model: nn.Module, path: str) -> Iterator[tuple[str, Any, str]]:
    """(full path, object, attribute) of all that a path matches: with `**`, of all modules with the attribute.

    An attribute may be an entry of a tuple or list, `shape[1]`.
    """
    prefix, _, name = path.rpartition(".")
    names = [prefix]
    if "*" in prefix:
        names = [n for matches in match_names(prefix, dict(model.named_modules())).values() for n in matches]
    for found in names:
        holder = _reached(model, found)
        if value_of(holder, name, ...) is not ...:
            yield f"{found}.{name}".removeprefix("."), holder, name


def value_of(holder: object, name: str, default: Any = None) -> Any:
    """An attribute, or an entry of one."""
    attribute, at = _parsed(name)
    found = getattr(holder, attribute, default)
    if at is None:
        return found
    return found[at] if isinstance(found, (tuple, list)) and at < len(found) else default


def _set(holder: object, name: str, value: Any) -> None:
    attribute, at = _parsed(name)
    if at is not None:
        whole = list(getattr(holder, attribute))
        whole[at] = value
        value = whole if isinstance(getattr(holder, attribute), list) else tuple(whole)
    setattr(holder, attribute, value)


def _parsed(name: str) -> tuple[str, int | None]:
    """The attribute and the index of `shape[1]`."""
    match = re.fullmatch(r"(.+)\[(\d+)\]", name)
    return (match[1], int(match[2])) if match else (name, None)


def _reached(model: nn.Module, path: str) -> Any:
    holder: Any = model
    for name in path.split(".") if path else ():
        holder = getattr(holder, name, None)
    return holder
