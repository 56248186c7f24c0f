"""Integers outside of torch.nn's layers that hold a removed size: `num_heads` of a module, fields of a config.

Those that a group lists are changed; those that look like it are only told.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..coupling import Coupling
from ..coupling.coupling import check_attrs
from ..coupling.names import filled, matched, stars
from ..errors import SparsityError
from .cut import members_of
from .kept import Cut
from .layers import sizes_of

__all__ = ["Change", "apply_changes", "changes_of", "check_held", "likely_sizes", "with_attrs"]


@dataclass(frozen=True, kw_only=True)
class Change:
    """One attribute that gets another value.

    Attributes:
        path: from the model on, `layers.0.attention.num_heads` or `config.hidden_size`.
        was, now: its values.
    """

    path: str
    was: Any
    now: Any


def with_attrs(groups: Sequence[Coupling], attrs: Mapping[str, str]) -> list[Coupling]:
    """Every attribute handed to the one group that has its axes.

    Raises:
        SparsityError: no group has them, or several.
    """
    out = list(groups)
    check_attrs("", attrs)
    for path, axes in attrs.items():
        fits = [at for at, group in enumerate(out) if _speaks_of(group, path, axes)]
        if len(fits) != 1:
            names = ", ".join(repr(out[at].name) for at in fits) or "none"
            raise SparsityError(
                f"attrs[{path!r}] = {axes!r} must name the unit axis of one group, its scope axes and its sizes, but "
                f"fits {names}. Give it to its group: Coupling(..., attrs={{...}}), or name units differently."
            )
        at = fits[0]
        out[at] = replace(out[at], attrs={**out[at].attrs, path: axes})
    return out


def _speaks_of(group: Coupling, path: str, axes: str) -> bool:
    known = {group.unit, *group.scope.split(), *group.sizes}
    captures = stars(next(iter(group.members)))
    return group.unit in axes.split() and set(axes.split()) <= known and stars(path) in (0, captures)


def changes_of(model: nn.Module, cuts: Sequence[Cut]) -> list[Change]:
    """New values of all attributes that the groups list.

    Groups that share a tensor each shrink a factor of their own. Those that share none and list the same axes are
    layers that hold the same number: they must agree, and it shrinks once.

    Raises:
        SparsityError: there is no such attribute, it holds another number, layers ask for different ones, or several
            groups of one tensor count the same factor of it.
    """
    found: dict[tuple[int, str], Change] = {}
    counted: dict[tuple[int, str], list[tuple[Cut, str]]] = {}
    for cut in cuts:
        where = f"group {cut.group.name!r}: attrs "
        for pattern, axes in cut.group.attrs.items():
            path = filled(pattern, cut.group.captured) if stars(pattern) else pattern
            for full, holder, name in _holders(model, path, where):
                _check_value(full, getattr(holder, name), holder, axes, cut, where)
                key = (id(holder), name)
                first = _counted_by(model, counted.setdefault(key, []), cut, axes)
                if first.kept * cut.of != cut.kept * first.of:
                    raise SparsityError(
                        f"{where}{full!r} is one number for several layers, but {first.group.name!r} keeps "
                        f"{first.kept} of {first.of} and {cut.group.name!r} {cut.kept} of {cut.of}. Keep equal "
                        "numbers, or do not list it."
                    )
                if first is cut:
                    was = found.setdefault(key, Change(path=full, was=getattr(holder, name), now=getattr(holder, name)))
                    if was.now % cut.of:
                        raise SparsityError(
                            f"{where}{full!r} is {was.was}, and other groups that list it leave {was.now}, no multiple "
                            f"of the {cut.of} units here. Each group must count a factor of its own; if all hold the "
                            "same number, list it in one of them."
                        )
                    found[key] = replace(was, now=was.now // cut.of * cut.kept)
    return list(found.values())


def _counted_by(model: nn.Module, counted: list[tuple[Cut, str]], cut: Cut, axes: str) -> Cut:
    """The cut that shrinks the factor that this one counts: an earlier one of another layer, or itself."""
    for first, said in counted:
        if first.source == cut.source or (said == axes and not _tensors(model, first) & _tensors(model, cut)):
            return first
    counted.append((cut, axes))
    return cut


def _tensors(model: nn.Module, cut: Cut) -> set[int]:
    return {id(tensor) for tensor in members_of(model, [m.fqn for m in cut.group.members]).values()}


def check_held(model: nn.Module, changes: Sequence[Change]) -> None:
    """Whether every attribute holds what it held when the changes were made.

    Raises:
        SparsityError: there is no such attribute, or it holds something else.
    """
    for change in changes:
        for full, holder, name in _holders(model, change.path, "cut_to: "):
            held = getattr(holder, name)
            if held != change.was:
                raise SparsityError(
                    f"cut_to: {full!r} is {held!r}, but the dense model's was {change.was!r}; make the model as the "
                    "dense one was made"
                )


def apply_changes(model: nn.Module, changes: Sequence[Change]) -> None:
    """Set the attributes."""
    for change in changes:
        (_, holder, name), *_ = _holders(model, change.path, "")
        setattr(holder, name, change.now)


def likely_sizes(small: nn.Module, cuts: Sequence[Cut], done: Sequence[Change]) -> list[str]:
    """Integers, near the tensors that were cut and in the model's config, that still hold a size that is gone."""
    known = {change.path for change in done}
    found: dict[str, str] = {}
    for cut in cuts:
        if cut.is_whole:
            continue
        gone = {cut.of, math.prod(cut.group.grid)}
        for member in cut.group.members:
            dimension = next(d for d in member.pattern.dimensions if cut.group.unit in d)
            gone.add(math.prod(member.pattern.sizes.get(axis, 0) for axis in dimension))
        for path, value, least in _integers_near(small, cut):
            if value in gone and value >= least and path not in known:
                found.setdefault(path, f"{path} = {value}, as {cut.group.name!r} had")
    return list(found.values())


