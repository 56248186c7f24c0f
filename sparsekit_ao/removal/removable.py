"""removable: the couplings that `compact` can remove from a model, found by removing units and comparing outputs.

Integers that hold a removed size are found on the way: for a coupling whose removal fails, those of `candidate_attrs`
are changed too, and the fewest that make outputs equal are listed in its `attrs`.
"""

import copy
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..coupling import BoundCoupling, Coupling, Discovery, discover
from ..coupling.coupling import merged_couplings
from ..errors import SparsityError
from ..sparsifiers.config import excluded_names
from ..sparsifiers.names import named_tensors
from ..sparsifiers.progress import counted
from ..structure import sparsity_to_nnz
from .compact import compared, find_removals, without_units
from .remove import Removal, check_multiple, zero_units
from .sizes import candidate_attrs
from .verify import Reference

_NEAREST = 7  # candidates for attributes of one coupling that are tried by themselves


def removable(
    model: nn.Module,
    example_inputs: Any,
    couplings: Sequence[Coupling] | None = None,
    *,
    ratio: float = 0.5,
    exclude: Sequence[str | type] = (),
    multiple_of: int | Mapping[str, int] = 1,
    tolerance: float = 1e-5,
) -> Discovery:
    """Find the couplings that `compact` can remove from a model, with the integers that this changes.

    Random units are made zero in a copy of the model, removed from another one, and the outputs of both compared. Where
    they differ, or the smaller model does not run, each coupling is tried by itself, with integers near its tensors
    changed that equal a removed size (`num_heads`, `config.hidden_size`, entries of tuples). Couplings that fail
    because the forward has one number for both (the size of a head, of queries and of values) are merged. Prune
    what is returned by `joint_entries`, then call `compact`.

    Args:
        model: not changed; copies run.
        example_inputs: as for `compact`.
        couplings: to be tried; None takes what `discover` finds.
        ratio: fraction of the units of every coupling that is removed in the trial.
        exclude: names, globs and regular expressions of tensors or modules, and module classes; couplings with such a
            tensor are left out.
        multiple_of, tolerance: as for `compact`.

    Returns:
        As `discover`; `left_out` has the couplings that cannot be removed, with the reason. All names differ.

    Raises:
        SparsityError: as `discover`; the model does not run, or returns no tensor, only zeros, or a nan.

    >>> class Heads(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.qkv, self.out, self.heads = nn.Linear(8, 24), nn.Linear(8, 8), 4
    ...
    ...     def forward(self, x):
    ...         q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, 2)).permute(2, 0, 3, 1, 4)
    ...         return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    >>> removable(Heads(), torch.randn(2, 5, 8)).couplings[0].attrs
    {'heads': 'u'}
    """
    for number in multiple_of.values() if isinstance(multiple_of, Mapping) else [multiple_of]:
        check_multiple(number, "")  # else it would be the reason why each coupling is left out
    if couplings is None:
        discovery = discover(model, example_inputs)
    else:
        discovery = Discovery(couplings=tuple(couplings), counts=(), frozen=())
    tried, left_out = _tried(model, with_own_names(discovery.couplings), ratio, exclude)
    with counted("removable", " compactions", sum(p.numel() for p in model.parameters())) as done:
        trials = functools.partial(
            Trials, inputs=example_inputs, multiple_of=multiple_of, tolerance=tolerance, done=done
        )
        good, bad = _sorted(model, tried, ratio, trials)
    names = [coupling.name for coupling in tried]
    good.sort(key=lambda coupling: names.index(coupling.name))
    bindings = [coupling.bind(model) for coupling in good]
    return replace(
        discovery,
        couplings=tuple(good),
        counts=tuple((len(bound), bound[0].grid[-1]) for bound in bindings),
        left_out=(*left_out, *((coupling.name, why) for coupling, why in bad.items())),
    )


