"""Child processes of a minute or more, run one after the other beside the tests, from the start of a session.

Each works on one core; the tests use little more than one themselves. A job has the name of the test or test file that
reads its result.
"""

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from grids import EXHAUSTIVE
from kernel_cases import INTERPRETS
from scripts import runner

HERE = Path(__file__).parent
ARCHES = (80, 90, 100) if EXHAUSTIVE else (90,)
# releases (3.4 3.6) or folders of triton to compile with too; a wheel has 150 MB, so only where it is asked for
OLDER_TRITON = os.environ.get("SPARSEKIT_AO_TRITON", "").split()


interprets_kernels = pytest.mark.skipif(
    not INTERPRETS, reason="triton before 3.7 interprets kernels with conversions that numpy 2.4 has removed"
)
_running: list[subprocess.Popen] = []
_found: dict[str, subprocess.CompletedProcess] = {}
_folders: dict[str, Path] = {}
_ended: dict[str, threading.Event] = {}
_begun: set[str] = set()
_lock = threading.Lock()


def _child(script, *options, python=(), **environment):
    """A command and its environment, in which None takes a variable away."""
    given = {k: v for k, v in (os.environ | environment).items() if v is not None}
    return [sys.executable, *python, str((HERE / script).resolve()), *options], given


def _compiling(script, *options):
    """Whatever was compiled before."""
    every = ["--every"] if EXHAUSTIVE else []
    return _child(script, *options, *every, TRITON_INTERPRET=None, TRITON_CACHE_DIR=tempfile.mkdtemp())


def _older_aot(release):
    """With a release of triton, whose wheel pip downloads, or with a folder that holds the package."""
    folder = release if Path(release).is_dir() else tempfile.mkdtemp()
    if folder != release:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*pip, "--target", folder, f"triton=={release}.*"])
    return _compiling("aot_child.py", "90", "--triton", folder, PYTHONPATH=os.pathsep.join([folder, *sys.path]))


def _interpreter():
    kernels = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
    return _child("../selection/interpreted_kernels.py", python=kernels, TRITON_INTERPRET="1")


def _ranks():
    return _child("../distributed/test_sharded.py", PYTHONPATH=os.pathsep.join(sys.path), OMP_NUM_THREADS="1")


def _killed():
    return _child("killed.py", "20" if EXHAUSTIVE else "1", python=("-O", "-W", "error"), OMP_NUM_THREADS="1")


def _tiny(script, run_by=()):
    return _child(f"../../examples/{script}", "--tiny", python=run_by)


def _script(script, *options):
    """An example that runs in a fork of a process that has imported transformers; see `scripts.py`."""
    return [str(HERE.parent.parent / "examples" / script), "--tiny", *options], None


JOBS = {  # in the order in which the tests need them
    **{
        f"test_every_tutorial_runs[{name}]": lambda name=name: _script(f"tutorials/{name}.py")
        for name in ("rigl", "trainer_2_4", "minilm", "smaller_models")
    },
    "test_fsdp2_prunes_over_two_ranks_and_prints_the_bytes": lambda: _tiny(
        "fsdp2.py", run_by=("-m", "torch.distributed.run", "--nproc-per-node", "2")
    ),
    **{
        f"test_every_long_benchmark_runs[{name}]": lambda name=name: _tiny(f"benchmarks/{name}.py")
        for name in ("prune_ranks", "recover_rate", "compare_llmcompressor")
    },
    "test_the_trained_language_model_is_pruned_by_every_method": lambda: _script("one_shot_language_model.py"),
    "test_minilm_is_exported_to_every_target": lambda: _script("export_minilm.py", "--threads", "1"),
    "test_minilm_2_4_is_pruned_recovered_saved_and_loads_again": lambda: _script("prune_minilm.py", "--threads", "1"),
    "test_minilm_is_shrunk_rebuilt_and_run_by_onnxruntime": lambda: _script("shrink_minilm.py", "--threads", "1"),
    "test_the_gpu_benchmark_runs_in_the_interpreter_and_prints_no_times": lambda: _tiny("benchmarks/gpu_step.py"),
    "test_every_case": _ranks,
    "test_a_process_is_the_same_before_and_after": lambda: _child(
        "process_child.py", python=("-W", "ignore"), OMP_NUM_THREADS="2"
    ),
    "test_killed_runs_go_on_bit_for_bit": _killed,
    "test_triton_aot.py": lambda: _compiling("aot_child.py", *map(str, ARCHES)),
    "test_triton_interpreter.py": _interpreter,
    **{
        f"test_every_form_compiles_with_an_older_triton[{release}]": lambda release=release: _older_aot(release)
        for release in OLDER_TRITON
    },
}


def has_job(item):
    """Whether a test reads the result of a job."""
    return item.name in JOBS or item.path.name in JOBS


def start(items):
    """Start the jobs of those tests that have one, in a thread."""
    slow = {item.path.name for item in items if item.get_closest_marker("slow")}
    _start([name for name in JOBS if name in slow | {item.name for item in items}])


def _start(names):
    names = [name for name in names if name not in _ended]
    _ended.update({name: threading.Event() for name in names})
    threading.Thread(target=lambda: [_run(name) for name in names], daemon=True).start()


def result(name):
    """What a job printed and its exit code, and the folder in which it ran, empty before; waits for it."""
    _start([name])
    for other in (name, *_ended):  # the tests would wait: take the jobs that have not begun
        if not _ended[name].is_set():
            _run(other)
    assert _ended[name].wait(900), f"the child process of {name} takes too long"
    return _found[name], _folders[name]


def succeeded(name):
    """What a job printed, and its folder, once it has succeeded."""
    done, folder = result(name)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-4000:]
    return done.stdout, folder


def _run(name):
    with _lock:
        if name in _begun:
            return
        _begun.add(name)
    command, environment = JOBS[name]()
    folder = _folders[name] = Path(tempfile.mkdtemp())
    if environment is None:
        with runner(fresh=True) as run_script:
            _found[name] = run_script(*command, cwd=folder)
    else:
        child = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
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
    for folder in list(_folders.values()):
        shutil.rmtree(folder, ignore_errors=True)