def _integers_near(model: nn.Module, cut: Cut) -> Iterator[tuple[str, int, int]]:
    """Integers of the modules that hold members, of the modules around those, and of the config; no layer's own.

    Also of modules beside them that hold no tensor (a GroupNorm without weights). Those, as a config, hold many small
    numbers that are no sizes (2 layers, a stride of 2), so with each comes the least value that says anything.
    """
    holders: dict[str, set[str]] = {"config": set()} if hasattr(model, "config") else {}
    for member in cut.group.members:
        prefix, _, name = member.fqn.rpartition(".")
        module = model.get_submodule(prefix)
        holders.setdefault(prefix, set()).update(sizes_of(module, name, getattr(module, name), ()))
        holders.setdefault(prefix.rpartition(".")[0], set())
    modules = {name: module for name, module in model.named_modules() if not [*module.parameters(), *module.buffers()]}
    beside = {name for name in modules if name.rpartition(".")[0] in holders} - holders.keys()
    holders.update({name: set() for name in beside})
    for prefix, own in holders.items():
        for name, value in getattr(_reached(model, prefix), "__dict__", {}).items():
            if isinstance(value, int) and not isinstance(value, bool) and name not in own and not name.startswith("_"):
                told = prefix == "config" or prefix in beside
                yield f"{prefix}.{name}".removeprefix("."), value, 4 if told else 0


def _check_settable(path: str, holder: object, where: str) -> None:
    own = getattr(type(holder), path.rpartition(".")[2], None)
    if isinstance(own, property) and own.fset is None:
        raise SparsityError(f"{where}{path!r} is a property that cannot be set; list what it is computed from")


def _check_value(path: str, value: object, holder: object, axes: str, cut: Cut, where: str) -> None:
    sizes, names = cut.group.sizes, axes.split()
    _check_settable(path, holder, where)
    for axis in names:
        if axis not in sizes:
            raise SparsityError(f"{where}{path!r} = {axes!r}: the group knows the sizes of {', '.join(sizes)} only")
    if cut.group.unit not in names:
        raise SparsityError(f"{where}{path!r} = {axes!r} has no unit axis {cut.group.unit!r}, so it would not change")
    product = math.prod(sizes[axis] for axis in names)
    if isinstance(value, bool) or not isinstance(value, int) or value != product:
        asked = " * ".join(f"{axis}={sizes[axis]}" for axis in names)
        raise SparsityError(f"{where}{path!r} is {value!r}, but {asked} is {product}; name other axes")


def _holders(model: nn.Module, path: str, where: str) -> list[tuple[str, Any, str]]:
    """(full path, object, attribute) of all that a path means: where it has `**`, of all modules with the attribute."""
    prefix, _, name = path.rpartition(".")
    if "*" in prefix:
        names = [n for found in matched(prefix, dict(model.named_modules())).values() for n in found]
    else:
        names = [prefix]
    reached = [(f"{found}.{name}".removeprefix("."), _reached(model, found), name) for found in names]
    found = [(full, holder, name) for full, holder, name in reached if hasattr(holder, name)]
    if not found:
        raise SparsityError(f"{where}the model has no attribute {path!r}")
    return found


def _reached(model: nn.Module, path: str) -> Any:
    holder: Any = model
    for part in path.split(".") if path else ():
        holder = getattr(holder, part, None)
    return holder
