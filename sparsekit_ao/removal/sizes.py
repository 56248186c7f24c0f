"""Integers outside of torch.nn's layers that hold a removed size: `num_heads` of a module, fields of a config."""

import copy
import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from ..coupling import BoundCoupling
from ..coupling.bound import count_stars, fill_stars, match_names
from ..errors import SparsityError
from .modules import WIDTH, set_width, width_of
from .plan import Plan
from .remove import Removal, plain_tensor, sizes_of

OF_ANY_MODULE = vars(nn.Module()).keys()  # attributes that every module has
_AXES = 6  # at most this many axes beside the unit are multiplied with it
_OF_NORMS = ("normalized_shape", "num_features", "num_channels")
_ENTRIES = 16  # a tuple or list with more entries is no list of sizes
# Names of what counts, or numbers, samples, tokens, pixels, blocks or choices: not units, even of the same number.
_NO_UNITS = re.compile(
    r"(?!.*(dim|units|features|per_layer)$)"
    r"(.*(batch|capacity|queue|window|distance|len|position|chunk|kernel|stride|offset|shift|patch|image|bucket|top_k"
    r"|per_tok|label|vocab).*"
    r"|.*(layers?(_?(index|num|number))?|_idx?|ratio))"
    r"|.*(conv_kernel|patch)_dim"
)
FILLED = ("head_dim", "n_inner")  # fields of configs that may be None or missing, and are then computed from others


@dataclass(frozen=True, kw_only=True)
class Change:
    """The old and the new value of one attribute, `layers.0.attention.num_heads` or `config.hidden_size`."""

    path: str
    was: Any
    now: Any


def reverse_changes(changes: Sequence[Change]) -> list[Change]:
    """Return the changes that restore the values before some changes."""
    return [Change(path=change.path, was=change.now, now=change.was) for change in reversed(changes)]


