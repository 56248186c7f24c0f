"""Compiles every kernel ahead of time, in a process of its own; prints one JSON line a kernel and architecture.

    python tests/aot_child.py 80 90 100
    python tests/aot_child.py 90 --table

Weights live on the meta device: only shapes, strides and dtypes matter. Registers and spills come from the tools in
the triton wheel.
"""

import argparse
import json
import math
import os
import re
import subprocess
import tempfile
import time

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sparsekit_ao.kernels import Blocks, Scopes
from sparsekit_ao.kernels.triton import blocks, fused, narrow, passes, shrink
from sparsekit_ao.kernels.triton.launch import warps_of
from sparsekit_ao.kernels.triton.parts import strided_part
from sparsekit_ao.kernels.triton.plan import Limits, key_bits, make_plan, rows_plan, score_plan
from sparsekit_ao.kernels.triton.ready import TYPES
from sparsekit_ao.kernels.triton.select import REGISTERS, WARPS, halved
from sparsekit_ao.kernels.update import Update

TOOLS = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
POINTERS = {
    "starts": "*i64",
    "parts": "*i64",
    "members": "*i64",
    "scores": "*fp32",
    "kept": "*u8",
    "state": "*i64",
    "spans": "*i32",
    "inside": "*u32",
    "samples": "*u32",
    "counts": "*i32",
    "thresholds": "*fp32",
    "misses": "*fp32",
    "factor": "fp32",
    "eps": "fp32",
    "atol": "fp32",
    "steps": "i32",
}
BF16, F32 = torch.bfloat16, torch.float32

# name: shape, dtype, block, scope, norm, stage
CASES = {
    "2:4": ((8192, 8192), BF16, (1, 1), (1, 4), 2, False),
    "2:4 float32": ((8192, 8192), F32, (1, 1), (1, 4), 2, False),
    "2:4 as a second stage": ((8192, 8192), BF16, (1, 1), (1, 4), 2, True),
    "8:16": ((8192, 8192), BF16, (1, 1), (1, 16), 2, False),
    "16:32": ((8192, 8192), BF16, (1, 1), (1, 32), 2, False),
    "2:4 of 1x2": ((8192, 8192), BF16, (1, 2), (1, 4), 2, False),
    "2:4 along the output": ((8192, 8192), BF16, (1, 1), (4, 1), 2, False),
    "4:8 of 64x1": ((8192, 8192), BF16, (64, 1), (1, 8), 2, False),
    "rows of 4096": ((4096, 4096), BF16, (1, 1), (1, 4096), 2, False),
    "rows of 11008": ((4096, 11008), BF16, (1, 1), (1, 11008), 2, False),
    "rows of 8192, float32": ((8192, 8192), F32, (1, 1), (1, 8192), 2, False),
    "1x1 of a tensor": ((8192, 8192), BF16, (1, 1), (8192, 8192), 2, False),
    "1x1 of a tensor, float32": ((8192, 8192), F32, (1, 1), (8192, 8192), 2, False),
    "1x1 of a tensor beyond 2^31": ((65536, 65536), BF16, (1, 1), (65536, 65536), 2, False),
    "1x4 of a tensor": ((8192, 8192), BF16, (1, 4), (8192, 2048), 2, False),
    "32x32 of a tensor": ((8192, 8192), BF16, (32, 32), (256, 256), 2, False),
    "32x32 of a tensor, inf": ((8192, 8192), BF16, (32, 32), (256, 256), math.inf, False),
    "output neurons": ((8192, 8192), BF16, (1, 8192), (8192, 1), 2, False),
    "inputs": ((8192, 8192), BF16, (8192, 1), (1, 8192), 2, False),
    "1x1 of a tensor as a second stage, float16": ((8192, 8192), torch.float16, (1, 1), (8192, 8192), 2, True),
    "1x4 of a tensor as a second stage": ((8192, 8192), BF16, (1, 4), (8192, 2048), 1, True),
    "4:8 of 3 elements": ((8192, 768 * 8), BF16, (1, 3), (1, 8), math.inf, False),
    "a slice that starts anywhere": ((8190, 8191), BF16, (1, 1), (8190, 8191), 2, False),
    "a hidden unit of three tensors": None,
    "rows of signed scores": None,
    "thresholds of 1x16": None,
}


