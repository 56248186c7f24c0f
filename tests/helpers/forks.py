"""Functions that run in a fork of this process, which is far cheaper than a new one.

`assert` is not used in what runs there, since it also runs as `python -O`.
"""

import os
import sys
import traceback


def need(condition, text):
    """What `assert` does, also where Python leaves that out."""
    if not condition:
        raise RuntimeError(text)


def begin(function, *args):
    """Call a function in a fork; returns its process id."""
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        function(*args)
        code = 0
    except SystemExit as e:
        code = int(e.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def end(process):
    """Wait for a fork; its exit code, negative if a signal ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def call(function, *args):
    """Call a function in a fork, which must succeed."""
    code = end(begin(function, *args))
    need(code == 0, f"{function.__name__}{args} ended with {code} in a fork")
