"""Zeros of a sparse model: `prune` counts those that return, keeps all with `keep_zeros`, or takes given masks."""

import accelerate
import hf_models
import pytest
import torch
from pruned_models import Model, correlated, interrupted
from safetensors.torch import save_file
from torch import nn

from sparsekit_ao import ScopeSparsifier, SparsityError, export, patterns, prune

BATCHES = correlated()
PIXELS = [torch.linspace(0, 9, 2 * 3 * 8 * 8).sin().view(2, 3, 8, 8)]


def linear(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).to(dtype)


def convolutions():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.Flatten(), nn.Linear(128, 4))


def blocks(dtype=torch.float32):
    torch.manual_seed(0)
    return Model().to(dtype)


def sparse(model, level=0.7):
    return prune(model, level)[0]


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.ndim > 1}


def in_fours(weight):
    return weight.flatten(1).unflatten(1, (-1, 4)).ne(0).sum(-1)


CASES = {  # {name: (a function that returns a sparse model, the second pattern or level, arguments of `prune`)}
    **{f"2:4 by {how}": (lambda: sparse(linear()), "2:4", {"compensate": how, "batches": BATCHES})
       for how in ("admm", "obs", "sparsegpt", "least_squares", None)},
    **{f"unstructured by {how}": (lambda: sparse(linear(), 0.4), 0.6, {"compensate": how, "batches": BATCHES})
       for how in ("admm", "obs", "sparsegpt", "least_squares")},
    "less than before": (lambda: sparse(linear()), 0.5, {"batches": BATCHES}),
    "without batches": (lambda: sparse(linear()), "4x4", {}),
    "random": (lambda: sparse(linear()), "2:4", {"score": "random", "compensate": None, "batches": BATCHES}),
    "rows": (lambda: sparse(linear()), "rows", {"batches": BATCHES}),
    "blocks": (lambda: sparse(linear()), patterns.blocks(2, 2), {"batches": BATCHES, "compensate": "obs"}),
    "V:N:M": (lambda: sparse(linear()), patterns.v_n_m(4, 2, 8), {"batches": BATCHES}),
    "negative saliencies": (
        lambda: sparse(linear()), "2:4", {"score": lambda weight, name: -weight.abs(), "compensate": None},
    ),
    "bfloat16": (lambda: sparse(blocks(torch.bfloat16)), "2:4", {"batches": [b.bfloat16() for b in BATCHES]}),
    "recover": (lambda: sparse(blocks()), "2:4", {"batches": BATCHES, "recover": 1}),
    "in place": (lambda: sparse(blocks()), "2:4", {"batches": BATCHES, "inplace": True}),
    "convolutions": (lambda: sparse(convolutions()), patterns.blocks(1, 2), {"batches": PIXELS}),
    "GPT-2": (lambda: sparse(hf_models.make("GPT-2")[0]), "2:4", {"batches": [torch.arange(24).view(2, 12)]}),
    "Mixtral": (lambda: sparse(hf_models.make("Mixtral")[0]), "2:4", {"batches": [torch.arange(24).view(2, 12)]}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_nothing_that_is_zero_returns(name):
    make, pattern, keys = CASES[name]
    model = make()
    before = weights(model)
    pruned, report = prune(model, pattern, keep_zeros=True, progress=False, **keys)
    after = weights(pruned)
    for row in report:
        assert not (after[row.tensor][before[row.tensor] == 0]).any() and row.returned == 0, row.tensor
        assert row.density == pytest.approx(float((after[row.tensor] != 0).float().mean()))
        if pattern == "2:4" and isinstance(pruned, nn.Sequential):  # a scope has more zeros only if it had them before
            assert torch.equal(in_fours(after[row.tensor]), in_fours(before[row.tensor]).clamp(max=2))
    assert "zero before" not in str(report) and "keep_zeros=True" in report.call
    fewest = {row.tensor: min(float((before[row.tensor] != 0).float().mean()), 0.4) for row in report}
    if pattern == 0.6:  # a budget of the whole tensor is spent on what is not zero
        assert all(row.density == pytest.approx(fewest[row.tensor], abs=0.03) for row in report)


def test_an_offloaded_model_keeps_its_zeros(tmp_path):
    model = sparse(blocks())
    expected = prune(model, "2:4", batches=BATCHES, keep_zeros=True, progress=False)[0]
    offloaded = accelerate.disk_offload(model, tmp_path, execution_device="cpu")
    pruned, report = prune(offloaded, "2:4", batches=BATCHES, keep_zeros=True, inplace=True, progress=False)
    with torch.no_grad():
        assert torch.equal(pruned(BATCHES[0]), expected(BATCHES[0])) and all(row.density <= 0.5 for row in report)


@pytest.mark.parametrize("name", ["2:4 by admm", "2:4 by sparsegpt", "rows", "convolutions", "Mixtral", "bfloat16"])
def test_the_report_says_how_many_zeros_returned(name):
    make, pattern, keys = CASES[name]
    model = make()
    before = weights(model)
    pruned, report = prune(model, pattern, progress=False, **keys)
    after = weights(pruned)
    returned = {row.tensor: int(((before[row.tensor] == 0) & (after[row.tensor] != 0)).sum()) for row in report}
    assert {row.tensor: row.returned for row in report} == returned and sum(returned.values()) > 0
    first = f"{sum(returned.values()):,} weights that were zero before are not zero now; prune(keep_zeros=True) keeps"
    assert str(report).startswith(first)
    assert report.cells()[0] == ("tensor", "before", "after", "density", "seconds", "note")
    assert report.to_csv().splitlines()[0] == "tensor,before,after,density,seconds,note"


def test_the_density_is_that_of_the_weight():
    _, report = prune(sparse(linear(), 0.7), 0.2)
    assert all(row.density == pytest.approx(0.3, abs=0.01) for row in report)
    assert "zero before" not in str(report)


def test_a_continued_call_counts_the_zeros_of_both_parts(tmp_path):
    whole = prune(sparse(blocks()), "2:4", batches=BATCHES, progress=False)[1]
    model, keys = sparse(blocks()), {"batches": BATCHES, "checkpoint": tmp_path, "inplace": True, "progress": False}
    with interrupted([model.blocks[1]], 20):
        prune(model, "2:4", **keys)
    again = prune(sparse(blocks()), "2:4", **keys)[1]
    assert [row.returned for row in again] == [row.returned for row in whole]
    with pytest.raises(SparsityError, match="other arguments"):
        prune(sparse(blocks()), "2:4", keep_zeros=True, **keys)


def test_a_dry_run_knows_the_zeros():
    keys = {"batches": BATCHES, "keep_zeros": True, "progress": False}
    plan = prune(sparse(linear()), "2:4", dry_run=True, **keys)[1]
    report = prune(sparse(linear()), "2:4", **keys)[1]
    assert [row.density for row in plan] == [row.density for row in report]


def masks_of(model, seed=1):
    g = torch.Generator().manual_seed(seed)
    return {name: torch.rand(p.shape, generator=g) > 0.4 for name, p in weights(model).items()}


MODELS = {"linear": (linear, BATCHES), "blocks": (blocks, BATCHES), "convolutions": (convolutions, PIXELS)}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("keys", [{}, {"compensate": "least_squares"}, {"recover": 1}, {"compensate": None}])
def test_weights_are_fitted_to_masks_that_are_given(name, keys):
    make, batches = MODELS[name]
    model = make()
    masks = dict(list(masks_of(model).items())[:-1])
    pruned, report = prune(model, masks=masks, batches=batches, progress=False, **keys)
    before, after = weights(model), weights(pruned)
    assert {row.tensor for row in report} == masks.keys()
    for tensor, mask in masks.items():
        assert torch.equal(after[tensor] != 0, mask), tensor
        assert torch.equal(after[tensor], before[tensor] * mask) == (keys == {"compensate": None})
    if "recover" not in keys:
        assert all(torch.equal(after[tensor], before[tensor]) for tensor in before.keys() - masks.keys())
    if keys != {"compensate": None}:
        assert all(row.after < row.before for row in report) or name == "convolutions"
    plain = weights(prune(model, masks=masks)[0])
    assert all(torch.equal(plain[tensor], before[tensor] * mask) for tensor, mask in masks.items())


def test_the_fit_to_a_given_mask_is_the_best_one():
    model, inputs = linear(torch.float64), torch.cat(BATCHES).double()
    mask = masks_of(model)["0.weight"]
    pruned, _ = prune(model, masks={"0.weight": mask}, batches=[inputs], progress=False)
    with torch.no_grad():
        for row, kept, target in zip(pruned[0].weight, mask, model[0].weight, strict=True):
            best = torch.linalg.lstsq(inputs[:, kept], inputs @ target).solution
            full = torch.zeros_like(target).masked_scatter(kept, best)
            actual, least = ((inputs @ (weight - target)).norm() for weight in (row, full))
            assert actual < 1.02 * least + 1e-9


class Saved(nn.Sequential):
    def save_pretrained(self, path, state_dict):
        save_file(state_dict, path / "model.safetensors")


def test_masks_of_a_saved_model_fit_its_dense_model(tmp_path):
    model, sparsifier = Saved(*linear()), ScopeSparsifier("2:4")
    dense = Saved(*linear())
    sparsifier.prepare(model)
    sparsifier.step()
    export.save_pretrained(model, sparsifier, tmp_path)
    masks = export.load_masks(tmp_path)
    pruned, report = prune(dense, "2:4", masks=masks, batches=BATCHES, progress=False)
    assert all(torch.equal(pruned.get_parameter(name) != 0, mask) for name, mask in masks.items())
    assert all(row.after < row.before and row.density == 0.5 for row in report)
    as_numbers = {name: mask.to(torch.uint8) for name, mask in masks.items()}
    plan = prune(dense, masks=as_numbers, batches=BATCHES, dry_run=True, progress=False)[1]
    assert [(row.density, row.note) for row in plan] == [(0.5, "given mask; compensated")] * 2


def test_masks_of_what_is_left_dense_by_default():
    model, _ = hf_models.make("Mixtral")
    names = ("lm_head.weight", "model.layers.0.mlp.gate.weight", "model.layers.1.mlp.experts.down_proj")
    masks = {name: mask for name, mask in masks_of(model).items() if name in names}
    pruned, report = prune(model, masks=masks, batches=[torch.arange(24).view(2, 12)], progress=False)
    assert {row.tensor for row in report} == {*names}
    assert all(torch.equal(pruned.get_parameter(name) != 0, mask) for name, mask in masks.items())


GOOD = masks_of(linear())


@pytest.mark.parametrize(
    ("masks", "keys", "message"),
    [
        ({"0.weigth": GOOD["0.weight"]}, {}, r"masks\['0.weigth'\]: the model has no such parameter. Did you mean"),
        ({"0.weight": GOOD["0.weight"].T}, {}, r"masks\['0.weight'\] has shape \(8, 16\), but the tensor has"),
        ({"0.weight": torch.rand(16, 8)}, {}, "must hold bools, or numbers 0 and 1"),
        ({"0.weight": torch.zeros(16, 8)}, {}, "keep at least one element"),
        ({}, {}, "masks must be a dict"),
        ([GOOD["0.weight"]], {}, "masks must be a dict"),
        (GOOD, {"sparsity_level": "2:4"}, r"0.weight: \d+ of 32 scopes are wrong; scope \d+ keeps [34] blocks"),
        (GOOD, {"sparsity_level": 0.9}, "0.weight: 1 of 1 scopes are wrong; scope 0 keeps"),
        (GOOD, {"sparsity_level": "2:3"}, "divisible by 3"),
        (GOOD, {"compensate": "sparsegpt"}, "the masks are given, so compensate='sparsegpt' has no effect"),
        (GOOD, {"compensate": "obs"}, "the masks are given, so compensate='obs' has no effect"),
        (GOOD, {"score": "wanda"}, "the masks are given, so score='wanda' has no effect"),
        (GOOD, {"exclude": ["2"]}, "the masks are given, so exclude="),
        (GOOD, {"keep_zeros": True}, "the masks are given, so keep_zeros=True has no effect"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dry_run", [False, True])
def test_masks_that_do_not_fit_change_nothing(masks, keys, message, dry_run):
    model = linear()
    before = weights(model)
    with pytest.raises(SparsityError, match=message):
        prune(model, masks=masks, batches=BATCHES, inplace=True, dry_run=dry_run, progress=False, **keys)
    assert all(torch.equal(p, before[name]) for name, p in weights(model).items())


def test_masks_may_keep_less_than_a_level_allows():
    masks = {"0.weight": torch.eye(16, 8)}
    assert [row.density for row in prune(linear(), 0.5, masks=masks)[1]] == [1 / 16]
    assert [row.tensor for row in prune(linear(), "2:4", masks=masks)[1]] == ["0.weight"]
