"""compact: make a masked model smaller and dense, with the same outputs.

Couplings are bound -> dropped units removed from a copy -> sizes updated, norms folded -> both models run and compared.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ..coupling import Coupling
from ..errors import SparsityError
from .attributes import Change, assign_attrs, unlisted_sizes
from .config_fields import fit_config, has_config
from .manifest import make_manifest
from .removal import Removal
from .results import UNLISTED, Compaction, KeptUnits, Size
from .trial import Compacted, compacted, compared, find_removals
from .verify import Reference


def compact(
    model: nn.Module,
    couplings: Coupling | Sequence[Coupling],
    example_inputs: Any,
    *,
    multiple_of: int | Mapping[str, int] = 1,
    attrs: Mapping[str, str] | None = None,
    tolerance: float = 1e-5,
) -> tuple[nn.Module, Compaction]:
    """Remove the dropped units of couplings from every member, and check that outputs do not change.

    A unit is dropped where all weights of the coupling hold only zeros, as they do after pruning by `Coupling.entries`
    and `squash_mask`; one that is a module of a list, where all its parameters do. In any case, the masked and the
    compacted model are run on the example inputs and compared.

    Args:
        model: squashed; neither it nor the inputs change, since copies run.
        couplings: one or several; a tensor may be in several.
        example_inputs: a tensor, a tuple of arguments, or a mapping of keyword arguments. The check is as good as they
            are, so use typical ones: sequences of more than one token, values that are not zero, attention masks with
            zeros. Tensors are compared in tuples, mappings and dataclasses of the output; other objects (a cache, say)
            are reported.
        multiple_of: the number of units kept in a scope is rounded up to a multiple (or to all) by keeping some dropped
            ones; a number, or {name of a coupling: number} for some. At least one unit is kept.
        attrs: {integer attribute: the axes whose product it holds}, as `Coupling(attrs=)`; for the one coupling that
            has these axes.
        tolerance: largest difference of an output tensor, relative to the largest of its values that differ; integers
            must be equal. What is known not to be exact (a LayerNorm over a pruned axis) needs a larger one. Models of
            16-bit floats are compared as float32 copies; where the masked model differs as much from its own float64
            copy, float64 copies decide.

    Returns:
        The smaller model, and a `Compaction`.

    Raises:
        SparsityError: outputs differ (the message names the coupling that causes it), are all zero or contain nan; a
            tensor still has a mask; a name, axis or attribute that does not fit.
        CouplingError: scopes of a coupling keep different numbers, or what couplings keep of a tensor that they share
            is not rectangular.

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
        raise SparsityError(f"tolerance must be a number >= 0, got {tolerance!r}")
    removals = find_removals(model, assign_attrs(_checked(couplings), attrs or {}), multiple_of)
    return verified(model, removals, example_inputs, tolerance)


def verified(
    model: nn.Module, removals: Sequence[Removal], example_inputs: Any, tolerance: float, *, with_config: bool = False
) -> tuple[nn.Module, Compaction]:
    """A model without some units (or without none), if it gives the same outputs; see `compact`, and `fit_config`."""
    result = compacted(model, removals)
    reference = Reference(model, example_inputs)
    found = compared(reference, result, tolerance)
    if isinstance(found, str):
        raise _error(model, reference, tolerance, result, found)
    of_config: list[Change] = []
    not_in_config = None
    if with_config and has_config(model):
        of_config, not_in_config = fit_config(model, result.model, removals, reference, tolerance)
    changes = [*result.changes, *of_config]
    report = Compaction(
        couplings=tuple(_row(removal) for removal in removals),
        before=_size(model, reference.flops),
        after=_size(result.model, found.flops),
        difference=found.difference,
        in_float64=found.in_float64,
        notes=tuple(result.notes),
        not_compared=tuple(reference.opaque),
        unlisted=tuple(unlisted_sizes(result.model, removals, changes)),
        changed=_changed(changes),
        not_in_config=not_in_config,
        manifest=make_manifest(removals, changes, result.shapes),
    )
    return result.model, report


def _checked(couplings: Coupling | Sequence[Coupling]) -> list[Coupling]:
    found = [couplings] if isinstance(couplings, Coupling) else couplings
    if not isinstance(found, Sequence) or not found or not all(isinstance(one, Coupling) for one in found):
        raise SparsityError(f"couplings must be a Coupling or a list of them, got {couplings!r}")
    return list(found)


def _error(model: nn.Module, reference: Reference, tolerance: float, result: Compacted, problem: str) -> SparsityError:
    """The error for a compacted model with other outputs, with the couplings that cause it by themselves."""
    lines = []
    for removal in result.removals:
        if not removal.is_empty:
            alone = compared(reference, compacted(model, [removal]), tolerance, discarded=True)
            lines += [f"coupling {removal.coupling.name!r} by itself {alone}"] if isinstance(alone, str) else []
    lines = lines or ["each coupling by itself is right, so some of them contradict each other"]
    lines += [f"not exact: {note}" for note in result.notes]
    lines += [UNLISTED + text for text in unlisted_sizes(result.model, result.removals, result.changes)]
    return SparsityError(
        f"the compacted model {problem}. Look for a missing member, a wrong axis, an attribute that holds a removed "
        "size, or zeroed units that act on others (through a softmax or a norm).\n  " + "\n  ".join(lines)
    )


def _changed(changes: Sequence[Change]) -> tuple[str, ...]:
    """The changed integers as text, those of repeated layers once, with stars for their numbers."""
    numbers = re.compile(r"(?<![^.])\d+(?![^.])")
    integers = [c for c in changes if isinstance(c.was, int) and c.was != c.now]
    lines = [f"{numbers.sub('*', c.path)}: {c.was} -> {c.now}" for c in integers]
    return tuple(dict.fromkeys(lines))


def _row(removal: Removal) -> KeptUnits:
    scopes = removal.keep.numel() // removal.of
    return KeptUnits(name=removal.coupling.name, kept=removal.kept, of=removal.of, scopes=scopes, partly=removal.partly)


def _size(model: nn.Module, flops: int) -> Size:
    tensors = [*model.parameters(), *model.buffers()]
    return Size(
        parameters=sum(p.numel() for p in model.parameters()),
        bytes=sum(t.numel() * t.element_size() for t in tensors),
        flops=flops,
    )
