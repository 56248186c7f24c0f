"""One mask update on a GPU: the Triton kernels against a copy, torch's own selection, torch.ao, and torchao's PAT.

    python examples/benchmarks/gpu_step.py                # the table, and a CSV under examples/benchmarks/results/
    python examples/benchmarks/gpu_step.py --size 16384 --no-csv
    python examples/benchmarks/gpu_step.py --tiny         # a smoke test in Triton's interpreter on CPU; no times

Masks are checked before anything is timed: exact counts, and the reference's mask bit for bit where scores are exact.
Times are medians of many runs between device events, which cycle through weights that together exceed the cache.
"captured" is a CUDA graph of many runs, queued behind a pause, so that it includes no time of the host; the other kinds
are timed as they are called, host included. `clone` copies the weight; `topk` and `kthvalue` are plain torch for the
same mask; `4x4 tile` is torch's own 2:4 kernel, which prunes rows and columns of tiles at once, so its mask is another.
Bytes are the fewest that must be moved: a weight of N elements of b bytes is read once and its bool mask written once,
N (b + 1). The floor is the time of these bytes at the rate of a device copy measured in the same run.
"""

import argparse
import csv
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

if "--tiny" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch
from torch import Tensor, nn
from torch.ao.pruning import WeightNormSparsifier as Stock

import sparsekit_ao
from sparsekit_ao import BlockSpec, ScopeSpec
from sparsekit_ao.selection import Request, fill_masks

sys.path.append(str(Path(__file__).parent.parent))
from rows import write_rows

# name: block, scope (-1 is all), level, stock's arguments where it has the pattern
ROWS = {
    "2:4": ((1, 1), (1, 4), 0.5, {"sparsity_level": 1.0, "sparse_block_shape": (1, 4), "zeros_per_block": 2}),
    "rows at 50 %": ((1, 1), (1, -1), 0.5, None),
    "1x1 at 50 %": ((1, 1), (-1, -1), 0.5, {"sparsity_level": 0.5, "sparse_block_shape": (1, 1)}),
    "1x1 at 90 %": ((1, 1), (-1, -1), 0.9, {"sparsity_level": 0.9, "sparse_block_shape": (1, 1)}),
    "32x32 at 80 %": ((32, 32), (-1, -1), 0.8, {"sparsity_level": 0.8, "sparse_block_shape": (32, 32)}),
}
HIDDEN, INNER, LAYERS = 4096, 11008, 32  # Llama-7B: 7 weights a layer
DTYPE = torch.bfloat16
COPIES = 4  # weights that runs cycle through; together they must exceed the cache


def request_of(weight: Tensor, mask: Tensor, row: str) -> Request:
    """The mask update of one weight in a step."""
    block, scope, level, _ = ROWS[row]
    blocks = BlockSpec(weight, block)
    scopes = ScopeSpec(blocks, scope)
    return Request(scope=scopes, masks={blocks: mask}, keep=scopes.sparsity_to_nnz(level))


def check_mask(weight: Tensor, row: str) -> None:
    """Refuse to time a wrong mask; with integers the sums of blocks are exact in any order."""
    values = weight if ROWS[row][0] == (1, 1) else torch.randint_like(weight, -4, 5)
    masks = [torch.zeros_like(values, dtype=torch.bool) for _ in range(2)]
    for mask, impl in zip(masks, ("triton", "reference"), strict=True):
        fill_masks([request_of(values, mask, row)], impl=impl)
    if not torch.equal(*masks):
        raise SystemExit(f"{row}: {int((masks[0] != masks[1]).sum())} elements differ; nothing is timed")


Work = Callable[[int], object]
ROUNDS, PAUSE = 8, 2_000_000  # runs of every weight in a graph; clock cycles in which the host queues the work


def median_ms(work: Work, copies: int, repeat: int) -> float:
    """Median milliseconds of `work(i)` as it is called, where i cycles through `copies` weights."""
    for i in range(copies):
        work(i)
    return statistics.median(elapsed_ms(lambda i=i: work(i % copies)) for i in range(repeat))


