"""The Triton kernels under the interpreter, bit for bit against the reference, in a process of its own.

The interpreter is chosen by an environment variable that must be set before triton is imported, so the tests
themselves are in `interpreted_kernels.py`.
"""

import os
import re
import subprocess
import sys
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
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 200


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


def test_without_triton_only_requesting_it_is_an_error(tmp_path):
    code = """
import importlib.util, torch
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "triton" else find(name, package)
from sparsekit_ao import SparsityError
from sparsekit_ao.selection import keep_mask
assert keep_mask(torch.tensor([[1.0, 2.0]]), 1).tolist() == [[False, True]]
try:
    keep_mask(torch.ones(1, 2), 1, impl="triton")
except SparsityError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith('impl="triton" cannot take this: triton is not installed')
