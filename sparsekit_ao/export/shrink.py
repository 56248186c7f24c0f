"""shrink: discover, choose, squash, compact and report in one call."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ..coupling import Coupling, joint_entries
from ..scores import Score, needs_of, parse_score
from ..sparsifiers import ScopeSparsifier
from .compact import verified
from .removable import Trials, removable
from .results import Compaction
from .trial import find_removals


def shrink(
    model: nn.Module,
    example_inputs: Any,
    ratio: float = 0.5,
    score: Score | str | None = None,
    exclude: Sequence[str | type] = (),
    *,
    couplings: Sequence[Coupling] | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    multiple_of: int | Mapping[str, int] = 1,
    tolerance: float = 1e-5,
) -> tuple[nn.Module, Compaction]:
    """Make a model smaller: drop a fraction of all units that can be removed, and remove them.

    Couplings are discovered, and those from which `compact` cannot remove units are left out (see `removable`). Of
    several that divide one dimension of a tensor (key heads, query heads in each, numbers of a head) the first is
    pruned, so that a dimension loses `ratio` of its length once. The report lists what is left out, with the reason.

    Args:
        model: not changed.
        example_inputs: a tensor, a tuple of arguments, or a mapping of keyword arguments; see `compact`.
        ratio: fraction of the units of every coupling that is dropped, in each scope.
        score: one of `scores`, by name or object; None is the norm of a unit. Statistics that it needs are recorded
            on the example inputs; where they are of layers' inputs, units are scored by the layers that read them.
        exclude: names, globs and regular expressions of tensors or modules, and module classes; couplings with such a
            tensor are left out.
        couplings: those to be considered; None takes what `discover` finds.
        forward: `(model, example_inputs) -> loss`, for scores that need gradients.
        multiple_of, tolerance: as for `compact`.

    Returns:
        The smaller model, and a `Compaction`. Where nothing can be removed it is a copy.

    Raises:
        SparsityError: as `discover`, `compact` and `calibrate`; no coupling that cannot be removed raises one.

    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> small, report = shrink(model, torch.randn(3, 8), ratio=0.75, exclude=["4"])
    >>> small[0], small[2]
    (Linear(in_features=8, out_features=4, bias=True), Linear(in_features=4, out_features=16, bias=True))
    >>> report.left_out
    ("2.weight: left out by exclude[0] ('4')",)
    """
    keys: dict[str, Any] = {"multiple_of": multiple_of, "tolerance": tolerance}
    found = removable(model, example_inputs, couplings, ratio=ratio, exclude=exclude, **keys)
    chosen, left = _one_for_each_dimension(model, found.couplings)
    left = [*found.left_out, *left]
    while True:
        masked = _pruned(model, chosen, example_inputs, ratio, score, forward)
        good, bad = Trials(masked, example_inputs, **keys).sort(chosen)
        left += [(coupling.name, why) for coupling, why in bad.items()]
        chosen = good
        if not bad:
            break  # what was pruned is what will be removed
    names = {coupling.name for coupling in chosen}
    own = {n: k for n, k in multiple_of.items() if n in names} if isinstance(multiple_of, Mapping) else multiple_of
    small, report = verified(masked, find_removals(masked, chosen, own), example_inputs, tolerance)
    return small, replace(report, left_out=tuple(f"{name}: {why}" for name, why in left))


def _one_for_each_dimension(
    model: nn.Module, couplings: Sequence[Coupling]
) -> tuple[list[Coupling], list[tuple[str, str]]]:
    """The couplings without those that divide a dimension that an earlier one divides; and (name, reason) of these."""
    owner: dict[tuple[str, int, tuple[int, int] | None], str] = {}  # by tensor, dimension, and part of a concatenation
    chosen, left = [], []
    for coupling in couplings:
        members = [member for bound in coupling.bind(model) for member in bound.members]
        divided = [(member, member.pattern.dimension_of(coupling.unit)) for member in members]
        places = [(member.fqn, d, member.pattern.outside.get(d)) for member, d in divided]
        shared = next((place for place in places if place in owner), None)
        if shared is None:
            owner |= dict.fromkeys(places, coupling.name)
            chosen.append(coupling)
        else:
            left.append((coupling.name, f"it divides {shared[0]}[{shared[1]}] as {owner[shared]!r} does"))
    return chosen, left


def _pruned(
    model: nn.Module,
    couplings: Sequence[Coupling],
    inputs: Any,
    ratio: float,
    score: Score | str | None,
    forward: Callable[[nn.Module, Any], Any] | None,
) -> nn.Module:
    """A copy in which the lowest units of all couplings are zero, without masks."""
    masked = copy.deepcopy(model)
    needs = needs_of(parse_score(score, "shrink: "))
    if any(need.startswith("input") for need in needs):
        couplings = [replace(coupling, scores="consumers") for coupling in couplings]
    if couplings:
        sparsifier = ScopeSparsifier(ratio, score=score)  # type: ignore[arg-type]
        sparsifier.prepare(masked, joint_entries(couplings, masked))
        if needs:
            sparsifier.calibrate([inputs], forward)
        sparsifier.step()
        sparsifier.squash_mask()
    return masked
