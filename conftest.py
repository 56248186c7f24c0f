"""Fixtures: the names that docstring examples use, and one that tests of several files share."""

import pytest
import torch

import sparsekit_ao

collect_ignore_glob = ["tests/*_child.py"]  # scripts: collecting them for doctests would run them


def pytest_collection_finish(session):
    """Start the child processes of the tests that were selected; see `tests/background.py`."""
    if not session.config.option.collectonly:
        import background

        background.start(session.items)


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
