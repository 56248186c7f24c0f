"""Every kernel compiles ahead of time for the GPUs it is meant for, without spills and within its registers.

Runs in a child process without the interpreter's variable; needs no GPU.
"""

import json
import re

import background
import pytest
from background import ARCHES, OLDER_TRITON
from grids import EXHAUSTIVE
from older_aot_child import NOT_AVAILABLE

pytestmark = [pytest.mark.aot, pytest.mark.slow]
REGISTERS = 128  # so that an SM holds 16 warps
STATEMENTS = 5_400  # of a kernel's program (PTX), about twice those of the longest: compilation takes time with them
KERNELS = {
    *("fused", "score", "fill", "sample", "bracket", "narrow", "histogram", "tie", "mark"),
    *("threshold", "condition"),
}


@pytest.fixture(scope="module")
def lines():
    """What the child process printed: one dict a kernel and architecture."""
    done, _ = background.result("test_triton_aot.py")
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_kernel_is_compiled_for_every_architecture(lines):
    for arch in ARCHES:
        assert {line["kernel"] for line in lines if line["arch"] == arch} == KERNELS


@pytest.mark.parametrize(
    "release", OLDER_TRITON or [pytest.param("", marks=pytest.mark.skip(reason="SPARSEKIT_AO_TRITON names no release"))]
)
def test_every_form_compiles_with_an_older_triton(release):
    """Before 3.7 the compiler treats some compile-time constants in other ways."""
    done, _ = background.result(f"test_every_form_compiles_with_an_older_triton[{release}]")
    if done.returncode == NOT_AVAILABLE:
        pytest.skip(f"no wheel of triton {release}: {done.stderr}")
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {line["kernel"] for line in found} == KERNELS
    assert [line for line in found if line["spills"]] == []


def test_nothing_spills(lines):
    assert [line for line in lines if line["spills"]] == []


def test_registers_stay_within_the_limit(lines):
    assert [line for line in lines if line["registers"] > REGISTERS] == []


def test_no_kernel_is_long(lines):
    assert all(line["statements"] > 0 for line in lines)
    assert [line for line in lines if line["statements"] > STATEMENTS] == []


def test_products_are_rounded_before_they_are_added(lines):
    """A fused multiply-add would give other sums than the reference's."""
    assert [line for line in lines if line["fused"]] == []


def test_the_hot_kernels_read_and_write_vectors_and_exchange_nothing(lines):
    """2:4 reads and writes 16 bytes a thread and moves no weights between threads; blocks go in vectors too."""
    found = [line for line in lines if line["case"] in ("2:4", "2:4, float32")]
    assert len(found) == 2 * len(ARCHES)
    assert all(line["wide loads"] and line["wide stores"] and line["shared"] <= 32 for line in found)
    for kernel, case, what in (
        ("score", "32x32 in scopes of 64x64", "wide loads"),
        ("fill", "32x32 in scopes of 64x64", "wide stores"),
        ("narrow", "1x1 over a tensor", "wide loads"),
        ("mark", "1x1 over a tensor", "wide stores"),
        ("threshold", "soft threshold of 1x16", "wide stores"),
    ):
        cases = [line for line in lines if line["case"] == case and line["kernel"] == kernel]
        assert len(cases) == len(ARCHES) and all(line[what] for line in cases), (kernel, case)


def test_scopes_of_a_transposed_weight_go_in_memory_order(lines):
    """N:M along the input of a transposed weight is the very kernel of N:M along the output."""
    assert len([line for line in lines if line["case"] == "2:4 along the output"]) == len(ARCHES)
    assert not [line for line in lines if line["case"] == "2:4 of a transposed weight"]


def test_the_number_of_tensors_compiles_few_kernels(lines):
    """One for one tensor, one for up to 16, one for up to 512: a case that compiles nothing new has no line."""
    own = [line for line in lines if re.fullmatch(r"2:4 of \d+ tensors", line["case"]) and line["arch"] == 90]
    assert {line["kernel"] for line in own} == {"fused"}
    assert [line["case"] for line in own if line["case"] != "2:4 of 1 tensors"] == [
        "2:4 of 2 tensors",
        "2:4 of 17 tensors",
    ]
    long_rows = {"": {"histogram", "tie", "mark"}}
    if EXHAUSTIVE:
        long_rows[", narrowed"] = {"sample", "bracket", "narrow", "histogram", "tie", "mark"}
    for kind, kernels in long_rows.items():
        named = re.compile(rf"1x1 over each of \d+ tensors{kind}")
        own = [line for line in lines if named.fullmatch(line["case"]) and line["arch"] == 90]
        assert {line["case"] for line in own} == {f"1x1 over each of 2 tensors{kind}"}
        assert {line["kernel"] for line in own} == kernels
