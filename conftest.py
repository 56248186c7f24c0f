"""Names that every docstring example may use, and what tests of several files ask for by name."""

import pytest
import torch

import sparsekit_ao


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace):
    doctest_namespace.update(torch=torch, sparsekit_ao=sparsekit_ao)


@pytest.fixture(scope="module")
def one_thread():
    """Threads that wait for each other are slow on a busy machine; a test of thread counts sets its own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
