"""Runs scripts: in a process of their own, or one after the other in one, which imports torch and transformers once."""

import contextlib
import csv
import io
import multiprocessing
import os
import runpy
import subprocess
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

HERE = Path(__file__).parent
EXAMPLES = HERE.parent.parent / "examples"


def read_csv(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def run_child(script, *options, cwd, python=(), **environment):
    """What `python script options` prints, which must succeed; None takes a variable out of its environment."""
    command = [sys.executable, *python, str((HERE / script).resolve()), *map(str, options)]
    given = {"PYTHONPATH": os.pathsep.join(sys.path)} | environment
    env = {k: v for k, v in (os.environ | given).items() if v is not None}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-4000:]
    return done.stdout


@contextlib.contextmanager
def runner():
    """A function that runs a script as `run_child` does, in a process that is shared by all its calls."""
    forks = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if forks else "spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:

        def run(script, *options, cwd):
            code, out, err = pool.submit(_run, str(script), [*map(str, options)], str(cwd)).result()
            assert code == 0, out[-3000:] + err[-4000:]
            return out

        yield run


def _run(script, options, cwd):
    out, err, path = io.StringIO(), io.StringIO(), sys.path
    torch.set_num_threads = lambda count: None  # one thread, since other tests run beside
    sys.argv, sys.path = [script, *options], [os.path.dirname(script), *path]
    os.chdir(cwd)
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as e:  # with a text Python prints it and exits with 1
            code = e.code if isinstance(e.code, int) else int(e.code is not None)
            print(e.code if isinstance(e.code, str) else "", file=sys.stderr)
        except Exception:
            code = 1
            traceback.print_exc()
    sys.path = path
    return code, out.getvalue(), err.getvalue()
