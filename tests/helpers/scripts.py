"""Runs scripts one after the other in one process, so that torch and transformers are imported once for all."""

import contextlib
import io
import multiprocessing
import os
import runpy
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor
from subprocess import CompletedProcess

import torch


@contextlib.contextmanager
def runner():
    """A function that runs a script as `python script options` does, in a process that is shared by all its calls."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:

        def run(script, *options, cwd):
            code, out, err = pool.submit(_run, str(script), [*map(str, options)], str(cwd)).result()
            return CompletedProcess([script, *options], code, out, err)

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
