"""Instructions per element of the GPU kernels, counted in what the assembler makes of them; needs no GPU.

    python examples/benchmarks/gpu_instructions.py      # the table, and a CSV under examples/benchmarks/results/

Kernels are compiled for sm_90 as the launchers would launch them, for one weight of 8192 x 8192 = 2^26 elements, and
their machine code is counted (`sass.py` has the method). `integer` are instructions of the units for 32-bit integers,
`shared` those that go through shared memory, `all` every instruction, each for one element. `bound us` is the time
below which an H200 cannot be: it has 132 SMs, takes at most 1.98 GHz, and an SM completes 64 integer instructions or
128 of any kind a clock (integer multiply-adds go to other units and count only among all). `floor us` is the time of
the bytes, a weight read once and a mask byte written for each element, at 4.3 TB/s; a kernel that only reads
or only writes has its own. `launches` are those of the whole pattern for one weight, fills with zeros not counted.
"""

import argparse
from collections.abc import Callable

import torch
import triton
from machine import RESULTS, show, write_csv
from sass import Compiled, Launcher, compiling, count, empty, usage

from sparsekit_ao import BlockSpec, ScopeSpec
from sparsekit_ao.selection import Request
from sparsekit_ao.selection.triton import lowering
from sparsekit_ao.selection.triton.launches import PROGRAMS, TILE, Form, launch

SIZE, ARCH = 8192, 90
CLOCK, SMS, INTEGER_RATE, RATE = 1.98e3, 132, 64, 128  # clocks a microsecond; SMs; instructions a clock and SM
BANDWIDTH = 4.3e6  # bytes a microsecond
WHOLE = -1
PATTERNS = {  # name: block, scope
    "2:4": ((1, 1), (1, 4)),
    "4:8": ((1, 1), (1, 8)),
    "8:16": ((1, 1), (1, 16)),
    "2:4 along the output": ((1, 1), (4, 1)),
    "1x1 over the tensor": ((1, 1), (WHOLE, WHOLE)),
    "32x32 over the tensor": ((32, 32), (WHOLE, WHOLE)),
}
# kernels over all elements of a weight: how often they read it and write its mask
PASSES = {"fused": (1, 1), "score": (1, 0), "fill": (0, 1), "histogram": (1, 0), "tie": (1, 0), "mark": (1, 1)}


def update(block: tuple[int, int], scope: tuple[int, int], dtype: torch.dtype) -> Request:
    """The mask update of one weight without memory."""
    blocks = BlockSpec(empty((SIZE, SIZE), dtype), block)
    scopes = ScopeSpec(blocks, scope)
    masks = {blocks: empty((SIZE, SIZE), torch.bool)}
    return Request(scope=scopes, masks=masks, keep=scopes.numblk_per_scope() // 2)


def elements_of_thread(kernel: str, form: Form, warps: int, block: tuple[int, int]) -> int:
    """Elements that a thread handles, in all trips of a loop."""
    if kernel == "fused":
        held = form.tile * form.padded * form.chunk
    elif kernel in ("score", "fill"):
        held = form.tile * block[0] * block[1]
    else:  # a span of tiles, one for each of the programs of a launch
        held = max(TILE, SIZE * SIZE // PROGRAMS)
    return held // (warps * 32)


def lines_of(pattern: str, dtype: torch.dtype, compiled: Callable[[int, Launcher], list[Compiled]]) -> list[dict]:
    """A row for each kernel that goes over all elements of a weight."""
    block, scope = PATTERNS[pattern]
    work = update(block, scope, dtype)
    launches, lines = compiled(ARCH, lambda: launch(lowering.lower(work))), []
    for launched in launches:
        of_blocks = launched.name == "mark" and block != (1, 1)  # reads scores, not the weight
        if launched.name in PASSES and not of_blocks:
            cubin, warps = launched.kernel.asm["cubin"], launched.kernel.metadata.num_warps
            counts = count(cubin, elements_of_thread(launched.name, launched.form, warps, block), dtype.itemsize)
            shown = {"pattern": pattern, "dtype": str(dtype).removeprefix("torch."), "launches": len(launches)}
            lines.append(show(shown | row(launched.name, counts, usage(cubin), dtype.itemsize)))
    return lines


def row(kernel: str, counts: tuple[float, float, float], used: dict[str, int], itemsize: int) -> dict:
    """Counts, bound and floor of one kernel."""
    integer, shared, every = counts
    clocks = max(integer / INTEGER_RATE, every / RATE) * SIZE * SIZE / SMS
    read, written = PASSES[kernel]
    return {
        "kernel": kernel,
        "integer": round(integer, 1),
        "shared": round(shared, 1),
        "all": round(every, 1),
        "bound us": round(clocks / CLOCK, 1),
        "floor us": round((read * itemsize + written) * SIZE * SIZE / BANDWIDTH, 1),
        **used,
    }


def main() -> None:
    """Print the table, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a smoke test: one pattern, without CSV")
    args = parser.parse_args()
    patterns, dtypes = list(PATTERNS), [torch.bfloat16, torch.float32]
    if args.tiny:
        patterns, dtypes = patterns[:1], dtypes[:1]
    with compiling() as compiled:
        lines = [line for name in patterns for dtype in dtypes for line in lines_of(name, dtype, compiled)]
    if not args.tiny:
        write_csv([line | {"triton": triton.__version__} for line in lines], RESULTS / "gpu_instructions.csv")


if __name__ == "__main__":
    main()
