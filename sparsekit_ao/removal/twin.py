"""A short twin of a model, which keeps two blocks of each kind in every list of blocks, for discovery and trials.

Blocks are of one kind if their modules have the same classes, shapes and attributes, and if the same tensors of each
are in couplings. What can be removed from two blocks of a kind can be removed from all of them, unless blocks that look
alike behave differently; so what is found is verified on the whole model.
"""

import copy
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..coupling import BoundCoupling, Coupling, Discovery, discover
from ..coupling.bound import is_list
from ..coupling.discovery.tracing import UNUSED
from ..errors import SparsityError
from ..masking.normalized import computed_tensors
from .config_fields import ConfigFields
from .modules import drop_modules
from .plan import Plan
from .remove import Removal
from .sizes import OF_ANY_MODULE, apply_changes

_ALIKE = 2  # how many blocks of each kind are kept; with two, one block reads what another one of its kind has written
_NUMBERS = re.compile(r"(?<![^.])(\d+|\*+)(?![^.])")  # the parts of a dotted name that are a number or stars

_KeptBlocks = Mapping[str, Sequence[int]]  # {path of a list, with a dot at the end: indices of the blocks it keeps}


@dataclass(frozen=True, kw_only=True)
class Twin:
    """A short model with parameters of the whole one, and plans in it without tensors of blocks that it lacks."""

    model: nn.Module
    plans: tuple[Plan, ...]
    wholes: Mapping[Coupling, Plan]  # {coupling of the short model, without `attrs`: plan in the whole model}
    kept: _KeptBlocks

    def in_whole(self, plan: Plan, model: nn.Module) -> Plan:
        """Return a plan in the short model as one in the whole model, with the `attrs` of both."""
        if (whole := self.wholes.get(replace(plan.coupling, attrs={}))) is not None:
            numbers = {path: {str(k): str(at) for k, at in enumerate(kept)} for path, kept in self.kept.items()}
            return whole.with_attrs({_renamed(path, numbers): axes for path, axes in plan.attrs.items()})
        if any(short.members != whole.coupling.members for short, whole in self.wholes.items()):
            raise SparsityError(f"coupling {plan.name!r} was merged in a model that lacks blocks which couplings name")
        # Its names have stars for the blocks, so it is the same in both models.
        return Plan.of(plan.coupling, model, plan.multiple)


def make_twin(model: nn.Module, plans: Sequence[Plan], fields: ConfigFields | None = None) -> Twin | None:
    """Return a short model, which may turn out not to run, and plans in it, or None if none can stand for the whole.

    `fields` are those of the model's config, if it has one.
    """
    try:
        if not (kept := _kept_blocks(model, plans)):
            return None
        numbers = {path: {str(at): str(k) for k, at in enumerate(some)} for path, some in kept.items()}
        short, in_short = _short_model(model, kept, fields), list[Plan]()
        for whole in plans:
            texts = (whole.coupling.members, whole.attrs)
            members, attrs = ({_renamed(name, numbers): axes for name, axes in text.items()} for text in texts)
            for names in (members, attrs):
                names.pop("", None)  # "" is what `_renamed` returns for names in blocks that are not kept
            coupling = replace(whole.coupling, members=members, attrs=attrs)
            plan = Plan.of(coupling, short, whole.multiple)
            # A layer that lies in such a block alone becomes an empty set.
            expected = {frozenset(_renamed(m.fqn, numbers) for m in b.members) - {""} for b in whole.bound}
            if expected - {frozenset()} != {frozenset(m.fqn for m in bound.members) for bound in plan.bound}:
                return None
            in_short.append(plan)
    except Exception:  # the model cannot be copied, or not without the other blocks
        return None
    wholes = {replace(plan.coupling, attrs={}): whole for plan, whole in zip(in_short, plans, strict=True)}
    if len(wholes) < len(plans):  # couplings of different blocks have become one
        return None
    return Twin(model=short, plans=tuple(in_short), wholes=wholes, kept=kept)


def discover_in_twin(model: nn.Module, example_inputs: Any, fields: ConfigFields | None) -> Discovery | None:
    """Find couplings as `discover` does, but in a short model; None if there is none that can stand for the whole one.

    Names have the numbers of the whole model, but places in missing blocks are missing, and counts and values are those
    of the short one. Where a block reads what a block far from it has written, couplings may join more blocks.
    """
    kept = _kept_blocks(model, ())
    numbers = {path: {str(k): str(at) for k, at in enumerate(some)} for path, some in kept.items()}

    def in_whole(text: str) -> str:  # the text may be a reason, with names in it
        for path, new in numbers.items():
            # The parts are text, the path of a list, the number of a block, text, path, number and so on.
            parts = re.split(rf"(?<![\w.])({re.escape(path)})(\d+)", text)
            text = "".join(new[part] if at % 3 == 2 else part for at, part in enumerate(parts))
        return text

    if not kept or "" in kept:  # "": the model itself is a sequence of blocks, whose names begin with no path
        return None
    try:
        found = discover(_short_model(model, kept, fields), example_inputs)
    except Exception:  # the model cannot be copied, or does not run, without the other blocks
        return None
    if any(name.startswith((*kept,)) for name in found.uncalled):
        return None
    names = {is_unused: set[str]() for is_unused in (True, False)}  # names of tensors with stars for all numbers
    for axis, _ in found.frozen:
        frozen_names = [name for name, _ in axis.places]
        names[axis.why == UNUSED] |= {_NUMBERS.sub("*", name) for name in frozen_names}
        # If a tensor of a single block is an input or output, this may be due to the block's position (such as the
        # third of all blocks), which may differ in the whole model.
        is_outside = axis.why.startswith(("input", "output"))
        if is_outside and any(name.startswith((*kept,)) and "**" not in name for name in frozen_names):
            return None
    names[False] |= {_NUMBERS.sub("*", name) for coupling in found.couplings for name in coupling.members}
    if names[True] & names[False]:  # a list of layers stands beside the blocks; the short model uses only some of them
        return None
    members = [{in_whole(name): axes for name, axes in c.members.items()} for c in found.couplings]
    # With name="", a coupling is named after its first member again.
    couplings = [replace(c, members=m, name="") for c, m in zip(found.couplings, members, strict=True)]
    try:
        twin = make_twin(model, [Plan.of(coupling, model) for coupling in couplings], fields)
    except SparsityError:  # names of the short model are not those of the whole one
        return None
    if twin is None or twin.kept != kept:  # they treat blocks of one kind differently
        return None
    places = [tuple((in_whole(name), d) for name, d in axis.places) for axis, _ in found.frozen]
    axes = [replace(row[0], why=in_whole(row[0].why), places=p) for row, p in zip(found.frozen, places, strict=True)]
    frozen = tuple((axis, count) for axis, (_, count) in zip(axes, found.frozen, strict=True))
    return replace(found, couplings=tuple(couplings), frozen=frozen)


