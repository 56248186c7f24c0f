"""Find the units of a coupling that are zero, and remove them from tensors and torch.nn's layers.

Keeping a zero unit changes no output, so a scope with fewer nonzero units keeps some, to match the other scopes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize

from ..coupling import BoundCoupling, Member
from ..errors import CouplingError, SparsityError
from ..models.loading import replace_offloaded
from ..models.names import owner_of
from ..models.progress import progress_bar
from ..structure import AxisPattern
from ..structure.tiles import Shape
from .verify import Computed, light_copy, match_format, replace_tensors

_KeptOf = Sequence[tuple[AxisPattern, int]]  # axes of each coupling of a tensor, and its kept units of a scope


@dataclass(frozen=True, kw_only=True, eq=False)
class Removal:
    """Which units of a coupling of one model are kept: bool, of the coupling's grid, equally many in each scope."""

    bound: BoundCoupling
    keep: Tensor
    source: int = 0  # index of the `Coupling` that it was bound from
    partly: int = 0  # the number of kept units, over all scopes, that are zero in some of the weights
    fields: tuple[str, ...] = ()  # fields of a config that count the units, perhaps with those of others

    @property
    def scope_units(self) -> int:
        """The number of units of a scope."""
        return self.bound.scope_units

    @property
    def kept(self) -> int:
        """The number of kept units of a scope."""
        return int(self.keep.reshape(-1, self.scope_units)[0].sum())

    @property
    def is_empty(self) -> bool:
        """Whether nothing is removed."""
        return self.kept == self.scope_units


def find_removal(model: nn.Module, coupling: BoundCoupling, multiple_of: int) -> Removal:
    """Find the dropped units of a coupling, but keep some if a multiple must be left (at least one, at most all)."""
    where = f"coupling {coupling.name!r}: "
    check_multiple(multiple_of, where)
    names = [*(member.fqn for member in coupling.members), *(fqn for names in coupling.listed for fqn in names)]
    tensors, grid = {name: plain_tensor(model, name) for name in names}, coupling.grid
    if coupling.listed:  # units are modules of lists
        zero = torch.tensor([[not any(tensors[fqn].any() for fqn in names) for names in coupling.listed]], device="cpu")
        zero = zero.reshape(1, *grid)
    else:
        parameters = [m for m in coupling.members if m.is_parameter]
        if not parameters:
            raise SparsityError(f"{where}no member is a parameter, so there are no zeros that mark dropped units")
        weights = [m for m in parameters if tensors[m.fqn].ndim > 1] or parameters
        views = [m.pattern(tensors[m.fqn].detach()) == 0 for m in weights]
        zero = torch.stack([view.unsqueeze(-1).flatten(len(grid)).all(-1).cpu() for view in views])
    dropped, units = zero.all(0), grid[-1]
    keep = ~dropped.reshape(-1, units)
    counts = keep.sum(1)
    most = int(counts.max())
    other = ((counts != most) & (counts != 0)).nonzero()
    if other.numel():
        at = int(other[0, 0])
        raise CouplingError(
            f"{where}scope {int(counts.argmax())} of {' '.join(coupling.scope)} keeps {most} of {units} units, but "
            f"scope {at} keeps {int(counts[at])}; a dense layer needs the same number in each. Prune with the "
            "coupling's own entries, which give every scope the same budget."
        )
    wanted = round_up(most, units, multiple_of)
    # Scopes that keep fewer units also keep the first of their dropped ones, until each scope keeps as many as wanted.
    keep = keep | ((~keep).cumsum(1) <= (wanted - counts)[:, None])
    partly = int((zero.any(0) & ~dropped).sum())
    return Removal(bound=coupling, keep=keep.reshape(grid), partly=partly)


def check_multiple(multiple_of: object, where: str) -> None:
    """Raise an error unless `multiple_of` is a positive int."""
    if isinstance(multiple_of, bool) or not isinstance(multiple_of, int) or multiple_of < 1:
        raise SparsityError(f"{where}multiple_of must be a positive int, got {multiple_of!r}")


