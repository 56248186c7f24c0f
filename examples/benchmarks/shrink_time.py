"""How long `shrink` takes as a model grows, beside Torch-Pruning where that runs.

    pip install torch-pruning transformers
    python examples/benchmarks/shrink_time.py           # the table, and a CSV under examples/benchmarks/results/
    python examples/benchmarks/shrink_time.py "44 layers" "ResNet-50"

Weights are random, and half of the units of each coupling go. Each model is shrunk once in a process of its own, after
a smaller one that loads what torch and transformers import when they are first used. Torch-Pruning gets the model as
`compare_torch_pruning.py` gives it, and its result is compared with the masked model as there. Processors of the
machine must be idle: times are wall-clock.
"""

import argparse
import multiprocessing
import resource
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from machine import RESULTS, show, write_csv
from torch import nn

from sparsekit_ao.removal import shrink

LARGE = 100_000_000  # parameters from which on Torch-Pruning is not run, which takes many minutes
Made = tuple[nn.Module, Any]


def llama(layers: int, width: int = 64, inner: int = 128, heads: int = 4, keys: int = 2, vocabulary: int = 128) -> Made:
    """A Llama of random weights, and a sequence of 16 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": width, "intermediate_size": inner, "vocab_size": vocabulary}
    numbers = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": keys}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes, **numbers)).eval(), {"input_ids": torch.randint(0, 128, (1, 16))}


def resnet(size: int = 224, **keys: Any) -> Made:
    """A ResNet-50 of random weights, and two images."""
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    return ResNetForImageClassification(ResNetConfig(**keys)).eval(), torch.randn(2, 3, size, size)


MODELS: dict[str, tuple[Callable[[], Made], int]] = {  # and on how many threads
    **{f"Llama of {n} layers": (lambda n=n: llama(n), 2) for n in (11, 22, 44, 88)},
    "Llama of 44 layers, 1 GiB": (lambda: llama(44, 768, 2048, 12, 4, 2048), 1),
    "ResNet-50": (resnet, 2),
    "Llama of 1.1B": (lambda: llama(22, 2048, 5632, 32, 4, 32000), 2),
}
TINY: dict[str, tuple[Callable[[], Made], int]] = {
    "Llama of 3 layers": (lambda: llama(3), 1),
    "ResNet": (lambda: resnet(32, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 3], layer_type="basic"), 1),
}


def ours(model: nn.Module, inputs: Any) -> tuple[str, float]:
    """Shrink it; the result as in `compare_torch_pruning.py`, and the fraction of parameters that is removed."""
    keep_config = (
        None if "Llama" in type(model).__name__ else False
    )  # a ResNet's config holds the width of its stem alone
    _, report = shrink(model, inputs, {"*": 0.5, "width": 0.5}, "norm", keep_config=keep_config)
    return "exact", 1 - report.after.parameters / report.before.parameters


def measured(name: str, is_tiny: bool) -> dict[str, Any]:
    """The row of one model."""
    make, threads = (TINY if is_tiny else MODELS)[name]
    torch.set_num_threads(threads)
    warnings.filterwarnings("ignore")
    for start in () if is_tiny else (llama(1), resnet(32, depths=[1, 1, 1, 1])):
        ours(*start)
    model, inputs = make()
    row: dict[str, Any] = {"model": name, "threads": threads, "parameters": sum(p.numel() for p in model.parameters())}
    start = time.perf_counter()
    result, removed = ours(model, inputs)
    row |= {"seconds": f"{time.perf_counter() - start:.2f}", "result": result, "removed": f"{removed:.3f}"}
    row |= {"peak MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10}
    if find_spec("torch_pruning") and not is_tiny and row["parameters"] < LARGE:
        from compare_torch_pruning import theirs

        try:
            result, removed, seconds, _ = theirs(model, inputs)
        except Exception as e:
            result, removed, seconds = f"error: {type(e).__name__}", 0.0, 0.0
        columns = {"seconds": f"{seconds:.2f}", "result": result, "removed": f"{removed:.3f}"}
        row |= {f"Torch-Pruning {column}": value for column, value in columns.items()}
    return row


def main() -> None:
    """Print the rows, and write the CSV of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of names of models (default: all)")
    parser.add_argument("--tiny", action="store_true", help="a smoke test: two small models, without CSV")
    args = parser.parse_args()
    rows = []
    for name in TINY if args.tiny else MODELS:
        if args.names and not any(part in name for part in args.names):
            continue
        if args.tiny:
            rows.append(show(measured(name, True)))
            continue
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            rows.append(show(pool.apply(measured, (name, False))))
    if not args.tiny and not args.names:
        write_csv(rows, RESULTS / "shrink_time.csv")


if __name__ == "__main__":
    main()
