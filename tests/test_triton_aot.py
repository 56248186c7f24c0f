"""Every kernel compiles ahead of time for the GPUs it is meant for, without spills and within its registers.

Runs in a child process without the interpreter's variable; needs no GPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.aot, pytest.mark.slow]
ARCHES = (80, 90, 100)
REGISTERS = 128  # so that an SM holds at least two programs of 8 warps
PADDED = 192  # where blocks of three elements are padded to four


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """What the child process printed: one dict a kernel and architecture."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))  # compile, whatever was compiled before
    command = [sys.executable, str(Path(__file__).parent / "aot_child.py"), *map(str, ARCHES)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_kernel_is_compiled_for_every_architecture(lines):
    kernels = {
        "fused_kernel",
        "score_kernel",
        "fill_kernel",
        "sample_kernel",
        "bracket_kernel",
        "narrow_kernel",
        "histogram_kernel",
        "tie_kernel",
        "mark_kernel",
        "threshold_kernel",
        "condition_kernel",
    }
    for arch in ARCHES:
        assert {line["kernel"] for line in lines if line["arch"] == arch} == kernels


def test_nothing_spills(lines):
    assert [line for line in lines if line["spills"]] == []


def test_registers_stay_below_the_ceiling(lines):
    ceilings = {"4:8 of 3 elements": PADDED}
    assert [line for line in lines if line["registers"] > ceilings.get(line["case"], REGISTERS)] == []


def test_the_hot_kernels_read_and_write_vectors_and_exchange_nothing(lines):
    """2:4 reads and writes 16 bytes a thread and moves no weights between threads; blocks go in vectors too."""
    found = [line for line in lines if line["case"] in ("2:4", "2:4 float32")]
    assert len(found) == 2 * len(ARCHES)
    assert all(line["wide loads"] and line["wide stores"] and line["shared"] <= 32 for line in found)
    for kernel, what in (
        ("score_kernel", "wide loads"),
        ("fill_kernel", "wide stores"),
        ("mark_kernel", "wide stores"),
    ):
        cases = [line for line in lines if line["case"].startswith("32x32 of a tensor") and line["kernel"] == kernel]
        assert cases and all(line[what] for line in cases)
