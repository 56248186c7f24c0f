"""Compiles every kernel ahead of time, in a process of its own; prints one JSON line a kernel and architecture.

    python tests/aot_child.py 80 90 100
    python tests/aot_child.py 90 --every --table

The launchers themselves run, on weights of the meta device, and each launch is compiled instead of made: so forms,
warps and registers are those of a real run. Registers and spills come from the tools in the triton wheel.
"""

import argparse
import json
import math
import re
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples" / "benchmarks"))
from sass import compiling, empty, usage

from sparsekit_ao.selection import Blocks, Scopes, Update
from sparsekit_ao.selection import triton as gpu

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def blocks(shape, block, dtype, order=(), stride=None, mask=torch.bool, start=0):
    values, mask = empty(shape, dtype, stride, start), empty(shape, mask, stride, start)
    return Blocks(shape=block, values=values, mask=mask, order=order)


def update(shape, dtype, block, scope, norm=2, among_kept=False, stride=None, big=False, mask=torch.bool, start=0):
    """A launch of one tensor's scopes."""
    scoped = Scopes(members=(blocks(shape, block, dtype, stride=stride, mask=mask, start=start),), shape=scope)
    return lambda: gpu.scope_masks(
        [Update(scopes=(scoped,), keep=1, norm=norm, among_kept=among_kept)], gpu.Limits(big=big)
    )


def many(count, shape=(512, 512), scope=(1, 4)):
    """2:4, or another scope, over several tensors in one launch."""
    groups = [Scopes(members=(blocks(shape, (1, 1), BF16),), shape=scope) for _ in range(count)]
    return lambda: gpu.scope_masks([Update(scopes=(scoped,), keep=2) for scoped in groups])


def hidden_units(dtype, big, among_kept=False):
    """Rows of gate and up, columns of down, coupled."""
    gate, up = (blocks((11008, 4096), (1, 4096), dtype) for _ in range(2))
    scoped = Scopes(members=(gate, up, blocks((4096, 11008), (4096, 1), dtype, (1, 0))), shape=(11008, 1))
    return lambda: gpu.scope_masks([Update(scopes=(scoped,), keep=1, among_kept=among_kept)], gpu.Limits(big=big))


def rows(dtype, width, big, among_kept):
    """Selection among scores of either sign, with a budget for each row."""
    keep, allowed = empty((64,), torch.int64), empty((64, width), torch.bool) if among_kept else None
    scores = empty((64, width), dtype)
    return lambda: gpu.keep_mask(scores, keep, allowed, magnitude=False, limits=gpu.Limits(big=big))


def threshold(block, dtype, soft, each=False, big=False, diagonal=None):
    shape = (4096, 4096)
    mask = None if diagonal is None else empty(shape, diagonal)
    member = Blocks(shape=block, values=empty(shape, dtype), mask=mask)
    scopes, limits = Scopes(members=(member,), shape=(1, 1)), gpu.Limits(big=big)
    t = empty(scopes.scope_grid, F32) if each else 1.0
    if diagonal is None:
        return lambda: gpu.threshold(scopes, t, soft=soft, limits=limits)
    return lambda: gpu.condition(scopes, t, factor=1.0, eps=0.0, atol=1e-6, max_iter=50, limits=limits)