def captured_ms(work: Work, copies: int, repeat: int) -> float:
    """Median milliseconds of `work(i)` on the device alone: a graph of many runs over all weights in order."""
    for i in range(copies):
        work(i)
    runs = list(range(copies))
    if not torch.cuda.is_available():  # under the interpreter there is no graph
        return statistics.median(elapsed_ms(lambda: [work(i) for i in runs]) for _ in range(repeat)) / len(runs)
    runs *= ROUNDS if copies > 1 else 1
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in runs:
            work(i)
    graph.replay()
    return statistics.median(elapsed_ms(graph.replay, pause=True) for _ in range(repeat)) / len(runs)


def elapsed_ms(act: Callable[[], object], pause: bool = False) -> float:
    """Milliseconds between device events around `act`; with `pause` the device waits until all work is queued."""
    if not torch.cuda.is_available():
        begin = time.perf_counter()
        act()
        return (time.perf_counter() - begin) * 1e3
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if pause:
        torch.cuda._sleep(PAUSE)
    first.record()
    act()
    last.record()
    last.synchronize()
    return first.elapsed_time(last)


def stock_of(weight: Tensor, row: str) -> Work | None:
    """torch.ao's step for the same mask, in float32, since it fails with bf16 weights after the first step."""
    if ROWS[row][3] is None:
        return None
    model = nn.Sequential(nn.Linear(weight.shape[1], weight.shape[0], bias=False, device=weight.device))
    model[0].weight.data = weight.float()
    sparsifier = Stock(**ROWS[row][3])
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}])

    def step(_: int) -> None:
        model[0].parametrizations.weight[0].mask.fill_(1)
        sparsifier.step()

    return step


def topk_of(weights: list[Tensor], row: str) -> Work:
    """Plain torch for the same masks: topk in each scope, of norms where blocks have several elements."""
    (height, width), scope, level, _ = ROWS[row]

    def step(i: int) -> Tensor:
        tiles = weights[i].unflatten(1, (-1, width)).unflatten(0, (-1, height))
        scores = (
            tiles.abs() if height * width == 1 else torch.linalg.vector_norm(tiles, dim=(1, 3), dtype=torch.float32)
        )
        scores = (
            scores.reshape(1, -1)
            if scope == (-1, -1)
            else scores.reshape(-1, scope[1] if scope[1] > 0 else weights[i].shape[1])
        )
        count = scores.shape[1] - int(level * scores.shape[1] + 1e-9)
        kept = torch.zeros_like(scores, dtype=torch.bool).scatter_(
            1, scores.topk(count, dim=1, sorted=False).indices, True
        )
        shape = (tiles.shape[0], 1, tiles.shape[2], 1)
        return kept.view(shape).expand_as(tiles).reshape(weights[i].shape)

    return step


def kthvalue_of(weights: list[Tensor], row: str) -> Work | None:
    """All weights above the k-th value, which keeps too few where there are ties; None but for single weights."""
    block, scope, level, _ = ROWS[row]
    if block != (1, 1) or scope != (-1, -1):
        return None

    def step(i: int) -> Tensor:
        size = weights[i].abs()
        return size > size.flatten().float().kthvalue(int(level * size.numel())).values

    return step


def tile_of(weights: list[Tensor], row: str) -> Work | None:
    """torch's kernel that makes a 2:4 mask of 4x4 tiles and packs it; None where this torch or device has none."""
    tile = getattr(torch, "_sparse_semi_structured_tile", None)
    if row != "2:4" or tile is None or not torch.cuda.is_available():
        return None
    try:
        tile(weights[0])
    except (RuntimeError, NotImplementedError):
        return None
    return lambda i: tile(weights[i])


