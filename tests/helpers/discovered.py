"""Pruning what was discovered: half of the units of a coupling, then the smaller model against the masked one."""

import copy

import torch

from sparsekit_ao import ScopeSparsifier
from sparsekit_ao.coupling import joint_entries
from sparsekit_ao.removal import compact


def fill(model):
    """A copy with random weights and running statistics, so that nothing is zero or one by chance."""
    model = copy.deepcopy(model).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        running = [buffer for name, buffer in model.named_buffers() if "running" in name]
        for tensor in (*model.parameters(), *running):
            tensor.copy_(torch.rand_like(tensor) + 0.5 if (tensor >= 0).all() else torch.randn_like(tensor) * 0.3)
    return model


def pruned(model, couplings):
    """A copy of which every second unit of the couplings (which share no tensor) is zero."""
    model = copy.deepcopy(model)
    sparsifier = ScopeSparsifier()
    sparsifier.prepare(
        model, [entry for coupling in couplings for entry in coupling.entries(model, sparsity_level=0.5)]
    )
    sparsifier.step()
    sparsifier.squash_mask()
    return model


def pruned_jointly(model, couplings, level=None, **budgets):
    """The model itself, pruned by couplings that may share tensors."""
    sparsifier = ScopeSparsifier() if level is None else ScopeSparsifier(level)
    sparsifier.prepare(model, joint_entries(couplings, model, **budgets))
    sparsifier.step()
    sparsifier.check()
    sparsifier.squash_mask()
    return model


def assert_exact(model, coupling, inputs, attrs=None):
    """Half of the units are removed and no output changes."""
    masked = pruned(model, [coupling])
    small, report = compact(masked, coupling, inputs, attrs=attrs)
    assert report.after.parameters < report.before.parameters
    assert report.difference <= 1e-5
    assert all("cannot hold the different epsilons" in note for note in report.notes)  # of Qwen3, by the head
    return small
