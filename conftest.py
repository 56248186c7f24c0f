"""Fixtures: the names that docstring examples use, and one that tests of several files share."""

import pytest
import torch

import sparsekit_ao

collect_ignore_glob = ["tests/*_child.py"]  # scripts: collecting them for doctests would run them


def pytest_collection_finish(session):
    """Start the child processes of the tests that were selected; see `tests/background.py`."""
    if not session.config.option.collectonly:
        slow = {item.path.name for item in session.items if item.get_closest_marker("slow")}
        if slow & {"test_triton_aot.py", "test_triton_interpreter.py"}:
            import background

            background.start(slow)


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace):
    doctest_namespace.update(torch=torch, sparsekit_ao=sparsekit_ao)


@pytest.fixture(scope="module")
def one_thread():
    """Run the tests of a module with one torch thread; tests of thread counts set their own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
