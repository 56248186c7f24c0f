"""Nothing that belongs to the process is changed: thread counts, affinity, environment, modes, signal handlers."""

import background
import pytest


@pytest.mark.parametrize("install", ["numba", "hidden"])
def test_a_process_is_the_same_before_and_after(install):
    if install == "numba":
        pytest.importorskip("numba")
    done, _ = background.result(f"test_a_process_is_the_same_before_and_after[{install}]")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "nothing has changed"
