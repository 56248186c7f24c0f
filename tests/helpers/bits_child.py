"""Prints a hash of the masks and scores of a small selection grid; run by test_same_bits.py under several CPU settings.

Weights are random, so every bit of a rounded sum or root counts.
"""

import hashlib
import itertools
import math

import torch

from sparsekit_ao import BlockCoupling, BlockSpec, ScopeSparsifier, ScopeSpec, WeightNormSparsifier

BLOCKS = [(1, 1), (1, 4), (3, 5), (1, -1)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def weight(rows, columns, dtype, seed):
    """Normal numbers made of integer operations alone, so that they are the same whatever the processor."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 1 << 20, (12, rows, columns), generator=generator)
    return (bits.sum(0).double() / (1 << 20) - 6).to(dtype)


def model_of(*weights):
    layers = [torch.nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=w.dtype) for w in weights]
    for layer, w in zip(layers, weights, strict=True):
        layer.weight.data.copy_(w)
    return torch.nn.Sequential(*layers)


def masks(sparsifier, config, *weights):
    model = model_of(*weights)
    sparsifier.prepare(model, config)
    for _ in range(2):
        sparsifier.step()
    return [sparsifier.mask(entry["tensor_fqn"]) for entry in config]


def results():
    """(name, tensors) of each case."""
    for block, dtype, norm in itertools.product(BLOCKS, DTYPES, (1, 2, math.inf)):
        w = weight(60, 77, dtype, 1)
        spec = BlockSpec(w, block, edge="partial")
        yield f"norms {block} {dtype} {norm}", [spec.norms(p=norm), spec.norms(w.clone().requires_grad_(), p=norm)]
        entry = {"tensor_fqn": "0.weight", "block_shape": block, "norm": norm, "edge": "partial"}
        yield f"mask {block} {dtype} {norm}", masks(ScopeSparsifier(0.6), [entry], w)
    for dtype in DTYPES:
        pair = weight(64, 48, dtype, 2), weight(48, 64, torch.float64, 3)
        specs = [BlockSpec(pair[0], (1, -1)), BlockSpec(pair[1], (-1, 1))]
        scope = ScopeSpec(BlockCoupling(specs, [None, (1, 0)]), (8, 1))
        yield f"coupled {dtype}", [scope.block_norms(), scope.kth_mid(nnz=3), *scope.get_masks(3).values()]
        entries = [{"tensor_fqn": f"{k}.weight", "block_shape": (1, 4), "scope_coupling": "all"} for k in (0, 1)]
        yield f"global {dtype}", masks(ScopeSparsifier(0.7), entries, *pair)
        for zeros in (4, 2):
            stock = WeightNormSparsifier(0.8, (3, 4), zeros_per_block=zeros)
            yield f"weight norm {dtype} {zeros}", masks(stock, [{"tensor_fqn": "0.weight"}], pair[0])
    large = weight(700, 600, torch.float64, 4)  # scored in parts, read in parts
    yield "large", [ScopeSpec(BlockSpec(large, (1, 4))).block_norms(), *masks(ScopeSparsifier(0.9), LARGE, large)]


LARGE = [{"tensor_fqn": "0.weight", "block_shape": (1, 4)}]


def hashes():
    """{name: hash of the bytes}."""
    found = {}
    for name, tensors in results():
        data = b"".join(t.detach().contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)
        found[name] = hashlib.sha256(data).hexdigest()[:16]
    return found


if __name__ == "__main__":
    for line in hashes().items():
        print(*line, sep="\t")
