"""Nothing that belongs to the process is changed: thread counts, affinity, environment, modes, signal handlers."""

import os
import pathlib
import subprocess
import sys

import pytest

CHILD = pathlib.Path(__file__).parent / "process_child.py"


@pytest.mark.parametrize("install", ["numba", "hidden"])
def test_a_process_is_the_same_before_and_after(install):
    if install == "numba":
        pytest.importorskip("numba")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(CHILD), install],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "nothing has changed"
