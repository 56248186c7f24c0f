"""Integers that may hold a removed size, for couplings that do not list them in `attrs`.

They are attributes, entries of tuples and lists, and fields of configs, of the modules around a coupling's tensors.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..coupling import BoundCoupling, Coupling
from ..coupling.bound import count_stars, fill_stars, match_names
from ..sparsifiers.names import owner_of
from .attributes import holders, value_of
from .removal import sizes_of

_OF_ANY_MODULE = vars(nn.Module()).keys()
_AXES = 6  # beside the unit, of which products are formed
_ENTRIES = 16  # of a tuple or list


def candidate_attrs(model: nn.Module, coupling: Coupling) -> dict[str, str]:
    """Attributes that equal the number of units, or its product with other sizes of the coupling, nearest first.

    Returns:
        {path: axes}, as in `Coupling(attrs=)`; each has that value for every binding of the coupling.

    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.up, self.down, self.width, self.shape = nn.Linear(4, 6), nn.Linear(6, 4), 6, (2, 6)
    >>> candidate_attrs(nn.Sequential(Block()), Coupling({"*.up.weight": "u i", "*.down.weight": "o u"}))
    {'*.width': 'u', '*.shape[1]': 'u'}
    """
    bound = coupling.bind(model)
    products, found = products_of(bound[0]), dict[str, str]()
    for path, value in _integers(model, coupling, bound[0]):
        axes = products.get(value)
        if axes and path not in found and all(_holds(model, one, path, axes) for one in bound):
            found[path] = axes
    return found


def products_of(bound: BoundCoupling) -> dict[int, str]:
    """{product of the unit axis and some others: these axes}, for each product those of the fewest axes."""
    others = [axis for axis, size in bound.sizes.items() if axis != bound.unit and size > 1][:_AXES]
    found: dict[int, str] = {}
    for count in range(len(others) + 1):
        for some in itertools.combinations(others, count):
            product = math.prod(bound.sizes[axis] for axis in (bound.unit, *some))
            found.setdefault(product, " ".join((bound.unit, *some)))
    return found


def _holds(model: nn.Module, bound: BoundCoupling, path: str, axes: str) -> bool:
    """Whether all that a path names for this binding is the product of these axes, and can be set."""
    product = math.prod(bound.sizes[axis] for axis in axes.split())
    found = list(holders(model, fill_stars(path, bound.captured)))
    values = [value_of(holder, name) for _, holder, name in found]
    return bool(found) and all(_is_size(value) and value == product for value in values)


def _integers(model: nn.Module, coupling: Coupling, first: BoundCoupling) -> Iterator[tuple[str, int]]:
    """(path with stars, value for the first binding): modules that hold members first, the model and configs last."""
    depth: dict[str, int] = {}
    for member in coupling.members:
        parts = member.split(".")
        for up in range(1, len(parts) + 1):
            prefix = ".".join(parts[:-up])
            depth[prefix] = min(up, depth.get(prefix, up))
    stars = count_stars(next(iter(coupling.members)))
    prefixes = [prefix for prefix in depth if count_stars(prefix) in (0, stars)]
    configs: dict[int, tuple[str, Any]] = {}
    for prefix in sorted(prefixes, key=len):
        for module in _modules(model, fill_stars(prefix, first.captured)):
            config = vars(module).get("config")
            if hasattr(config, "__dict__"):
                configs.setdefault(id(config), (prefix, config))
    own = _own_sizes(model, first)
    for prefix in sorted(prefixes, key=lambda prefix: depth[prefix]):
        for module in _modules(model, fill_stars(prefix, first.captured)):
            yield from _of(prefix, module, own.get(id(module), set()))
            for name, child in module.named_children() if depth[prefix] < 3 else ():
                if not [*child.parameters(), *child.buffers()]:
                    yield from _of(f"{prefix}.{name}", child, set())
    for prefix, config in configs.values():
        yield from _of(f"{prefix}.config", config, set())


def _modules(model: nn.Module, prefix: str) -> list[nn.Module]:
    modules = dict(model.named_modules())
    if "*" in prefix:
        return [modules[name] for names in match_names(prefix, modules).values() for name in names]
    return [modules[prefix]] if prefix in modules else []


def _own_sizes(model: nn.Module, bound: BoundCoupling) -> dict[int, set[str]]:
    """{id of a module: its attributes that `remove_units` sets}, of the modules that hold members."""
    found: dict[int, set[str]] = {}
    for member in bound.members:
        module, name = owner_of(model, member.fqn)
        found.setdefault(id(module), set()).update(sizes_of(module, name, getattr(module, name), ()))
    return found


def _of(prefix: str, holder: Any, own: set[str]) -> Iterator[tuple[str, int]]:
    for name, value in vars(holder).items():
        path = f"{prefix}.{name}".removeprefix(".")
        if name in own or name in _OF_ANY_MODULE or name.startswith("_"):  # no manifest sets what is private
            continue
        if _is_size(value):
            yield path, value
        elif isinstance(value, (tuple, list)):
            yield from ((f"{path}[{at}]", v) for at, v in enumerate(value[:_ENTRIES]) if _is_size(v))


def config_sizes(model: nn.Module) -> Iterator[tuple[str, int]]:
    """(path, value) of the integers above one in the configs of a model and of its modules, and in configs in those."""
    seen: set[int] = set()
    configs = [(f"{name}.config".removeprefix("."), vars(m).get("config")) for name, m in model.named_modules()]
    while configs:
        path, config = configs.pop(0)
        if hasattr(config, "to_dict") and id(config) not in seen:
            seen.add(id(config))
            yield from _of(path, config, set())
            configs += [(f"{path}.{name}", value) for name, value in vars(config).items()]


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 1
