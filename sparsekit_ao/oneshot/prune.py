"""`prune`: from a model to a plain pruned model in one call."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ..errors import SparsityError, checked_model
from ..masking.normalized import copy_of, redo_weight_norms, undo_weight_norms
from ..patterns import Pattern
from ..scores import Score
from ..sparsifiers.config import Rule
from ..sparsifiers.scope import ScopeSparsifier
from .one_shot import LayerRow, OneShotReport, check_method, one_shot
from .sequential import CalibrationData


def prune(
    model: nn.Module,
    sparsity_level: float | None = None,
    *,
    pattern: Pattern | str | None = None,
    batches: Iterable[Any] | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    token_mask: str | Callable[[Any], Tensor] | None = None,
    exclude: Sequence[Rule] = (),
    score: Score | None = None,
    compensate: str | None = "admm",
    recover: bool = False,
    inplace: bool = False,
    progress: bool = True,
) -> tuple[nn.Module, OneShotReport]:
    """Prune the weights of every Linear and convolution, and return a plain model with zeros in them.

    Without batches, weights are dropped by their size (or a `score` that needs no data) and the others stay. With
    batches, kept weights make up for the dropped ones; see `one_shot`. For other configs, training and schedules use
    `ScopeSparsifier`.

    Args:
        model: Of any device and dtype; not changed unless `inplace`. In a copy, weights of weight_norm are pruned too.
        sparsity_level: Fraction dropped of each weight, in [0, 1]; 0.5 by default.
        pattern: One of `patterns`, or its text ("2:4"); None drops single elements.
        batches, forward, token_mask, compensate, progress: As for `one_shot`; inputs alone, no labels.
        exclude: Names, globs and regular expressions of tensors or modules, modules and module classes, to leave out.
        score: How much each weight matters; see `scores`. It chooses the masks with `compensate=None` or
            `"least_squares"` only.
        recover: Then train the kept weights of each block to give the dense model's outputs; see `recover`.
        inplace: Prune the model itself.

    Returns:
        The pruned model, and a report. It has a row for each layer with its density and errors, what recovery did, and
        what was left out, such as layers that the pattern does not fit.

    Raises:
        SparsityError: Bad arguments, or nothing to prune. The model is then unchanged. An error in the middle leaves a
            model that was pruned in place with masks, and partly pruned.

    >>> model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    >>> pruned, report = prune(model, pattern="2:4", batches=[torch.randn(64, 16) for _ in range(4)])
    >>> int((pruned[0].weight == 0).sum()), int((model[0].weight == 0).sum()), [row.density for row in report]
    (256, 0, [0.5, 0.5])
    """
    checked_model(model, "prune")
    if batches is None and (recover or forward is not None or token_mask is not None):
        raise SparsityError("prune: recover, forward and token_mask need batches; give unlabelled inputs as batches=")
    check_method(compensate)
    sparsifier = ScopeSparsifier(sparsity_level, pattern=pattern, score=score)
    if batches is not None:
        batches = CalibrationData.checked(model, batches, forward, token_mask, "prune").batches
    pruned = model if inplace else copy_of(model)
    twin = dict(zip(model.modules(), pruned.modules(), strict=True))
    normed = () if inplace else undo_weight_norms(pruned)
    if isinstance(exclude, (list, tuple)):
        exclude = [twin.get(rule, rule) if isinstance(rule, nn.Module) else rule for rule in exclude]
    sparsifier.prepare(pruned, exclude=exclude, skip_unfit=True)
    left_out = sparsifier.report().skipped
    if batches is None:
        sparsifier.step()
        nan = float("nan")
        rows = tuple(
            LayerRow(tensor=r.tensor, before=nan, after=nan, density=1 - r.sparsity, seconds=0.0, note="no batches")
            for r in sparsifier.report()
        )
        report = OneShotReport(rows=rows, seconds=0.0, left_out=left_out)
    else:
        report = one_shot(
            sparsifier,
            batches,
            forward,
            compensate=compensate,
            token_mask=token_mask,
            recover=(inplace or model) if recover else False,
            progress=progress,
        )
        report = replace(report, left_out=left_out)
    sparsifier.squash_mask()
    redo_weight_norms(pruned, normed)
    return pruned, report
