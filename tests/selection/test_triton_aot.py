"""Every kernel compiles ahead of time for the GPUs it is meant for, without spills and within its registers.

Runs in a child process without the interpreter's variable; needs no GPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from grids import EXHAUSTIVE
from scripts import run_child

pytestmark = pytest.mark.nightly
ARCHES = (80, 90, 100) if EXHAUSTIVE else (90,)
# releases (3.4 3.6) or folders of triton to compile with too; a wheel has 150 MB, so only where it is asked for
OLDER_TRITON = os.environ.get("SPARSEKIT_AO_TRITON", "").split()
REGISTERS = 128  # so that an SM holds 16 warps
STATEMENTS = 5_400  # of a kernel's program (PTX), about twice those of the longest: compilation takes time with them
KERNELS = {"fused", "score", "fill", "histogram", "tie", "mark"}


def compiled(*options, cwd, **environment):
    """One dict a kernel and architecture, whatever was compiled before."""
    every = ["--every"] if EXHAUSTIVE else []
    environment |= {"TRITON_INTERPRET": None, "TRITON_CACHE_DIR": str(cwd)}
    return [
        json.loads(line) for line in run_child("aot_child.py", *options, *every, cwd=cwd, **environment).splitlines()
    ]


@pytest.mark.parametrize(
    "release", OLDER_TRITON or [pytest.param("", marks=pytest.mark.skip(reason="SPARSEKIT_AO_TRITON names no release"))]
)
def test_every_form_compiles_with_an_older_triton(release, tmp_path):
    """Before 3.7 the compiler treats some compile-time constants in other ways."""
    folder = release
    if not Path(release).is_dir():
        folder = str(tmp_path / "triton")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*pip, "--target", folder, f"triton=={release}.*"], check=True)
    path = os.pathsep.join([folder, *sys.path])
    found = compiled("90", "--triton", folder, cwd=tmp_path, PYTHONPATH=path)
    assert {line["kernel"] for line in found} == KERNELS
    assert [line for line in found if line["spills"]] == []


def test_every_kernel_compiles_within_limits(tmp_path):
    lines = compiled(*ARCHES, cwd=tmp_path)
    for arch in ARCHES:
        assert {line["kernel"] for line in lines if line["arch"] == arch} == KERNELS
    assert [line for line in lines if line["spills"]] == []
    assert [line for line in lines if line["registers"] > REGISTERS] == []
    assert [line for line in lines if not 0 < line["statements"] <= STATEMENTS] == []
    # 2:4 reads and writes 16 bytes a thread and moves no weights between threads; blocks go in vectors too
    found = [line for line in lines if line["case"] in ("2:4", "2:4, float32")]
    assert len(found) == 2 * len(ARCHES)
    assert all(line["wide loads"] and line["wide stores"] and line["shared"] <= 32 for line in found)
    for kernel, case, what in (
        ("score", "32x32 over a tensor", "wide loads"),
        ("fill", "32x32 over a tensor", "wide stores"),
        ("tie", "1x1 over a tensor", "wide loads"),
        ("mark", "1x1 over a tensor", "wide stores"),
    ):
        cases = [line for line in lines if line["case"] == case and line["kernel"] == kernel]
        assert len(cases) == len(ARCHES) and all(line[what] for line in cases), (kernel, case)
    # N:M along the input of a transposed weight is the very kernel of N:M along the output
    assert len([line for line in lines if line["case"] == "2:4 along the output"]) == len(ARCHES)
    assert not [line for line in lines if line["case"] == "2:4 of a transposed weight"]
