"""Faults in the middle of an update, killed processes and limited resources: nothing is lost, the next call works."""

import sys

import background
import pytest
import torch
from stock import linear_model

from sparsekit_ao import ScopeSparsifier


class Failing:
    """A score that raises once it is `armed`."""

    armed = False

    def __call__(self, weight, name):
        if self.armed:
            raise ValueError("no score")
        return weight.abs()


def test_a_raising_score_of_a_later_stage_changes_nothing():
    model, sparsifier, score = linear_model(8, 6, 8), ScopeSparsifier(0.5), Failing()
    stages = [{"block_shape": (2, 1)}, {"scope_shape": (1, 2), "score": score, "nnz": 1}]
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight", "stages": stages}, {"tensor_fqn": "2.weight"}])
    sparsifier.step()
    masks = [sparsifier.mask(f"{k}.weight") for k in (0, 2)]
    old = [m.clone() for m in masks]
    for k in (0, 2):
        model[k].parametrizations.weight.original.data.normal_()
    score.armed = True
    with pytest.raises(ValueError, match="no score"):
        sparsifier.step()
    assert all(map(torch.equal, masks, old))
    score.armed = False
    sparsifier.step()
    sparsifier.check()
    assert not all(map(torch.equal, masks, old))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits and /proc of Linux")
def test_killed_runs_go_on_bit_for_bit_and_steps_survive_limits():
    """Killed processes, little memory, forks, one core; as `python -O -W error`."""
    done, _ = background.result("test_killed_runs_go_on_bit_for_bit_and_steps_survive_limits")
    assert done.returncode == 0 and done.stdout.endswith("all is whole\n"), done.stderr[-3000:]
