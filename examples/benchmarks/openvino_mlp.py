"""OpenVINO's sparse int8 layers (`export.openvino`) against dense ones, on CPUs with AMX.

    python examples/benchmarks/openvino_mlp.py          # the table, and a CSV under examples/benchmarks/results/
    python examples/benchmarks/openvino_mlp.py --tiny   # a smoke test

Two layers, 2048 to 8192 and back. The same compiled int8 model runs with sparse weights and with them switched off (a
rate of 1.0), alternated in one process; the results are the same bits, which is checked before anything is timed. Where
the CPU has no amx_int8 every weight runs dense: then that is printed, and nothing is timed.
"""

import argparse
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from machine import RESULTS, medians, show, write_csv
from torch import nn

from sparsekit_ao import ScopeSparsifier, export, patterns
from sparsekit_ao.export.openvino import RATE, OpenVinoModel, _has_amx

PATTERNS = {"2:4": patterns.n_m(2, 4), **{f"{level:.0%}": patterns.unstructured(level) for level in (0.7, 0.8, 0.9)}}
HINTS = {"INFERENCE_PRECISION_HINT": "f32"}


def pruned(width: int, pattern: Any) -> nn.Module:
    """The two layers, pruned by magnitude."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
    sparsifier = ScopeSparsifier(pattern=pattern)
    sparsifier.prepare(model)
    sparsifier.step()
    sparsifier.squash_mask()
    return model


def rows(name: str, width: int, batches: tuple[int, ...], repeat: int, threads: int) -> list[dict[str, Any]]:
    """A row for each batch size; without times where no weight runs sparse."""
    inputs = [torch.randn(n, width) for n in batches]
    config = {**HINTS, "INFERENCE_NUM_THREADS": threads}
    sparse, report = export.openvino(pruned(width, PATTERNS[name]), inputs, config=config)
    dense = OpenVinoModel(sparse.graph, {**config, RATE: 1.0})
    about = {"pattern": name, "rate": report.rate, "kernels": ", ".join(sorted(set(report.kernels.values())))}
    if not report.ran_sparse:
        return [show({**about, "not measured": "; ".join(report.notes) or "no weight runs sparse"})]
    found = []
    for x in inputs:
        assert torch.equal(sparse(x)[0], dense(x)[0])
        calls: dict[str, Callable[[], Any]] = {"sparse": lambda x=x: sparse(x), "dense": lambda x=x: dense(x)}
        ms = medians(calls, repeat)
        found.append(show({
            **about, "batch": len(x), "dense int8 ms": round(ms["dense"], 3), "sparse int8 ms": round(ms["sparse"], 3),
            "times dense int8": round(ms["dense"] / ms["sparse"], 2),
        }))  # fmt: skip
    return found


def main() -> None:
    """Print the table; write the CSV if everything was timed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a smoke test: a small size, once, without CSV")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    installed = find_spec("openvino") is not None
    print(f"amx_int8: {_has_amx()}, openvino: {'installed' if installed else 'not installed, so nothing is measured'}")
    if not installed:
        return
    torch.set_num_threads(args.threads)
    width, repeat, batches = (64, 1, (1,)) if args.tiny else (2048, 41, (1, 16))
    lines = [row for name in PATTERNS for row in rows(name, width, batches, repeat, args.threads)]
    if not args.tiny and not any("not measured" in line for line in lines):
        write_csv(lines, RESULTS / "openvino_mlp.csv")


if __name__ == "__main__":
    main()
