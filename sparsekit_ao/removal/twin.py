"""A short model, which keeps two blocks of each kind from every list of blocks, for discovery and trials.

Blocks are of one kind if their modules have the same classes, shapes and attributes, and if couplings have the same
tensors in them. What can be removed from two of them can be removed from all.
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
from .modules import drop_modules
from .remove import Removal
from .sizes import Change, apply_changes, config_sizes, has_config, misfits, undone

_ALIKE = 2  # blocks kept of each kind: two, so that one reads what another of its kind has written
_NUMBERS = re.compile(r"(?<![^.])(\d+|\*+)(?![^.])")
_OF_ANY_MODULE = vars(nn.Module()).keys()

_Kept = Mapping[str, Sequence[int]]  # {path of a list, with a dot: the indices of the blocks that are kept}


@dataclass(frozen=True, kw_only=True)
class Twin:
    """A short model with the parameters of the whole one.

    Attributes:
        model: The short model.
        couplings: Those of the short model, which lack the tensors of blocks that are left out.
        wholes: {one of these, without attributes: the same one of the whole model}.
        kept: The indices in the whole model of the blocks of each list.
    """

    model: nn.Module
    couplings: tuple[Coupling, ...]
    wholes: Mapping[Coupling, Coupling]
    kept: _Kept

    def in_whole(self, coupling: Coupling) -> Coupling:
        """The coupling of the whole model with the attributes that were found in the short one.

        Raises:
            SparsityError: It was merged of couplings that name blocks, some of which are left out.
        """
        if (whole := self.wholes.get(replace(coupling, attrs={}))) is not None:
            numbers = {path: {str(k): str(at) for k, at in enumerate(kept)} for path, kept in self.kept.items()}
            found = {_renamed(path, numbers): axes for path, axes in coupling.attrs.items()}
            return replace(whole, attrs={**whole.attrs, **found})
        if any(short.members != whole.members for short, whole in self.wholes.items()):
            raise SparsityError(f"coupling {coupling.name!r} is merged of others that name blocks")
        return coupling


def make_twin(model: nn.Module, couplings: Sequence[Coupling]) -> Twin | None:
    """Return a short model and couplings in it; None if no blocks are alike, or if it cannot run without the others.

    Blocks that are left out are not copied. Numbers of layers in a config are changed accordingly.
    """
    try:
        bounds = {coupling: coupling.bind(model) for coupling in couplings}
        if not (kept := _kept_blocks(model, bounds)):
            return None
        numbers = {path: {str(at): str(k) for k, at in enumerate(some)} for path, some in kept.items()}
        short, shorts = _without_others(model, kept), dict[Coupling, Coupling]()
        for whole, bound in bounds.items():
            members, attrs = ({_renamed(n, numbers): a for n, a in d.items()} for d in (whole.members, whole.attrs))
            members.pop("", None), attrs.pop("", None)
            coupling = replace(whole, members=members, attrs=attrs)
            names = {frozenset(_renamed(member.fqn, numbers) for member in b.members) - {""} for b in bound}
            if names - {frozenset()} != {frozenset(m.fqn for m in b.members) for b in coupling.bind(short)}:
                return None
            shorts[coupling] = whole
    except Exception:  # it cannot be copied, or not without the other blocks
        return None
    wholes = {replace(coupling, attrs={}): whole for coupling, whole in shorts.items()}
    are_different = len(wholes) == len(couplings)
    return Twin(model=short, couplings=(*shorts,), wholes=wholes, kept=kept) if are_different else None


def discover_in_twin(model: nn.Module, example_inputs: Any) -> Discovery | None:
    """Find couplings as `discover` does, in a short model; None if there is a sign that they differ in the whole one.

    Counts, values, and the places of what is frozen, are those of the short model. Where a block reads what a block far
    from it has written, couplings may join more blocks than those of the whole model.
    """
    kept = _kept_blocks(model, {})
    numbers = {path: {str(k): str(at) for k, at in enumerate(some)} for path, some in kept.items()}

    def in_whole(text: str) -> str:
        for path, new in numbers.items():
            parts = re.split(rf"(?<![\w.])({re.escape(path)})(\d+)", text)
            text = "".join(new[part] if at % 3 == 2 else part for at, part in enumerate(parts))
        return text

    try:
        found = discover(_without_others(model, kept), example_inputs) if kept and "" not in kept else None
    except Exception:  # it does not run without the others, or cannot be copied
        return None
    if found is None or any(name.startswith((*kept,)) for name in found.uncalled):
        return None
    names = {unused: set[str]() for unused in (True, False)}  # without their numbers
    for axis, _ in found.frozen:
        frozen_names = [name for name, _ in axis.places]
        names[axis.why == UNUSED] |= {_NUMBERS.sub("*", name) for name in frozen_names}
        is_outside = axis.why.startswith(("input", "output"))  # blocks whose outputs are, say, by their position
        if is_outside and any(name.startswith((*kept,)) and "**" not in name for name in frozen_names):
            return None
    names[False] |= {_NUMBERS.sub("*", name) for coupling in found.couplings for name in coupling.members}
    if names[True] & names[False]:  # layers beside the blocks, of which the short model uses some
        return None
    members = [{in_whole(name): axes for name, axes in c.members.items()} for c in found.couplings]
    couplings = [replace(c, members=m, name="") for c, m in zip(found.couplings, members, strict=True)]
    if (twin := make_twin(model, couplings)) is None or twin.kept != kept:
        return None
    places = [tuple((in_whole(name), d) for name, d in axis.places) for axis, _ in found.frozen]
    axes = [replace(row[0], why=in_whole(row[0].why), places=p) for row, p in zip(found.frozen, places, strict=True)]
    frozen = tuple((axis, count) for axis, (_, count) in zip(axes, found.frozen, strict=True))
    return replace(found, couplings=tuple(couplings), frozen=frozen)


def _renamed(name: str, numbers: Mapping[str, Mapping[str, str]]) -> str:
    """A name, or a pattern, with another number of its block; empty if the block has none."""
    for path, new in numbers.items():
        at, dot, rest = name.removeprefix(path).partition(".")
        if name.startswith(path) and at.isdecimal():
            return f"{path}{new[at]}{dot}{rest}" if at in new else ""
    return name


def _kept_blocks(model: nn.Module, bounds: Mapping[Coupling, Sequence[BoundCoupling]]) -> _Kept:
    """The first blocks of each kind, in the outermost lists that have more of them."""
    inside = defaultdict[str, list[Any]](list)  # {path of a module, with a dot: tensors of couplings in it}
    for at, member in ((at, m) for at, bound in enumerate(bounds.values()) for b in bound for m in b.members):
        parts = member.fqn.split(".")
        for depth in range(1, len(parts)):
            inside[".".join([*parts[:depth], ""])].append((at, ".".join(parts[depth:]), member.pattern.axes))
    kept: dict[str, Sequence[int]] = {}
    for name, modules in model.named_modules():
        path, blocks = f"{name}." if name else "", [*modules._modules.values()]
        if not (is_list(modules) or isinstance(modules, nn.Sequential)) or path.startswith((*kept,)):
            continue
        if len({*blocks}) < len(blocks) or [*modules._modules] != [*map(str, range(len(blocks)))]:
            continue
        kinds = defaultdict[Any, list[int]](list)
        for at, row in enumerate(_attributes(blocks)):
            is_block = blocks[at] is not None and [*blocks[at].children()] and [*blocks[at].parameters()]
            kinds[(row, tuple(inside[f"{path}{at}."])) if is_block else at].append(at)
        first = sorted(at for alike in kinds.values() for at in alike[:_ALIKE])
        kept |= {path: first} if len(first) < len(blocks) else {}
    return kept


def _attributes(blocks: Sequence[nn.Module | None]) -> list[tuple[Any, ...]]:
    """What decides how the modules of each block treat sizes; integers that number the blocks are left out."""
    rows: list[dict[tuple[str, str], Any]] = [{} for _ in blocks]
    for block, row in zip(blocks, rows, strict=True):
        for name, module in block.named_modules() if block is not None else ():
            tensors = {**module._parameters, **module._buffers}
            row |= {(name, ""): type(module)} | {(name, key): _plain(value) for key, value in tensors.items()}
            row |= {(name, key): _plain(value) for key, value in vars(module).items() if key not in _OF_ANY_MODULE}
    offsets = defaultdict[tuple[str, str], list[Any]](list)
    for at, (key, value) in ((at, item) for at, row in enumerate(rows) for item in row.items()):
        offsets[key].append(value - at if type(value) is int else None)
    same = {key: values[0] for key, values in offsets.items() if len(values) > 1 and len({*values}) == 1}
    numbers = {key for key, offset in same.items() if offset is not None}
    return [tuple(item for item in row.items() if item[0] not in numbers) for row in rows]


def _plain(value: Any) -> Any:
    """Return a hashable stand-in: a shape, an int or a name; of others (also floats, which only scale) the class."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    return value if type(value) in (int, bool, str, type(None)) else getattr(value, "__qualname__", type(value))


