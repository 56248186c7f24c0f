"""The Triton kernels under the interpreter, bit for bit against the reference, in a process of its own.

The interpreter is chosen by an environment variable that must be set before triton is imported, so the tests
themselves are in `interpreted_kernels.py`.
"""

import os
import re

import pytest
import torch
from kernel_cases import as_scopes, interprets_kernels, scope_mask
from scripts import run_child

from sparsekit_ao import SparsityError
from sparsekit_ao.selection import keep_mask


@interprets_kernels
@pytest.mark.parametrize(
    ("chosen", "least"),
    [("a_2_4_and_a_row_of_64", 1), pytest.param("test", 160, marks=[pytest.mark.nightly, pytest.mark.slow])],
)
def test_kernels_equal_the_reference_bit_for_bit(chosen, least, tmp_path):
    pytest_ = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen)
    printed = run_child("../selection/interpreted_kernels.py", python=pytest_, TRITON_INTERPRET="1", cwd=tmp_path)
    assert int(re.search(r"(\d+) passed", printed)[1]) >= least


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted")
def test_cpu_tensors_are_refused_when_triton_is_requested():
    mask = torch.zeros(4, 8, dtype=torch.bool)
    for call in (
        lambda: keep_mask(torch.ones(2, 4), 1, impl="triton"),
        lambda: scope_mask([as_scopes(torch.ones(4, 8), mask, (1, 1), (1, 4))], 2, impl="triton"),
    ):
        with pytest.raises(SparsityError, match='works on CUDA tensors .* got cpu. Use impl="auto"'):
            call()
    assert not mask.any()
