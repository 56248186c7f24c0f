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
def runner(*, fresh=False):
    """A function that runs a script as `python script options` does, in a process that is shared by all its calls.

    With `fresh` every call has a process of its own: a fork of one that has imported torch and transformers, if the
    system can fork.
    """
    forks = fresh and "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        context.set_forkserver_preload(["torch", "transformers.trainer"])
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1 if fresh else None) as pool:

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
