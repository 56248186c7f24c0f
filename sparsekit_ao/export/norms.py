"""Norms over a pruned axis: an RMSNorm is folded, a LayerNorm is said not to be exact.

With n values of which m are left, the mean square over those is n / m of what it was: an eps of n / m of its own and a
weight times sqrt(n / m) give the same output. A LayerNorm subtracts a mean and has no such way out.
"""

import copy
import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .attributes import Change
from .cut import kept_elements, owner_of
from .kept import Cut

__all__ = ["NormCut", "cut_norms", "fold", "narrower_groups"]

_EPS = ("eps", "variance_epsilon", "epsilon")


@dataclass(frozen=True, kw_only=True, eq=False)
class NormCut:
    """A norm that takes statistics over an axis that is cut.

    Attributes:
        fqn: of its weight.
        keep: bool, which of its values stay.
    """

    fqn: str
    keep: Tensor


def cut_norms(model: nn.Module, cuts: Sequence[Cut]) -> list[NormCut]:
    """LayerNorms and what looks like an RMSNorm (a vector `weight` and an eps, no running statistics), if cut."""
    found: dict[str, Tensor] = {}
    for cut in cuts:
        for member in () if cut.is_whole else cut.group.members:
            module, name = owner_of(model, member.fqn)
            if name != "weight" or getattr(module, name).ndim != 1 or not _takes_statistics(module):
                continue
            seen = kept_elements(member, cut, tuple(getattr(module, name).shape))
            found[member.fqn] = found[member.fqn] & seen if member.fqn in found else seen
    return [NormCut(fqn=fqn, keep=keep) for fqn, keep in found.items()]


def fold(model: nn.Module, small: nn.Module, norm: NormCut) -> tuple[list[Change], str]:
    """Make a cut RMSNorm give what it gave before.

    Whether it is one is tried out on random values, since classes of many names are RMSNorms. A weight may also be
    kept as its difference from one.

    Args:
        model: with the dense norm.
        small: with the cut one, which is changed in place.
        norm: from `cut_norms`.

    Returns:
        The change of its eps (nothing where it is no RMSNorm), and what is not exact, in words ("" if all is).
    """
    (dense, _), (cut, _) = owner_of(model, norm.fqn), owner_of(small, norm.fqn)
    weight = cut.weight
    assert isinstance(weight, nn.Parameter)
    if isinstance(dense, nn.LayerNorm):
        return [], f"{norm.fqn}: a LayerNorm over a pruned axis takes its statistics of fewer values"
    eps_name = next(name for name in _EPS if name in vars(dense))
    was = getattr(dense, eps_name)
    ratio = norm.keep.numel() / int(norm.keep.sum())
    eps = (torch.finfo(weight.dtype).eps if was is None else was) * ratio
    try:
        wanted = _tried(copy.deepcopy(dense), weight, norm.keep, whole=True)[..., norm.keep.to(weight.device)]
    except Exception as e:
        return [], f"{norm.fqn}: a {type(dense).__name__} could not be tried, so it was not folded ({e})"
    for shift in (0.0, 1.0):
        scaled = (weight.detach().double() + shift) * math.sqrt(ratio) - shift
        trial = copy.deepcopy(cut)
        trial.weight = nn.Parameter(scaled.to(weight.dtype), weight.requires_grad)
        setattr(trial, eps_name, eps)
        if _gives(trial, wanted, weight, norm.keep):
            weight.data.copy_(scaled)
            setattr(cut, eps_name, eps)
            change = Change(path=f"{norm.fqn.removesuffix('weight')}{eps_name}", was=was, now=eps)
            half = weight.dtype in (torch.float16, torch.bfloat16)
            return [change], f"{norm.fqn}: its folded weight is rounded to {weight.dtype}" if half else ""
    return [], f"{norm.fqn}: a {type(dense).__name__} over a pruned axis takes its statistics of fewer values"


def _takes_statistics(module: nn.Module) -> bool:
    if hasattr(module, "running_mean") or isinstance(module, (nn.GroupNorm, nn.modules.batchnorm._NormBase)):
        return False  # those are taken channel by channel, or of groups that are cut as a whole
    return any(isinstance(vars(module).get(name), float) for name in _EPS) or isinstance(module, nn.RMSNorm)


def narrower_groups(model: nn.Module, small: nn.Module) -> list[str]:
    """GroupNorms that lost channels inside their groups, in words."""
    return [
        f"{name}: a GroupNorm whose groups lose channels takes its statistics of fewer values"
        for (name, dense), cut in zip(model.named_modules(), small.modules(), strict=True)
        if isinstance(dense, nn.GroupNorm)
        and isinstance(cut, nn.GroupNorm)
        and dense.num_channels * cut.num_groups != cut.num_channels * dense.num_groups
    ]


@torch.no_grad()
def _tried(norm: nn.Module, like: Tensor, keep: Tensor, *, whole: bool) -> Tensor:
    """What it gives for random values that are zero where units go, or for those that stay; a gate is random too."""
    needed = [p for p in inspect.signature(norm.forward).parameters.values() if p.default is p.empty]
    generator = torch.Generator().manual_seed(0)
    inputs = [
        (torch.randn(4, keep.numel(), generator=generator) * keep).to(like)
        for _ in range(max(1, sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in needed)))
    ]
    out: Tensor = norm(*(x if whole else x[..., keep.to(like.device)] for x in inputs))
    return out


def _gives(norm: nn.Module, want: Tensor, like: Tensor, keep: Tensor) -> bool:
    try:
        found = _tried(norm, like, keep, whole=False)
    except Exception:  # it knows its size from elsewhere
        return False
    return torch.allclose(want.double(), found.double(), rtol=8 * torch.finfo(want.dtype).eps, atol=1e-6)
