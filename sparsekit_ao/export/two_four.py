"""2:4 weights packed as values and metadata, in the layout of torch's CUTLASS kernels."""

import torch
from torch import nn

from . import rules
from .layers import Layer

MULTIPLES = {torch.float16: (32, 64), torch.bfloat16: (32, 64), torch.int8: (16, 128)}  # of torch's CUTLASS kernels


def reasons(layer: Layer) -> list[str]:
    """Why a weight cannot be packed; empty if it can."""
    found = rules.is_a(layer, nn.Linear) or rules.has_dtype(layer, MULTIPLES)
    return found or [
        *rules.is_not_parametrized(layer),
        *rules.is_not_shared(layer),
        *rules.has_multiples(layer, *MULTIPLES[layer.weight.dtype]),
        *rules.is_finite(layer),
        *rules.keeps_n_of_m(layer, 2, 4),
    ]