def find_changes(model: nn.Module, removals: Sequence[Removal]) -> list[Change]:
    """Find the new values of all attributes that the couplings list; a SparsityError if some do not fit."""
    changes: dict[tuple[int, str], Change] = {}  # by the object and the attribute
    counted: dict[tuple[int, str], list[tuple[Removal, str]]] = {}
    for removal, (pattern, axes) in ((r, item) for r in removals for item in r.bound.attrs.items()):
        name, where = removal.bound.name, f"coupling {removal.bound.name!r}: attrs "
        for full, holder, attribute in _holders(model, fill_stars(pattern, removal.bound.captured), where):
            was, key = value_of(holder, attribute), (id(holder), attribute)
            _check_value(full, was, holder, axes, removal, where)
            is_new = all(other is not removal for other, _ in counted.setdefault(key, []))  # stars may match twice
            first = _counted_by(model, counted[key], removal, axes)
            if first.kept * removal.scope_units != removal.kept * first.scope_units:
                raise SparsityError(
                    f"{where}{full!r} is one number for several layers, but {first.bound.name!r} keeps {first.kept} "
                    f"of {first.scope_units} and {name!r} {removal.kept} of {removal.scope_units}. Keep equal numbers, "
                    "or do not list it."
                )
            if first is removal and is_new:
                change = changes.setdefault(key, Change(path=full, was=was, now=was))
                if change.now % removal.scope_units:
                    raise SparsityError(
                        f"{where}{full!r} is {was}, and other couplings that list it leave {change.now}, no multiple "
                        f"of the {removal.scope_units} units here. Each coupling must count a factor of its own; if "
                        "all hold the same number, list it in one of them."
                    )
                changes[key] = replace(change, now=change.now // removal.scope_units * removal.kept)
    return list(changes.values())


def _counted_by(model: nn.Module, counted: list[tuple[Removal, str]], removal: Removal, axes: str) -> Removal:
    """Return the removal by which the factor of this one shrinks: an earlier one of another layer, or this one."""

    def tensors(removal: Removal) -> set[int]:
        return {id(plain_tensor(model, m.fqn)) for m in removal.bound.members}

    for first, first_axes in counted:
        if first.source == removal.source or (first_axes == axes and not tensors(first) & tensors(removal)):
            return first
    counted.append((removal, axes))
    return removal


def check_old_values(model: nn.Module, changes: Sequence[Change]) -> None:
    """Check that every attribute is one of a module or a config that can be set, and has the value that it had."""
    for change in changes:
        for full, holder, name in _holders(model, change.path, "cut_to: "):
            is_config = change.path.rpartition(".")[0].endswith("config")
            if not (isinstance(holder, nn.Module) or is_config) or _is_fixed(holder, name):
                raise SparsityError(f"cut_to: {full!r} is not an integer of a module or its config that can be set")
            if type(value_of(holder, name)) is not type(change.was) or value_of(holder, name) != change.was:
                raise SparsityError(
                    f"cut_to: {full!r} is {value_of(holder, name)!r}, but was {change.was!r} in the dense model; "
                    "construct the model as the dense one was constructed"
                )


def apply_changes(model: nn.Module, changes: Sequence[Change]) -> None:
    """Set the attributes; where one is an entry of a tuple or list, set a new tuple or list."""
    for change in changes:
        (_, holder, name), *_ = _holders(model, change.path, "")
        (attribute, at), value = _parsed(name), change.now
        if at is not None:
            entries = getattr(holder, attribute)
            value = (list if isinstance(entries, list) else tuple)([*entries[:at], value, *entries[at + 1 :]])
        if value is None and not hasattr(type(holder), attribute):
            delattr(holder, attribute)  # a field of `FILLED` that was missing
        elif attribute == WIDTH and isinstance(holder, nn.Module):
            set_width(holder, value)
        else:
            setattr(holder, attribute, value)


def unlisted_sizes(small: nn.Module, removals: Sequence[Removal], changes: Sequence[Change]) -> list[str]:
    """Describe integers, in the modules around smaller tensors and in configs, that equal a removed size."""
    changed = {change.path for change in changes}
    texts: dict[str, str] = {}
    for removal in (removal for removal in removals if not removal.is_empty and removal.bound.members):
        bound = removal.bound
        sizes = {removal.scope_units, bound.units}
        for pattern in (member.pattern for member in bound.members):
            dimension = pattern.dimensions[pattern.dimension_of(bound.unit)]
            sizes.add(math.prod(pattern.sizes.get(axis, 0) for axis in dimension))
        names = [member.fqn for member in bound.members]
        for path, value, depth in _integers_around(small, names, names):
            # A config, or a module without tensors, holds many small numbers that are not sizes (a stride of 2).
            if value in sizes and depth <= 2 and (depth or value >= 4) and "[" not in path and path not in changed:
                texts.setdefault(path, f"{path} = {value}, as {bound.name!r} had")
    return list(texts.values())


def _check_value(path: str, value: object, holder: object, axes: str, removal: Removal, where: str) -> None:
    sizes, names = removal.bound.sizes, axes.split()
    if _is_fixed(holder, path.rpartition(".")[2]):
        raise SparsityError(f"{where}{path!r} is a property that cannot be set; list what it is computed from")
    if unknown := [axis for axis in names if axis not in sizes]:
        raise SparsityError(
            f"{where}{path!r} = {axes!r}: unknown axis {unknown[0]!r}; the coupling has sizes of {', '.join(sizes)}"
        )
    if removal.bound.unit not in names:
        raise SparsityError(
            f"{where}{path!r} = {axes!r} lacks the unit axis {removal.bound.unit!r}, so it would not change"
        )
    product = math.prod(sizes[axis] for axis in names)
    if type(value) is not int or value != product:
        factors = " * ".join(f"{axis}={sizes[axis]}" for axis in names)
        raise SparsityError(f"{where}{path!r} is {value!r}, but {factors} is {product}; name other axes")


def _holders(model: nn.Module, path: str, where: str | None = None) -> list[tuple[str, Any, str]]:
    """(full path, object, attribute) of all that a path with stars matches; with `where`, an error if it is nothing."""
    prefix, _, name = path.rpartition(".")
    holders = [
        (f"{full}.{name}".removeprefix("."), holder, name)
        for full, holder in _objects(model, prefix)
        if value_of(holder, name, ...) is not ... or (name in FILLED and hasattr(holder, "to_dict"))
    ]
    if not holders and where is not None:
        raise SparsityError(f"{where}the model has no attribute {path!r}")
    return holders


def _objects(model: nn.Module, path: str) -> list[tuple[str, Any]]:
    """(full path, object or None) of every module that a path with stars matches; else of the path itself."""
    paths = [path]
    if "*" in path:
        paths = [name for names in match_names(path, dict(model.named_modules())).values() for name in names]
    return [(full, _reached(model, full)) for full in paths]


def _attribute(holder: object, name: str, default: Any = None) -> Any:
    """Return an attribute, or the default if there is none, or if a config raises because it differs by layer."""
    try:
        return getattr(holder, name, default)
    except Exception:  # transformers has an error of its own for this
        return default


def value_of(holder: object, name: str, default: Any = None) -> Any:
    """Return an attribute, or an entry of one."""
    attribute, at = _parsed(name)
    if attribute == WIDTH and isinstance(holder, nn.Module):
        return width_of(holder, default)
    value = _attribute(holder, attribute, default)
    if at is None:
        return value
    return value[at] if isinstance(value, (tuple, list)) and at < len(value) else default


def value_at(model: nn.Module, path: str) -> Any:
    """Return the attribute at a path without stars, or None if there is none."""
    prefix, _, name = path.rpartition(".")
    return value_of(_reached(model, prefix), name)


def _parsed(name: str) -> tuple[str, int | None]:
    """The attribute and the index of `shape[1]`."""
    match = re.fullmatch(r"(.+)\[(\d+)\]", name)
    return (match[1], int(match[2])) if match else (name, None)


def _reached(model: nn.Module, path: str) -> Any:
    holder: Any = model
    for name in path.split(".") if path else ():
        holder = getattr(holder, name, None)
    return holder


def _is_fixed(holder: object, name: str) -> bool:
    """Whether an attribute is a property that cannot be set."""
    descriptor = getattr(type(holder), _parsed(name)[0], None)
    return isinstance(descriptor, property) and descriptor.fset is None


def candidate_attrs(model: nn.Module, plan: Plan, *, inside: bool = False) -> dict[str, str]:
    """Find attributes that equal the number of units or its product with other sizes, nearest first, {path: axes}.

    With `inside`, they are of modules around the layers, equal the number of units or its product with one other size,
    and equal no size that keeps its units.
    """
    bindings, attrs = plan.bound, dict[str, str]()
    products = products_of(bindings[0])
    products = {size: axes for size, axes in products.items() if not inside or axes.count(" ") < 2}
    names, captured = [member.fqn for member in bindings[0].members], bindings[0].captured
    for member in bindings[0].members if inside else ():
        d = member.pattern.dimension_of(bindings[0].unit)
        for size in (n for k, n in enumerate(plain_tensor(model, member.fqn).shape) if k != d):
            products.pop(size, None)
    for path, value, depth in _integers_around(model, plan.coupling.members, names, captured):
        if value not in products or path in attrs or (inside and (depth > 2 or "config" in path.split("."))):
            continue
        if inside and _NO_UNITS.fullmatch(path.rpartition(".")[2]):
            continue
        if not all(_holds(model, bound, path, products[value]) for bound in bindings):
            continue  # such as `**.6.kernel_size` of a child of the model itself, which these stars do not match
        if inside and depth == 0:  # of children without tensors: a stride or a kernel of torch.nn is no number of units
            _, holder, name = _holders(model, fill_stars(path, captured))[0]
            if type(holder).__module__.startswith("torch.nn.") and _parsed(name)[0] not in _OF_NORMS:
                continue
        attrs[path] = products[value]
    return attrs


def width_attrs(model: nn.Module, plan: Plan) -> dict[str, str]:
    """Return {path of `WIDTH`: axes} of modules that may read the units, times other sizes, as an input's width."""
    members, stars = plan.coupling.members, count_stars(next(iter(plan.coupling.members)))
    products, attrs = products_of(plan.bound[0]), dict[str, str]()
    for prefix in dict.fromkeys(".".join(member.split(".")[:-2]) for member in members):
        path = f"{prefix}.{WIDTH}".removeprefix(".")
        if count_stars(path) in (0, stars):
            for axes in products.values():
                if all(_holds(model, bound, path, axes) for bound in plan.bound):
                    attrs[path] = axes
    return attrs


def _holds(model: nn.Module, bound: BoundCoupling, path: str, axes: str) -> bool:
    """Whether all that a path names for this binding is the product of these axes."""
    product = math.prod(bound.sizes[axis] for axis in axes.split())
    values = [value_of(holder, name) for _, holder, name in _holders(model, fill_stars(path, bound.captured))]
    return bool(values) and all(_is_size(value) and value == product for value in values)


def products_of(bound: BoundCoupling) -> dict[int, str]:
    """Return {product of the unit axis and some others: these axes}, for each product those of the fewest axes."""
    others = [axis for axis, size in bound.sizes.items() if axis != bound.unit and size > 1][:_AXES]
    products: dict[int, str] = {}
    for count in range(len(others) + 1):
        for some in itertools.combinations(others, count):
            product = math.prod(bound.sizes[axis] for axis in (bound.unit, *some))
            products.setdefault(product, " ".join((bound.unit, *some)))
    return products


def _integers_around(
    model: nn.Module, members: Collection[str], fqns: Collection[str], captured: Iterable[str] = ()
) -> Iterator[tuple[str, int, int]]:
    """Yield (path, value, depth) of integers around members, first those of their modules, those of configs last.

    The depth is 1 for modules that hold members, 2 for those around these, and so on; 0 for configs and for children
    without tensors. Stars in members stand for `captured` in the layer whose tensors are `fqns`.
    """
    layer_sizes: dict[int, set[str]] = {}  # of the modules that hold members, by id; `remove_units` sets these
    for fqn in fqns:
        prefix, _, name = fqn.rpartition(".")
        module = _reached(model, prefix)
        if isinstance(getattr(module, name, None), Tensor):  # else it was in a module that was dropped from its list
            layer_sizes.setdefault(id(module), set()).update(sizes_of(module, name, getattr(module, name), ()))
        if isinstance(module, nn.MultiheadAttention):
            layer_sizes.setdefault(id(module), set()).update(("embed_dim", "kdim", "vdim", "num_heads"))
    depths: dict[str, int] = {}
    for member in members:
        parts = member.split(".")
        for depth in range(1, len(parts) + 1):
            prefix = ".".join(parts[:-depth])
            depths[prefix] = min(depth, depths.get(prefix, depth))
    stars = count_stars(next(iter(members)))
    modules = [
        (prefix, depth, module)
        for prefix, depth in sorted(depths.items(), key=lambda item: item[1])
        if count_stars(prefix) in (0, stars)
        for _, module in _objects(model, fill_stars(prefix, captured))
        if isinstance(module, nn.Module)
    ]
    for prefix, depth, module in modules:
        yield from ((*item, depth) for item in integers_of(prefix, module, layer_sizes.get(id(module), ())))
        for name, child in module.named_children() if depth < 3 else ():
            if not [*child.parameters(), *child.buffers()]:
                yield from ((*item, 0) for item in integers_of(f"{prefix}.{name}", child))
    configs: dict[int, tuple[str, Any]] = {}
    for prefix, _, module in sorted(modules, key=lambda item: len(item[0])):
        config = vars(module).get("config")
        configs.setdefault(id(config), (prefix, config))
    for prefix, config in configs.values():
        yield from ((*item, 0) for item in integers_of(f"{prefix}.config", config))


def integers_of(prefix: str, holder: Any, known: Collection[str] = ()) -> Iterator[tuple[str, int]]:
    """(path, value) of the public integers above one of an object, and of its tuples and lists."""
    for name, value in getattr(holder, "__dict__", {}).items():
        path = f"{prefix}.{name}".removeprefix(".")
        if name in known or name in OF_ANY_MODULE or name.startswith("_"):  # no manifest sets what is private
            continue
        if _is_size(value):
            yield path, value
        elif isinstance(value, (tuple, list)) and len(value) <= _ENTRIES:
            yield from ((f"{path}[{at}]", v) for at, v in enumerate(value) if _is_size(v))


def _is_size(value: object) -> bool:
    return type(value) is int and value > 1


def has_config(model: nn.Module) -> bool:
    """Return whether transformers saves this model with a config and constructs it from one."""
    return hasattr(getattr(model, "config", None), "to_dict") and hasattr(model, "save_pretrained")


def read_again(config: Any) -> Any:
    """Return a config as it is read from its file, where its class may compute fields anew."""
    if not hasattr(type(config), "from_dict"):
        return copy.deepcopy(config)
    again = type(config).from_dict(config.to_dict())
    pairs = [(config, again)]
    for written, read in pairs:  # the loop appends; a file lacks private fields: how attention is implemented
        vars(read).update({key: copy.deepcopy(value) for key, value in vars(written).items() if key.startswith("_")})
        inner = [(value, vars(read).get(key)) for key, value in vars(written).items() if hasattr(value, "to_dict")]
        known = {id(one) for one, _ in pairs}
        pairs += [(one, other) for one, other in inner if type(other) is type(one) and id(one) not in known]
    return again
