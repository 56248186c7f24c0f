"""Relative output error and time of pruning single layers of MiniLM in one pass, for several structures and methods.

    python examples/benchmarks/one_shot_layers.py   # prints the table, writes a CSV in examples/benchmarks/results/

Inputs are those of the layers of all-MiniLM-L6-v2 on 192 training sentences; see examples/minilm.py. The error is
||X (W - V)^T|| / ||X W^T|| for inputs X, weight W and pruned weight V. Seconds are the median of alternated runs, for
masks and compensation from recorded statistics; recording takes the same time for all methods. SparseGPT is defined for
2:4 and unstructured pruning only. For other structures the baseline is what generalizes it: structured OBS without
least squares after it ("obs alone"), while "obs" is followed by least squares; times are compared with SparseGPT's for
2:4.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from machine import RESULTS, show, write_csv
from torch import Tensor, nn

from sparsekit_ao import ScopeSparsifier, one_shot, patterns
from sparsekit_ao.calibration import damped_gram
from sparsekit_ao.oneshot import solvers
from sparsekit_ao.oneshot.solving import DAMP, Layer, matrix_scopes

sys.path.append(str(Path(__file__).parent.parent))  # for minilm
LAYERS = (
    "encoder.layer.2.intermediate.dense",
    "encoder.layer.4.attention.output.dense",
    "encoder.layer.3.output.dense",
)
# (score, compensation) by name.
METHODS: dict[str, tuple[str, str | None]] = {
    "magnitude": ("magnitude", None),
    "wanda": ("wanda", None),
    "wanda + least squares": ("wanda", "least_squares"),
    "sparsegpt": ("wanda", "sparsegpt"),
    "obs alone": ("obs", "obs"),
    "obs": ("obs", "obs"),
    "admm": ("wanda", "admm"),
}
FOR_SPARSEGPT = ("2:4", "50 % unstructured")


def structures(outputs: int, inputs: int) -> dict[str, dict[str, Any]]:
    """Config keys by name, all with half of the weights dropped."""
    return {
        "2:4": patterns.n_m(2, 4),
        "2:4 of pairs of columns 8 apart": {
            "view": ((outputs, inputs // 16, 8, 2), (inputs, 16, 1, 8)),
            "block_shape": (1, 1, 1, 2),
            "scope_shape": (1, 1, 4, 1),
            "nnz": 2,
        },
        "pairs of neighbours, 4 of 8": {"block_shape": (1, 2), "scope_shape": (1, 4), "nnz": 2},
        "8 rows x 1 column, 8 of 16": {"block_shape": (8, 1), "scope_shape": (1, 16), "nnz": 8},
        "50 % unstructured": patterns.unstructured(0.5),
    }


@torch.no_grad()
def minilm_layers(sentences: int, names: tuple[str, ...]) -> dict[str, tuple[Tensor, Tensor]]:
    """{layer: its weight, and its inputs at real tokens [tokens, inputs]}."""
    from minilm import batched, load_model, shuffled, split_sentences

    tokenizer, model = load_model()
    train, _ = split_sentences(limit=sentences if sentences < 100 else None)
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    modules = {name: model.get_submodule(name) for name in names}
    for batch in batched(tokenizer, shuffled(train)[:sentences]):
        real = batch["attention_mask"].bool()
        hooks = [
            module.register_forward_pre_hook(lambda m, args, n=name, r=real: found[n].append(args[0][r]))
            for name, module in modules.items()
        ]
        model(**batch)
        for hook in hooks:
            hook.remove()
    return {name: (modules[name].weight.detach(), torch.cat(x)) for name, x in found.items()}


def prune(weight: Tensor, x: Tensor, structure: dict[str, Any], method: str) -> tuple[float, float]:
    """Relative output error and seconds of one method."""
    score, compensation = METHODS[method]
    outputs, inputs = weight.shape
    layer = nn.Linear(inputs, outputs, bias=False)
    with torch.no_grad():
        layer.weight.copy_(weight)
    sparsifier = ScopeSparsifier(score=score)
    sparsifier.prepare(nn.Sequential(layer), [{"tensor_fqn": "0.weight", **structure}])
    if method == "obs alone":
        found, seconds = obs_alone(sparsifier, x)
    else:
        seconds = one_shot(sparsifier, [x], compensate=compensation, progress=False)[0].seconds
        sparsifier.check()
        sparsifier.squash_mask()
        found = layer.weight.detach()
    return float((x @ (weight - found).T).norm() / (x @ weight.T).norm()), seconds


def obs_alone(sparsifier: ScopeSparsifier, x: Tensor) -> tuple[Tensor, float]:
    """The weight that structured OBS leaves, and seconds."""
    sparsifier.calibrate([x], needs=["input_gram"])
    (group,) = sparsifier.groups
    target, weight = sparsifier.recorder.target(group["tensor_fqn"], ()), sparsifier._dense(group)
    statistics = sparsifier.statistics[target.name]
    pruning_groups = sparsifier.pruning_groups()
    layer = Layer(target=target, statistics=statistics, weight=weight, pruning_groups=pruning_groups)
    start = time.perf_counter()
    gram = damped_gram(statistics.input_gram, DAMP)
    scopes = matrix_scopes(layer, {target.name: group})
    _, compensated = solvers.structured_obs(statistics.matrix(weight), gram, scopes)
    return statistics.from_matrix(compensated), time.perf_counter() - start


def measure(layer: str, weight: Tensor, x: Tensor, repeat: int) -> list[dict]:
    """The rows of one layer."""
    rows, sparsegpt = [], 0.0
    for name, structure in structures(*weight.shape).items():
        left_out = () if name == "2:4" else ("obs alone",) if name in FOR_SPARSEGPT else ("sparsegpt",)
        methods = [m for m in METHODS if m not in left_out]
        errors: dict[str, float] = {}
        seconds: dict[str, list[float]] = {m: [] for m in methods}
        for _ in range(repeat):
            for method in methods:
                errors[method], spent = prune(weight, x, structure, method)
                seconds[method].append(spent)
        baseline = "sparsegpt" if name in FOR_SPARSEGPT else "obs alone"
        sparsegpt = statistics.median(seconds["sparsegpt"]) if "sparsegpt" in methods else sparsegpt
        for method in methods:
            median = statistics.median(seconds[method])
            about = {"layer": layer, "structure": name, "method": method, "error": f"{errors[method]:.4f}"}
            ratios = {
                "baseline": baseline,
                "error of baseline's": f"{errors[method] / errors[baseline]:.3f}",
                "seconds": f"{median:.3f}",
                "times SparseGPT's seconds": f"{median / sparsegpt:.2f}",
            }
            rows.append(show({**about, **ratios}))
    return rows


def main() -> None:
    """Print the table, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--no-csv", action="store_true", help="print only")
    parser.add_argument("--tiny", action="store_true", help="a smoke test: a part of one layer, once, without CSV")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    lines = []
    if args.tiny:
        mix = torch.randn(64, 64)
        lines = measure("random", torch.randn(32, 64), torch.randn(256, 64) @ mix, 1)
    else:
        for name, (weight, x) in minilm_layers(192, LAYERS).items():
            lines += measure(name, weight, x, args.repeat)
    if not args.tiny and not args.no_csv:
        write_csv(lines, RESULTS / "one_shot_layers.csv")


if __name__ == "__main__":
    main()