def pat_of(weights: list[Tensor], row: str) -> Work | None:
    """torchao's PAT constraint on a copy of the weight, in groups as its optimizer makes them; None without PAT."""
    try:
        from torchao.prototype.pat.optim import MinSparsityConstraint, NMSparseConstraint
    except ImportError:
        return None
    (height, width), scope, level, _ = ROWS[row]
    if row == "2:4":
        two = torch.vmap(NMSparseConstraint(0.0, 2).apply_, in_dims=(0, None), out_dims=(0, 0))
        return lambda i: two(weights[i].clone().view(-1, 4), 0.0)

    def grouped(i: int) -> Tensor:
        tiles = weights[i].unflatten(0, (-1, height)).unflatten(2, (-1, width))
        return tiles.transpose(1, 2).reshape(-1, height * width)

    if scope != (-1, -1):
        return None  # all of its groups share one sparsity
    least = MinSparsityConstraint(0.0, level)
    return lambda i: least.apply_(grouped(i).clone(), 0.0)


def llama(layers: int, hidden: int, inner: int, device: str) -> Iterator[Tensor]:
    """Weights of the shapes of a Llama: q, k, v, o, gate, up and down of each layer."""
    for _ in range(layers):
        for shape in [(hidden, hidden)] * 4 + [(inner, hidden)] * 2 + [(hidden, inner)]:
            yield torch.randn(shape, device=device, dtype=DTYPE)


def whole_model(row: str, weights: list[Tensor]) -> Work:
    """A step over all weights at once, whose counts are checked first."""
    masks = [torch.zeros_like(w, dtype=torch.bool) for w in weights]
    requests = [request_of(w, m, row) for w, m in zip(weights, masks, strict=True)]
    fill_masks(requests, impl="triton")
    for request, mask in zip(requests, masks, strict=True):
        want = int(request.keep) * request.scope.numscp() * math.prod(ROWS[row][0])
        if int(mask.sum()) != want:
            raise SystemExit(f"{row}, whole model: {int(mask.sum())} elements kept, not {want}; nothing is timed")
    return lambda _: fill_masks(requests, impl="triton")


def copy_rate(size: int, device: str, repeat: int) -> float:
    """Bytes that a device copy reads and writes per millisecond."""
    sources = [torch.randn(size, size, device=device, dtype=DTYPE) for _ in range(COPIES)]
    targets = [torch.empty_like(source) for source in sources]
    moved = 2 * sources[0].numel() * DTYPE.itemsize
    return moved / captured_ms(lambda i: targets[i].copy_(sources[i]), COPIES, repeat)


