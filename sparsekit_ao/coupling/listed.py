"""Units of a coupling that are modules of an `nn.ModuleList`, such as experts: found in a model, as config entries.

All parameters of a module are one block. The modules of a list compete, an equal number in each scope of the coupling.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..errors import CouplingError, SparsityError
from .bound import BoundCoupling, fill_stars, match_names

Lists = Mapping[str, Mapping[tuple[str, ...], list[str]]]  # {pattern: {values of its stars: names of lists}}


def find_lists(model: nn.Module, patterns: Sequence[str], where: str) -> Lists:
    """The lists that each pattern matches, by what its stars capture; errors begin with `where`."""
    modules = model.named_modules(remove_duplicate=False) if patterns else ()
    names = [name for name, module in modules if is_list(module)]
    found = {pattern: match_names(pattern, names) for pattern in patterns}
    for pattern, matches in found.items():
        if not matches:
            raise SparsityError(f"{where}{pattern!r} in lists matches no nn.ModuleList of the model")
    return found


def is_list(module: nn.Module) -> bool:
    """Whether this is an `nn.ModuleList` of the model, not one in which torch holds parametrizations."""
    return isinstance(module, nn.ModuleList) and not isinstance(module, parametrize.ParametrizationList)


def with_lists(
    bound: BoundCoupling, found: Lists, model: nn.Module, tensors: Mapping[str, tuple[Tensor, bool]]
) -> BoundCoupling:
    """The coupling with its lists, and the parameters of each unit.

    Args:
        bound: of members only.
        found: from `find_lists`.
        model: where both are.
        tensors: parameters and buffers by name, and whether they are parameters.

    Raises:
        CouplingError: a list has another number of modules than the coupling has units, modules of two units share a
            parameter, or a member has units in another order than a list.
        SparsityError: there is no list for the values of the coupling's stars; two patterns match one list; a module
            without parameters.
    """
    where = f"coupling {bound.name!r}: "
    for pattern, matches in found.items():
        if bound.captured not in matches:
            raise SparsityError(f"{where}the model has no list {fill_stars(pattern, bound.captured)!r}")
    _check_order(bound, where)
    paths = tuple(path for matches in found.values() for path in matches[bound.captured])
    units: list[list[str]] = [[] for _ in range(bound.units)]
    for path in paths:
        if paths.count(path) > 1:
            raise SparsityError(f"{where}two patterns in lists match {path!r}; each list may be matched once")
        count = len(model.get_submodule(path))  # type: ignore[arg-type]
        if count != bound.units:
            raise CouplingError(
                f"{where}the list {path} has {count} modules, but the coupling has {bound.units} units; each needs one"
            )
        for fqn, (tensor, is_parameter) in tensors.items():
            if is_parameter and tensor.ndim and fqn.startswith(f"{path}."):
                index = fqn[len(path) + 1 :].partition(".")[0]
                if index.isdecimal():  # else a parameter of the list itself, which belongs to no unit
                    units[int(index)].append(fqn)
    for at, own in enumerate(units):
        if not own:
            raise SparsityError(
                f"{where}{paths[0]}.{at} has no parameters of its own, so there is nothing to put a mask on; a module "
                "may be in one place only"
            )
    _check_shared(units, tensors, where)
    return replace(bound, lists=paths, listed=tuple(map(tuple, units)))


def _check_order(bound: BoundCoupling, where: str) -> None:
    """Raise unless scopes come before the unit in each member, so that the modules have the order of the grid."""
    order = [*bound.scope, bound.unit]
    for member in bound.members:
        found = [axis for dimension in member.pattern.dimensions for axis in dimension if axis in order]
        if found != order:
            raise CouplingError(
                f"{where}{member.fqn} has its axes in the order {' '.join(found)!r}, but with lists it must be "
                f"{' '.join(order)!r}, since the modules of a list belong to the units one scope after the other"
            )


def _check_shared(units: Sequence[Sequence[str]], tensors: Mapping[str, tuple[Tensor, bool]], where: str) -> None:
    """Raise if modules of two units share a parameter, which would be dropped with either."""
    first: dict[int, tuple[int, str]] = {}
    for at, names in enumerate(units):
        for fqn in names:
            other, name = first.setdefault(id(tensors[fqn][0]), (at, fqn))
            if other != at:
                raise CouplingError(
                    f"{where}{name} and {fqn} are one parameter, but belong to the units {other} and {at}; drop units "
                    "of modules that share nothing"
                )


def listed_entries(
    bound: BoundCoupling, scores: str, tensors: Mapping[str, Tensor], keys: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """A config dict for each parameter of a unit, which is one block, coupled with the others of the unit.

    The units of a scope share its budget. A parameter with several names has one entry.
    """
    first: dict[int, str] = {}
    for at, names in enumerate(bound.listed):
        own = [fqn for fqn in names if first.setdefault(id(tensors[fqn]), fqn) == fqn]
        scope = f"{bound.name}, scope {at // bound.grid[-1]}" if bound.scope else bound.name
        for fqn in own:
            entry: dict[str, Any] = {"tensor_fqn": fqn, "block_shape": (-1,) * tensors[fqn].ndim}
            entry |= {"scope_coupling": scope}
            entry |= {"block_coupling": f"{bound.name}, unit {at}"} if len(own) > 1 else {}
            entry |= {"member_scores": scores} if scores != "sum" and len(own) > 1 else {}
            yield entry | dict(keys)
