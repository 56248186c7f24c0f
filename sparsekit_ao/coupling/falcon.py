"""Couplings of a Falcon whose query heads share one key head: one projection writes all queries, one key, one value."""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .coupling import Coupling

_FUSED = re.compile(r"(.*?)\d+\.self_attention\.query_key_value\.weight")


def falcon_couplings(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Coupling] | None:
    """`"mlp"` and `"heads"` (query heads); None for another model, or one with as many key heads as query heads.

    Args:
        model: for the number and the size of its heads.
        tensors: its parameters by name.
    """
    match = next(filter(None, map(_FUSED.fullmatch, tensors)), None)
    if match is None:
        return None
    attention: Any = model.get_submodule(match[0].removesuffix(".query_key_value.weight"))
    heads, d = (getattr(attention, name, 0) for name in ("num_heads", "head_dim"))
    if tensors[match[0]].shape[0] != (heads + 2) * d:
        return None
    path = f"{match[1]}*"
    members = {
        f"{path}.self_attention.query_key_value.weight": f"(u d + {2 * d}) i",
        f"{path}.self_attention.query_key_value.bias": f"(u d + {2 * d})",
        f"{path}.self_attention.dense.weight": "o (u d)",
    }
    hidden = {
        f"{path}.mlp.dense_h_to_4h.weight": "u i",
        f"{path}.mlp.dense_h_to_4h.bias": "u",
        f"{path}.mlp.dense_4h_to_h.weight": "o u",
    }
    first = match[0].partition(".self_attention")[0]
    members, hidden = (
        {n: a for n, a in some.items() if n.replace(path, first) in tensors} for some in (members, hidden)
    )
    own = {f"{path}.self_attention.num_heads": "u"}
    return {
        "mlp": Coupling(hidden, name="mlp"),
        "heads": Coupling(members, sizes={"d": d}, attrs=own, name="heads"),
    }
