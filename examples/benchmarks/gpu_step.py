"""One mask update on a GPU: the Triton kernels against torch.ao, torch's own selection, and torchao's PAT constraints.

    python examples/benchmarks/gpu_step.py                # the table, and a CSV under examples/benchmarks/results/
    python examples/benchmarks/gpu_step.py --size 4096 --no-csv
    python examples/benchmarks/gpu_step.py --tiny         # under Triton's interpreter on CPU: does it run; no times

Masks are checked before anything is timed: exact counts, and the reference's mask bit for bit where scores are exact.
Times are medians of many runs between device events, over weights in turn that together are larger than the cache.
Bytes are the fewest that the work must move: a weight of N elements of b bytes is read once and its bool mask written
once, N (b + 1). The floor is those bytes over the rate of a device copy measured in the same run.
"""

import argparse
import csv
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

if "--tiny" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch
from torch import Tensor, nn
from torch.ao.pruning import WeightNormSparsifier as Stock

import sparsekit_ao
from sparsekit_ao.kernels import Blocks, Scopes, Update, scope_mask, scope_masks

# name: block, scope (-1 is all), level, stock's arguments
ROWS = {
    "2:4": ((1, 1), (1, 4), 0.5, {"sparsity_level": 1.0, "sparse_block_shape": (1, 4), "zeros_per_block": 2}),
    "1x1 at 50 %": ((1, 1), (-1, -1), 0.5, {"sparsity_level": 0.5, "sparse_block_shape": (1, 1)}),
    "1x1 at 90 %": ((1, 1), (-1, -1), 0.9, {"sparsity_level": 0.9, "sparse_block_shape": (1, 1)}),
    "32x32 at 80 %": ((32, 32), (-1, -1), 0.8, {"sparsity_level": 0.8, "sparse_block_shape": (32, 32)}),
}
HIDDEN, INNER, LAYERS = 4096, 11008, 32  # Llama-7B: 7 weights a layer
DTYPE = torch.bfloat16


def update_of(weight: Tensor, mask: Tensor, row: str) -> Update:
    """What a step does to one weight."""
    block, scope, level, _ = ROWS[row]
    grid = [n // b for n, b in zip(weight.shape, block, strict=True)]
    shape = tuple(g if n == -1 else n for g, n in zip(grid, scope, strict=True))
    count = shape[0] * shape[1]
    group = Scopes(members=(Blocks(shape=block, values=weight, mask=mask),), shape=shape)
    return Update(groups=(group,), keep=count - int(level * count + 1e-9))


def gate(weight: Tensor, row: str) -> None:
    """Refuse to time a wrong mask; integers make the sums of blocks exact in any order."""
    values = weight if ROWS[row][0] == (1, 1) else torch.randint_like(weight, -4, 5)
    masks = [torch.zeros_like(values, dtype=torch.bool) for _ in range(2)]
    update = update_of(values, masks[0], row)
    scope_masks([update], impl="triton")
    expected = update_of(values, masks[1], row)
    scope_mask(expected.groups, expected.keep, impl="reference")
    if not torch.equal(*masks):
        raise SystemExit(f"{row}: {int((masks[0] != masks[1]).sum())} elements differ; nothing is timed")


def median_ms(work: Callable[[int], object], copies: int, repeat: int) -> float:
    """Median milliseconds of `work(i)`, i going round over `copies` weights."""
    for i in range(copies + 2):
        work(i % copies)
    times = []
    for i in range(repeat):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work(i % copies)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def captured(work: Callable[[int], object], copies: int) -> Callable[[int], object]:
    """The same work as CUDA graphs, one a weight: without the time that Python takes to launch."""
    graphs = []
    for i in range(copies):
        work(i)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work(i)
        graphs.append(graph)
    return lambda i: graphs[i].replay()


def stock_of(weight: Tensor, row: str) -> Callable[[int], object]:
    """torch.ao's step on the same work, in float32: it cannot take bf16 masks further than the first step."""
    model = nn.Sequential(nn.Linear(weight.shape[1], weight.shape[0], bias=False, device=weight.device))
    model[0].weight.data = weight.float()
    sparsifier = Stock(**ROWS[row][3])
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}])

    def step(_: int) -> None:
        model[0].parametrizations.weight[0].mask.fill_(1)
        sparsifier.step()

    return step


