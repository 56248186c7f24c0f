"""Masks and scores are the same bits whichever instructions torch and MKL use; roots are correctly rounded."""

import math
import os
import pathlib
import subprocess
import sys
from fractions import Fraction

import bits_child
import pytest
import torch

from sparsekit_ao import BlockSpec
from sparsekit_ao.selection import cpu
from sparsekit_ao.structure import windows
from sparsekit_ao.structure.windows import Window, block_scores

CHILD = pathlib.Path(__file__).parent.parent / "helpers" / "bits_child.py"
SETTINGS = [  # the second one without assert statements
    {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"},
    {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "PYTHONOPTIMIZE": "1"},
    {"ATEN_CPU_CAPABILITY": "avx512", "MKL_CBWR": "AVX512", "OMP_NUM_THREADS": "2"},
]


@pytest.mark.nightly
@pytest.mark.slow
def test_every_instruction_set_gives_the_same_bits():
    children = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(CHILD)],
            env={**os.environ, **setting},
            stdout=subprocess.PIPE,
            text=True,
        )
        for setting in SETTINGS
    ]
    own = bits_child.hashes()
    for setting, child in zip(SETTINGS, children, strict=True):
        out, _ = child.communicate(timeout=300)
        assert child.returncode == 0, setting
        assert dict(line.split("\t") for line in out.splitlines()) == own, setting


def is_nearest(root, square):
    """Whether no float64 is nearer to the root of `square`, in exact arithmetic."""
    low, high = (math.nextafter(root, end) for end in (0.0, math.inf))
    below, above = ((Fraction(root) + Fraction(other)) / 2 for other in (low, high))
    return below**2 <= Fraction(square) <= above**2


def test_float64_norms_are_correctly_rounded():
    values = bits_child.weight(20, 30, torch.float64, 5)
    squares = (values[:, 0::2] ** 2 + values[:, 1::2] ** 2).reshape(-1).tolist()
    for norms in (
        BlockSpec(values, (1, 2)).norms(),
        BlockSpec(values.clone().requires_grad_(), (1, 2)).norms(),
        block_scores([Window(shape=(1, 2), values=values)], 2, 2),
        cpu._block_scores([Window(shape=(1, 2), values=values)], 2, 2),
        windows._root((values[:, 0::2] ** 2 + values[:, 1::2] ** 2).requires_grad_()),
    ):
        assert all(is_nearest(root, square) for root, square in zip(norms.reshape(-1).tolist(), squares, strict=True))


def test_the_root_of_float32_is_that_of_float64_rounded():
    bits = torch.randint(0, 0x7F800001, (1 << 20,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    sums = torch.cat([bits.view(torch.float32), torch.tensor([0.0, 1e-45, 1e-38, math.inf, math.nan])])
    expected = sums.double().sqrt().float()
    assert torch.equal(windows._root(sums).view(torch.int32), expected.view(torch.int32))