def _without_others(model: nn.Module, kept: _Kept) -> nn.Module:
    """A copy with these blocks alone, and the parameters of the model."""
    memo: dict[int, Any] = {id(p): p for p in model.parameters()}
    memo |= {id(tensor): tensor.detach() for tensor in computed_tensors(model)}
    removals, lengths = list[Removal](), set[tuple[int, int]]()
    for path, some in kept.items():
        blocks = [*model.get_submodule(path[:-1]).children()]
        memo |= {id(block): nn.Identity() for at, block in enumerate(blocks) if at not in some}  # it is not copied
        keep = torch.zeros(len(blocks), dtype=torch.bool).index_fill_(0, torch.tensor(some), True)
        keys: dict[str, Any] = {"captured": (), "members": (), "scope": (), "attrs": {}, "lists": (path[:-1],)}
        bound = BoundCoupling(name="blocks", unit="u", sizes={"u": len(blocks)}, **keys)
        removals.append(Removal(coupling=bound, keep=keep))
        lengths.add((len(blocks), len(some)))
    short = copy.deepcopy(model, memo)
    drop_modules(short, removals)
    wrong = misfits(short) if has_config(short) else []
    for path, was in [*config_sizes(short)] if wrong else ():
        for change in [Change(path=path, was=was, now=now) for whole, now in lengths if whole == was and wrong]:
            apply_changes(short, [change])
            if len(fewer := misfits(short)) < len(wrong):
                wrong = fewer
                break
            apply_changes(short, undone([change]))
    return short
