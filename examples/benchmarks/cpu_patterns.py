"""Time of `ScopeSparsifier.step` on CPU for many patterns and dtypes, and its growth with size.

    python examples/benchmarks/cpu_patterns.py          # both tables, and two CSVs under examples/benchmarks/results/
    python examples/benchmarks/cpu_patterns.py --size 1024 --no-csv

"ms" is a step on random weights, "zeros ms" one on weights that are exactly zero wherever an earlier mask is, which are
half of the scores in most patterns. Times are medians of alternated runs; each is compared with a copy of the same
bytes, and masks are checked before.
"""

import argparse

import torch
from machine import RESULTS, medians, show, write_csv
from torch import nn

from sparsekit_ao import ScopeSparsifier, patterns


def linear_patterns(n: int) -> dict[str, dict]:
    """The patterns of a Linear of n x n: {name: config keys}."""
    return {
        "unstructured per tensor": {},
        "unstructured per row": {"scope_shape": (1, -1)},
        "unstructured per column": {"scope_shape": (-1, 1)},
        "2:4": patterns.n_m(2, 4),
        "4:8": patterns.n_m(4, 8),
        "8:16": patterns.n_m(8, 16),
        "16:32": patterns.n_m(16, 32),
        "64:128": patterns.n_m(64, 128),
        "2:4 of 1x2 pairs": {"block_shape": (1, 2), "scope_shape": (1, 4), "nnz": 2},
        "vector 2:4, 8 rows": {"block_shape": (8, 1), "scope_shape": (1, 4), "nnz": 2},
        "1x4 per tensor": patterns.blocks(1, 4),
        "32x32 per tensor": patterns.blocks(32, 32),
        "8x8 per block row": {"block_shape": (8, 8), "scope_shape": (1, -1)},
        "2:4 of 8x8": {"block_shape": (8, 8), "scope_shape": (1, 4), "nnz": 2},
        "rows": patterns.rows(),
        "columns": patterns.columns(),
        "coupled 2:4, columns 8 apart": {
            "view": ((n, n // 16, 8, 2), (n, 16, 1, 8)),
            "block_shape": (1, 1, 1, 2),
            "scope_shape": (1, 1, 4, 1),
            "nnz": 2,
        },
        "16 columns, rows 8 apart, 1:2": {
            "view": ((n // 16, 8, 2, n), (16 * n, n, 8 * n, 1)),
            "block_shape": (1, 1, 1, 16),
            "scope_shape": (1, 1, 2, 1),
            "nnz": 1,
        },
        "MMA thread group, 32x16 tile": {
            "view": ((n // 32, 4, 8, n // 16, 16), (32 * n, 8 * n, n, 16, 1)),
            "block_shape": (1, 1, 1, 1, 16),
            "scope_shape": (1, 4, 1, 1, 1),
            "nnz": 2,
        },
        "heads": patterns.heads(32),
        "V:N:M, 32:2:8": patterns.v_n_m(32, 2, 8),
        "1x5 per tensor, partial edge": {"block_shape": (1, 5), "edge": "partial"},
    }


CONV = {
    "conv filters": {"block_shape": (1, -1, -1, -1)},
    "conv input channels": {"block_shape": (-1, 1, -1, -1)},
    "conv kernels": {"block_shape": (1, 1, -1, -1)},
    "conv 2:4 along inputs": patterns.n_m(2, 4),
}
MANY = {  # over four Linears of the same bytes in all
    "global, single elements": {"scope_coupling": "all"},
    "global, 1x4": {"scope_coupling": "all", "block_shape": (1, 4)},
    "coupled rows of four": {"block_coupling": "all", "block_shape": (1, -1)},
}


def cases(n: int):
    """(name, a function that makes the model, config entries)."""
    for name, entry in linear_patterns(n).items():
        yield name, lambda: nn.Sequential(nn.Linear(n, n, bias=False)), [{"tensor_fqn": "0.weight", **entry}]
    for layout in (torch.contiguous_format, torch.channels_last):
        for name, entry in CONV.items():
            full = name + (", channels_last" if layout == torch.channels_last else "")
            yield full, lambda at=layout: _conv(n, at), [{"tensor_fqn": "0.weight", **entry}]
    for name, entry in MANY.items():
        entries = [{"tensor_fqn": f"{i}.weight", **entry} for i in range(4)]
        yield name, lambda: nn.Sequential(*(nn.Linear(n // 2, n // 2, bias=False) for _ in range(4))), entries


def _conv(n: int, layout: torch.memory_format) -> nn.Module:
    return nn.Sequential(nn.Conv2d(n // 4, n // 4, 4, bias=False)).to(memory_format=layout)


def measure(make, entries: list[dict], repeat: int, dtype: torch.dtype) -> dict[str, float]:
    """Milliseconds of a step, of one where dropped weights are zero, and of one copy of the same bytes."""
    calls = {}
    for name in ("", "zeros "):
        torch.manual_seed(0)
        model, sparsifier = make().to(dtype), ScopeSparsifier()
        sparsifier.prepare(model, entries)
        sparsifier.step()
        sparsifier.check()
        if name:
            for entry in entries:
                weight = model.get_submodule(entry["tensor_fqn"].split(".")[0]).parametrizations.weight.original
                weight.detach().masked_fill_(sparsifier.mask(entry["tensor_fqn"]) == 0, 0)
            sparsifier.step()
            sparsifier.check()
        calls[name] = sparsifier.step
    source = torch.randn(sum(p.numel() for p in model.parameters())).to(dtype)
    target = torch.empty_like(source)
    return medians({**calls, "copy ": lambda: target.copy_(source)}, repeat)


def row(about: dict, ms: dict[str, float]) -> dict:
    """One line of the table of patterns."""
    ratios = {f"{name}times one copy": round(ms[name] / ms["copy "], 1) for name in ("", "zeros ")}
    return show({**about, **{f"{k}ms": round(v, 2) for k, v in ms.items()}, **ratios})


def grow(sizes: list[int], repeat: int) -> list[dict]:
    """Nanoseconds per element from the smallest to the largest size."""
    lines = []
    for name in ("2:4", "1x4 per tensor", "unstructured per tensor", "32x32 per tensor"):
        for n in sizes:
            entries = [{"tensor_fqn": "0.weight", **linear_patterns(n)[name]}]
            ms = measure(lambda n=n: nn.Sequential(nn.Linear(n, n, bias=False)), entries, repeat, torch.float32)
            per = {f"{k}ns an element": round(v * 1e6 / n**2, 3) for k, v in ms.items()}
            lines.append(show({"pattern": name, "size": n, **per}))
    return lines


def main() -> None:
    """Print both tables, write both CSVs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--no-csv", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a smoke test: small sizes, once, without CSV")
    args = parser.parse_args()
    n, repeat = (128, 1) if args.tiny else (args.size, args.repeat)
    torch.set_num_threads(2)
    lines = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for name, make, entries in cases(n):
            about = {"pattern": name, "dtype": str(dtype).removeprefix("torch."), "size": n}
            lines.append(row(about, measure(make, entries, repeat, dtype)))
    growth = grow([n // 4, n // 2, n, 2 * n] if not args.tiny else [64, 128], repeat)
    if not (args.tiny or args.no_csv):
        write_csv(lines, RESULTS / "cpu_patterns.csv")
        write_csv(growth, RESULTS / "cpu_growth.csv")


if __name__ == "__main__":
    main()
