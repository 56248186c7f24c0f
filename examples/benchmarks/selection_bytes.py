"""One budget over weights that two ranks share: bisection with summed counts, or weights gathered on every rank.

    python examples/benchmarks/selection_bytes.py      # the table, and a CSV under examples/benchmarks/results/

67M float32 weights of one layer, sharded by FSDP2 over gloo ranks on this machine, one thread each, half of the weights
dropped. Both methods use the library's selection and give the same mask; they are timed in one run, alternated, and
the median is shown. `bytes` are those that a rank passes to collectives.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from machine import RESULTS, show, write_csv
from ranks import on_ranks
from torch import distributed, nn

from sparsekit_ao import BlockSpec, ScopeSparsifier, ScopeSpec
from sparsekit_ao.selection import Request, fill_masks


@contextmanager
def bytes_sent() -> Iterator[Callable[[], int]]:
    """Count the bytes that are passed to all-reduces."""
    real, sent = distributed.all_reduce, []

    def counted(tensor, *args, **kwargs):  # type: ignore[no-untyped-def]
        sent.append(tensor.numel() * tensor.element_size())
        return real(tensor, *args, **kwargs)

    distributed.all_reduce = counted
    try:
        yield lambda: sum(sent)
    finally:
        distributed.all_reduce = real


def by_gather(weight: torch.Tensor, level: float) -> torch.Tensor:
    """Gather the weights on every rank and choose among them as a single process does."""
    whole = weight.detach().full_tensor()  # type: ignore[attr-defined]
    mask = torch.ones(whole.shape, dtype=torch.bool)
    block = BlockSpec(whole)
    scope = ScopeSpec(block)
    fill_masks([Request(scope=scope, masks={block: mask}, keep=scope.sparsity_to_nnz(level))])
    return mask


def measure(size: int, repeat: int) -> tuple[dict, dict]:
    """Time both methods."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(size, size, bias=False))
    sparsifier = ScopeSparsifier(0.5)
    sparsifier.prepare(model, None)
    fully_shard(model)
    weight = model[0].parametrizations.weight.original  # type: ignore[index, union-attr]
    times: dict[str, list[float]] = {"bisection": [], "gather": []}
    for _ in range(repeat):
        for method, found in times.items():
            distributed.barrier()
            start = time.perf_counter()
            with bytes_sent() as count:
                if method == "gather":
                    mask = by_gather(weight, 0.5)
                else:
                    sparsifier.step()
                    sent = count()
            distributed.barrier()
            found.append((time.perf_counter() - start) * 1e3)
    assert torch.equal(sparsifier.mask("0.weight").full_tensor(), mask)  # type: ignore[attr-defined]
    return (times, {"bisection": sent, "gather": weight.numel() * 4})


def main() -> None:
    """Print the table, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a smoke test: few weights, once, without CSV")
    args = parser.parse_args()
    size, repeat, world = (64, 1, 2) if args.tiny else (8192, 5, 2)
    times, sent = on_ranks(world, measure, size, repeat)
    lines = [
        show({"way": method, "weights": size * size, "bytes": sent[method], "ms": round(statistics.median(found), 1)})
        for method, found in times.items()
    ]
    if not args.tiny:
        write_csv(lines, RESULTS / "selection_bytes.csv")


if __name__ == "__main__":
    main()
