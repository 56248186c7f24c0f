"""`compact` makes a masked model smaller and dense, with the same outputs, which it verifies."""

import copy
import re
import traceback
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ..coupling import Coupling
from ..coupling.bound import count_stars
from ..coupling.coupling import check_attrs
from ..coupling.discovery.tracing import code_line
from ..distributed import is_managed, is_sharded
from ..errors import SparsityError
from ..masking.normalized import plain_copy, redo_weight_norms
from ..models.running import eval_mode
from .config_fields import ConfigFields
from .manifest import make_manifest
from .modules import check_lists, drop_modules, outside_dropped
from .norms import fold_norms
from .removal_report import KeptUnits, ShrinkReport, size_of
from .remove import Removal, find_removal, plain_tensor, remove_units
from .sizes import Change, apply_changes, find_changes, unlisted_sizes
from .verify import Comparison, Reference, light_copy, plain_weights, run_dtype


def compact(
    model: nn.Module,
    couplings: Coupling | Sequence[Coupling],
    example_inputs: Any,
    *,
    multiple_of: int | Mapping[str, int] = 1,
    attrs: Mapping[str, str] | None = None,
    tolerance: float = 1e-5,
) -> tuple[nn.Module, ShrinkReport]:
    """Remove the dropped units of couplings from every member, and check that outputs do not change.

    A unit is dropped if it is zero in all weights of the coupling, as after pruning by `Coupling.entries` and
    `squash_mask`. A unit that is a module of a list is dropped if all parameters of this module are zero.

    Args:
        model: The squashed model. Neither the model nor the inputs change, because copies run.
        couplings: One or several; a tensor may be in several.
        example_inputs: A tensor, a tuple of arguments, or a mapping of keyword arguments. The check is as good as they
            are, so use typical ones: sequences of different tokens, values that are not zero, attention masks with
            zeros. A single token is refused if the model combines tokens. Outputs are compared in tuples, mappings
            and dataclasses; other objects (a cache) are reported.
        multiple_of: A number, or {name of a coupling: number}. The number of units kept in a scope is rounded up to a
            multiple, or to all, by keeping some dropped ones. At least one unit is kept.
        attrs: {integer attribute: the axes whose product it holds}, as `Coupling(attrs=)`; for the one coupling that
            has these axes.
        tolerance: Largest difference of an output tensor, relative to the largest of its values that differ; integers
            must be equal. What is known not to be exact (a LayerNorm over a pruned axis) needs a larger one. Models of
            16-bit floats are compared as float32 copies, in which folded weights of norms are not rounded. If the
            difference is at most 16 times that of the masked model to its own float64 copy, float64 copies decide.

    Returns:
        The smaller model, and a `ShrinkReport`.

    Raises:
        SparsityError: Outputs differ (the message names the coupling that causes it), are all zero or contain nan. A
            tensor still has a mask. A name, axis or attribute does not fit.
        CouplingError: Scopes of a coupling keep different numbers, or what couplings keep of a tensor that they share
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
    coupling  kind  kept
    hidden    mlp   4 of 16 units
    parameters: 178 -> 46 (0.258)
    bytes: 712 -> 184 (0.258)
    flops: 960 -> 240 (0.250)
    largest relative difference on the example inputs: ...
    """
    check_comparable("", model, tolerance)
    listed = [couplings] if isinstance(couplings, Coupling) else couplings
    if not isinstance(listed, Sequence) or not listed or not all(isinstance(coupling, Coupling) for coupling in listed):
        raise SparsityError(f"couplings must be a Coupling or a list of them, got {couplings!r}")
    model, listed = plain_copy(model), _assign_attrs(listed, attrs or {})
    multiples = multiple_of if isinstance(multiple_of, Mapping) else {c.name: multiple_of for c in listed}
    check_names("multiple_of", multiples, [coupling.name for coupling in listed])
    pairs = [(at, coupling, bound) for at, coupling in enumerate(listed) for bound in coupling.bind(model)]
    found = (replace(find_removal(model, b, multiples.get(c.name, 1)), source=at) for at, c, b in pairs)
    removals = outside_dropped([*found])
    reference = Reference(model, example_inputs, tolerance)
    reference.check_lengths()
    small, report = verify_removal(reference, removals)
    why = "no unit is zero in all of its weights (or multiple_of keeps all); prune by its entries, then squash_mask"
    return small, replace(report, left_out=tuple(f"{r.bound.name}: {why}" for r in removals if r.is_empty))


