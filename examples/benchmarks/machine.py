"""Helpers of all benchmarks: the machine's data, memory use, medians, CSVs."""

import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

import sparsekit_ao

sys.path.append(str(Path(__file__).parent.parent))
from rows import write_rows

RESULTS = Path(__file__).parent / "results"


def facts() -> dict[str, str]:
    """Machine and versions, for every row of a CSV."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    name = next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.machine())
    return {
        "cpu": name,
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "sparsekit_ao": sparsekit_ao.__version__,
    }


def write_csv(lines: list[dict], path: Path) -> None:
    """The table with machine and versions."""
    write_rows(lines, path, facts())
    print(f"wrote {path.name}")


def show(line: dict) -> dict:
    """Print a row of the table and return it."""
    print("  ".join(f"{k}: {v}" for k, v in line.items()), flush=True)
    return line


def medians(
    calls: Mapping[str, Callable[[], None]], repeat: int, before: Callable[[str], None] = lambda _: None
) -> dict[str, float]:
    """Median milliseconds of each call, alternated; `before(name)` runs before each and is not timed."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeat + 1):
        for name, call in calls.items():
            before(name)
            start = time.perf_counter()
            call()
            if turn:  # the first turn compiles and touches memory for the first time
                found[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in found.items()}


def resident() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def reset_high_water() -> None:
    """Reset the kernel's high-water mark of this process (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def high_water() -> int:
    """The largest resident size since the last reset, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024
