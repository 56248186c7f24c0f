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
        CouplingError: a list has another number of modules than the coupling has units.
        SparsityError: there is no list for the values of the coupling's stars; a module without parameters.
    """
    where = f"coupling {bound.name!r}: "
    for pattern, matches in found.items():
        if bound.captured not in matches:
            raise SparsityError(f"{where}the model has no list {fill_stars(pattern, bound.captured)!r}")
    paths = tuple(path for matches in found.values() for path in matches[bound.captured])
    units: list[list[str]] = [[] for _ in range(bound.units)]
    for path in paths:
        count = len(model.get_submodule(path))  # type: ignore[arg-type]
        if count != bound.units:
            raise CouplingError(
                f"{where}the list {path} has {count} modules, but the coupling has {bound.units} units; each needs one"
            )
        for fqn, (tensor, is_parameter) in tensors.items():
            if is_parameter and tensor.ndim and fqn.startswith(f"{path}."):
                units[int(fqn[len(path) + 1 :].partition(".")[0])].append(fqn)
    for at, own in enumerate(units):
        if not own:
            raise SparsityError(f"{where}{paths[0]}.{at} has no parameters, so there is nothing to put a mask on")
    return replace(bound, lists=paths, listed=tuple(map(tuple, units)))


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
