"""What a fresh process imports, and when; selection without triton, and in a fork; what a process keeps as it was."""

import json

import pytest
from scripts import run_child

HEAVY = ("triton", "torchao", "matplotlib", "transformers", "lightning", "sklearn", "torch.distributed.tensor")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What `fresh_child.py` printed."""
    return json.loads(run_child("fresh_child.py", cwd=tmp_path_factory.mktemp("fresh")))


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


@pytest.mark.slow
def test_a_process_is_the_same_before_and_after(tmp_path):
    """Thread counts, affinity, environment, modes, signal handlers."""
    printed = run_child("process_child.py", python=("-W", "ignore"), OMP_NUM_THREADS="2", cwd=tmp_path)
    assert printed == "nothing has changed\n"
