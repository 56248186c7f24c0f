"""One torch thread a process (tests of thread counts set their own), long tests first, names in docstring examples."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: other test processes take the other cores

import pytest
import torch

import sparsekit_ao

collect_ignore_glob = ["tests/*/*_child.py"]  # scripts: collecting them for doctests would run them


def pytest_collection_modifyitems(items):
    """Long tests come first, so that processes end at the same time."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace):
    doctest_namespace.update(torch=torch, sparsekit_ao=sparsekit_ao)
