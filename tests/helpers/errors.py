"""Expected errors."""

import re

import pytest

from sparsekit_ao import SparsityError


def refuses(text, kind=SparsityError):
    """Expects an error whose message holds this text."""
    return pytest.raises(kind, match=re.escape(text))
