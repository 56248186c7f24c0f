"""The Triton kernels under the interpreter, bit for bit against the reference, in a process of its own.

The interpreter is chosen by an environment variable that must be set before triton is imported, so the tests
themselves are in `interpreted_kernels.py`.
"""

import os
import re
from pathlib import Path

import background
import pytest
import torch

from sparsekit_ao import SparsityError
from sparsekit_ao.selection import Blocks, Scopes, block_scores, keep_mask, scope_mask

HERE = Path(__file__).parent


@pytest.mark.slow
@background.interprets_kernels
def test_every_kernel_equals_the_reference_bit_for_bit():
    done, _ = background.result("test_triton_interpreter.py")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 150


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted")
def test_cpu_tensors_are_refused_when_triton_is_requested():
    mask = torch.zeros(4, 8, dtype=torch.bool)
    member = Blocks(shape=(1, 1), values=torch.ones(4, 8), mask=mask)
    for call in (
        lambda: keep_mask(torch.ones(2, 4), 1, impl="triton"),
        lambda: block_scores([member], impl="triton"),
        lambda: scope_mask([Scopes(members=(member,), shape=(1, 4))], 2, impl="triton"),
    ):
        with pytest.raises(SparsityError, match='works on CUDA tensors .* got cpu. Use impl="auto"'):
            call()
    assert not mask.any()
