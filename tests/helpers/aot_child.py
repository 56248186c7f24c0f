"""Compiles every kernel ahead of time, in a process of its own; prints one JSON line a kernel and architecture.

    python tests/helpers/aot_child.py 80 90 100
    python tests/helpers/aot_child.py 90 --every --table

The launchers themselves run, on weights of the meta device, and each launch is compiled instead of made: so forms,
warps and registers are those of a real run. Registers and spills come from the tools in the triton wheel.
"""

import argparse
import json
import math
import re
import sys
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples" / "benchmarks"))
from kernel_cases import as_request
from sass import compiling, empty, usage

from sparsekit_ao.selection.triton import launches, lowering
from sparsekit_ao.structure.windows import ScopeWindows, Window

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
COLUMNS = ("case", "kernel", "warps", "registers", "spills", "shared", "wide loads", "wide stores")


def member(shape, block, dtype, order=(), stride=None, mask=torch.bool, start=0):
    values, mask = empty(shape, dtype, stride, start), empty(shape, mask, stride, start)
    return Window(shape=block, values=values, mask=mask, order=order)


@contextmanager
def offsets(big):
    """Offsets of 64 bits for tensors of any size, or as their sizes need."""
    usual, lowering.BIG = lowering.BIG, 0 if big else lowering.BIG
    yield
    lowering.BIG = usual


def fill(groups, keep=1, big=False, **how):
    def launch():
        with offsets(big):
            launches.launch(lowering.lower(as_request(groups, keep, **how)))

    return launch


def update(shape, dtype, block, scope, norm=2, within_mask=False, big=False, **layout):
    """The update of one tensor."""
    scopes = ScopeWindows(windows=(member(shape, block, dtype, **layout),), shape=scope)
    return fill([scopes], norm=norm, within_mask=within_mask, big=big)


def hidden_units(dtype, big=False, within_mask=False):
    """Rows of gate and up, columns of down, coupled."""
    members = [member((11008, 4096), (1, 4096), dtype) for _ in range(2)]
    members.append(member((4096, 11008), (4096, 1), dtype, (1, 0)))
    return fill([ScopeWindows(windows=tuple(members), shape=(11008, 1))], big=big, within_mask=within_mask)


def rows(dtype, width, big=False, within_mask=False):
    """Selection among scores of either sign, with a budget for each row."""
    scopes = ScopeWindows(windows=(member((64, width), (1, 1), dtype),), shape=(1, width))
    return fill([scopes], empty((64,), torch.int64), big=big, norm=None, within_mask=within_mask)