def _sorted(
    model: nn.Module, couplings: Sequence[Coupling], ratio: float, trials: Callable[[nn.Module], "Trials"]
) -> tuple[list[Coupling], dict[Coupling, str]]:
    """The couplings that can be removed together, some with more `attrs` or merged; and why the others cannot."""
    first = trials(zeroed(model, couplings, ratio))
    good, bad = first.sort(couplings)
    fitted: dict[Coupling, list[Coupling]] = {}  # with what each replaces
    for coupling, parts in _merges(model, good, bad):
        if not any(part in replaced for replaced in fitted.values() for part in parts):
            one = trials(zeroed(model, [coupling], ratio)).fitted(coupling)
            fitted |= {} if one is None else {one: parts}
    for coupling in bad:
        if not any(coupling in replaced for replaced in fitted.values()):
            one = first.fitted(coupling, together=2)
            fitted |= {} if one is None else {one: [coupling]}
    if fitted:
        replaced = [part for parts in fitted.values() for part in parts]
        good = [*(one for one in good if one not in replaced), *fitted]
        good, more = trials(zeroed(model, good, ratio)).sort(good)
        bad = {one: why for one, why in bad.items() if one not in replaced} | more
    return good, bad


class Trials:
    """Compactions of one masked model, each by some of its couplings.

    Args:
        masked: units of all couplings are zero in it.
        inputs, multiple_of, tolerance: as for `compact`.
        done: called after each compaction.
    """

    def __init__(
        self,
        masked: nn.Module,
        inputs: Any,
        multiple_of: int | Mapping[str, int] = 1,
        tolerance: float = 1e-5,
        done: Callable[[], object] = lambda: None,
    ) -> None:
        self._done = done
        self._masked, self._multiple_of, self._tolerance = masked, multiple_of, tolerance
        self._reference = Reference(masked, inputs)

    def problem(self, couplings: Sequence[Coupling]) -> str:
        """What is wrong with the model without the zero units of these couplings; empty if nothing is."""
        names, multiple = {coupling.name for coupling in couplings}, self._multiple_of
        if isinstance(multiple, Mapping):
            multiple = {name: number for name, number in multiple.items() if name in names}
        try:
            smaller = without_units(self._masked, find_removals(self._masked, couplings, multiple))
        except SparsityError as e:
            return str(e)
        finally:
            self._done()
        comparison = compared(self._reference, smaller.model, self._tolerance, discarded=True)
        return comparison if isinstance(comparison, str) else ""

    def sort(self, couplings: Sequence[Coupling]) -> tuple[list[Coupling], dict[Coupling, str]]:
        """The couplings that can be removed together, with the attributes that this changes; and why others cannot."""
        good, failing = self._split(list(couplings))
        fitted, bad = [], {}
        for coupling, why in failing.items():
            one = self.fitted(coupling)
            if one is None:
                bad[coupling] = why
            else:
                fitted.append(one)
        good, more = self._extended(good, fitted)
        return good, bad | more

    def fitted(self, coupling: Coupling, together: int = 1) -> Coupling | None:
        """The coupling with the fewest further `attrs` with which it can be removed; None if none were found.

        Tried are all candidates, those that are not of a config, and so many of the nearest ones together.
        """
        if not self.problem([coupling]):
            return coupling
        axes = {p: a for p, a in candidate_attrs(self._masked, coupling).items() if p not in coupling.attrs}

        def with_attrs(paths: Sequence[str]) -> Coupling:
            return replace(coupling, attrs={**coupling.attrs, **{path: axes[path] for path in paths}})

        near = [path for path in axes if "config" not in path.split(".")]
        for paths in (list(axes), near) if together == 1 else ():
            if paths and not self.problem([with_attrs(paths)]):
                for path in reversed(paths):  # the farthest first
                    fewer = [one for one in paths if one != path]
                    paths = paths if self.problem([with_attrs(fewer)]) else fewer
                return with_attrs(paths)
        sets = itertools.combinations(list(axes)[:_NEAREST], together)
        return next((one for one in map(with_attrs, sets) if not self.problem([one])), None)

    def _split(self, couplings: list[Coupling]) -> tuple[list[Coupling], dict[Coupling, str]]:
        """Those that can be removed as they are, together, and the others: by halves, since most mostly can."""
        why = self.problem(couplings)
        if not why or len(couplings) <= 1:  # without any, the model itself may not run
            return ([], dict.fromkeys(couplings, why)) if why else (couplings, {})
        half = len(couplings) // 2
        (left, bad), (right, worse) = self._split(couplings[:half]), self._split(couplings[half:])
        good, more = self._extended(left, right)
        return good, bad | worse | more

    def _extended(self, good: list[Coupling], others: Sequence[Coupling]) -> tuple[list[Coupling], dict[Coupling, str]]:
        """Couplings that can be removed together, and others of which each can be by itself: all, or one by one."""
        if not good or not others or not self.problem([*good, *others]):
            return [*good, *others], {}
        bad = {}
        for one in others:
            why = self.problem([*good, one])
            if why:
                bad[one] = f"together with others it {why}"
            else:
                good = [*good, one]
        return good, bad


