"""The same masks made with other libraries: torch itself, its pruning module, torchao's PAT.

Each call reads the weight and returns a mask or a pruned copy, whichever that library makes.
"""

import contextlib
import logging
import math
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

__all__ = ["contenders"]

Prune = Callable[[], Tensor]


def contenders(weight: Tensor, block: tuple[int, int], n_m: tuple[int, int] | None, level: float) -> dict[str, Prune]:
    """{name: a call that prunes} for topk, kthvalue, torch.nn.utils.prune and PAT, where they have the pattern.

    Args:
        weight: [out, in].
        block: elements of a block.
        n_m: keep n of m inputs, or None for a whole-tensor budget.
        level: fraction of blocks dropped.
    """
    if n_m:
        return {"torch.topk": lambda: _topk_n_m(weight, *n_m), **_pat_n_m(weight, *n_m)}
    calls = {
        "torch.topk": lambda: _topk(weight, block, level),
        "torch.kthvalue": lambda: _kthvalue(weight, block, level),
        **_pat_blocks(weight, block, level),
    }
    if block == (1, 1):
        calls["prune.l1_unstructured"] = lambda: _l1(weight, level)
    return calls


def _tiles(weight: Tensor, block: tuple[int, int]) -> Tensor:
    """[block rows, block columns, rows, columns]"""
    return weight.unfold(0, block[0], block[0]).unfold(1, block[1], block[1])


def _expand(kept: Tensor, block: tuple[int, int]) -> Tensor:
    return kept.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1) if block != (1, 1) else kept


def _scores(weight: Tensor, block: tuple[int, int]) -> Tensor:
    return weight.abs() if block == (1, 1) else torch.linalg.vector_norm(_tiles(weight, block), dim=(2, 3))


def _topk(weight: Tensor, block: tuple[int, int], level: float) -> Tensor:
    scores = _scores(weight, block)
    keep = scores.numel() - math.floor(level * scores.numel())
    kept = torch.zeros(scores.numel(), dtype=torch.bool)
    kept[scores.flatten().topk(keep, sorted=False).indices] = True
    return _expand(kept.view(scores.shape), block)


def _kthvalue(weight: Tensor, block: tuple[int, int], level: float) -> Tensor:
    scores = _scores(weight, block)
    return _expand(scores > scores.flatten().kthvalue(max(1, math.floor(level * scores.numel()))).values, block)


def _topk_n_m(weight: Tensor, n: int, m: int) -> Tensor:
    groups = weight.abs().view(-1, m)
    kept = torch.zeros(groups.shape, dtype=torch.bool)
    return kept.scatter_(1, groups.topk(n, sorted=False).indices, True).view(weight.shape)


def _l1(weight: Tensor, level: float) -> Tensor:
    layer = nn.Linear(1, 1, bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return prune.l1_unstructured(layer, "weight", amount=level).weight_mask


def _pat_n_m(weight: Tensor, n: int, m: int) -> dict[str, Prune]:
    pat = _pat()
    if pat is None:
        return {}
    constraint = pat.NMSparseConstraint(0.0, n)

    def call() -> Tensor:
        pruned = weight.clone()
        torch.vmap(constraint.apply_, in_dims=(0, None))(pruned.view(-1, m), 0.0)
        return pruned

    return {"PAT NMSparseConstraint": call}


def _pat_blocks(weight: Tensor, block: tuple[int, int], level: float) -> dict[str, Prune]:
    pat = _pat()
    if pat is None:
        return {}
    constraint = pat.MinSparsityConstraint(0.0, level)

    def call() -> Tensor:
        groups = _tiles(weight, block).reshape(-1, block[0] * block[1]).clone()
        constraint.apply_(groups, 0.0)
        return groups

    return {"PAT MinSparsityConstraint": call}


def _pat():
    """torchao's module, or None where the installed release has none."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(None), contextlib.suppress(ImportError):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)  # its import warns of libraries that cannot be loaded
        try:
            from torchao.prototype.pat.optim import min_sparsity
        finally:
            logging.disable(logging.NOTSET)
        return min_sparsity
    return None
