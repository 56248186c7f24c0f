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
from sparsekit_ao.selection import Blocks, block_scores, reference

CHILD = pathlib.Path(__file__).parent.parent / "helpers" / "bits_child.py"
SETTINGS = [  # the second one without assert statements
    {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"},
    {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "PYTHONOPTIMIZE": "1"},
    {"ATEN_CPU_CAPABILITY": "avx512", "MKL_CBWR": "AVX512", "OMP_NUM_THREADS": "2"},
]


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
        block_scores([Blocks(shape=(1, 2), values=values)], impl="reference"),
        block_scores([Blocks(shape=(1, 2), values=values)], impl="cpu"),
        reference.root((values[:, 0::2] ** 2 + values[:, 1::2] ** 2).requires_grad_()),
    ):
        assert all(is_nearest(root, square) for root, square in zip(norms.reshape(-1).tolist(), squares, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_of_finite_weights_neither_overflow_nor_vanish(dtype):
    largest, smallest = {torch.float32: (125, -149), torch.float64: (1021, -1074)}[dtype]
    for exponent in (largest, largest // 2 + 1, smallest // 2, smallest):
        scale = math.ldexp(1, exponent)
        values = torch.tensor([[3.0, 4.0, 0.0, 2.0]], dtype=torch.float64).mul(scale).to(dtype)
        assert BlockSpec(values, (1, 2)).norms()[0].tolist() == [5 * scale, 2 * scale]
        assert BlockSpec(values, (1, 3), edge="partial").norms(p=1)[0].tolist()[1] == 2 * scale