def zeroed(model: nn.Module, couplings: Sequence[Coupling], ratio: float) -> nn.Module:
    """A copy with random units of all couplings zero, always the same."""
    masked, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)
    for bound in (bound for coupling in couplings for bound in coupling.bind(masked)):
        keep = torch.rand(bound.grid, generator=generator).argsort(-1) < _kept(bound, ratio)
        zero_units(masked, Removal(coupling=bound, keep=keep))
    return masked


def _kept(bound: BoundCoupling, ratio: float) -> int:
    return max(1, sparsity_to_nnz(ratio, bound.grid[-1], "ratio: "))


def with_own_names(couplings: Sequence[Coupling]) -> list[Coupling]:
    """Give couplings different names: those of equal ones get the axes of their first member, or a number."""
    for suffix in (lambda one, at: f" {next(iter(one.members.values()))}", lambda one, at: f" #{at}"):
        counts = Counter(coupling.name for coupling in couplings)
        couplings = [
            replace(one, name=one.name + suffix(one, at)) if counts[one.name] > 1 else one
            for at, one in enumerate(couplings)
        ]
    return list(couplings)


def _tried(
    model: nn.Module, couplings: Sequence[Coupling], ratio: float, exclude: Sequence[str | type]
) -> tuple[list[Coupling], list[tuple[str, str]]]:
    """The couplings to be tried, and (name, reason) of the others."""
    excluded = excluded_names(model, exclude, dict(named_tensors(model)))
    tried, left_out = [], []
    for coupling in couplings:
        bindings = coupling.bind(model)
        why = next((excluded[m.fqn] for bound in bindings for m in bound.members if m.fqn in excluded), "")
        if not why and coupling.lists:
            why = "its units are modules of a list; give them masks by its entries, and call compact with a tolerance"
        if not why and all(_kept(bound, ratio) == bound.grid[-1] for bound in bindings):
            why = f"a ratio of {ratio} drops none of its units: {bindings[0].grid[-1]} in each scope"
        if why:
            left_out.append((coupling.name, why))
        else:
            tried.append(coupling)
    return tried, left_out


def _merges(
    model: nn.Module, good: Sequence[Coupling], bad: Mapping[Coupling, str]
) -> list[tuple[Coupling, list[Coupling]]]:
    """Merged couplings that may be removed although their parts cannot, since all have one attribute as candidate."""
    sharing: dict[str, list[Coupling]] = {}  # by the attribute
    for coupling in bad:
        for path in candidate_attrs(model, coupling):
            if "config" not in path.split("."):  # shared by all layers
                sharing.setdefault(path.replace("**", "*"), []).append(coupling)
    for coupling in good:
        for path in sharing.keys() & {path.replace("**", "*") for path in coupling.attrs}:
            sharing[path].append(coupling)
    merges = []
    for parts in dict.fromkeys(map(tuple, sharing.values())):
        whole: Coupling | None = parts[0]
        for part in parts[1:]:
            whole = whole and merged_couplings(whole, part, model)
        if whole is not None and len(parts) > 1:
            merges.append((whole, list(parts)))
    return merges
