"""Norms over a pruned axis: RMSNorms and global response norms are folded, a LayerNorm is reported as not exact.

If m of n values are kept and the others are zero, the mean square over m values is n / m times that over n. The output
is the same with eps times n / m and the weight times sqrt(n / m). A global response norm divides by the mean itself,
so its weight is multiplied by n / m; where its code has the epsilon as a number, the difference is of its size.
"""

import copy
import inspect
import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ..models.names import owner_of
from .remove import Removal, kept_elements
from .sizes import Change, apply_changes

EPS_NAMES = ("eps", "variance_epsilon", "epsilon")
CONFIG_EPS = ("rms_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon")

_Exact = dict[nn.Parameter, Tensor]  # folded weights before they are rounded


def fold_norms(
    model: nn.Module, small: nn.Module, removals: Sequence[Removal]
) -> tuple[list[Change], list[str], _Exact]:
    """Fold RMSNorms over a pruned axis, in place; return changes of eps, notes, and weights before 16-bit rounding."""
    notes = [
        f"{name}: a GroupNorm whose groups lose channels has statistics of fewer values"
        for (name, dense), smaller in zip(model.named_modules(), small.modules(), strict=True)
        if isinstance(dense, nn.GroupNorm)
        and isinstance(smaller, nn.GroupNorm)
        and dense.num_channels * smaller.num_groups != smaller.num_channels * dense.num_groups
    ]
    norms: dict[int, dict[str, nn.Module]] = {}  # {id of a weight: norms that have it, by name; several if it is tied}
    for name, module in model.named_modules():
        if _takes_statistics(module):
            norms.setdefault(id(getattr(module, "weight", None)), {})[name] = module
    kept: dict[nn.Parameter, Tensor] = {}  # {weight of the model: bool, which of its values are kept}
    for removal in removals:
        for member in () if removal.is_empty else removal.bound.members:
            module, name = owner_of(model, member.fqn)
            weight = getattr(module, name)
            if name == "weight" and weight.numel() == weight.shape[-1] and id(weight) in norms:
                keep = kept_elements(member, removal, tuple(weight.shape)).flatten()
                kept[weight] = kept[weight] & keep if weight in kept else keep
    unrounded, changes = _Exact(), list[Change]()
    for weight, keep in kept.items():
        changes += _fold(norms[id(weight)], small, keep, notes, unrounded)
    if changes and hasattr(small, "config"):
        changes += _change_config(model, small, changes, notes)
    return changes, notes, unrounded


def _fold(
    norms: dict[str, nn.Module], small: nn.Module, keep: Tensor, notes: list[str], unrounded: _Exact
) -> list[Change]:
    """Fold all RMSNorms of one weight or none; return changes of eps, and append what is not exact to the notes."""
    smaller = {name: small.get_submodule(name) for name in norms}
    weight: nn.Parameter = next(iter(smaller.values()))._parameters["weight"]  # type: ignore[assignment]
    ratio = keep.numel() / int(keep.sum())
    like = weight.to(torch.promote_types(weight.dtype, torch.float32))
    wanted, changes = dict[str, Tensor](), list[Change]()
    for name, dense in norms.items():
        if isinstance(dense, nn.LayerNorm):
            notes.append(f"{name}.weight: a LayerNorm over a pruned axis has statistics of fewer values")
            return []
        try:
            outputs = _outputs(copy.deepcopy(dense).to(like.dtype), like, keep, whole=True)
        except Exception as e:
            notes.append(f"{name}.weight: a {type(dense).__name__} could not be tested, so it was not folded ({e})")
            return []
        wanted[name] = outputs[..., keep.to(weight.device)]
        if eps_name := next((eps_name for eps_name in EPS_NAMES if eps_name in vars(dense)), ""):
            was = getattr(dense, eps_name)
            eps = (torch.finfo(like.dtype).eps if was is None else was) * ratio
            changes.append(Change(path=f"{name}.{eps_name}".lstrip("."), was=was, now=eps))
    # A class may have any name, so folds are tested. A weight may also be stored as its difference from one.
    for shift, factor in ((0.0, math.sqrt(ratio)), (1.0, math.sqrt(ratio)), (0.0, ratio)):
        scaled = (weight.detach().double() + shift) * factor - shift
        fits = partial(_is_folded, changes=changes, weight=scaled.to(like.dtype), keep=keep)
        wrong = [name for name, norm in smaller.items() if not fits(name, norm, wanted[name])]
        if not wrong:
            weight.data.copy_(scaled)
            apply_changes(small, changes)
            if weight.dtype in (torch.float16, torch.bfloat16):
                notes.append(f"{next(iter(norms))}.weight: its folded weight is rounded to {weight.dtype}")
                unrounded[weight] = scaled
            return changes
    kind = type(norms[wrong[0]]).__name__
    notes.append(f"{wrong[0]}.weight: a {kind} over a pruned axis has statistics of fewer values")
    return []


