"""compact: a masked model becomes a smaller dense one that gives the same outputs.

The way: groups -> cuts -> a copy of the model, cut -> norms folded, sizes told -> both models run and compared.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..coupling import Coupling
from ..errors import SparsityError
from .attributes import Change, apply_changes, changes_of, likely_sizes, with_attrs
from .cut import cut_model, members_of
from .kept import Cut, make_cut
from .manifest import make_manifest
from .norms import cut_norms, fold, narrower_groups
from .report import Compaction, KeptUnits, Size
from .verify import Comparison, Reference

__all__ = ["compact"]


def compact(
    model: nn.Module,
    groups: Coupling | Sequence[Coupling],
    example_inputs: Any,
    *,
    multiple_of: int | Mapping[str, int] = 1,
    attrs: Mapping[str, str] | None = None,
    tolerance: float = 1e-5,
) -> tuple[nn.Module, Compaction]:
    """Remove the dropped units of groups from every member, and check that outputs stay.

    A unit is dropped where all weights of the group hold zeros only, as they do after pruning by `Coupling.entries` and
    `squash_mask`. Whatever the groups say, masked and compacted model are run on the example inputs and compared.

    Args:
        model: squashed; neither it nor the inputs change, since copies run.
        groups: one or several; a tensor may be in several.
        example_inputs: a tensor, a tuple of arguments, or a mapping of keyword arguments. They are the check, so give
            them as in use: sequences of more than one token, values that are not zero, masks that mask. Tensors are
            compared in tuples, mappings and dataclasses of the output; other objects (a cache, say) are told.
        multiple_of: units kept of a scope are rounded up to a multiple (or to all) by keeping some dropped ones; a
            number, or {group name: number} for some. At least one unit is kept.
        attrs: {integer attribute: the axes whose product it holds}, as `Coupling(attrs=)`; for the one group that has
            these axes.
        tolerance: largest difference of an output tensor, relative to the largest of its values that differ; whole
            numbers must be equal. What is known not to be exact (a LayerNorm over a pruned axis) needs a larger one.
            Models of 16-bit floats are compared as float32 copies; where the masked model differs as much from its own
            float64 copy, float64 copies decide.

    Returns:
        The smaller model, and a `Compaction`.

    Raises:
        SparsityError: outputs differ (the group that makes them is named), are all zero or hold nan; a tensor still
            has a mask; a name, axis or attribute that does not fit.
        CouplingError: scopes of a group, or groups that share a tensor, leave no rectangle.

    >>> from sparsekit_ao import ScopeSparsifier
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    >>> hidden = Coupling({"0.weight": "u i", "0.bias": "u", "2.weight": "o u"}, name="hidden")
    >>> sparsifier = ScopeSparsifier()
    >>> sparsifier.prepare(model, hidden.entries(model, nnz=4))
    >>> sparsifier.step()
    >>> sparsifier.squash_mask()
    >>> small, report = compact(model, hidden, torch.randn(3, 8))
    >>> small[0], report.after.parameters
    (Linear(in_features=8, out_features=4, bias=True), 46)
    >>> print(report)  # doctest: +ELLIPSIS
    hidden  4 of 16 units
    parameters: 178 -> 46 (0.258)
    bytes: 712 -> 184 (0.258)
    flops: 960 -> 240 (0.250)
    largest relative difference on the example inputs: ...
    """
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not tolerance >= 0:
        raise SparsityError(f"tolerance must be a number that is not negative, got {tolerance!r}")
    cuts = _cuts(model, with_attrs(_checked(groups), attrs or {}), multiple_of)
    changes = changes_of(model, cuts)
    reference = Reference(model, example_inputs)
    made = _make(model, cuts, changes)
    found = _compared(reference, made, tolerance)
    if isinstance(found, str):
        raise _blamed(model, cuts, reference, tolerance, made, found)
    report = Compaction(
        groups=tuple(_row(cut) for cut in cuts),
        before=_size(model, reference.flops),
        after=_size(made.model, found.flops),
        difference=found.difference,
        in_float64=found.in_float64,
        notes=tuple(made.notes),
        not_compared=tuple(reference.opaque),
        likely=tuple(likely_sizes(made.model, cuts, made.changes)),
        manifest=make_manifest(cuts, made.changes, made.shapes),
    )
    return made.model, report


@dataclass(frozen=True, kw_only=True, eq=False)
class _Made:
    """A compacted copy, and what was done to it."""

    model: nn.Module
    changes: list[Change]
    notes: list[str]
    shapes: dict[str, tuple[int, ...]]


def _checked(groups: Coupling | Sequence[Coupling]) -> list[Coupling]:
    found = [groups] if isinstance(groups, Coupling) else groups
    if not isinstance(found, Sequence) or not found or not all(isinstance(group, Coupling) for group in found):
        raise SparsityError(f"groups must be a Coupling or a list of them, got {groups!r}")
    return list(found)


def _cuts(model: nn.Module, groups: Sequence[Coupling], multiple_of: int | Mapping[str, int]) -> list[Cut]:
    names = [group.name for group in groups]
    for name in multiple_of if isinstance(multiple_of, Mapping) else ():
        if name not in names:
            raise SparsityError(f"multiple_of names {name!r}, but the groups are {', '.join(map(repr, names))}")
    cuts = []
    for at, group in enumerate(groups):
        multiple = multiple_of.get(group.name, 1) if isinstance(multiple_of, Mapping) else multiple_of
        for bound in group.bind(model):
            cuts.append(make_cut(bound, members_of(model, [m.fqn for m in bound.members]), multiple, at))
    return cuts


def _make(model: nn.Module, cuts: Sequence[Cut], changes: Sequence[Change]) -> _Made:
    small = copy.deepcopy(model)
    cut_model(small, cuts)
    apply_changes(small, changes)
    all_changes, notes = list(changes), narrower_groups(model, small)
    for norm in cut_norms(model, cuts):
        folded, note = fold(model, small, norm)
        all_changes += folded
        notes += [note] if note else []
    fqns = [m.fqn for cut in cuts for m in cut.group.members]
    shapes = {fqn: tuple(tensor.shape) for fqn, tensor in members_of(model, fqns).items()}
    return _Made(model=small, changes=all_changes, notes=notes, shapes=shapes)


def _compared(reference: Reference, made: _Made, tolerance: float) -> Comparison | str:
    """How a compacted model compares, or in words what is wrong with it."""
    try:
        found = reference.compare(made.model, tolerance)
    except Exception as e:
        return f"does not run: {e}"
    if found.decided <= tolerance:
        return found
    finite = found.decided < float("inf")
    how = f"a relative difference of {found.difference:.1e}" if finite else "other shapes, whole numbers, inf or nan"
    return f"gives other outputs: {how}"


def _blamed(
    model: nn.Module, cuts: Sequence[Cut], reference: Reference, tolerance: float, made: _Made, problem: str
) -> SparsityError:
    """The error of a compacted model that is not the masked one, with the groups that make it so by themselves."""
    lines = []
    for cut in cuts:
        if not cut.is_whole:
            alone = _compared(reference, _make(model, [cut], changes_of(model, [cut])), tolerance)
            lines += [f"group {cut.group.name!r} by itself {alone}"] if isinstance(alone, str) else []
    lines = lines or ["each group by itself is right, so some of them contradict each other"]
    lines += [f"not exact: {note}" for note in made.notes]
    lines += [
        f"likely a size that is gone (list it in attrs): {s}" for s in likely_sizes(made.model, cuts, made.changes)
    ]
    return SparsityError(
        f"the compacted model {problem}. Look for a missing member, a wrong axis, an attribute that holds a removed "
        "size, or zeroed units that act on others (through a softmax or a norm).\n  " + "\n  ".join(lines)
    )


def _row(cut: Cut) -> KeptUnits:
    scopes = cut.keep.numel() // cut.of
    return KeptUnits(name=cut.group.name, kept=cut.kept, of=cut.of, scopes=scopes, partly=cut.partly)


def _size(model: nn.Module, flops: int) -> Size:
    tensors = [*model.parameters(), *model.buffers()]
    return Size(
        parameters=sum(p.numel() for p in model.parameters()),
        bytes=sum(t.numel() * t.element_size() for t in tensors),
        flops=flops,
    )