def round_up(kept: int, units: int, multiple: int) -> int:
    """Return a number of kept units as a multiple (at least one), or all of them.

    >>> round_up(5, 12, 4), round_up(0, 12, 4), round_up(11, 11, 4)
    (8, 4, 11)
    """
    return min(-(-max(kept, 1) // multiple) * multiple, units)


def plain_tensor(model: nn.Module, fqn: str) -> Tensor:
    """Return a tensor by name. Raise a SparsityError if it is parametrized, as its values then lack the mask."""
    module, name = owner_of(model, fqn)
    if parametrize.is_parametrized(module, name):
        raise SparsityError(
            f"{fqn} is still parametrized (masked, perhaps), so nothing can be removed from it; call squash_mask first"
        )
    return getattr(module, name)


def remove_units(model: nn.Module, removals: Sequence[Removal]) -> None:
    """Remove dropped units, in place, and update sizes of torch.nn's layers; an error is raised before any change."""
    cuts: dict[int, list[tuple[Member, Removal]]] = {}  # {id of a tensor: what is cut from it}
    tensors: dict[int, Tensor] = {}
    for removal, member in ((r, member) for r in removals for member in r.bound.members):
        tensor = plain_tensor(model, member.fqn)
        tensors[id(tensor)] = tensor
        tensor_cuts, shape = cuts.setdefault(id(tensor), []), tuple(tensor.shape)
        same = [m for m, r in tensor_cuts if r is removal]  # two names of one tensor count once
        if not any(torch.equal(kept_elements(m, removal, shape), kept_elements(member, removal, shape)) for m in same):
            tensor_cuts.append((member, removal))
    elements = sum(tensor.numel() for tensor in tensors.values())
    items = progress_bar(list(cuts.items()), "compact", "tensors", elements=elements)
    smaller = {key: _smaller(tensors[key], tensor_cuts) for key, tensor_cuts in items}
    registered = ((m, {**m._parameters, **m._buffers}.items()) for m in model.modules())
    places = [(m, name, id(t)) for m, named in registered for name, t in named if id(t) in smaller]
    sizes = [sizes_of(m, n, smaller[key], [(mb.pattern, r.kept) for mb, r in cuts[key]]) for m, n, key in places]
    replace_offloaded(model, {key: partial(_smaller, cuts=tensor_cuts) for key, tensor_cuts in cuts.items()})
    replace_tensors(model, smaller)
    for (module, *_), new_sizes in zip(places, sizes, strict=True):
        for attribute, size in new_sizes.items():
            setattr(module, attribute, size)
    for path, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention) and any(module is m for m, *_ in places):
            _fit_attention(module, path)
    for encoder in (module for module in model.modules() if isinstance(module, nn.TransformerEncoder)):
        if any(isinstance(module, PrunedMultiheadAttention) for module in encoder.modules()):
            encoder.use_nested_tensor = False  # nested tensors are for the fused kernels, which need equal sizes


def masked_copy(model: nn.Module, removals: Sequence[Removal]) -> nn.Module:
    """Return a copy whose parameters are zero for removed units; large ones are computed, as in `light_copy`."""
    cuts = [(member, r) for r in removals for member in r.bound.members if member.is_parameter]
    written = {id(plain_tensor(model, member.fqn)) for member, _ in cuts}
    masked = light_copy(model, shared={id(p) for p in model.parameters()} - written)
    for member, removal in cuts:
        tensor = plain_tensor(masked, member.fqn)
        indices = _kept_indices(tuple(tensor.shape), [(member, removal)])
        if isinstance(tensor, Computed) and indices is None:
            plain = nn.Parameter(tensor.compute(), tensor.source.requires_grad)
            replace_tensors(masked, {id(tensor): plain})
            tensor = plain
        if not isinstance(tensor, Computed):
            tensor.data.masked_fill_(~kept_elements(member, removal, tuple(tensor.shape)).to(tensor.device), 0)
            continue
        for d, kept in (indices or {}).items():
            dropped = torch.ones(tensor.shape[d], dtype=torch.bool, device="cpu").index_fill_(0, kept, False)
            tensor.zero[d] = tensor.zero.get(d, False) | dropped.to(tensor.device)
    return masked


def kept_elements(member: Member, removal: Removal, shape: Shape) -> Tensor:
    """Return which elements of a member belong to kept units, as a bool tensor of this shape."""
    kept = torch.ones(shape, dtype=torch.bool, device="cpu")
    view = member.pattern(kept)
    view.copy_(removal.keep.reshape(removal.keep.shape + (1,) * (view.ndim - removal.keep.ndim)).expand_as(view))
    return kept


def _smaller(tensor: Tensor, cuts: Sequence[tuple[Member, Removal]]) -> Tensor:
    """Return a copy without the removed units, of the same kind (parameter or not) and memory format."""
    shape = _shape_without(tuple(tensor.shape), cuts)
    indices = None if tensor.is_meta else _kept_indices(tuple(tensor.shape), cuts)
    is_cut = indices and [len(indices.get(d, range(n))) for d, n in enumerate(tensor.shape)] == shape
    if isinstance(tensor, Computed):
        if is_cut:
            return Computed.of(tensor, kept={d: kept.to(tensor.device) for d, kept in (indices or {}).items()})
        tensor = nn.Parameter(tensor.compute(), tensor.source.requires_grad)
    if tensor.is_meta:
        data = tensor.new_empty(shape)
    elif indices and is_cut:
        data = tensor.detach()
        for d, kept in sorted(indices.items()):
            data = data.index_select(d, kept.to(tensor.device))
    elif len(cuts) == 1 and not cuts[0][0].pattern.outside:
        member, removal = cuts[0]
        units = member.pattern(tensor.detach())[removal.keep.to(tensor.device)]
        data = member.pattern.undo(units.reshape(*removal.keep.shape[:-1], removal.kept, *units.shape[1:]))
    else:
        data = _without_all(tensor.detach(), cuts, shape)
    data = match_format(tensor, data)
    return nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data


def _shape_without(shape: Shape, cuts: Sequence[tuple[Member, Removal]]) -> list[int]:
    """Return the shape without the removed units; units in a part of a concatenation shorten this part."""
    lengths: dict[tuple[int, tuple[int, int]], int] = {}  # of (dimension, entries before and after the part)
    for member, removal in cuts:
        d = member.pattern.dimension_of(removal.bound.unit)
        around = member.pattern.outside.get(d, (0, 0))
        length = lengths.get((d, around), shape[d] - sum(around))
        lengths[d, around] = length // removal.scope_units * removal.kept
    smaller = list(shape)
    for (d, around), length in lengths.items():
        smaller[d] -= shape[d] - sum(around) - length
    return smaller


def _kept_indices(shape: Shape, cuts: Sequence[tuple[Member, Removal]]) -> dict[int, Tensor] | None:
    """Return {dimension: indices that all removals keep}; None if single dimensions cannot express this."""
    masks: dict[int, Tensor] = {}
    for member, removal in cuts:
        pattern, unit, scope = member.pattern, removal.bound.unit, removal.bound.scope
        d, keep = pattern.dimension_of(unit), removal.keep
        axes, rows = pattern.dimensions[d], keep.reshape(-1, removal.scope_units)
        if bool((rows == rows[0]).all()):  # every scope keeps the same units, so scopes do not matter
            scope, keep = (), rows[0]
        if [axis for axis in axes if axis in (*scope, unit)] != [*scope, unit]:
            return None
        lengths, (before, after) = pattern.lengths(shape), pattern.outside.get(d, (0, 0))
        part = keep.reshape([lengths[axis] if axis in (*scope, unit) else 1 for axis in axes])
        part = part.expand([lengths[axis] for axis in axes]).flatten()
        mask = F.pad(part, (before, after), value=True)
        masks[d] = masks[d] & mask if d in masks else mask
    return {d: mask.nonzero()[:, 0] for d, mask in masks.items()}


def _without_all(tensor: Tensor, cuts: Sequence[tuple[Member, Removal]], shape: Sequence[int]) -> Tensor:
    """Keep what all removals keep, in the tensor's order; no unit may vary more slowly than its scopes."""
    keep = torch.ones(tensor.shape, dtype=torch.bool, device="cpu")
    for member, removal in cuts:
        keep &= kept_elements(member, removal, tuple(tensor.shape))
    where = f"{cuts[0][0].fqn}: the couplings {', '.join(repr(removal.bound.name) for _, removal in cuts)} "
    if int(keep.sum()) != math.prod(shape):
        raise CouplingError(
            f"{where}keep elements of its {tuple(tensor.shape)} that do not form a rectangle; write their axes as "
            "factors of one pattern"
        )
    for member, removal in cuts:
        order = [axis for dimension in member.pattern.dimensions for axis in dimension]
        rows = removal.keep.reshape(-1, removal.scope_units)
        is_inside = not set(removal.bound.scope) <= set(order[: order.index(removal.bound.unit)])
        if is_inside and bool((rows != rows[0]).any()):
            raise CouplingError(
                f"{where}share one tensor, and one of them keeps different units in scopes that vary faster than the "
                "unit; compact by one coupling after the other"
            )
    return tensor[keep.to(tensor.device)].reshape(*shape)


def sizes_of(module: nn.Module, name: str, tensor: Tensor, kept_of: _KeptOf) -> dict[str, Any]:
    """Return {attribute: integer} of a torch.nn layer for its new tensor; {} for other modules."""
    shape = tuple(tensor.shape)
    if isinstance(module, _NormBase):
        return {"num_features": shape[0]}
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return {"normalized_shape": shape}
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        if name in ("weight_ih_l0", "weight_ih"):
            return {"input_size": shape[1]}
        if name == "weight_hr_l0":
            return {"proj_size": shape[0], "hidden_size": shape[1]}
        is_hidden = name in ("weight_hh_l0", "weight_hh") and not getattr(module, "proj_size", 0)
        return {"hidden_size": shape[1]} if is_hidden else {}
    if name != "weight":
        return {}
    if isinstance(module, nn.GroupNorm):
        return {"num_groups": _remaining_groups(module, module.num_groups, kept_of), "num_channels": shape[0]}
    if isinstance(module, _ConvNd):
        groups = _remaining_groups(module, module.groups, kept_of)
        ends = (shape[0], shape[1] * groups) if module.transposed else (shape[1] * groups, shape[0])
        return {"groups": groups, **dict(zip(("in_channels", "out_channels"), ends, strict=True))}
    if isinstance(module, nn.Linear):
        return {"out_features": shape[0], "in_features": shape[1]}
    if isinstance(module, nn.Bilinear):
        return dict(zip(("out_features", "in1_features", "in2_features"), shape, strict=True))
    if isinstance(module, nn.PReLU):
        return {"num_parameters": shape[0]}
    if type(module).__name__ == "Conv1D" and {"nx", "nf"} <= vars(module).keys():
        return {"nx": shape[0], "nf": shape[1]}  # transformers' Linear, whose weight is stored transposed
    if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return {}
    if shape[0] != module.num_embeddings:  # example inputs need not show that later indices read other rows
        pattern = next(p for p, _ in kept_of if p.dimension_of(p.unit[-1]) == 0)
        raise SparsityError(
            f"{pattern.where}axes {pattern.axes!r} would keep {shape[0]} of the {module.num_embeddings} rows of an "
            f"{type(module).__name__}. Rows are read by index, so the indices of later ones would change; use units of "
            "its second dimension, or leave it out."
        )
    return {"num_embeddings": shape[0], "embedding_dim": shape[1]}


def _remaining_groups(module: nn.GroupNorm | _ConvNd, groups: int, kept_of: _KeptOf) -> int:
    """Return the groups of a layer with a shorter first dimension: fewer of equal width, or as many narrower ones."""
    remaining = groups
    for pattern, kept in kept_of:
        unit = pattern.unit[-1]
        if groups == 1 or pattern.dimension_of(unit) != 0:
            continue
        if 0 in pattern.outside and len(module.weight) == groups:  # a channel in each group
            part = groups - sum(pattern.outside[0])
            remaining -= part - part // pattern.sizes[unit] * kept
            continue
        outer = pattern.leading(groups)
        if outer is None:
            raise SparsityError(
                f"{pattern.where}axes {pattern.axes!r}: a {type(module).__name__} of {groups} groups can lose whole "
                "groups, or equally many channels of each; write its first dimension as factors of which the first "
                f"make {groups}"
            )
        if unit in outer:
            remaining = remaining // pattern.sizes[unit] * kept
    return remaining


class PrunedMultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` that lost heads: `num_heads * head_dim` may differ from `embed_dim`."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as `torch.nn.MultiheadAttention` does; `is_causal` needs `attn_mask` and adds nothing to it."""
        if is_causal and attn_mask is None:
            raise RuntimeError(
                "is_causal needs attn_mask; torch.nn.Transformer.generate_square_subsequent_mask makes it"
            )
        is_batched = query.dim() == 3
        q, k, v = (x if is_batched else x.unsqueeze(0) for x in (query, key, value))
        if is_batched and not self.batch_first:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        packed, bias = self.in_proj_weight, self.in_proj_bias
        in_weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight) if packed is None else packed.chunk(3)
        in_biases = (None,) * 3 if bias is None else bias.chunk(3)
        q, k, v = (F.linear(*args) for args in zip((q, k, v), in_weights, in_biases, strict=True))
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (torch.cat([x, b.expand(len(x), 1, -1)], 1) for x, b in ((k, self.bias_k), (v, self.bias_v)))
        if self.add_zero_attn:
            k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        if attn_mask is not None and attn_mask.ndim == 3:
            attn_mask = attn_mask.unflatten(0, (-1, self.num_heads))
        masks = [attn_mask, None if key_padding_mask is None else key_padding_mask[..., None, None, :]]
        total = None  # the sum of both masks, for scores (batch, heads, queries, keys)
        for mask in (mask for mask in masks if mask is not None):
            if mask.dtype == torch.bool:  # True means that a key is left out
                mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask, float("-inf"))
            mask = F.pad(mask, (0, k.shape[2] - mask.shape[-1]))  # what was added to the keys is never left out
            total = mask if total is None else total + mask
        rate, weights = self.dropout if self.training else 0.0, None
        if need_weights:
            scores = q @ k.transpose(-2, -1) * self.head_dim**-0.5
            weights = F.dropout((scores if total is None else scores + total).softmax(-1), rate)
            out = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            out = F.scaled_dot_product_attention(q, k, v, total, rate)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        if not is_batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1), weights


def _fit_attention(module: nn.MultiheadAttention, where: str) -> None:
    """Set the sizes of an attention module, in place, by its tensors; a SparsityError if it lost parts of heads."""
    packed = module._parameters["in_proj_weight"]
    names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    weights = [module._parameters[name] for name in names] if packed is None else packed.chunk(3)
    (rows, embed_dim), (_, kdim), (_, vdim) = (weight.shape for weight in weights if weight is not None)
    if rows % module.head_dim:
        raise SparsityError(
            f"{where}: its queries keep {rows} rows, which is not a multiple of the head size {module.head_dim}. A "
            "MultiheadAttention can lose whole heads only; write its rows as '(three u d)', with d the size of a head."
        )
    module.num_heads, module.embed_dim, module.kdim, module.vdim = rows // module.head_dim, embed_dim, kdim, vdim
    if rows != embed_dim and type(module) is nn.MultiheadAttention:
        module.__class__ = PrunedMultiheadAttention
        module._qkv_same_embed_dim = False  # layers that hold it do not pass its tensors to a fused kernel then