WHOLE = (8192, 8192)
SINGLE = {  # scopes of single elements, which have keys of their own for each dtype, with and without signs
    "2:4": (WHOLE, (1, 4)),
    "2:5": ((8192, 8190), (1, 5)),
    "3:8 along the output": (WHOLE, (8, 1)),
    "16:32": (WHOLE, (1, 32)),
}
SIGNS = {"signed": None, "unsigned": 2}
CASES = {  # each kernel in its usual form, and what the tests compare on every architecture
    "2:4": update(WHOLE, BF16, (1, 1), (1, 4)),
    "2:4, float32": update(WHOLE, F32, (1, 1), (1, 4)),
    "2:4 along the output": update(WHOLE, BF16, (1, 1), (4, 1)),
    "2:4 of a transposed weight": update(WHOLE, BF16, (1, 1), (1, 4), stride=(1, 8192)),
    "1x1 over a tensor": update(WHOLE, BF16, (1, 1), WHOLE),
    "32x32 over a tensor": update(WHOLE, BF16, (32, 32), (256, 256)),
}
FORMS = {  # the other forms, each at least once: for the architecture in the middle only, to save time
    "a hidden unit of three tensors": hidden_units(BF16),
    "2:4 as a second stage": update(WHOLE, BF16, (1, 1), (1, 4), within_mask=True),
    "8:16": update(WHOLE, BF16, (1, 1), (1, 16)),
    "8:16, float32": update(WHOLE, F32, (1, 1), (1, 16)),
    "16:32": update(WHOLE, BF16, (1, 1), (1, 32)),
    "2:4 of 1x2": update(WHOLE, BF16, (1, 2), (1, 4)),
    "4:8 of 64x1": update(WHOLE, BF16, (64, 1), (1, 8)),
    "rows of 1,024": update((4096, 1024), BF16, (1, 1), (1, 1024)),
    "rows of 4,096": update((4096, 4096), BF16, (1, 1), (1, 4096)),
    "rows of 11,008": update((4096, 11008), BF16, (1, 1), (1, 11008)),
    "output neurons": update(WHOLE, BF16, (1, 8192), (8192, 1)),
    "inputs": update(WHOLE, BF16, (8192, 1), (1, 8192)),
    "2:4 of 3x3 kernels": update((512, 512, 3, 3), F32, (1, 1, 3, 3), (1, 4, 1, 1)),
    "4:8 of 3 elements": update((8192, 768 * 8), BF16, (1, 3), (1, 8), norm=math.inf),
    "rows of 8,192, float32": update(WHOLE, F32, (1, 1), (1, 8192)),
    "1x1 over a tensor, float32": update(WHOLE, F32, (1, 1), WHOLE),
    "1x1 over a slice that starts anywhere": update(
        (8190, 8191), BF16, (1, 1), (8190, 8191), stride=(8193, 1), start=1
    ),
    "2:4 of a slice that starts anywhere": update((8190, 8192), BF16, (1, 1), (1, 4), stride=(8193, 1), start=1),
    "1x4 over a tensor": update(WHOLE, BF16, (1, 4), (8192, 2048)),
    "32x32 over a tensor, float32": update(WHOLE, F32, (32, 32), (256, 256)),
    "signed rows of 1,000": rows(F32, 1000, within_mask=True),
    "signed rows of 10, 64-bit": rows(BF16, 10, big=True),
    "signed rows of 2^19, 64-bit, float32": rows(F32, 1 << 19, big=True, within_mask=True),
    "2:4 along the output, signed, 16 bits": update(WHOLE, BF16, (1, 1), (4, 1), norm=None),
    **{
        f"{name}, {sign}, {str(dtype)[6:]}, {within_mask=}": update(shape, dtype, (1, 1), scope, norm, within_mask)
        for (name, (shape, scope)), (sign, norm), dtype, within_mask in product(
            SINGLE.items(), SIGNS.items(), (F16, F32), (False, True)
        )
    },
}
COMBINED = {  # forms that combine what others have one by one: only with --every, or by name
    "rows of 28,672": update((8192, 28672), BF16, (1, 1), (1, 28672)),
    "1x1 over a tensor beyond 2^31": update((65536, 65536), BF16, (1, 1), (65536, 65536)),
    "1x1 over a tensor, strided float32 as a second stage": update(
        WHOLE, F32, (1, 1), WHOLE, within_mask=True, stride=(8200, 1), mask=F32
    ),
    "1x1 over a transposed tensor": update(WHOLE, BF16, (1, 1), WHOLE, stride=(1, 8192)),
    "1x1 over a tensor as a second stage, float16": update(WHOLE, F16, (1, 1), WHOLE, within_mask=True),
    "1x4 over a tensor as a second stage": update(WHOLE, BF16, (1, 4), (8192, 2048), norm=1, within_mask=True),
    "32x32 over a tensor as a second stage": update(WHOLE, BF16, (32, 32), (256, 256), within_mask=True),
    "32x32 over a tensor, inf": update(WHOLE, BF16, (32, 32), (256, 256), norm=math.inf),
    "a hidden unit of three tensors, 64-bit, float32": hidden_units(F32, big=True, within_mask=True),
    "rows of 8,192 as a second stage, 64-bit, float32": update(
        WHOLE, F32, (1, 1), (1, 8192), within_mask=True, big=True
    ),
    "signed rows of 2^19": rows(F32, 1 << 19, within_mask=True),
    "signed rows of 2^19, 64-bit": rows(BF16, 1 << 19, big=True, within_mask=True),
}


def lines(cases):
    """One dict a kernel and architecture, each compiled once; `cases` are (name, architecture)."""
    done, launched = set(), CASES | FORMS | COMBINED
    with compiling() as compiled:
        for case, arch in cases:
            for launch in compiled(arch, launched[case]):
                kernel = launch.kernel
                if kernel.hash in done:
                    continue
                done.add(kernel.hash)
                ptx = kernel.asm["ptx"]
                yield {
                    "case": case,
                    "kernel": launch.name,
                    "arch": arch,
                    "warps": kernel.metadata.num_warps,
                    **usage(kernel.asm["cubin"]),
                    "shared": kernel.metadata.shared,
                    "wide loads": len(re.findall(r"ld\.global\.v4\.b32", ptx)),
                    "wide stores": len(re.findall(r"st\.global\.v4\.b32", ptx)),
                    "statements": ptx.count(";\n"),
                }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arches", type=int, nargs="+")
    parser.add_argument("--case", default="", help="only cases whose name holds this")
    parser.add_argument("--every", action="store_true", help="all cases for every architecture")
    parser.add_argument("--table", action="store_true", help="rows for a README instead of JSON")
    parser.add_argument("--triton", default="", help="the folder that triton must come from")
    args = parser.parse_args()
    assert triton.__file__.startswith(args.triton), f"{args.triton} has no triton"
    every = args.every or args.case
    names = [name for name in CASES | FORMS | (COMBINED if every else {}) if args.case in name]
    cases = [(name, arch) for name in names for arch in args.arches if every or name in CASES or arch == 90]
    for line in lines(cases):
        print("| " + " | ".join(str(line[k]) for k in COLUMNS) + " |" if args.table else json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