def check_comparable(where: str, model: nn.Module, tolerance: object = 1e-5) -> None:
    """Raise an error unless the tolerance is a number and parameters have values, on one rank."""
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not tolerance >= 0:
        raise SparsityError(f"{where}tolerance must be a number >= 0, got {tolerance!r}")
    managed = [name or "the model" for name, module in model.named_modules() if is_managed(module)]  # perhaps gathered
    if name := next((name for name, p in model.named_parameters() if is_sharded(p)), "".join(managed[:1])):
        raise SparsityError(f"{where}{name} is sharded; remove units before parallelize_module or fully_shard")
    if name := next((name for name, p in model.named_parameters() if p.is_meta), ""):
        raise SparsityError(
            f"{where}{name} is on the meta device, so it has no values to be compared; load the weights first, without "
            "accelerate's offloading. To give a model without values the shapes of a smaller one, use cut_to."
        )


def verify_removal(
    reference: Reference,
    removals: Sequence[Removal],
    fields: ConfigFields | None = None,
    *,
    by_caller: bool = False,
    changes: Sequence[Change] = (),
    single_use: bool = False,
) -> tuple[nn.Module, ShrinkReport]:
    """Return the model of a reference without some units, if it gives the same outputs; see `compact`.

    With `fields`, its config follows, if a model constructed from it is the smaller one. With `by_caller`, the caller
    finds out what causes a problem. `changes` and `single_use` are as in `make_smaller`.
    """
    model = reference.model
    small, changes, notes, unrounded = make_smaller(model, removals, changes, single_use=single_use)
    reference.unrounded = unrounded | redo_weight_norms(small, reference.normed)
    comparison = compare_models(reference, small)
    problem = comparison.problem
    others = reference.with_other_inputs() if reference.tolerance < 1 and not problem else None
    if others is not None and (problem := compare_models(others, small).problem):
        problem += " with other values of inputs that are equal along a dimension (pass typical inputs)"
    if problem:
        reference.check_repeats()
        if by_caller:  # `shrink` tries the couplings by themselves
            raise SparsityError(f"the smaller model {problem}")
        lines = _causes(reference, removals)
        lines += [f"not exact: {note}" for note in notes]
        unlisted = unlisted_sizes(small, removals, changes)
        lines += [f"possibly a removed size (list it in attrs): {text}" for text in unlisted]
        raise SparsityError(
            f"the compacted model {problem}. Look for a missing member, a wrong axis, an attribute that holds a "
            "removed size, or zeroed units that act on others (through a softmax or a norm).\n  " + "\n  ".join(lines)
        )
    notes += _fused_notes(reference, small)
    if reference.normed and reference.dtype is not None:
        notes.append("lengths of weights of weight_norm are rounded to 16 bits after the comparison")
    not_in_config = None
    if fields is not None:
        # If outputs may change, they still must not change by the config.
        exact = reference if reference.tolerance < 1 else Reference(small, reference.example_inputs)
        config_changes, not_in_config = fields.fit(small, removals, exact)
        changes = [*changes, *config_changes]
    report = ShrinkReport(
        couplings=kept_units(removals),
        before=size_of(model, reference.flops),
        after=size_of(small, comparison.flops),
        difference=comparison.difference,
        in_float64=comparison.in_float64,
        notes=tuple(notes),
        uncounted=reference.uncounted,
        not_compared=tuple(reference.opaque),
        unlisted=tuple(unlisted_sizes(small, removals, changes)),
        changed=_as_texts(changes),
        not_in_config=not_in_config,
        manifest=make_manifest(model, removals, changes),
    )
    return small, report


