"""shrink_experts and shrink_layers: whole experts, and whole blocks of a model, which change its outputs."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..calibration import Forward, call, checked_batches, eval_mode
from ..coupling import BoundCoupling, expert_couplings, expert_scores
from ..coupling.bound import is_list
from ..coupling.nested_tensors import tensors_in
from ..errors import SparsityError
from ..selection import keep_mask
from ..structure import checked_level, sparsity_to_nnz
from .compact import Compaction, verified
from .remove import Removal, check_multiple, rounded
from .sizes import fitting_engines, has_config
from .verify import Reference


def shrink_experts(
    model: nn.Module,
    batches: Sequence[Any],
    ratio: float = 0.5,
    *,
    multiple_of: int = 1,
    forward: Forward | None = None,
) -> tuple[nn.Module, Compaction]:
    """Remove a fraction of the experts of every layer, those of the lowest `expert_scores` (REAP, arXiv 2510.13999).

    Every layer keeps as many, and every group of experts where routers choose among groups, so that the config can hold
    the number. The result is the model whose routers never choose the others: its outputs differ from the given model's
    by `report.difference` on the first batch, and are not compared otherwise.

    Args:
        model: With experts of `expert_couplings`, packed as transformers 5 does; not changed.
        batches, forward: As for `expert_scores`.
        ratio: Fraction of the experts that is removed, rounded so that a multiple of `multiple_of` is kept.

    Raises:
        SparsityError: As `expert_scores`; fewer experts would be kept than a token needs.

    >>> small, report = shrink_experts(model, batches, 0.25)  # doctest: +SKIP
    """
    level, scores = checked_level(ratio, "shrink_experts: ratio: "), expert_scores(model, batches, forward)
    check_multiple(multiple_of, "shrink_experts: ")
    coupling = expert_couplings(model).get("experts")
    if coupling is None:
        raise SparsityError("shrink_experts: there is no router with a row for each expert beside the experts")
    removals = []
    for bound in coupling.bind(model):
        units, names = bound.grid[-1], [member.fqn.rpartition(".")[0] for member in bound.members]
        path = next(name for name in names if name in scores)
        kept = rounded(sparsity_to_nnz(level, units, "shrink_experts: ratio: "), units, multiple_of)
        keep = keep_mask(scores[path].reshape(-1, units), kept).reshape(bound.grid)
        removals.append(Removal(coupling=bound, keep=keep))
    least = getattr(model.config.get_text_config(), "num_experts_per_tok", 1) if has_config(model) else 1  # type: ignore
    if (kept := int(removals[0].keep.sum())) < least:
        raise SparsityError(f"shrink_experts: a token needs {least} experts, but {ratio=} keeps {kept}")
    return _without(model, removals, batches, forward)


def shrink_layers(
    model: nn.Module,
    batches: Sequence[Any],
    ratio: float = 0.25,
    *,
    blocks: str | None = None,
    forward: Forward | None = None,
) -> tuple[nn.Module, Compaction]:
    """Remove the fraction of the repeated blocks that change their input least (ShortGPT, arXiv 2403.03853).

    A block's influence is one less the cosine of its input and its output, the mean over all tokens. Blocks that remain
    are numbered anew (`layer_idx`), and the config of a transformers model too. Outputs change: by `report.difference`
    on the first batch.

    Args:
        model: Not changed.
        batches, forward: As for `expert_scores`.
        ratio: Fraction of the blocks that is removed.
        blocks: Name of an `nn.ModuleList`; None takes the one with the most parameters.

    Raises:
        SparsityError: No such list; a block gives no tensor of its input's shape.

    >>> small, report = shrink_layers(model, batches, 0.25)  # doctest: +SKIP
    """
    checked_batches(batches, None, forward, "shrink_layers")
    batches = list(batches)
    lists: dict[str, Any] = {n: m for n, m in model.named_modules() if is_list(m) and blocks in (None, n)}
    if not lists:
        raise SparsityError(f"shrink_layers: the model has no nn.ModuleList{f' {blocks!r}' if blocks else ''}")
    path, layers = max(lists.items(), key=lambda item: sum(p.numel() for p in item[1].parameters()))
    cosines: list[list[Tensor]] = [[] for _ in layers]

    def record(at: int, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        before, after = (next((t for _, t in tensors_in("", value)), None) for value in ([args, kwargs], output))
        if before is None or after is None or before.shape != after.shape:
            raise SparsityError(f"shrink_layers: {path}.{at} gives no tensor of its input's shape")
        cosines[at].append(F.cosine_similarity(before.double(), after.double(), dim=-1).flatten())

    hooks = [m.register_forward_hook(partial(record, at), with_kwargs=True) for at, m in enumerate(layers)]
    try:
        with torch.no_grad(), eval_mode(model):
            for batch in batches:
                call(model, batch) if forward is None else forward(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    if not all(cosines):
        raise SparsityError(f"shrink_layers: not all modules of {path} were called")
    influences = torch.stack([1 - torch.cat(values).mean() for values in cosines])
    kept = sparsity_to_nnz(checked_level(ratio, "shrink_layers: "), len(cosines), "")
    if kept == 0:
        raise SparsityError(f"shrink_layers: ratio={ratio} keeps none of the {len(cosines)} blocks of {path}")
    keep = keep_mask(influences[None], kept)[0]
    keys: dict[str, Any] = {"captured": (), "members": (), "scope": (), "attrs": {}, "lists": (path,)}
    coupling = BoundCoupling(name="layers", unit="u", sizes={"u": len(cosines)}, **keys)
    return _without(model, [Removal(coupling=coupling, keep=keep)], batches, forward)


def _without(
    model: nn.Module, removals: Sequence[Removal], batches: Iterable[Any], forward: Forward | None
) -> tuple[nn.Module, Compaction]:
    """Remove units that are not zero; the report's difference is that of the outputs on the first batch."""
    calls: list[Any] = []
    hook = model.register_forward_pre_hook(lambda _, args, kwargs: calls.append(kwargs or args), with_kwargs=True)
    try:
        with torch.no_grad(), eval_mode(model):
            (forward or call)(model, next(iter(batches)))
    finally:
        hook.remove()
    small, report = verified(model, removals, Reference(model, calls[0]), sys.float_info.max, with_config=True)
    fits = fitting_engines(small, 1) if report.not_in_config == "" else ()
    return small, replace(report, fits=fits, notes=(*report.notes, "what is removed is not zero"))
