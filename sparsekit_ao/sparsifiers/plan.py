"""From group dicts to scopes: which blocks compete, computed once and reused until a group's structure changes.

A plan holds specs over placeholders on the meta device: names and integers, no weights and no masks. Tensors are looked
up at every update, because `.to()` and sharding replace them. Budgets are read from the groups at every update,
because schedulers write there.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..errors import CouplingError, SparsityError
from ..selection.strides import Shape, row_major
from ..structure import BlockCoupling, BlockSpec, ScopeCoupling, ScopeSpec, SparseBlock, View, sparsity_to_nnz
from .component import Component
from .config import TensorGroup
from .structure import Stage


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All components, earlier stages first; `connected[i]` are those of group i and of all groups coupled to it."""

    components: tuple[Component, ...]
    connected: tuple[tuple[Component, ...], ...]

    @property
    def elements(self) -> int:
        """Elements of all components."""
        return elements_of(self.components)


def make_plan(groups: Sequence[TensorGroup], stages: Sequence[tuple[Stage, ...]], tensors: Sequence[Tensor]) -> Plan:
    """Lower every group: stage by stage, uncoupled tensors alone, coupled ones together.

    Args:
        groups: for names and error messages.
        stages: `stages_of` each group.
        tensors: the dense weights; only shape, strides and dtype are read.

    Raises:
        SparsityError, CouplingError: what does not fit, by tensor name.
    """
    out: list[Component] = []
    for stage in range(max((len(s) for s in stages), default=0)):
        rules = {at: s[stage] for at, s in enumerate(stages) if stage < len(s)}
        specs = {at: _block_spec(groups[at]["tensor_fqn"], rule, tensors[at]) for at, rule in rules.items()}
        for label, members in _budget_units(rules, _block_units(rules, specs)):
            out.append(_component(label, members, rules, specs, stage))
    return Plan(components=tuple(out), connected=_connected(out, len(groups)))


def elements_of(components: Sequence[Component]) -> int:
    """Elements of all tensors of components, once for each stage."""
    return sum(leaf.view.numel() for component in components for leaf, _ in component.leaves)


def batches(components: Sequence[Component], most: int | None) -> Iterator[list[Component]]:
    """The components, those of coupled tensors and of all their stages always together.

    Args:
        components: any; earlier stages first.
        most: elements in a batch (coupled tensors with more are a batch of their own), or None for a single batch.
    """
    count = 1 + max((at for c in components for _, at in c.leaves), default=-1)
    coupled = list(dict.fromkeys(found for found in _connected(components, count) if found))
    batch: list[Component] = []
    held = 0
    for found in coupled:
        size = elements_of(found)
        if batch and most is not None and held + size > most:
            yield batch
            batch, held = [], 0
        batch += found
        held += size
    if batch:
        yield batch


def _connected(components: Sequence[Component], count: int) -> tuple[tuple[Component, ...], ...]:
    """For each group, the components of all stages of it and the groups coupled to it, which are updated together."""
    connection = list(range(count))
    for component in components:
        joined = {connection[at] for _, at in component.leaves}
        if len(joined) > 1:
            connection = [min(joined) if f in joined else f for f in connection]
    found: dict[int, list[Component]] = {}
    for component in components:
        found.setdefault(connection[component.leaves[0][1]], []).append(component)
    return tuple(tuple(found.get(f, ())) for f in connection)


Unit = tuple[list[int], SparseBlock]
_SCORING = ("norm", "score", "member_scores", "max_sparsity")  # what tensors that are chosen together agree on


def _block_units(rules: Mapping[int, Stage], specs: Mapping[int, BlockSpec]) -> list[Unit]:
    """Blocks that are kept or dropped together: a tensor's own, or a BlockCoupling of tensors that give one name."""
    named: dict[object, list[int]] = {}
    for at, rule in rules.items():
        named.setdefault(rule.block_coupling if rule.block_coupling is not None else (at,), []).append(at)
    units: list[Unit] = []
    for name, members in named.items():
        if not isinstance(name, str):
            rule, name = rules[members[0]], specs[members[0]].name
            for key, is_given in (
                ("coupling_order", rule.coupling_order is not None),
                ("member_scores", rule.member_scores != "sum"),
            ):
                if is_given:
                    raise SparsityError(f"{name}: {key} needs a block_coupling")
            units.append((members, specs[members[0]]))
            continue
        label = f"block coupling {name!r}"
        if len(members) == 1:
            raise CouplingError(f"{label}: {specs[members[0]].name} is its only member; a coupling needs two")
        _must_agree(label, ("scope_shape", "scope_coupling", *_SCORING), members, rules, specs)
        orders = [rules[at].coupling_order for at in members]
        units.append((members, BlockCoupling([specs[at] for at in members], orders, name=label)))
    return units


def _budget_units(rules: Mapping[int, Stage], units: Sequence[Unit]) -> list[tuple[str, list[Unit]]]:
    """Units that share one budget, by the name of their scope coupling."""
    named: dict[object, list[Unit]] = {}
    for unit in units:
        name = rules[unit[0][0]].scope_coupling
        named.setdefault(name if name is not None else (unit[0][0],), []).append(unit)
    return [
        (f"scope coupling {name!r}" if isinstance(name, str) else str(found[0][1].name), found)
        for name, found in named.items()
    ]


