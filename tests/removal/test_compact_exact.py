"""Every structure, pruned by its couplings, compacted, and rebuilt from a manifest: the same outputs."""

import copy

import pytest
import torch
from compact_models import CASES, close, pruned, shaken
from torch import nn

from sparsekit_ao import Coupling
from sparsekit_ao.removal import compact, cut_to


@pytest.mark.parametrize("name", CASES)
def test_compacted_outputs_equal_masked_ones_and_it_is_rebuilt_bit_for_bit(name, tmp_path):
    make, couplings, inputs = CASES[name]
    couplings = [couplings] if isinstance(couplings, Coupling) else couplings
    torch.manual_seed(0)
    model, x = pruned(shaken(make()), couplings), inputs()
    model.eval()
    before = copy.deepcopy(model.state_dict())
    small, report = compact(model, couplings, x)
    with torch.no_grad():
        assert close(model(x), small(x))
    assert report.difference <= 1e-5 and not report.notes
    assert all(row.kept == row.of - row.of // 2 for row in report.couplings)
    assert report.after.parameters < report.before.parameters and report.after.bytes < report.before.bytes
    assert report.after.parameters == sum(p.numel() for p in small.parameters())
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(t, before[key]) for key, t in model.state_dict().items())

    for path, module in small.named_modules():
        if isinstance(module, nn.Linear):
            assert (module.out_features, module.in_features) == module.weight.shape, path
        elif isinstance(module, (nn.Conv1d, nn.Conv2d)):
            shape = (module.out_channels, module.in_channels // module.groups)
            assert module.weight.shape[:2] == shape and module.out_channels % module.groups == 0, path
        elif isinstance(module, nn.ConvTranspose2d):
            assert (module.in_channels, module.out_channels) == module.weight.shape[:2], path
        elif isinstance(module, nn.Embedding):
            assert (module.num_embeddings, module.embedding_dim) == module.weight.shape, path
        elif hasattr(module, "num_features"):
            assert module.num_features == len(module.weight), path

    report.save(tmp_path / "manifest.json")
    fresh = cut_to(make(), tmp_path / "manifest.json").eval()
    fresh.load_state_dict(small.state_dict())
    with torch.no_grad():
        assert torch.equal(fresh(x), small(x))
    for (path, a), (_, b) in zip(small.named_modules(), fresh.named_modules(), strict=True):
        assert numbers(a) == numbers(b), path
    assert repr(small) == repr(fresh)


def numbers(module):
    return {key: value for key, value in vars(module).items() if isinstance(value, (int, float, tuple))}
