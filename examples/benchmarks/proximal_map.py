"""Soft thresholding of one weight in place, Euclidean and under a diagonal, in copies of the weight.

    python examples/benchmarks/proximal_map.py      # the table, and a CSV under examples/benchmarks/results/

The weight is 1024 x 1024, float32; a copy is one of the weight in the same run. Half of the blocks become zero. The
diagonal has a condition of 1e6. Times are medians, from which that of restoring the weight is subtracted.
"""

import argparse

import torch
from machine import RESULTS, medians, show, write_csv
from torch import Tensor

from sparsekit_ao import BlockSpec

BLOCKS = {
    "rows": (1, -1),
    "columns": (-1, 1),
    "32x32": (32, 32),
    "1x16": (1, 16),
    "1x4": (1, 4),
    "1x1": (1, 1),
    "the whole": (-1, -1),
}


def measure(name: str, size: int, repeat: int) -> dict:
    """Copies of the weight that one call takes, for blocks of a shape."""
    g = torch.Generator().manual_seed(0)
    weight, diagonal = torch.randn(size, size, generator=g), 1e6 ** (torch.rand(size, size, generator=g) - 0.5)
    w, out = weight.clone(), torch.empty_like(weight)
    block = BlockSpec(w, BLOCKS[name])
    share = 0.5 if block.numblk() == 1 else 1.0
    plain, conditioned = (float(block.norms(v).median()) * share for v in (weight, weight * diagonal))

    def restored(t: float, conditioners: Tensor | None) -> None:
        w.copy_(weight)
        block.soft_threshold(t, conditioners)

    found = medians(
        {
            "copy": lambda: out.copy_(weight),
            "plain": lambda: restored(plain, None),
            "conditioned": lambda: restored(conditioned, diagonal),
        },
        repeat,
    )
    own = {k: round(found[k] / found["copy"] - 1, 1) for k in ("plain", "conditioned")}
    return {
        "block": name,
        "size": size,
        "copy ms": round(found["copy"], 3),
        **{f"{k} copies": n for k, n in own.items()},
    }


def main() -> None:
    """Print the table, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a smoke test: a small weight, once, without CSV")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: 1)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    size, repeat = (64, 1) if args.tiny else (1024, 15)
    lines = [show(measure(name, size, repeat)) for name in BLOCKS]
    if not args.tiny:
        write_csv(lines, RESULTS / "proximal_map.csv")


if __name__ == "__main__":
    main()
