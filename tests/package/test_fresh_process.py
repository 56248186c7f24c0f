"""What a fresh process imports, and when; selection without triton, and in a fork; what a process keeps as it was."""

import json
import subprocess
import sys
from pathlib import Path

import background
import pytest

HEAVY = ("triton", "torchao", "matplotlib", "transformers", "lightning", "sklearn", "torch.distributed.tensor")


@pytest.fixture(scope="module")
def found():
    """What `fresh_child.py` printed."""
    command = [sys.executable, str(Path(__file__).parent.parent / "helpers" / "fresh_child.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_package_imports_itself_and_einops_alone_and_does_not_initialize_cuda(found):
    new = set(found["package"]) - set(found["torch"])
    assert "sparsekit_ao" in new and {m.split(".")[0] for m in new} <= {"sparsekit_ao", "einops"}
    assert not found["cuda is initialized"]


@pytest.mark.parametrize("use", ["package", "plain tensors", "plot", "selection"])
def test_no_heavy_module_is_imported(use, found):
    assert not set(found[use]) & set(HEAVY)


def test_without_triton_only_requesting_it_is_an_error(found):
    assert found["without triton"] == [[False, True]]
    assert found["triton"].startswith('impl="triton" cannot take this: triton is not installed')


def test_a_fork_gets_threads_of_its_own(found):
    assert found["exit code of a fork"] == 0


def test_a_process_is_the_same_before_and_after():
    """Thread counts, affinity, environment, modes, signal handlers."""
    assert background.succeeded("test_a_process_is_the_same_before_and_after")[0].strip() == "nothing has changed"
