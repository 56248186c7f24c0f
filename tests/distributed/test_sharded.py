"""Over 2, 4 and (exhaustive) 3 gloo ranks: selection, FSDP2, DDP, tensor parallel, checkpoints. One spawn for each.

The cases are in the modules `sharded_*`.
"""

import sys
import warnings

import pytest
import sharded_calibration
import sharded_ddp
import sharded_dynamic
import sharded_fsdp
import sharded_selection
import sharded_training
from grids import EXHAUSTIVE
from ranks import run_ranks
from torch import distributed

pytestmark = pytest.mark.skipif(not distributed.is_available() or sys.platform == "win32", reason="needs gloo")


def cases_of_two():
    yield from sharded_selection.cases()
    yield from sharded_fsdp.cases()
    yield from sharded_training.cases_of_two()
    yield from sharded_dynamic.cases_of_two()
    yield from sharded_ddp.cases()
    yield from sharded_calibration.cases()


def cases_of_three():
    yield from sharded_selection.cases()


def cases_of_four():
    yield from sharded_selection.cases()
    yield from sharded_training.cases_of_four()
    yield from sharded_dynamic.cases_of_four()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder in which one number of ranks saves what the next loads."""
    with pytest.MonkeyPatch.context() as patch:
        found = tmp_path_factory.mktemp("ranks")
        patch.setenv("SPARSEKIT_TEST_FOLDER", str(found))
        yield found


def subfolder(folder, name):
    (folder / name).mkdir()
    return folder / name


def report(found):
    failed = [f"{name}\n{text}" for name, text in found.items() if text]
    assert not failed, f"{len(failed)} of {len(found)}\n" + "\n".join(failed[:5])


def test_a_rank_exits_between_two_checkpoints(folder, capfd):
    """The next test continues from the files that it leaves."""
    with pytest.raises(AssertionError, match=r", 3\], \[\]"):
        run_ranks(2, subfolder(folder, "exits"), sharded_training.cases_until_a_rank_exits)


WORLDS = [(2, cases_of_two), *([(3, cases_of_three)] if EXHAUSTIVE else []), (4, cases_of_four)]


@pytest.mark.parametrize(("world", "cases"), WORLDS)
def test_every_case(world, cases, folder):
    found = run_ranks(world, subfolder(folder, str(world)), cases)
    report(found)
    assert len(found) >= 90


@pytest.mark.parametrize("how", ["save", "async_save", "dynamic"])
def test_one_process_loads_what_two_ranks_saved(how, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that it loads in a single process
        sharded_dynamic.load(folder) if how == "dynamic" else sharded_training.load(folder, how)