def thresholds():
    """(kernel, traits, warps) of soft, hard and conditioned thresholding of 1x16 blocks."""
    values = torch.empty(4096, 4096, dtype=BF16, device="meta")
    diagonal = torch.empty(4096, 4096, dtype=F32, device="meta")
    for mask in (None, diagonal):
        group = Scopes(members=(Blocks(shape=(1, 16), values=values, mask=mask),), shape=(4096, 256))
        plan = score_plan(Update(groups=(group,), keep=0), Limits(), flat=False, held=0 if mask is None else 1024)
        for soft in (True, False) if mask is None else (True,):
            kernel = shrink.threshold_kernel if mask is None else shrink.condition_kernel
            yield kernel, {**dict(plan.scored[0].traits), "SOFT": soft, "EACH": True}, 4 if mask is None else WARPS


def on_meta(shape, block, dtype, order=()):
    values = torch.empty(shape, dtype=dtype, device="meta")
    mask = torch.empty(shape, dtype=torch.bool, device="meta")
    return Blocks(shape=block, values=values, mask=mask, order=order)


def one_tensor(shape, dtype, block, scope, norm, stage):
    return Scopes(members=(on_meta(shape, block, dtype),), shape=scope), norm, stage


def hidden_units():
    """Rows of gate and up, columns of down: one fate."""
    gate, up = (on_meta((11008, 4096), (1, 4096), BF16) for _ in range(2))
    return Scopes(members=(gate, up, on_meta((4096, 11008), (4096, 1), BF16, (1, 0))), shape=(11008, 1))


def signed_rows():
    """(kernel, traits, warps) of selections among scores of either sign, with a budget for each row."""
    keep, limits = torch.empty(64, dtype=torch.int64, device="meta"), Limits()
    for dtype, big, widths in ((F32, False, (1000, 1 << 19)), (BF16, True, (10, 1 << 19))):
        for width, stage in ((width, width > 10) for width in widths):
            part = strided_part(64, width, (width, 1), dtype=dtype, big=big)
            plan = rows_plan(part, keep, stage, True, limits)
            for batch in plan.rows:
                yield fused.fused_kernel, dict(batch.traits), warps_of(dict(batch.traits))
            for batch in (b for family in plan.wide for b in family):
                yield from long_rows(dict(batch.traits), batch.places[0], limits)


def batches(case):
    """(kernel, traits, warps) of every launch of a case."""
    if case == "thresholds of 1x16":
        yield from thresholds()
        return
    if case == "rows of signed scores":
        yield from signed_rows()
        return
    group, norm, stage = (hidden_units(), 2, False) if CASES[case] is None else one_tensor(*CASES[case])
    limits = Limits()
    plan = make_plan([Update(groups=(group,), keep=1, norm=norm, stage=stage)], limits)
    for batch in (*plan.fused, *plan.rows):
        traits = dict(batch.traits)
        yield fused.fused_kernel, traits, warps_of(traits)
    for batch in plan.scored:
        traits = dict(batch.traits)
        yield blocks.score_kernel, traits, warps_of(traits)
        yield (
            blocks.fill_kernel,
            {k: v for k, v in traits.items() if k not in ("DTYPE", "NORM", "SINGLE")},
            warps_of(traits),
        )
    for batch in (b for family in plan.wide for b in family):
        yield from long_rows(dict(batch.traits), batch.places[0], limits)


