"""torch.nn.MultiheadAttention with fewer heads than its embedding holds, which torch's own forward refuses."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import SparsityError


class PrunedMultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` of `num_heads * head_dim` hidden numbers, where it requires `embed_dim`.

    `compact` makes it of one that loses heads. Arguments, outputs and names of tensors are those of the original.
    """

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
        """As `torch.nn.MultiheadAttention.forward`; `is_causal` needs `attn_mask` and adds nothing to it."""
        if is_causal and attn_mask is None:
            raise RuntimeError(
                "is_causal needs attn_mask; torch.nn.Transformer.generate_square_subsequent_mask makes it"
            )
        is_batched = query.dim() == 3
        if not is_batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = self._projected(query, key, value)
        mask = self._mask(attn_mask, key_padding_mask, q, k)
        rate = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) * self.head_dim**-0.5
            weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), rate)
            out = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            out = F.scaled_dot_product_attention(q, k, v, mask, rate)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        if not is_batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1), weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Queries, keys and values of (batch, heads, tokens, size of a head)."""
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        inputs = zip((query, key, value), weights, biases, strict=True)
        q, k, v = (F.linear(x, weight, bias) for x, weight, bias in inputs)
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (torch.cat([x, b.expand(len(x), 1, -1)], 1) for x, b in ((k, self.bias_k), (v, self.bias_v)))
        if self.add_zero_attn:
            k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        return [x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in (q, k, v)]

    def _mask(self, attn_mask: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
        """Both masks as one that is added to scores of (batch, heads, queries, keys), or None."""
        masks = [] if padding is None else [padding.view(-1, 1, 1, padding.shape[-1])]
        if attn_mask is not None:
            masks.append(attn_mask.unflatten(0, (-1, self.num_heads)) if attn_mask.ndim == 3 else attn_mask)
        found = None
        for mask in masks:
            if mask.dtype == torch.bool:  # True is left out
                mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask, float("-inf"))
            mask = F.pad(mask, (0, k.shape[2] - mask.shape[-1]))  # what was added to the keys is never left out
            found = mask if found is None else found + mask
        return found


def fit_attention(module: nn.MultiheadAttention, where: str) -> None:
    """Set the sizes of an attention module, in place, by its tensors, which lost heads or numbers of the embedding.

    Raises:
        SparsityError: it lost parts of heads.
    """
    packed = module._parameters["in_proj_weight"]
    query, key, value = (
        (packed,) * 3 if packed is not None else [module._parameters[f"{n}_proj_weight"] for n in ("q", "k", "v")]
    )
    assert query is not None and key is not None and value is not None
    rows = query.shape[0] if packed is None else query.shape[0] // 3
    if rows % module.head_dim:
        raise SparsityError(
            f"{where}: {rows} rows are left of its queries, no multiple of the {module.head_dim} of a head. A "
            "MultiheadAttention can lose whole heads only; write its rows as '(three u d)', with d the size of a head."
        )
    module.num_heads, module.embed_dim = rows // module.head_dim, query.shape[1]
    module.kdim, module.vdim = key.shape[1], value.shape[1]
    if rows != module.embed_dim and type(module) is nn.MultiheadAttention:
        module.__class__ = PrunedMultiheadAttention
        module._qkv_same_embed_dim = False  # layers that hold it do not pass its tensors to a fused kernel then
