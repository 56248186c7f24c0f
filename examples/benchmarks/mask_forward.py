"""What masking a weight costs in eager mode on CPU, by kind of mask and by operation.

    python examples/benchmarks/mask_forward.py

A masked element must be exactly zero, whatever the weight holds; a product leaves NaN. Forward only, 4096 x 4096
float32 and bfloat16, medians of alternated runs.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from sparsekit_ao.masking import select

SIZE, REPEAT = 4096, 15


def main() -> None:
    """Print milliseconds for each way and each dtype."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small size, once: does it run")
    size, repeat = (64, 1) if parser.parse_args().tiny else (SIZE, REPEAT)
    torch.set_num_threads(2)
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.randn(size, size).to(dtype)
        keep = torch.rand(size, size) > 0.5
        as_float = keep.to(dtype)
        if not torch.equal(select(weight, keep), select(weight, as_float)):
            raise SystemExit("the two kinds of mask disagree; nothing is timed")
        ways: dict[str, Callable[[], torch.Tensor]] = {
            "copy of the weight": weight.clone,
            "product, float mask (torch.ao; keeps NaN)": lambda w=weight, m=as_float: m * w,
            "select, float mask (exact zeros)": lambda w=weight, m=as_float: select(w, m),
            "product, bool mask (keeps NaN)": lambda w=weight, m=keep: m * w,
            "select, bool mask (exact zeros)": lambda w=weight, m=keep: select(w, m),
        }
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(repeat):
            for name, way in ways.items():
                start = time.perf_counter()
                way()
                found[name].append((time.perf_counter() - start) * 1e3)
        for name, times in found.items():
            print(f"{dtype}  {name:42s} {statistics.median(times):6.1f} ms")


if __name__ == "__main__":
    main()
