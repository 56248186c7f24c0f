"""Kernels compiled for a GPU that is not there, and the instructions of their machine code (SASS).

`compiled` runs launchers on weights of the meta device and compiles each launch instead of making it, so forms, warps
and registers are those of a real run. `count` counts a kernel's instructions with the disassembler of the triton wheel.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from sparsekit_ao.structure.tiles import cosize, row_major

TOOLS = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
# 64 results a clock and SM each, on compute capability 9.0: what compares, selects, shifts and adds integers ...
INTEGER = {"ISETP", "SEL", "VIADD", "IADD3", "IADD", "LOP3", "PLOP3", "VIMNMX", "VIMNMX3", "IMNMX", "PRMT", "SHF"}
INTEGER |= {"SGXT", "LEA", "IABS", "P2R", "R2P", "BMSK", "FMNMX", "FSETP", "FSEL", "VOTE", "HMNMX2", "HSETP2"}
SHARED = {"LDS", "STS", "SHFL", "LDSM", "STSM", "ATOMS"}  # ... and what goes through shared memory
LINE = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z0-9_.]+)(.*)")
LABEL = re.compile(r"^(\.L_x_\d+):")
Counts = tuple[float, float, float]  # integer instructions, those of shared memory, all


class Target:
    """A driver of a GPU of one architecture, of which only compilation is used."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        """The GPU that is compiled for."""
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        """The architecture, so that what is compiled for one is not taken for another."""
        return self.arch

    def get_current_stream(self, device: int) -> int:
        """No stream."""
        return 0


def empty(
    shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None, start: int = 0
) -> torch.Tensor:
    """A tensor on the meta device, that starts `start` elements after a multiple of 16 bytes."""
    stride = row_major(tuple(shape)) if stride is None else stride
    memory = torch.empty(cosize(tuple(shape), tuple(stride)) + start, dtype=dtype, device="meta")
    return memory.as_strided(shape, stride, start)


@dataclass(frozen=True)
class Compiled:
    """A launch that was compiled: the kernel's name without suffix, what was compiled, and its form."""

    name: str
    kernel: Any
    form: Any


Launcher = Callable[[], None]


@contextmanager
def compiling() -> Iterator[Callable[[int, Launcher], list[Compiled]]]:
    """A function that compiles what a launcher would launch on a GPU of an architecture."""
    found: list[Compiled] = []
    launch, active = JITFunction.run, dict(vars(driver))

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        found.append(Compiled(self.__name__.removesuffix("_kernel"), kernel, options.get("FORM")))

    def compiled(arch: int, launcher: Launcher) -> list[Compiled]:
        found.clear()
        driver.set_active(Target(arch))
        launcher()
        return list(found)

    JITFunction.run = compile_only
    try:
        yield compiled
    finally:
        JITFunction.run = launch
        vars(driver).update(active)


def tool(name: str, *arguments: str) -> str:
    """What a program of the triton wheel prints."""
    command = [os.path.join(TOOLS, name), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def usage(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and how many instructions move spilled ones to its stack or back."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = tool("cuobjdump", "--dump-resource-usage", file.name)
        stack = int(re.search(r"STACK:(\d+)", text)[1])
        spills = len(re.findall(r"\b(?:STL|LDL)\b", tool("cuobjdump", "-sass", file.name))) if stack else 0
    return {"registers": int(re.search(r"REG:(\d+)", text)[1]), "spills": spills}


@dataclass(frozen=True)
class Instruction:
    """One instruction: its name with all suffixes, whether a predicate guards it, and the label that it branches to."""

    name: str
    guarded: bool
    target: str | None

    @property
    def counts(self) -> Counts:
        """What it adds to each of the counts."""
        kind = self.name.split(".")[0]
        return float(kind in INTEGER), float(kind in SHARED), float(kind != "NOP")

    @property
    def ends(self) -> bool:
        """Whether the next instruction is never reached from here."""
        return self.name.split(".")[0] in ("BRA", "EXIT", "RET") and not self.guarded


def instructions(cubin: bytes) -> tuple[list[Instruction], dict[str, int]]:
    """A kernel's instructions in order, and the index that each label stands for."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = tool("nvdisasm", "-c", file.name)
    found: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(found)
        elif match := LINE.match(line):
            target = re.search(r"`\((\.L_x_\d+)\)", match[4]) if match[3].startswith("BRA") else None
            found.append(Instruction(match[3], bool(match[2]) or "P" in match[4].split("`")[0], target and target[1]))
    return found, labels


def count(cubin: bytes, elements: int, itemsize: int) -> Counts:
    """Integer, shared-memory and all instructions of a thread, for each of its `elements` elements.

    Where code branches, the path of fewer integer instructions counts: what is left out handles ties or rare values.
    One loop may go over the elements: of all loops the one with most accesses of 16 bytes, of weights if any are
    loaded, else of mask bytes; it is taken as often as its elements need. Other loops count once at most.
    """
    code, labels = instructions(cubin)
    loop, held = _hot_loop(code, labels, itemsize)
    if loop is None:
        total = _shortest(code, labels, 0, len(code))
        assert total is not None
    else:
        first, last = loop
        before, body = _shortest(code, labels, 0, first), _shortest(code, labels, first, last)
        after = _shortest(code, labels, last + 1, len(code)) or (0.0, 0.0, 0.0)  # a loop may end by an exit inside
        assert before is not None and body is not None
        total = _plus(before, after, tuple(n * elements / held for n in _plus(body, code[last].counts)))
    return total[0] / elements, total[1] / elements, total[2] / elements


def _hot_loop(code: list[Instruction], labels: dict[str, int], itemsize: int) -> tuple[tuple[int, int] | None, int]:
    """First and last instruction of the loop over elements, and the elements of one trip; None without such a loop."""
    loops = [(labels[x.target], at) for at, x in enumerate(code) if x.target and labels[x.target] < at]
    for access, size in (("LDG.E.128", itemsize), ("STG.E.128", 1)):
        found = [(sum(x.name.startswith(access) for x in code[a : b + 1]), (a, b)) for a, b in loops]
        wide, loop = max(found, default=(0, (0, 0)))
        if wide:
            return loop, wide * 16 // size
    return None, 0


def _shortest(code: list[Instruction], labels: dict[str, int], begin: int, end: int) -> Counts | None:
    """Counts along the path of fewest integer instructions from `begin` to `end`, or to an exit where `end` is the end.

    No path goes backwards, and a guarded exit is not taken.
    """
    best: dict[int, Counts] = {begin: (0.0, 0.0, 0.0)}
    exits: list[Counts] = []
    for at in range(begin, end):
        if at not in best:
            continue
        x = code[at]
        here = _plus(best[at], x.counts)
        if x.ends and x.target is None:
            exits.append(here)
        follow = [] if x.ends else [at + 1]
        if x.target and at < labels[x.target] <= end:
            follow.append(labels[x.target])
        for place in follow:
            best[place] = min(best.get(place, here), here)
    return min(exits, default=None) if end == len(code) else best.get(end)


def _plus(*counts: Sequence[float]) -> Any:
    """The sums of counts."""
    return tuple(map(sum, zip(*counts, strict=True)))
