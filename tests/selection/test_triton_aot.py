"""Every kernel compiles ahead of time for the GPUs it is meant for, without spills and within its registers.

Runs in a child process without the interpreter's variable; needs no GPU.
"""

import json

import background
import pytest
from background import ARCHES, OLDER_TRITON

pytestmark = [pytest.mark.aot, pytest.mark.slow]
REGISTERS = 128  # so that an SM holds 16 warps
STATEMENTS = 5_400  # of a kernel's program (PTX), about twice those of the longest: compilation takes time with them
KERNELS = {"fused", "score", "fill", "sample", "bracket", "narrow", "histogram", "tie", "mark"}


@pytest.fixture(scope="module")
def lines():
    """What the child process printed: one dict a kernel and architecture."""
    return [json.loads(line) for line in background.succeeded("test_triton_aot.py")[0].splitlines()]


def test_every_kernel_is_compiled_for_every_architecture(lines):
    for arch in ARCHES:
        assert {line["kernel"] for line in lines if line["arch"] == arch} == KERNELS


@pytest.mark.parametrize(
    "release", OLDER_TRITON or [pytest.param("", marks=pytest.mark.skip(reason="SPARSEKIT_AO_TRITON names no release"))]
)
def test_every_form_compiles_with_an_older_triton(release):
    """Before 3.7 the compiler treats some compile-time constants in other ways."""
    printed, _ = background.succeeded(f"test_every_form_compiles_with_an_older_triton[{release}]")
    found = [json.loads(line) for line in printed.splitlines()]
    assert {line["kernel"] for line in found} == KERNELS
    assert [line for line in found if line["spills"]] == []


def test_nothing_spills(lines):
    assert [line for line in lines if line["spills"]] == []


def test_registers_stay_within_the_limit(lines):
    assert [line for line in lines if line["registers"] > REGISTERS] == []


def test_no_kernel_is_long(lines):
    assert all(line["statements"] > 0 for line in lines)
    assert [line for line in lines if line["statements"] > STATEMENTS] == []


def test_the_hot_kernels_read_and_write_vectors_and_exchange_nothing(lines):
    """2:4 reads and writes 16 bytes a thread and moves no weights between threads; blocks go in vectors too."""
    found = [line for line in lines if line["case"] in ("2:4", "2:4, float32")]
    assert len(found) == 2 * len(ARCHES)
    assert all(line["wide loads"] and line["wide stores"] and line["shared"] <= 32 for line in found)
    for kernel, case, what in (
        ("score", "32x32 over a tensor", "wide loads"),
        ("fill", "32x32 over a tensor", "wide stores"),
        ("narrow", "1x1 over a tensor", "wide loads"),
        ("mark", "1x1 over a tensor", "wide stores"),
    ):
        cases = [line for line in lines if line["case"] == case and line["kernel"] == kernel]
        assert len(cases) == len(ARCHES) and all(line[what] for line in cases), (kernel, case)


def test_scopes_of_a_transposed_weight_go_in_memory_order(lines):
    """N:M along the input of a transposed weight is the very kernel of N:M along the output."""
    assert len([line for line in lines if line["case"] == "2:4 along the output"]) == len(ARCHES)
    assert not [line for line in lines if line["case"] == "2:4 of a transposed weight"]