def kept_units(removals: Sequence[Removal]) -> tuple[KeptUnits, ...]:
    """Return the rows of a report: how many units each removal keeps."""
    return tuple(
        KeptUnits(name=b.name, kind=b.kind, kept=r.kept, of=n, scopes=b.units // n, partly=r.partly)
        for b, r, n in ((r.bound, r, r.scope_units) for r in removals)
    )


def _as_texts(changes: Sequence[Change]) -> tuple[str, ...]:
    """Write changed integers as lines; repeated layers, whose numbers become stars, share one line."""
    numbers = re.compile(r"(?<![^.])\d+(?![^.])")
    integers = [c for c in changes if isinstance(c.now, int) and c.was != c.now]
    return tuple(dict.fromkeys(f"{numbers.sub('*', c.path)}: {c.was} -> {c.now}" for c in integers))


def _fused_notes(reference: Reference, small: nn.Module) -> list[str]:
    """Return a note if outputs differ when torch fuses attention: an encoder then gives zeros at padded positions."""
    with warnings.catch_warnings(action="ignore"):  # about nested tensors in the encoder
        fused = reference.with_fused_attention() if reference.tolerance < 1 else None
        problem = "" if fused is None else compare_models(fused, small).problem
    note = (
        "in eval mode without gradients torch fuses an nn.TransformerEncoder, which then gives zeros at padded "
        f"positions. With fewer heads it is not fused, so the smaller model {problem}. Let nothing read padded "
        "positions, or keep the heads (exclude them, or prune other kinds)"
    )
    return [note] if problem else []


def _causes(reference: Reference, removals: Sequence[Removal]) -> list[str]:
    """Return what is wrong with each coupling by itself, as text."""
    lines = []
    for removal in (removal for removal in removals if not removal.is_empty):
        single = make_smaller(reference.model, [removal], single_use=True)[0]
        problem = compare_models(reference, single, single_use=True).problem
        lines += [f"coupling {removal.bound.name!r} by itself {problem}"] if problem else []
    return lines or ["each coupling by itself is right, so some of them contradict each other"]


def check_names(argument: str, given: Iterable[str], names: Sequence[str]) -> None:
    """Raise an error if an argument gives a name that no coupling has."""
    for name in given:
        if name not in names:
            known = ", ".join(repr(other) for other in names if other != "*") or "none"
            alike = [repr(other) for other in names if other.endswith(str(name))]
            hint = f"; did you mean {' or '.join(alike)}?" if alike else ""
            raise SparsityError(f"{argument} names {name!r}, but the couplings are {known}{hint}")


def _assign_attrs(couplings: Sequence[Coupling], attrs: Mapping[str, str]) -> list[Coupling]:
    """Add every attribute to the coupling that has its axes; a SparsityError if none or several have them."""
    assigned = list(couplings)
    check_attrs("", attrs)
    for path, axes in attrs.items():
        fits = [
            at
            for at, coupling in enumerate(assigned)
            if coupling.unit in axes.split()
            and set(axes.split()) <= {coupling.unit, *coupling.scope.split(), *coupling.sizes}
            and count_stars(path) in (0, count_stars(next(iter(coupling.members))))
        ]
        if len(fits) != 1:
            names = ", ".join(repr(assigned[at].name) for at in fits) or "none"
            raise SparsityError(
                f"attrs[{path!r}] = {axes!r} must name the unit axis of one coupling, its scope axes and its sizes, "
                f"but fits {names}. Pass it to its coupling: Coupling(..., attrs={{...}}), or name units differently."
            )
        coupling = assigned[fits[0]]
        assigned[fits[0]] = replace(coupling, attrs={**coupling.attrs, path: axes})
    return assigned


def make_smaller(
    model: nn.Module, removals: Sequence[Removal], more_changes: Sequence[Change] = (), *, single_use: bool = False
) -> tuple[nn.Module, list[Change], list[str], dict[str, Tensor]]:
    """Return a copy of a masked model without some units, and changes, notes and weights as `fold_norms` does.

    `more_changes` are what the caller knows to follow beside what the couplings list. With `single_use`, the copy
    serves one comparison, in its dtype, and computes large tensors when they are read.
    """
    check_lists(model, removals, "")
    changes = [*find_changes(model, removals), *more_changes]
    tensors = [plain_tensor(model, m.fqn) for removal in removals for m in removal.bound.members]
    replaced = {id(tensor): tensor for tensor in tensors}
    small = light_copy(model, run_dtype(model)) if single_use else copy.deepcopy(model, replaced)
    remove_units(small, removals)
    if not single_use:
        plain_weights(small)
    apply_changes(small, changes)
    folded, notes, weights = fold_norms(model, small, removals)
    drop_modules(small, removals)  # last, since it changes names
    with eval_mode(small):  # restores the mode of each module
        small.train().eval()  # modules may drop cached weights in train() or eval()
    unrounded = {name: weights[p] for name, p in small.named_parameters(remove_duplicate=False) if p in weights}
    return small, changes + folded, notes, unrounded


def compare_models(reference: Reference, small: nn.Module, *, single_use: bool = False) -> Comparison:
    """Compare a smaller model, and describe what is wrong with it; see `Reference.compare`."""
    try:
        comparison = reference.compare(small, single_use=single_use)
    except Exception as e:
        line = code_line(reversed(list(traceback.walk_tb(e.__traceback__))))
        return Comparison(problem=f"does not run: {e}" + (f" (at {line})" if line else ""))
    if comparison.decisive <= reference.tolerance:
        return comparison
    relative = f"a relative difference of {comparison.difference:.1e}"
    what = "other shapes, integers, inf or nan" if comparison.decisive == float("inf") else relative
    return replace(comparison, problem=f"gives other outputs: {what}")
