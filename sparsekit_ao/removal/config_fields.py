"""What the integer fields of a config count: the model's class is constructed with one of them doubled, and tells."""

import contextlib
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..coupling import BoundCoupling
from ..coupling.bound import is_list
from ..models.names import connected
from ..models.running import seeded
from .modules import layer_fields, repeated_blocks
from .remove import Removal
from .sizes import (
    Change,
    apply_changes,
    has_config,
    integers_of,
    products_of,
    read_again,
    value_at,
    value_of,
)
from .verify import Reference

_NEW = -1  # in place of a dimension: modules of this list are new, or this tensor is
_COMPUTED = re.compile(r"\.parametrizations\.(\w+)\.original1?$")  # names of weights that are computed
_FEW_BLOCKS = 4  # a field that counts blocks at one end changes fewer if it is one more or less
_COVERS = 4  # at most this many sets of fields that count the same entries are tried

Entries = Counter[tuple[str, int]]  # {(tensor, dimension): a number of entries}
Shapes = dict[str, tuple[int, ...]]


class ConfigFields:
    """The integer fields of a model's config, and what each of them counts.

    A field counts the entries that dimensions of tensors gain if it is doubled. `filled` are changes that write what
    the config computes if it is None, such as the size of heads from their number.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._gains = model, dict[str, Entries]()
        tensors = model.state_dict(keep_vars=True)
        first = {id(tensor): name for name, tensor in reversed(tensors.items())}
        self._names = {name: first[id(tensor)] for name, tensor in tensors.items()}  # tied tensors have several names
        self._shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        read = dict[str, Any]()
        with contextlib.suppress(Exception):  # a config that cannot be read has no fields that count anything
            read |= _parts_of(read_again(model.config))
        # What is read otherwise, such as how a file was quantized, is no part of the model's sizes.
        self._parts = [(path, part) for path, part in _parts_of(model.config) if type(read.get(path)) is type(part)]
        self._lists = {name: len(m) for name, m in model.named_modules() if is_list(m)}
        sizes = {vars(m)["head_dim"] for m in model.modules() if type(vars(m).get("head_dim")) is int}
        unset = [f"{path}.head_dim" for path, part in self._parts if value_of(part, "head_dim") is None]
        self.filled = [Change(path=path, was=None, now=n) for path in unset for n in sizes if len(sizes) == 1]

    @classmethod
    def of(cls, model: nn.Module) -> "ConfigFields | None":
        """Return the fields of a model's config, or None if it has none."""
        return cls(model) if has_config(model) else None

    def together(self, plans: Sequence[Sequence[BoundCoupling]]) -> list[tuple[list[int], list[tuple[str, ...]]]]:
        """Return (indices of plans, sets of fields) where each set counts exactly what these plans have together.

        A plan that has such fields for itself is alone. Plans without fields are missing.
        """
        self._fill({bound.scope_units for bounds in plans for bound in bounds if bound.grid})
        entries = [self._entries(bounds) for bounds in plans]
        alone = {at: covers for at, bounds in enumerate(plans) if (covers := self._covers(bounds))}
        found = [([at], covers) for at, covers in alone.items()]
        rest = {at: [*self._counting(bounds)] for at, bounds in enumerate(plans) if at not in alone}
        for linked in connected(rest):
            group = list[int]()  # no two of its plans divide the same dimension
            group += (at for at in linked if all(entries[at].keys().isdisjoint(entries[other]) for other in group))
            while len(group) > 1:
                bounds = [bound for at in group for bound in plans[at]]
                if covers := self._covers(bounds):
                    found.append((group, covers))
                    break
                counted = set[tuple[str, int]]().union(*self._usable(bounds).values())
                fewer = [at for at in group if entries[at].keys() <= counted]
                group = fewer if fewer != group else []
        return found

    def counted(self, removals: Sequence[Removal]) -> list[Removal]:
        """Return the removals with the first fields that count the units of each, or of several together."""
        plans = dict[int, list[BoundCoupling]]()
        for removal in removals:
            plans.setdefault(removal.source, []).append(removal.bound)
        groups = self.together([*plans.values()])
        fields = {[*plans][at]: covers[0] for group, covers in groups for at in group}
        return [replace(removal, fields=fields.get(removal.source, ())) for removal in removals]

    def allows(self, paths: Iterable[str], kept: int, units: int) -> bool:
        """Return whether the class takes `kept` of `units` parts of these fields, and tensors then lack the others."""
        values = {path: self._value(path) for path in paths}
        if any(value * kept % units for value in values.values()):
            return False
        gained = sum((self._gained_by(path) for path in values), Entries())
        shapes = self._constructed({path: value * kept // units for path, value in values.items()})
        lacking = Entries({place: -(n * (units - kept) // units) for place, n in gained.items()})
        return shapes is not None and self._difference_of(shapes) == lacking

    def fit(
        self, small: nn.Module, removals: Sequence[Removal], reference: Reference, *, single_use: bool = False
    ) -> tuple[list[Change], str]:
        """Change the config of a smaller model, in place, so that a model constructed from it is the smaller one.

        Return the changes, and how a model constructed from the config differs, "" if it does not. With `single_use`,
        the smaller model itself is not compared again. If no removal has fields yet, all get them first.
        """
        is_counted = any(removal.fields for removal in removals)
        changes, problem = self.changes(removals if is_counted else self.counted(removals))
        changes = [change for change in changes if value_at(small, change.path) == change.was]  # others follow already
        filled = [change for change in self.filled if all(change.path != other.path for other in changes)]
        before = [(part, dict(vars(part))) for _, part in _parts_of(small.config)]
        for more in [changes, *([[*filled, *changes]] if filled else [])] if not problem else ():
            apply_changes(small, more)
            if not (problem := _difference(small, reference, single_use)):
                return more, ""
            for part, fields in before:  # a field that was None is not missing afterwards
                vars(part).clear()
                vars(part).update(fields)
        return [], problem

    def changes(self, removals: Sequence[Removal]) -> tuple[list[Change], str]:
        """Return the changes of the fields that count removed units, and why a field has no value, or ""."""
        changes, filled = list[Change](), {change.path for change in self.filled}
        for path in dict.fromkeys(path for removal in removals for path in removal.fields):
            was = self._value(path)
            rows = [r for r in removals if path in r.fields and was in products_of(r.bound)]
            first, *others = {removal.kept / removal.scope_units: removal for removal in rows}.values()
            if others or was * first.kept % first.scope_units:
                kept = ", ".join(f"{r.kept} of {r.scope_units} {r.bound.name!r}" for r in (first, *others))
                return [], f"{path} is one number for {kept}"
            if not first.is_empty:
                now = was * first.kept // first.scope_units
                changes.append(Change(path=path, was=None if path in filled else was, now=now))
        return changes, ""

    def _value(self, path: str) -> int:
        return next((change.now for change in self.filled if change.path == path), value_at(self._model, path))

    def _fill(self, numbers: Iterable[int]) -> None:
        """Find what the config computes for the width of an MLP (`n_inner`) that is None, if it is one of `numbers`."""
        paths = [f"{path}.n_inner" for path, part in self._parts if value_of(part, "n_inner", ...) is None]
        for path in paths if not any(change.path.endswith("n_inner") for change in self.filled) else ():
            shapes = ((n, self._constructed({path: n})) for n in numbers)
            fitting = (n for n, made in shapes if made is not None and not self._difference_of(made))
            self.filled += [Change(path=path, was=None, now=n) for n in itertools.islice(fitting, 1)]

    def _counting(self, bounds: Sequence[BoundCoupling]) -> dict[str, Entries]:
        """Return the fields that count some entries of couplings, and all that they count."""
        rows = [(products_of(bound), self._entries([bound]).keys()) for bound in bounds]
        sizes = set[int]().union(*(products for products, _ in rows))
        values = {path: value for place, part in self._parts for path, value in integers_of(place, part)}
        values |= {change.path: change.now for change in self.filled}
        counting = dict[str, Entries]()
        # Numbers of tokens, such as `eos_token_id`, count nothing.
        for path, value in ((p, n) for p, n in values.items() if n in sizes and not p.endswith("_token_id")):
            gained = self._gained_by(path)
            touched = [products for products, entries in rows if entries & gained.keys()]
            if touched and all(value in products for products in touched):
                counting[path] = gained
        return counting

    def _usable(self, bounds: Sequence[BoundCoupling]) -> dict[str, Entries]:
        """Return the fields that count entries of couplings and no others."""
        entries = self._entries(bounds)
        counting = self._counting(bounds).items()
        return {path: gained for path, gained in counting if gained <= entries and min(gained.values()) > 0}

    def _covers(self, bounds: Sequence[BoundCoupling]) -> list[tuple[str, ...]]:
        """Return sets of fields that together count each entry of couplings exactly once."""
        entries = self._entries(bounds)
        return [*itertools.islice(_exact_covers(entries, self._usable(bounds)), _COVERS)] if entries else []

    def _entries(self, bounds: Sequence[BoundCoupling]) -> Entries:
        """Return the entries of tensors in which a plan has units."""
        parts = dict[tuple[str, int, Any], int]()  # the same part of a tied tensor counts once
        for bound in bounds:
            parts |= {(path, _NEW, None): 1 for path in bound.lists}
            for member in (member for member in bound.members if member.fqn in self._names):
                d = member.pattern.dimension_of(bound.unit)
                outside = member.pattern.outside.get(d) or ()
                size = self._shapes[member.fqn][d] - sum(outside)
                parts[self._names[member.fqn], d, outside] = size
        entries = Entries()
        for (name, d, _), size in parts.items():
            entries[name, d] += size
        return entries

    def _gained_by(self, path: str) -> Entries:
        """Return the entries that dimensions gain if a field is doubled; none where the class refuses the number."""
        if path not in self._gains:
            value = self._value(path)
            # Fields with an entry for each block must be as long as there are blocks.
            lists = [name for name, length in self._lists.items() if length == value]
            entries = {key: kinds for name in lists for key, kinds in layer_fields(self._model, name).items()}
            # The same config may be reached from the model and from one of its modules.
            pairs = [(key.rpartition("."), k) for key, k in entries.items() if isinstance(k, dict) or len(k) == value]
            places = {id(part): place for place, part in self._parts}
            longer = {f"{places.get(id(value_at(self._model, h)), h)}.{key}": kinds for (h, _, key), kinds in pairs}
            for factor in (2, 3):  # the double may be what another field is, so that a ResNet has no shortcut there
                shapes = self._constructed({path: factor * value})
                if shapes is None and longer:
                    repeated = {key: repeated_blocks(kinds, value, factor) for key, kinds in longer.items()}
                    shapes = self._constructed({path: factor * value, **repeated})
                gained = self._difference_of(shapes or self._shapes)
                self._gains[path] = Entries({place: -(-n // (factor - 1)) for place, n in gained.items()})
                if shapes is None or self._shapes.keys() <= shapes.keys():
                    break
        return self._gains[path]

    def _difference_of(self, shapes: Shapes) -> Entries:
        """Return the entries that dimensions of these shapes have beside those of the model."""
        gained = Entries()
        for name, shape in shapes.items():
            for d, (old, new) in enumerate(zip(self._shapes.get(name, shape), shape, strict=False)):
                if new != old:
                    gained[self._names[name], d] = new - old
            for match in re.finditer(r"\.(\d+)\.", name) if name not in self._shapes else ():
                if int(match[1]) >= self._lists.get(path := name[: match.start()], int(match[1]) + 1):
                    gained[path, _NEW] = 1
        return gained

    def of_blocks(self, path: str) -> tuple[list[tuple[str, int]], dict[str, range]]:
        """Return what follows the blocks of a list: dimensions with a part for each, and the fields that count some.

        A field counts all blocks, or those at one end of the list that are of another kind.
        """
        units, dimensions, counted = self._lists[path], list[tuple[str, int]](), dict[str, range]()
        values = {f"{place}.{key}": n for place, part in self._parts for key, n in vars(part).items() if type(n) is int}
        for field in (field for field, n in values.items() if n == units and not field.endswith("_token_id")):
            gained = self._gained_by(field)
            if {name for name, d in gained if d == _NEW} == {path}:
                # Of a model without other parts that its config still has, some shapes differ at any number of blocks.
                lacking = self._difference_of(self._constructed({}) or self._shapes)
                sizes = {place: self._shapes[place[0]][place[1]] for place in gained if place[1] != _NEW}
                dimensions = [place for place, n in sizes.items() if n == gained[place] and place not in lacking]
                counted[field] = range(units)
                break
        usual = self._kinds(path, {})
        for field, n in values.items():
            last = list[tuple[int, int]]()  # the last block that changes if the field is one less or more
            for more in (-1, 1) if 0 < n <= units and re.search("layer|dense", field) and field not in counted else ():
                kinds = self._kinds(path, {field: n + more})
                changed = [at for at in range(units) if len(kinds) == units and kinds[at] != usual[at]]
                # Another block may own the keys that others share then; but a period or an offset changes many.
                last += [(changed[-1], more)] if 0 < len(changed) < min(_FEW_BLOCKS, units) else []
            if last and all(at == n - (more < 0) for at, more in last):
                counted[field] = range(n)
            elif last and all(at == units - n - (more > 0) for at, more in last):
                counted[field] = range(units - n, units)
        return dimensions, counted

    def _kinds(self, path: str, values: Mapping[str, Any]) -> list[Any]:
        """Return what describes each block of a model whose config has these values: attributes and shapes."""
        fresh, plain = self._construct(values), (bool, int, float, str)

        def described(module: nn.Module) -> Any:
            attributes = {key: value for key, value in vars(module).items() if isinstance(value, plain)}
            return attributes, [p.shape for p in module.parameters(recurse=False)]

        blocks = [] if fresh is None else fresh.get_submodule(path).children()
        return [{name: described(module) for name, module in block.named_modules()} for block in blocks]

    def _constructed(self, values: Mapping[str, Any]) -> Shapes | None:
        """Return the shapes of a model whose config has these values, or None where its class refuses them."""
        if (fresh := self._construct(values)) is None:
            return None
        return {_COMPUTED.sub(r".\1", name): tuple(t.shape) for name, t in fresh.state_dict().items()}

    def _construct(self, values: Mapping[str, Any]) -> nn.Module | None:
        try:
            holder = nn.Module()
            holder.config = read_again(self._model.config)
            filled = [change for change in self.filled if change.path not in values]
            apply_changes(holder, [*filled, *(Change(path=p, was=None, now=value) for p, value in values.items())])
            getattr(holder.config, "validate", tuple)()  # as `save_pretrained` does
            with seeded([]), torch.device("meta"):
                return type(self._model)(holder.config)
        except Exception:
            return None


def _exact_covers(entries: Entries, fields: Mapping[str, Entries]) -> Iterator[tuple[str, ...]]:
    """Yield the sets of fields that together count each entry exactly once."""
    first = next(iter(entries), None)
    if first is None:
        yield ()
    for path, added in fields.items():
        if first in added and added <= entries:
            others = {other: some for other, some in fields.items() if other != path}
            yield from ((path, *paths) for paths in _exact_covers(entries - added, others))


def _parts_of(config: Any, path: str = "config", above: Sequence[Any] = ()) -> list[tuple[str, Any]]:
    """Return (path, config) of a config and of the configs in it, which may refer back to it."""
    above = [*above, config]
    inner = [(f"{path}.{name}", value) for name, value in vars(config).items() if hasattr(value, "to_dict")]
    inner = [(place, value) for place, value in inner if all(value is not one for one in above)]
    return [(path, config), *(part for place, value in inner for part in _parts_of(value, place, above))]


def _difference(small: nn.Module, reference: Reference, single_use: bool) -> str:
    """Return how a model that is constructed from the config of a smaller one differs from it, or ""."""
    shapes = {name: tuple(tensor.shape) for name, tensor in small.state_dict(keep_vars=True).items()}
    try:
        config: Any = read_again(small.config)
        getattr(config, "validate", tuple)()  # as `save_pretrained` does
        with seeded([]), _Unfilled():
            fresh = type(small)(config)
    except Exception as e:  # the config refuses the numbers, or the model cannot be constructed from it
        return f"{type(small).__name__}(config) raises {e}"
    constructed = {name: tuple(tensor.shape) for name, tensor in fresh.state_dict().items()}
    for name in sorted(n for n in shapes.keys() | constructed.keys() if shapes.get(n) != constructed.get(n)):
        return f"{name} is {shapes.get(name)}, but the config makes it {constructed.get(name)}"
    try:
        fresh.load_state_dict(small.state_dict(), assign=True)
        for name, module in small.named_modules():
            if hasattr(module, "_hf_hook"):  # accelerate reads its weights from disk
                from accelerate.hooks import add_hook_to_module

                add_hook_to_module(fresh.get_submodule(name), module._hf_hook)
        buffers = dict(small.named_buffers())
        for name, values in fresh.named_buffers():  # those that are not saved may have been rounded with the model
            values.data = values.to(next(small.parameters()).device if name not in buffers else buffers[name].device)
            if name in buffers and torch.equal(values.to(buffers[name].dtype), buffers[name]):
                values.data = buffers[name]
        for model in (fresh,) if single_use else (small, fresh):
            if not reference.compare(model, single_use=single_use).decisive <= reference.tolerance:
                return "a model constructed from the config gives other outputs"
    except Exception as e:
        return f"a model constructed from the config does not run: {e}"
    return ""


class _Unfilled(TorchDispatchMode):
    """Leaves the memory of new Parameters as it is, where random values would be written: all are replaced."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Other tensors are filled: `trunc_normal_` draws into them until no value is out of bounds.
        is_random = torch.Tag.nondeterministic_seeded in func.tags and func._schema.is_mutable
        return args[0] if is_random and isinstance(args[0], nn.Parameter) else func(*args, **(kwargs or {}))