def torch_of(weights: list[Tensor], row: str) -> Callable[[int], object]:
    """The shortest plain torch for the same masks: topk of 4, kthvalue of all, topk of block norms."""
    block, _, level, _ = ROWS[row]

    def two_four(i: int) -> Tensor:
        groups = weights[i].abs().view(-1, 4)
        return torch.zeros_like(groups, dtype=torch.bool).scatter_(1, groups.topk(2, dim=1).indices, True)

    def single(i: int) -> Tensor:
        size = weights[i].abs().flatten().float()
        return size > size.kthvalue(int(level * size.numel())).values

    def blocks(i: int) -> Tensor:
        rows, columns = weights[i].shape[0] // block[0], weights[i].shape[1] // block[1]
        tiles = weights[i].view(rows, block[0], columns, block[1])
        norms = torch.linalg.vector_norm(tiles, dim=(1, 3), dtype=torch.float32)
        kept = torch.zeros_like(norms, dtype=torch.bool).view(-1)
        kept[norms.view(-1).topk(norms.numel() - int(level * norms.numel())).indices] = True
        return kept.view(rows, 1, columns, 1).expand_as(tiles).reshape(weights[i].shape)

    return two_four if row == "2:4" else single if block == (1, 1) else blocks


def pat_of(weights: list[Tensor], row: str) -> Callable[[int], object] | None:
    """torchao's PAT constraint on a copy of the weight, in groups as its optimizer makes them; None without PAT."""
    try:
        from torchao.prototype.pat.optim import MinSparsityConstraint, NMSparseConstraint
    except ImportError:
        return None
    (height, width), level = ROWS[row][0], ROWS[row][2]
    if row == "2:4":
        two = torch.vmap(NMSparseConstraint(0.0, 2).apply_, in_dims=(0, None), out_dims=(0, 0))
        return lambda i: two(weights[i].clone().view(-1, 4), 0.0)

    def grouped(i: int) -> Tensor:
        tiles = weights[i].unflatten(0, (-1, height)).unflatten(2, (-1, width))
        return tiles.transpose(1, 2).reshape(-1, height * width)

    least = MinSparsityConstraint(0.0, level)
    return lambda i: least.apply_(grouped(i).clone(), 0.0)


def llama(layers: int, hidden: int, inner: int, device: str) -> Iterator[Tensor]:
    """Weights of a Llama's shapes: q, k, v, o, gate, up, down a layer."""
    for _ in range(layers):
        for shape in [(hidden, hidden)] * 4 + [(inner, hidden)] * 2 + [(hidden, inner)]:
            yield torch.randn(shape, device=device, dtype=DTYPE)


def whole_model(row: str, weights: list[Tensor]) -> Callable[[int], object]:
    """A step over all weights at once."""
    masks = [torch.zeros_like(w, dtype=torch.bool) for w in weights]
    updates = [update_of(w, m, row) for w, m in zip(weights, masks, strict=True)]
    return lambda _: scope_masks(updates, impl="triton")


def copy_rate(size: int) -> float:
    """Bytes read plus bytes written a millisecond by a device copy."""
    source = torch.randn(size, size, device="cuda", dtype=DTYPE)
    targets = [torch.empty_like(source) for _ in range(4)]
    ms = median_ms(lambda i: targets[i].copy_(source), 4, 100)
    return 2 * source.numel() * source.element_size() / ms


