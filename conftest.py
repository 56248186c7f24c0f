"""Names that every docstring example may use."""

import pytest
import torch

import sparsekit_ao


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace):
    doctest_namespace.update(torch=torch, sparsekit_ao=sparsekit_ao)