def _renamed(name: str, numbers: Mapping[str, Mapping[str, str]]) -> str:
    """Return a name, or a pattern, with the new number of the block that it is in, or "" if the block has none."""
    for path, new in numbers.items():
        at, dot, rest = name.removeprefix(path).partition(".")
        if name.startswith(path) and at.isdecimal():
            return f"{path}{new[at]}{dot}{rest}" if at in new else ""
    return name


def _kept_blocks(model: nn.Module, plans: Sequence[Plan]) -> _KeptBlocks:
    """Return the indices of the first two blocks of each kind, for every outermost list that has more of a kind."""
    inside = defaultdict[str, list[Any]](list)  # {path of a module, with a dot at the end: tensors of couplings in it}
    for at, member in ((at, m) for at, plan in enumerate(plans) for bound in plan.bound for m in bound.members):
        parts = member.fqn.split(".")
        for depth in range(1, len(parts)):
            inside[".".join([*parts[:depth], ""])].append((at, ".".join(parts[depth:]), member.pattern.axes))
    kept: dict[str, Sequence[int]] = {}
    for name, modules in model.named_modules():
        path, blocks = f"{name}." if name else "", [*modules._modules.values()]
        if not (is_list(modules) or isinstance(modules, nn.Sequential)) or path.startswith((*kept,)):
            continue
        if len({*blocks}) < len(blocks) or [*modules._modules] != [*map(str, range(len(blocks)))]:
            continue  # a block occurs twice, or blocks have names of their own
        kinds = defaultdict[Any, list[int]](list)
        for at, row in enumerate(_attributes(blocks)):
            is_block = blocks[at] is not None and [*blocks[at].children()] and [*blocks[at].parameters()]
            # What is not a block, such as a single layer or an activation, is a kind of its own, so that it is kept.
            kinds[(row, tuple(inside[f"{path}{at}."])) if is_block else at].append(at)
        first = sorted(at for alike in kinds.values() for at in alike[:_ALIKE])
        if len(first) < len(blocks):
            kept[path] = first
    return kept


def _attributes(blocks: Sequence[nn.Module | None]) -> list[tuple[Any, ...]]:
    """Return what decides how the modules of each block treat sizes, without integers that number the blocks."""
    rows: list[dict[tuple[str, str], Any]] = [{} for _ in blocks]
    for block, row in zip(blocks, rows, strict=True):
        for name, module in block.named_modules() if block is not None else ():
            tensors = {**module._parameters, **module._buffers}
            row |= {(name, ""): type(module)} | {(name, key): _plain(value) for key, value in tensors.items()}
            row |= {(name, key): _plain(value) for key, value in vars(module).items() if key not in OF_ANY_MODULE}
    offsets = defaultdict[tuple[str, str], list[Any]](list)  # an integer minus the index of its block, or None
    for at, (key, value) in ((at, item) for at, row in enumerate(rows) for item in row.items()):
        offsets[key].append(value - at if type(value) is int else None)
    same = {key: values[0] for key, values in offsets.items() if len(values) > 1 and len({*values}) == 1}
    numbers = {key for key, offset in same.items() if offset is not None}  # such as `layer_idx`
    return [tuple(item for item in row.items() if item[0] not in numbers) for row in rows]


def _plain(value: Any) -> Any:
    """Return a hashable value that stands for an attribute: what determines code or shapes, or else its class."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    # Floats count by their class too, since they only scale values.
    return value if type(value) in (int, bool, str, type(None)) else getattr(value, "__qualname__", type(value))


def _short_model(model: nn.Module, kept: _KeptBlocks, fields: ConfigFields | None) -> nn.Module:
    """Return a copy of a model that has these blocks alone and shares the parameters of the model."""
    memo: dict[int, Any] = {id(p): p for p in model.parameters()}  # `deepcopy` takes what is in it as copied
    memo |= {id(tensor): tensor.detach() for tensor in computed_tensors(model)}
    removals = list[Removal]()
    for path, some in kept.items():
        blocks = [*model.get_submodule(path[:-1]).children()]
        memo |= {id(block): nn.Identity() for at, block in enumerate(blocks) if at not in some}
        keep = torch.tensor([at in some for at in range(len(blocks))], device="cpu")
        bound = BoundCoupling(name="blocks", unit="u", sizes={"u": len(blocks)}, lists=(path[:-1],))
        removals.append(Removal(bound=bound, keep=keep, source=len(removals)))
    short = copy.deepcopy(model, memo)
    drop_modules(short, removals)
    if fields is not None:
        apply_changes(short, fields.changes(fields.counted(removals))[0])
    return short