def measure(args: argparse.Namespace) -> list[dict]:
    """The table."""
    rate, lines = copy_rate(args.size), []
    weights = [torch.randn(args.size, args.size, device="cuda", dtype=DTYPE) for _ in range(4)]
    masks = [torch.zeros_like(w, dtype=torch.bool) for w in weights]
    for row in ROWS:
        gate(weights[0], row)
        updates = [update_of(w, m, row) for w, m in zip(weights, masks, strict=True)]

        def ours(i: int, updates: list[Update] = updates) -> None:
            scope_masks([updates[i]], impl="triton")

        kinds = {
            "ours": ours,
            "ours, captured": captured(ours, 4),
            "stock (float32)": stock_of(weights[0], row),
            "torch": torch_of(weights, row),
            "torchao PAT": pat_of(weights, row),
        }
        bytes_moved = weights[0].numel() * (weights[0].element_size() + 1)
        lines += rows_of(row, kinds, bytes_moved, rate, args.repeat)
    model = list(llama(args.layers, HIDDEN, INNER, "cuda"))
    bytes_moved = sum(w.numel() * (w.element_size() + 1) for w in model)
    for row in ROWS:
        step = whole_model(row, model)
        kinds = {"ours": step, "ours, captured": captured(step, 1)}
        lines += rows_of(f"{len(model)} weights, {row}", kinds, bytes_moved, rate, max(3, args.repeat // 10), copies=1)
    return lines


def rows_of(row: str, kinds: dict, bytes_moved: int, rate: float, repeat: int, copies: int = 4) -> list[dict]:
    """One line a kind, printed as it is made."""
    ms = {kind: median_ms(work, copies, repeat) for kind, work in kinds.items() if work is not None}
    floor, lines = bytes_moved / rate, []
    for kind, time in ms.items():
        lines.append(
            {
                "pattern": row,
                "kind": kind,
                "ms": round(time, 4),
                "bytes N(b+1)": bytes_moved,
                "GB/s": round(bytes_moved / time / 1e6, 1),
                "copy GB/s": round(rate / 1e6, 1),
                "times the floor": round(time / floor, 2),
                "times faster than stock": round(ms["stock (float32)"] / time, 1) if "stock (float32)" in ms else "",
            }
        )
        print("  ".join(f"{k}: {v}" for k, v in lines[-1].items()), flush=True)
    return lines


def run_tiny() -> None:
    """Every piece once on CPU under the interpreter, without a clock."""
    weights = [torch.randn(64, 64).to(DTYPE) for _ in range(2)]
    for row in ROWS:
        gate(weights[0], row)
        kept = torch_of(weights, row)(0)
        stock_of(weights[0], row)(0)
        pat = pat_of(weights, row)
        if pat is not None:
            pat(1)
        print(f"{row}: mask checked, {int(kept.sum())} of {kept.numel()} kept by plain torch")
    whole_model("2:4", list(llama(1, 16, 32, "cpu")))(0)
    print("ran in the interpreter: nothing was timed, and there is no GPU figure")


def main() -> None:
    """Print the table, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--repeat", type=int, default=100)
    parser.add_argument("--no-csv", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="small, in the interpreter, untimed: does it run")
    args = parser.parse_args()
    if args.tiny:
        run_tiny()
        return
    if not torch.cuda.is_available():
        raise SystemExit("gpu_step.py needs a CUDA device; --tiny runs it without one, untimed")
    lines = measure(args)
    if not args.no_csv:
        write_csv(lines)


def write_csv(lines: list[dict]) -> None:
    """The table with machine and versions."""
    import triton

    about = {
        "gpu": torch.cuda.get_device_name(),
        "host": platform.machine(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "sparsekit_ao": sparsekit_ao.__version__,
    }
    path = Path(__file__).parent / "results" / "gpu_step.csv"
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*lines[0], *about], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**line, **about} for line in lines)
    print(f"wrote {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path.name}")


if __name__ == "__main__":
    main()
