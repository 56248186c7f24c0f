"""Over 2, 4 and (exhaustive) 3 gloo ranks: selection, FSDP2, DDP, tensor parallel, checkpoints.

The cases are in the modules `sharded_*`; this file runs them as a script.
"""

import functools
import json
import os
import sys
import warnings

import pytest
import sharded_calibration
import sharded_dynamic
import sharded_fsdp
import sharded_selection
import sharded_training
import torch
from grids import EXHAUSTIVE
from ranks import run_worlds
from scripts import run_child
from torch import distributed

pytestmark = pytest.mark.skipif(not distributed.is_available() or sys.platform == "win32", reason="needs gloo")


def cases_of_two():
    yield from sharded_fsdp.cases()
    yield from sharded_training.cases_of_two()
    yield from sharded_dynamic.cases_of_two()
    yield from sharded_calibration.cases()


def cases_of_four():
    yield from sharded_training.cases_of_four()
    yield from sharded_dynamic.cases_of_four()
    if EXHAUSTIVE:
        yield "one walk", sharded_calibration.one_walk_over_ranks


def cases_of_one():
    """One process loads what two ranks saved, and recovers as ranks did."""
    folder = os.environ["SPARSEKIT_TEST_FOLDER"]
    warnings.simplefilter("ignore", UserWarning)  # torch warns that it loads in a single process
    yield "dynamic load", functools.partial(sharded_dynamic.load, folder)
    yield "load async_save", functools.partial(sharded_training.load, folder, "async_save")
    yield from sharded_calibration.cases_of_steps()


WORLDS = {  # {part: {number of ranks: its cases}}; parts run at the same time
    "selection": dict.fromkeys((2, 3, 4) if EXHAUSTIVE else (2, 4), sharded_selection.cases),
    "the rest": {2: cases_of_two, 4: cases_of_four, 1: cases_of_one},
}


@pytest.mark.slow
@pytest.mark.parametrize(("part", "least"), [("selection", 70), ("the rest", 90)])
def test_every_case(part, least, tmp_path):
    worlds = json.loads(run_child(__file__, part, OMP_NUM_THREADS="1", cwd=tmp_path))
    found = {f"{name} of {world}": text for world, own in worlds.items() for name, text in own.items()}
    failed = [f"{name}\n{text}" for name, text in found.items() if text]
    assert not failed, f"{len(failed)} of {len(found)}\n" + "\n".join(failed[:5])
    assert len(found) >= least


if __name__ == "__main__":
    os.environ["SPARSEKIT_TEST_FOLDER"] = os.getcwd()
    if sys.argv[1] == "the rest":  # what compiling imports, once for all ranks
        torch.compile(torch.neg, backend="aot_eager")(torch.ones(1))
    run_worlds(WORLDS[sys.argv[1]])
