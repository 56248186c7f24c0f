"""`max_sparsity`: a budget over several tensors leaves each of them a least number of blocks; the total stays exact."""

import pytest
import torch
from torch import nn

from sparsekit_ao import ScopeSparsifier, SparsityError

SIZES = [(8, 8, 0.01), (4, 8, 1.0), (8, 4, 100.0), (16, 8, 0.1)]


def layers(sizes=SIZES):
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(i, o, bias=False) for i, o, _ in sizes)
    with torch.no_grad():
        for layer, (_, _, scale) in zip(model, sizes, strict=True):
            layer.weight.normal_().mul_(scale)
    return model


def stepped(model, level, entry=None, **options):
    sparsifier = ScopeSparsifier(level, scope_coupling="all", **options)
    sparsifier.prepare(model, [{"tensor_fqn": "*", **(entry or {})}])
    sparsifier.step()
    return sparsifier


def by_hand(model, keep, least):
    """The best elements of each tensor are kept first, then the best of all others."""
    scores = [layer.weight.detach().abs().reshape(-1) for layer in model]
    masks = [torch.zeros(s.numel(), dtype=torch.bool) for s in scores]
    for score, mask, count in zip(scores, masks, least, strict=True):
        mask[score.argsort(descending=True, stable=True)[:count]] = True
    rest = [(-float(s[i]), k, i) for k, s in enumerate(scores) for i in range(s.numel()) if not masks[k][i]]
    for _, k, i in sorted(rest)[: keep - sum(least)]:
        masks[k][i] = True
    return [mask.view(layer.weight.shape) for mask, layer in zip(masks, model, strict=True)]


@pytest.mark.parametrize("level", [0.5, 0.8])
@pytest.mark.parametrize("most", [0.81, 0.9, 0.99, None])
def test_the_best_elements_under_the_limit(level, most):
    model = layers()
    sparsifier = stepped(model, level, max_sparsity=most)
    total = sum(layer.weight.numel() for layer in model)
    least = [0 if most is None else n - int(n * most + 1e-9) for n in (layer.weight.numel() for layer in model)]
    keep = total - int(level * total + 1e-9)
    expected = by_hand(model, keep, least)
    found = [sparsifier.mask(f"{k}.weight") for k in range(len(model))]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert sum(int(m.sum()) for m in found) == keep and sparsifier.check() == 1
    if most is None:
        assert not found[0].any()  # the tensor of the smallest weights is empty
        assert "nearly empty: 0.weight" in str(sparsifier.report())


def test_coupled_blocks_and_blocks_of_several_elements():
    model = layers([(8, 8, 0.01), (8, 8, 0.01), (8, 16, 1.0)])
    sparsifier = ScopeSparsifier(0.5, scope_coupling="all", block_shape=(1, -1), max_sparsity=0.75)
    coupled = [{"tensor_fqn": f"{k}.weight", "block_coupling": "pair"} for k in range(2)]
    sparsifier.prepare(model, [*coupled, {"tensor_fqn": "2.weight"}])
    sparsifier.step()
    kept = [int(sparsifier.mask(f"{k}.weight").any(1).sum()) for k in range(3)]
    assert kept == [2, 2, 10] and sparsifier.check() == 1
    assert torch.equal(sparsifier.mask("0.weight"), sparsifier.mask("1.weight"))


def test_a_budget_below_the_limit_is_refused_before_a_mask_changes():
    model = layers()
    sparsifier = stepped(model, 0.5, max_sparsity=0.9)
    before = [sparsifier.mask(f"{k}.weight").clone() for k in range(4)]
    for group in sparsifier.groups:
        group["sparsity_level"] = 0.95
    with pytest.raises(SparsityError, match=r"sparsity_level=0.95 keeps 13 blocks of all tensors, .* requires 28"):
        sparsifier.step()
    assert all(torch.equal(sparsifier.mask(f"{k}.weight"), m) for k, m in enumerate(before))


@pytest.mark.parametrize(
    ("options", "entry", "text"),
    [
        ({"max_sparsity": 1.5}, {}, r"max_sparsity must be a number in \[0, 1\] or None, got 1.5"),
        ({"max_sparsity": 0.9}, {"scope_coupling": None}, "give them a scope_coupling and no scope_shape"),
        ({"max_sparsity": 0.9}, {"scope_shape": (1, 4)}, "give them a scope_coupling and no scope_shape"),
    ],
)
def test_what_it_does_not_fit(options, entry, text):
    with pytest.raises(SparsityError, match=text):
        stepped(layers([(8, 8, 1.0), (8, 8, 1.0)]), 0.5, entry, **options)