def long_rows(traits, place, limits):
    bits, long = key_bits(traits["DTYPE"], traits["SIGNED"]), place.width >= limits.narrow
    room, count = limits.tile * traits["SPAN_TILES"] // 8 if long else 1, -(-bits // 8)
    if long:
        sampled = {k: v for k, v in traits.items() if k not in ("EVEN", "SPAN_TILES")}
        yield narrow.sample_kernel, {**sampled, "TILE": 1024, "CAPACITY": limits.samples}, 4
        yield narrow.bracket_kernel, {"CAPACITY": limits.samples, "BITS": bits}, WARPS
        yield narrow.narrow_kernel, {**traits, "TILE": limits.tile, "ROOM": room}, WARPS
    shared = {**traits, "TILE": limits.tile, "ROOM": room, "COUNT": count, "NARROW": long}
    yield passes.histogram_kernel, halved({**shared, "PASS": count - 1}), WARPS
    yield passes.tie_kernel, shared, WARPS
    yield passes.mark_kernel, {**traits, "TILE": limits.tile}, WARPS


def compiled(kernel, traits, warps, arch, parts):
    """What one compilation amounts to, and the compiled kernel."""
    constants = {k: TYPES[v] if isinstance(v, torch.dtype) else v for k, v in traits.items()} | {"PARTS": parts}
    names = kernel.arg_names
    signature = {n: POINTERS.get(n, "constexpr") for n in names}
    if traits.get("STORED"):
        signature["scores"] = {F32: "*fp32", BF16: "*bf16", torch.float16: "*fp16"}[traits["DTYPE"]]
    if traits.get("BIG") and "counts" in signature:
        signature["counts"] = "*i64"
    attrs = {(k,): [["tt.divisibility", 16]] for k, n in enumerate(names) if signature[n].startswith("*")}
    constexprs = {n: constants[n] for n in names if signature[n] == "constexpr"}
    options = {"num_warps": warps, "maxnreg": REGISTERS if kernel is passes.histogram_kernel else None}
    begin = time.perf_counter()
    source = ASTSource(kernel, signature=signature, constexprs=constexprs, attrs=attrs)
    found = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    numbers = {**usage(found.asm["cubin"]), "shared": found.metadata.shared, "seconds": time.perf_counter() - begin}
    numbers["wide loads"] = len(re.findall(r"ld\.global\.v4\.b32", found.asm["ptx"]))
    numbers["wide stores"] = len(re.findall(r"st\.global\.v4\.b32", found.asm["ptx"]))
    return numbers, found


def usage(cubin):
    """Registers of a thread, and how many instructions move spilled ones to its stack or back."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = tool("cuobjdump", "--dump-resource-usage", file.name)
        stack = int(re.search(r"STACK:(\d+)", said)[1])
        spills = len(re.findall(r"\b(?:STL|LDL)\b", tool("cuobjdump", "-sass", file.name))) if stack else 0
    return {"registers": int(re.search(r"REG:(\d+)", said)[1]), "spills": spills}


def tool(name, *arguments):
    command = [os.path.join(TOOLS, name), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def lines(arches):
    """One dict a kernel and architecture, each compiled once."""
    done = set()
    for case in CASES:
        for kernel, traits, warps in batches(case):
            for arch in arches:
                key = (kernel.__name__, repr(sorted(traits.items(), key=str)), warps, arch)
                if key not in done:
                    done.add(key)
                    numbers, _ = compiled(kernel, traits, warps, arch, 1 if arch < 100 else 256)
                    yield {"case": case, "kernel": kernel.__name__, "arch": arch, "warps": warps, **numbers}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arches", type=int, nargs="+")
    parser.add_argument("--table", action="store_true", help="rows for a README instead of JSON")
    args = parser.parse_args()
    for line in lines(args.arches):
        if args.table:
            columns = ("case", "kernel", "warps", "registers", "spills", "shared", "wide loads", "wide stores")
            print("| " + " | ".join(str(line[k]) for k in columns) + " |")
        else:
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