def refuse_cached(size: int, cache: int) -> None:
    """Refuse sizes at which much of a weight is still in the cache when it is used again, and not read from memory."""
    least = math.isqrt(2 * cache // (COPIES * DTYPE.itemsize)) + 1
    if size < least:
        raise SystemExit(
            f"--size {size}: {COPIES} weights in turn are {COPIES * size * size * DTYPE.itemsize >> 20} MiB, and must "
            f"be more than twice the cache of {cache >> 20} MiB to be read from memory. Take --size {least} or more."
        )


def measure(args: argparse.Namespace, device: str) -> list[dict]:
    """The table."""
    rate, lines = copy_rate(args.size, device, args.repeat), []
    weights = [torch.randn(args.size, args.size, device=device, dtype=DTYPE) for _ in range(COPIES)]
    masks = [torch.zeros_like(w, dtype=torch.bool) for w in weights]
    for row in ROWS:
        check_mask(weights[0], row)
        requests = [request_of(w, m, row) for w, m in zip(weights, masks, strict=True)]

        def ours(i: int, requests: list[Request] = requests) -> None:
            fill_masks([requests[i]], impl="triton")

        kinds = {
            "ours": ours,
            "ours, captured": ours,
            "clone": lambda i: weights[i].clone(),
            "topk": topk_of(weights, row),
            "kthvalue": kthvalue_of(weights, row),
            "4x4 tile": tile_of(weights, row),
            "stock (float32)": stock_of(weights[0], row),
            "torchao PAT": pat_of(weights, row),
        }
        bytes_moved = weights[0].numel() * (weights[0].element_size() + 1)
        lines += rows_of(row, kinds, bytes_moved, rate, args.repeat)
    model = list(llama(args.layers, args.hidden, args.inner, device))
    bytes_moved = sum(w.numel() * (w.element_size() + 1) for w in model)
    for row in ROWS:
        step = whole_model(row, model)
        kinds = {"ours": step, "ours, captured": step}
        repeat = -(-args.repeat // 10)
        lines += rows_of(f"{len(model)} weights, {row}", kinds, bytes_moved, rate, repeat, copies=1)
    return lines


def rows_of(row: str, kinds: dict, bytes_moved: int, rate: float, repeat: int, copies: int = COPIES) -> list[dict]:
    """One line for each kind, printed at once."""
    ms = {
        kind: (captured_ms if kind.endswith("captured") else median_ms)(work, copies, repeat)
        for kind, work in kinds.items()
        if work is not None
    }
    floor, lines = bytes_moved / rate, []
    for kind, taken in ms.items():
        lines.append(
            {
                "pattern": row,
                "kind": kind,
                "ms": round(taken, 4),
                "bytes N(b+1)": bytes_moved,
                "GB/s": round(bytes_moved / taken / 1e6, 1),
                "copy GB/s": round(rate / 1e6, 1),
                "share of the floor's rate": round(floor / taken, 3),
                "times the floor": round(taken / floor, 2),
                "clones": round(taken / ms["clone"], 2) if "clone" in ms else "",
                "times faster than stock": round(ms["stock (float32)"] / taken, 1) if "stock (float32)" in ms else "",
            }
        )
        shown = lines[-1].items() if torch.cuda.is_available() else (("pattern", row), ("kind", kind))
        print("  ".join(f"{k}: {v}" for k, v in shown), flush=True)
    return lines


def main() -> None:
    """Print the table, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--hidden", type=int, default=HIDDEN)
    parser.add_argument("--inner", type=int, default=INNER)
    parser.add_argument("--repeat", type=int, default=100)
    parser.add_argument("--no-csv", action="store_true")
    parser.add_argument(
        "--tiny", action="store_true", help="a smoke test: small sizes in the interpreter, without times"
    )
    args = parser.parse_args()
    if args.tiny:
        run_tiny(args)
        return
    if not torch.cuda.is_available():
        raise SystemExit("gpu_step.py needs a CUDA device; --tiny runs it without one, untimed")
    refuse_cached(args.size, torch.cuda.get_device_properties("cuda").L2_cache_size)
    lines = measure(args, "cuda")
    if not args.no_csv:
        path = Path(__file__).parent / "results" / "gpu_step.csv"
        write_rows(lines, path, facts(torch.cuda.get_device_name()))


def run_tiny(args: argparse.Namespace) -> None:
    """The whole script on CPU in the interpreter, with a CSV in a temporary folder."""
    args.size, args.layers, args.hidden, args.inner, args.repeat = 64, 1, 32, 32, 1
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gpu_step.csv"
        lines = measure(args, "cpu")
        write_rows(lines, path, facts("none: Triton's interpreter"))
        with path.open(newline="") as file:
            read = list(csv.DictReader(file))
    if [line["kind"] for line in read] != [line["kind"] for line in lines]:
        raise SystemExit("the CSV differs from the table")
    print(f"ran in the interpreter, {len(read)} lines: masks were checked, and there is no GPU figure")


def facts(gpu: str) -> dict[str, object]:
    """The machine and versions."""
    import triton

    versions = {"cuda": torch.version.cuda, "torch": torch.__version__, "triton": triton.__version__}
    return {"gpu": gpu, "host": platform.machine(), **versions, "sparsekit_ao": sparsekit_ao.__version__}


if __name__ == "__main__":
    main()
