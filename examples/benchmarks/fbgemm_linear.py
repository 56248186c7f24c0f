"""torch's sparse int8 Linear on CPU (`export.fbgemm`) against dense int8 and float32, by level and batch.

    python examples/benchmarks/fbgemm_linear.py          # the table, and a CSV under examples/benchmarks/results/
    python examples/benchmarks/fbgemm_linear.py --tiny   # a smoke test

2048 x 2048, 1x4 blocks. All start and end in float32, as layers of a model do: quantizing the input and dequantizing
the output are part of the time of both int8 layers. Dense int8 is torch's static kernel on the same integers, on
whichever engine is faster (fbgemm, or oneDNN behind "x86"). Medians of alternated runs in one process; the outputs are
compared before anything is timed.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from machine import RESULTS, medians, show, write_csv
from torch import Tensor, nn

from sparsekit_ao import ScopeSparsifier, export, patterns
from sparsekit_ao.export.fbgemm import SparseInt8Linear

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


def line(size: int, level: float, batch: int, repeat: int) -> dict[str, Any]:
    """One row of the table."""
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
            ms = medians(calls, repeat, before=lambda name: use_engine(name, before))
    finally:
        torch.backends.quantized.engine = before
    best = min(ENGINES, key=ms.__getitem__)
    found = {"size": size, "blocks": "1x4", "level": level, "batch": batch}
    found |= {"float32 ms": round(ms["float32"], 3), "dense int8 ms": round(ms[best], 3), "engine": best}
    found |= {"sparse int8 ms": round(ms["sparse"], 3), "times dense int8": round(ms[best] / ms["sparse"], 2)}
    return found | {"times float32": round(ms["float32"] / ms["sparse"], 2)}


def use_engine(name: str, default: str) -> None:
    """Select the engine of a dense int8 layer."""
    torch.backends.quantized.engine = name if name in ENGINES else default


def main() -> None:
    """Print the table, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a smoke test: a small size, once, without CSV")
    parser.add_argument("--no-csv", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    size, repeat, sizes = (64, 1, (1, 16)) if args.tiny else (2048, 201, (1, 16, 128))
    lines = [show(line(size, level, batch, repeat)) for level in (0.7, 0.8, 0.9) for batch in sizes]
    if not (args.tiny or args.no_csv):
        write_csv(lines, RESULTS / "fbgemm_linear.csv")


if __name__ == "__main__":
    main()