def _component(
    label: str, units: Sequence[Unit], rules: Mapping[int, Stage], specs: Mapping[int, BlockSpec], stage: int
) -> Component:
    members = [at for found, _ in units for at in found]
    _must_agree(label, _SCORING, members, rules, specs)
    scopes = [ScopeSpec(block, rules[found[0]].scope_shape) for found, block in units]
    scope = scopes[0] if len(scopes) == 1 else ScopeCoupling(scopes, name=label)
    leaves = tuple((specs[at], at) for at in members)
    rule = rules[members[0]]
    return Component(
        scope=scope,
        leaves=leaves,
        stage=stage,
        norm=rule.norm if rule.score is None else None,
        score=rule.score,
        member_scores=rule.member_scores,
        label=label,
        least=_least(label, rule, scopes, stage),
    )


def _least(label: str, rule: Stage, scopes: Sequence[ScopeSpec], stage: int) -> tuple[int, ...]:
    """Blocks that each of these scopes keeps at least, by `max_sparsity`."""
    if rule.max_sparsity is None:
        return ()
    if rule.scope_coupling is None or stage or any(s.numscp() != 1 for s in scopes):
        raise SparsityError(
            f"{label}: max_sparsity limits what a budget over several whole tensors drops of each; it needs a "
            "scope_coupling, scopes that are whole tensors, and the first stage"
        )
    return tuple(sparsity_to_nnz(rule.max_sparsity, s.numblk(), f"{label}: max_sparsity: ") for s in scopes)


def _must_agree(
    label: str, keys: Sequence[str], members: Sequence[int], rules: Mapping[int, Stage], specs: Mapping[int, BlockSpec]
) -> None:
    for key in keys:
        first = getattr(rules[members[0]], key)
        for at in members[1:]:
            if getattr(rules[at], key) != first:
                raise CouplingError(
                    f"{label}: members need the same {key}, but {specs[members[0]].name} gives {first!r} and "
                    f"{specs[at].name} {getattr(rules[at], key)!r}"
                )


def _block_spec(fqn: str, rule: Stage, tensor: Tensor) -> BlockSpec:
    shape, stride = tuple(tensor.shape), tensor.stride()
    if isinstance(rule.view, tuple):
        stride = row_major(shape)  # a view given by numbers refers to the row-major layout
    placeholder = torch.empty_strided(shape, stride, dtype=tensor.dtype, device="meta")
    if rule.view is None:
        view = View.from_existing(placeholder, name=fqn)
    elif isinstance(rule.view, tuple):
        view = View(placeholder, *rule.view, name=fqn)
    else:
        view = View.from_function(placeholder, rule.view, name=fqn)
    return BlockSpec(view, rule.block_shape, name=fqn, edge=rule.edge)


def matrix_shape(shape: Sequence[int]) -> Shape:
    """The shape of a weight taken as a matrix."""
    return (1, math.prod(shape)) if len(shape) < 2 else (shape[0], math.prod(shape[1:]))


def matrix_budgets(
    weight: Tensor, block: tuple[int, ...], level: float, zeros: int
) -> list[tuple[ScopeSpec, int | Tensor]]:
    """The scopes and budgets whose masks' union is that of torch.ao's `WeightNormSparsifier`.

    Args:
        weight: taken as a matrix; only shape and strides are read.
        block: (rows, columns).
        level: the fraction of blocks that lose elements; all of them from 1 on.
        zeros: elements that such a block loses.
    """
    blocks, elements = _matrix_scopes(tuple(weight.shape), weight.stride(), block)
    found: list[tuple[ScopeSpec, int | Tensor]] = []
    if level < 1:
        count = blocks.numblk()
        found.append((blocks, count - min(round(level * count), count - 1)))
    if zeros < math.prod(block) and elements.is_partial:
        found.append((elements, (elements.blocks_per_scope() - zeros).clamp_(min=0)))
    elif zeros < math.prod(block):
        found.append((elements, max(elements.numblk_per_scope() - zeros, 0)))
    return found


@lru_cache(maxsize=256)  # a model has many tensors of few shapes
def _matrix_scopes(shape: Shape, stride: Shape, block: Shape) -> tuple[ScopeSpec, ScopeSpec]:
    """Blocks over the whole tensor, and elements inside each block, of a weight of this shape taken as a matrix."""
    matrix, own = matrix_shape(shape), stride if len(shape) == 2 else row_major(shape)
    placeholder = torch.empty_strided(shape, own, device="meta")
    view = View(placeholder, matrix, own if len(shape) == 2 else row_major(matrix))
    tile = [min(n, size) for n, size in zip(block, matrix, strict=True)]
    blocks, elements = (BlockSpec(view, s, edge="partial") for s in (tile, (1, 1)))
    return ScopeSpec(blocks), ScopeSpec(elements, tile)