def _is_folded(
    name: str, norm: nn.Module, wanted: Tensor, changes: Sequence[Change], weight: Tensor, keep: Tensor
) -> bool:
    """Whether a smaller norm with this weight and the changed eps gives what the larger one does."""
    folded = copy.deepcopy(norm).to(weight.dtype)
    folded.weight = nn.Parameter(weight, requires_grad=False)
    for change in changes:
        if change.path.rpartition(".")[0] == name:
            setattr(folded, change.path.rpartition(".")[2], change.now)
    try:
        output = _outputs(folded, weight, keep, whole=False)
    except Exception:  # its size is stored elsewhere, too
        return False
    largest = max(1.0, float(wanted.abs().max()))
    return torch.allclose(wanted.double(), output.double(), rtol=8 * torch.finfo(output.dtype).eps, atol=1e-6 * largest)


def _change_config(model: nn.Module, small: nn.Module, changes: Sequence[Change], notes: list[str]) -> list[Change]:
    """Set the eps of the config, which is what `save_pretrained` saves, if one number is right; else append a note."""
    config, olds = small.config, {change.was for change in changes}
    field = next((name for name in CONFIG_EPS if {getattr(config, name, None)} == olds != {None}), None)
    if field is not None:
        was = getattr(config, field)
        pairs = zip(model.modules(), small.modules(), strict=True)
        now = {getattr(s, e) for m, s in pairs for e in EPS_NAMES if vars(m).get(e) == was and _takes_statistics(m)}
        if len(now) == 1:
            setattr(config, field, now.pop())
            return [Change(path=f"config.{field}", was=was, now=getattr(config, field))]
    where = f"config.{field}" if field is not None else "its config"
    notes.append(
        f"{where} cannot hold the different epsilons of folded norms, so save_pretrained loses them; use the manifest"
    )
    return []


def _takes_statistics(module: nn.Module) -> bool:
    if hasattr(module, "running_mean") or isinstance(module, (nn.GroupNorm, nn.modules.batchnorm._NormBase)):
        return False  # their statistics are of single channels, or of groups that are removed as a whole
    weight = module._parameters.get("weight")
    is_response_norm = weight is not None and weight.ndim > 2 and not isinstance(module, _ConvNd)
    has_eps = any(isinstance(vars(module).get(name), float) for name in EPS_NAMES)
    return has_eps or isinstance(module, nn.RMSNorm) or is_response_norm


@torch.no_grad()
def _outputs(norm: nn.Module, like: Tensor, keep: Tensor, *, whole: bool) -> Tensor:
    """Its outputs for random values that are zero in removed units, or for the kept ones; a gate is random too."""
    needed = [p for p in inspect.signature(norm.forward).parameters.values() if p.default is p.empty]
    generator = torch.Generator().manual_seed(0)
    inputs = [  # images with channels last, which every norm takes
        (torch.randn(2, 2, 2, keep.numel(), generator=generator, dtype=torch.float32, device="cpu") * keep).to(like)
        for _ in range(max(1, sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in needed)))
    ]
    out: Tensor = norm(*(x if whole else x[..., keep.to(like.device)] for x in inputs))
    return out
