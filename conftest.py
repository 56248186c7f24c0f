"""One torch thread a process (tests of thread counts set their own), child processes, names in docstring examples."""

import os

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # before torch; child processes of `tests/helpers/background.py` take other cores

import pytest
import torch

import sparsekit_ao

collect_ignore_glob = ["tests/*/*_child.py"]  # scripts: collecting them for doctests would run them


def pytest_collection_modifyitems(items):
    """Tests that read the results of child processes come last, so that they wait for nothing."""
    import background

    items.sort(key=background.has_job)


def pytest_collection_finish(session):
    """Start the child processes of the tests that were selected; see `tests/helpers/background.py`."""
    if not session.config.option.collectonly:
        import background

        background.start(session.items)


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace):
    doctest_namespace.update(torch=torch, sparsekit_ao=sparsekit_ao)
