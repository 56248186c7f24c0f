"""Which rule an operation has: families of operators by name.

An operator without a rule is taken apart by torch's own decomposition; one that has none is not understood, and all
that it touches is frozen.
"""

from typing import Any

import torch

from .call import Rule
from .lookups import embedding, gather, index, index_select
from .pointwise import pointwise
from .products import along, batch_norm, convolution, group_norm, layer_norm, matmul, pool, reduce, rms_norm
from .shapes import (
    concatenate,
    expand,
    like,
    pad,
    permute,
    piece,
    pieces,
    repeat,
    reshape,
    same,
    select,
    stack,
    transpose,
    unbind,
)

__all__ = ["rule_of"]

_FAMILIES: dict[Rule, str] = {
    same: "clone alias detach _to_copy lift_fresh contiguous",
    like: "zeros_like ones_like full_like empty_like rand_like randn_like",
    reshape: "view _unsafe_view reshape _reshape_alias unsqueeze squeeze flatten unflatten",
    permute: "permute",
    transpose: "transpose t",
    expand: "expand",
    repeat: "repeat",
    piece: "slice",
    pieces: "split split_with_sizes chunk",
    select: "select",
    unbind: "unbind",
    concatenate: "cat",
    stack: "stack",
    pad: "constant_pad_nd",
    matmul: "mm bmm mv dot addmm baddbmm addmv",
    convolution: "convolution",
    batch_norm: "native_batch_norm _native_batch_norm_legit_no_training cudnn_batch_norm",
    layer_norm: "native_layer_norm",
    group_norm: "native_group_norm",
    rms_norm: "_fused_rms_norm",
    reduce: "sum mean amax amin linalg_vector_norm prod any all argmax argmin max min var std var_mean logsumexp",
    along: "_softmax _safe_softmax _log_softmax cumsum cumprod sort topk argsort flip roll tril triu",
    pool: "max_pool2d_with_indices max_pool3d_with_indices avg_pool2d avg_pool3d _adaptive_avg_pool2d "
    "_adaptive_avg_pool3d adaptive_max_pool2d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d",
    embedding: "embedding",
    index_select: "index_select",
    gather: "gather",
    index: "index _unsafe_index",
}
_RULES = {name: rule for rule, names in _FAMILIES.items() for name in names.split()}


def rule_of(func: Any) -> Rule | None:
    """The rule of an operator, if there is one.

    >>> rule_of(torch.ops.aten.relu_.default).__name__, rule_of(torch.ops.aten.mm.default).__name__
    ('pointwise', 'matmul')
    >>> rule_of(torch.ops.aten._fft_r2c.default) is None
    True
    """
    name = str(func.overloadpacket.__name__)
    if name in ("max", "min") and func._overloadname == "other":
        return pointwise
    found = _RULES.get(name.rstrip("_"))
    if found is None and (torch.Tag.pointwise in func.tags or name == "copy_"):
        return pointwise
    return found