WHOLE = (8192, 8192)
CASES = {  # each kernel in its usual form, and what the tests compare on every architecture
    "2:4": update(WHOLE, BF16, (1, 1), (1, 4)),
    "2:4, float32": update(WHOLE, F32, (1, 1), (1, 4)),
    "2:4 along the output": update(WHOLE, BF16, (1, 1), (4, 1)),
    "2:4 of a transposed weight": update(WHOLE, BF16, (1, 1), (1, 4), stride=(1, 8192)),
    "1x1 over a tensor": update(WHOLE, BF16, (1, 1), WHOLE),
    "32x32 in scopes of 64x64": update(WHOLE, BF16, (32, 32), (64, 64)),
    "soft threshold of 1x16": threshold((1, 16), BF16, True, each=True),
    "conditioned threshold of 1x16": threshold((1, 16), BF16, True, each=True, diagonal=F32),
}
FORMS = {  # the other forms, each at least once: for the architecture in the middle only, to save time
    "a hidden unit of three tensors": hidden_units(BF16, False),
    "hard threshold of 1x16": threshold((1, 16), BF16, False),
    "2:4 as a second stage": update(WHOLE, BF16, (1, 1), (1, 4), among_kept=True),
    "8:16": update(WHOLE, BF16, (1, 1), (1, 16)),
    "16:32": update(WHOLE, BF16, (1, 1), (1, 32)),
    "2:4 of 1x2": update(WHOLE, BF16, (1, 2), (1, 4)),
    "4:8 of 64x1": update(WHOLE, BF16, (64, 1), (1, 8)),
    "rows of 4,096": update((4096, 4096), BF16, (1, 1), (1, 4096)),
    "rows of 11,008": update((4096, 11008), BF16, (1, 1), (1, 11008)),
    "output neurons": update(WHOLE, BF16, (1, 8192), (8192, 1)),
    "inputs": update(WHOLE, BF16, (8192, 1), (1, 8192)),
    "2:4 of 3x3 kernels": update((512, 512, 3, 3), F32, (1, 1, 3, 3), (1, 4, 1, 1)),
    "4:8 of 3 elements": update((8192, 768 * 8), BF16, (1, 3), (1, 8), norm=math.inf),
    **{f"2:4 of {n} tensors": many(n) for n in (1, 2, 3, 4, 5, 6, 16, 17, 20, 512)},
    **{f"1x1 over each of {n} tensors": many(n, (256, 256), (256, 256)) for n in (2, 3, 4, 5, 16)},
    "rows of 8,192, float32": update(WHOLE, F32, (1, 1), (1, 8192)),
    "1x1 over a slice that starts anywhere": update(
        (8190, 8191), BF16, (1, 1), (8190, 8191), stride=(8193, 1), start=1
    ),
    "2:4 of a slice that starts anywhere": update((8190, 8192), BF16, (1, 1), (1, 4), stride=(8193, 1), start=1),
    "1x4 over a tensor": update(WHOLE, BF16, (1, 4), (8192, 2048)),
    "32x32 over a tensor": update(WHOLE, BF16, (32, 32), (256, 256)),
    "signed rows of 1,000": rows(F32, 1000, False, True),
    "signed rows of 10, 64-bit": rows(BF16, 10, True, False),
    "signed rows of 2^19, 64-bit, float32": rows(F32, 1 << 19, True, True),
    "soft threshold of 1x1, 64-bit": threshold((1, 1), F32, True, each=True, big=True),
    "conditioned threshold of 32x32, 64-bit": threshold((32, 32), F32, True, big=True, diagonal=F32),
}
COMBINED = {  # forms that combine what others have one by one: only with --every, or by name
    "1x1 over a tensor, float32": update(WHOLE, F32, (1, 1), WHOLE),
    **{f"1x1 over each of {n} tensors, narrowed": many(n, (1024, 1024), (1024, 1024)) for n in (2, 3, 16)},
    "32x32 over a tensor, float32": update(WHOLE, F32, (32, 32), (256, 256)),
    "rows of 28,672": update((8192, 28672), BF16, (1, 1), (1, 28672)),
    "1x1 over a tensor beyond 2^31": update((65536, 65536), BF16, (1, 1), (65536, 65536)),
    "1x1 over a tensor, strided float32 as a second stage": update(
        WHOLE, F32, (1, 1), WHOLE, among_kept=True, stride=(8200, 1), mask=F32
    ),
    "1x1 over a transposed tensor": update(WHOLE, BF16, (1, 1), WHOLE, stride=(1, 8192)),
    "1x1 over a tensor as a second stage, float16": update(WHOLE, F16, (1, 1), WHOLE, among_kept=True),
    "1x4 over a tensor as a second stage": update(WHOLE, BF16, (1, 4), (8192, 2048), norm=1, among_kept=True),
    "32x32 over a tensor as a second stage": update(WHOLE, BF16, (32, 32), (256, 256), among_kept=True),
    "32x32 over a tensor, inf": update(WHOLE, BF16, (32, 32), (256, 256), norm=math.inf),
    "a hidden unit of three tensors, 64-bit, float32": hidden_units(F32, True, among_kept=True),
    "signed rows of 2^19": rows(F32, 1 << 19, False, True),
    "signed rows of 2^19, 64-bit": rows(BF16, 1 << 19, True, True),
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
                    "fused": len(re.findall(r"\bfma\.rn\.f32", ptx)),
                    "statements": ptx.count(";\n"),
                }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arches", type=int, nargs="+")
    parser.add_argument("--case", default="", help="only cases whose name holds this")
    parser.add_argument("--every", action="store_true", help="all cases for every architecture")
    parser.add_argument("--table", action="store_true", help="rows for a README instead of JSON")
    args = parser.parse_args()
    names = [name for name in CASES | FORMS | COMBINED if args.case in name]
    chosen = {arch: CASES | (FORMS if arch == 90 else {}) for arch in args.arches}
    every = args.every or args.case
    cases = [(name, arch) for name in names for arch in args.arches if every or name in chosen[arch]]
    for line in lines(cases):
        if args.table:
            columns = ("case", "kernel", "warps", "registers", "spills", "shared", "wide loads", "wide stores")
            print("| " + " | ".join(str(line[k]) for k in columns) + " |")
        else:
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
