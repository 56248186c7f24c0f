"""torch's sparse int8 Linear on CPU (`export.fbgemm`) against dense int8 and float32, by level and batch.

    python examples/benchmarks/fbgemm_linear.py          # the table, and a CSV under examples/benchmarks/results/
    python examples/benchmarks/fbgemm_linear.py --tiny   # a smoke test

2048 x 2048, 1x4 blocks. All start and end in float32, as layers of a model do: quantizing the input and dequantizing
the output are part of the time of both int8 layers. Dense int8 is torch's static kernel on the same integers, on
whichever engine is faster (fbgemm, or oneDNN behind "x86"). Medians of alternated runs in one process: warm, ten calls
in a row, so that weights are in the caches as far as they fit; cold, one call after 64 MiB of other memory were
written. Outputs are compared before anything is timed.
"""

import argparse
from collections.abc import Callable, Mapping
from typing import Any

import torch
from machine import RESULTS, medians, show, write_csv
from torch import Tensor, nn

from sparsekit_ao import ScopeSparsifier, export, patterns
from sparsekit_ao.export.int8_linear import SparseInt8Linear

ENGINES = ("fbgemm", "x86")


def pruned(size: int, level: float) -> nn.Linear:
    """A Linear whose 1x4 blocks are pruned by magnitude."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(size, size))
    sparsifier = ScopeSparsifier(pattern=patterns.blocks(1, 4, level))
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}])
    sparsifier.step()
    sparsifier.squash_mask()
    return model[0]


class Whole(nn.Module):
    """A model of one layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs) -> (batch, outputs)."""
        return self.layer(x)


def dense_int8(sparse: SparseInt8Linear, engine: str) -> Callable[[Tensor], Tensor]:
    """The same integers in torch's dense kernel."""
    zeros = torch.zeros(len(sparse.scales), dtype=torch.long)
    weight = torch._make_per_channel_quantized_tensor(sparse.int8_weight(), sparse.scales.double(), zeros, 0)
    torch.backends.quantized.engine = engine
    packed = torch.ops.quantized.linear_prepack(weight, sparse.bias)
    inputs, outputs = sparse._inputs, sparse._outputs

    def run(x: Tensor) -> Tensor:
        q = torch.quantize_per_tensor(x.clamp(inputs.low, inputs.high), inputs.scale, inputs.zero_point, torch.quint8)
        return torch.ops.quantized.linear(q, packed, outputs.scale, outputs.zero_point).dequantize()

    return run


def lines(size: int, level: float, batch: int, repeat: int) -> list[dict[str, Any]]:
    """The rows of one layer and batch, with warm and with cold caches."""
    linear, x = pruned(size, level), torch.randn(batch, size)
    converted, _ = export.fbgemm(Whole(linear), [x])
    sparse: Any = converted.layer
    before = torch.backends.quantized.engine
    try:
        dense = {engine: dense_int8(sparse, engine) for engine in ENGINES}
        for engine, run in dense.items():
            if not torch.equal(run(x), sparse(x)):
                print(
                    f"dense int8 on {engine} rounds otherwise than fbgemm: at most {(run(x) - sparse(x)).abs().max()}"
                )
        calls: dict[str, Callable[[], Any]] = {"float32": lambda: linear(x), "sparse": lambda: sparse(x)}
        calls |= {engine: lambda run=run: run(x) for engine, run in dense.items()}
        with torch.no_grad():
            times = {"warm": warm(calls, repeat), "cold": cold(calls, repeat)}
    finally:
        torch.backends.quantized.engine = before
    about = {"size": size, "blocks": "1x4", "level": level, "batch": batch}
    return [show({**about, "caches": caches, **figures(ms)}) for caches, ms in times.items()]


def warm(calls: Mapping[str, Callable[[], Any]], repeat: int) -> dict[str, float]:
    """Milliseconds of a call, of ten in a row."""
    found = medians({name: lambda call=call: [call() for _ in range(10)] for name, call in calls.items()}, repeat)
    return {name: ms / 10 for name, ms in found.items()}


def cold(calls: Mapping[str, Callable[[], Any]], repeat: int) -> dict[str, float]:
    """Milliseconds of a call after other memory was written."""
    other = torch.zeros(1 << 24)
    return medians(dict(calls), repeat, before=lambda _: flush(other))


def flush(other: Tensor) -> None:
    """Write other memory, so that weights leave the caches."""
    other.add_(1)


def figures(ms: Mapping[str, float]) -> dict[str, Any]:
    """The columns of a row."""
    best = min(ENGINES, key=ms.__getitem__)
    found = {"float32 ms": round(ms["float32"], 3), "dense int8 ms": round(ms[best], 3), "engine": best}
    found |= {"sparse int8 ms": round(ms["sparse"], 3), "times dense int8": round(ms[best] / ms["sparse"], 2)}
    return found | {"times float32": round(ms["float32"] / ms["sparse"], 2)}


def main() -> None:
    """Print the table, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a smoke test: a small size, once, without CSV")
    parser.add_argument("--no-csv", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    size, repeat, sizes = (64, 1, (1, 16)) if args.tiny else (2048, 41, (1, 16, 128))
    rows = [row for level in (0.7, 0.8, 0.9) for batch in sizes for row in lines(size, level, batch, repeat)]
    if not (args.tiny or args.no_csv):
        write_csv(rows, RESULTS / "fbgemm_linear.csv")


if __name__ == "__main__":
    main()
