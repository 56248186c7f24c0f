"""Child processes that take minutes run beside the other tests, one after the other, from the start of a session.

Each compiles or interprets Triton kernels on one core; the tests use little more than one themselves.
"""

import atexit
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from grids import EXHAUSTIVE

HERE = Path(__file__).parent
ARCHES = (80, 90, 100)
_running: list[subprocess.Popen] = []
_found: dict[str, subprocess.CompletedProcess] = {}
_ended: dict[str, threading.Event] = {}


def _aot():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = tempfile.mkdtemp()  # compile, whatever was compiled before
    command = [sys.executable, str(HERE / "aot_child.py"), *map(str, ARCHES)]
    return command + (["--every"] if EXHAUSTIVE else []), environment


def _interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "interpreted_kernels.py")]
    return command, os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}


JOBS = {"test_triton_aot.py": _aot, "test_triton_interpreter.py": _interpreter}


def start(files):
    """Start the jobs of those test files that have one, in a thread."""
    names = [name for name in JOBS if name in files and name not in _ended]
    _ended.update({name: threading.Event() for name in names})
    threading.Thread(target=lambda: [_run(name) for name in names], daemon=True).start()


def result(name):
    """What the job of a test file printed, and its exit code; waits for it."""
    start([name])
    assert _ended[name].wait(900), f"the child process of {name} takes too long"
    return _found[name]


def _run(name):
    command, environment = JOBS[name]()
    child = subprocess.Popen(
        command, cwd=HERE.parent, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    _running.append(child)
    out, err = child.communicate()
    _found[name] = subprocess.CompletedProcess(command, child.returncode, out, err)
    _ended[name].set()


@atexit.register
def _kill():
    for child in _running:
        if child.poll() is None:
            child.kill()
