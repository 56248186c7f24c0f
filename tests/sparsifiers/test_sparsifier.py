"""ScopeSparsifier: masks from configs, on small patterns whose masks are easy to verify."""

import numpy
import pytest
import torch
from stock import Holder, linear_model, prepared, refuses
from torch import nn

from sparsekit_ao import SNFS, ProximalSparsifier, RigL, ScopeSparsifier, SparsityError, WeightNormSparsifier, patterns
from sparsekit_ao.sparsifiers.groups import is_same
from sparsekit_ao.torch_ao import CubicSL, LambdaSL


def masks_after_step(model: nn.Module, config, sparsifier=None) -> ScopeSparsifier:
    sparsifier = ScopeSparsifier() if sparsifier is None else sparsifier
    sparsifier.prepare(model, config)
    sparsifier.step()
    sparsifier.check()
    return sparsifier


def test_config_none_takes_every_linear_and_conv_in_model_order():
    class Special(nn.Linear):
        pass

    model = nn.Sequential(nn.Conv1d(2, 2, 1), nn.Sequential(Special(2, 2), nn.LayerNorm(2)), nn.Conv2d(2, 2, 1))
    sparsifier = prepared(model)
    assert [g["tensor_fqn"] for g in sparsifier.groups] == ["0.weight", "1.0.weight", "2.weight"]
    root = prepared(nn.Linear(2, 2))
    assert [g["tensor_fqn"] for g in root.groups] == ["weight"]


def test_edited_groups_are_used_by_the_next_step():
    sparsifier = masks_after_step(linear_model(8, 4), None)
    sparsifier.groups[0].update(block_shape=(1, -1), sparsity_level=0.25)
    sparsifier.step()
    assert sparsifier.mask("0.weight").all(1).sum() == 3


def test_enable_mask_update():
    sparsifier = prepared(linear_model(8, 4))
    sparsifier.enable_mask_update = False
    sparsifier.step()
    assert sparsifier.mask("0.weight").all()


@pytest.mark.parametrize(
    "scheduler", [lambda s: LambdaSL(s, lambda epoch: epoch / 4), lambda s: CubicSL(s, total_t=4, delta_t=1)]
)
@pytest.mark.parametrize("kwargs", [{"sparsity_level": 0.5}, {"nnz": 2, "scope_shape": (1, 4)}])
def test_torch_aos_schedulers_change_levels_and_counts(scheduler, kwargs):
    sparsifier = prepared(linear_model(8, 4), **kwargs)
    schedule = scheduler(sparsifier)
    kept = []
    for _ in range(5):
        sparsifier.step()
        kept.append(int(sparsifier.mask("0.weight").sum()))
        schedule.step()
    assert kept[0] == 32
    assert kept[-1] == 16
    assert sorted(kept, reverse=True) == kept


def test_a_scheduler_on_stages_with_their_own_budgets_is_an_error():
    sparsifier = prepared(Holder(w=torch.randn(4, 8)), [{"tensor_fqn": "w", **patterns.v_n_m(4, 2, 8)}])
    sparsifier.groups[0]["sparsity_level"] = 0.9
    with pytest.raises(SparsityError, match="every stage has a budget of its own. Leave the budget out of the stage"):
        sparsifier.step()


class Saliency:
    """A score that holds state, such as activation statistics."""

    def __init__(self) -> None:
        self.scale = torch.ones(8)

    def __call__(self, w, name):
        return w.abs() * self.scale


def test_a_score_object_is_used_as_it_is_and_shared():
    score = Saliency()
    model = linear_model(8, 4, 8, 4)
    sparsifier = ScopeSparsifier(score=score, scope_coupling="all")
    config = [{"tensor_fqn": "0.weight", "scope_shape": ()}, {"tensor_fqn": "4.weight"}]
    sparsifier.prepare(model, config)
    assert sparsifier.groups[0]["score"] is sparsifier.groups[1]["score"] is score
    sparsifier.step()
    plan = sparsifier._grouped
    score.scale = torch.arange(8.0)
    sparsifier.step()
    assert sparsifier._grouped is plan
    assert not sparsifier.mask("0.weight")[:, 0].any()


@pytest.mark.parametrize(
    "config", [{"pattern": "2:4"}, {"axes": "o i h w", "unit": "i"}, {"view": lambda w: w.flatten(1)}]
)
def test_a_weight_that_moves_to_another_layout_after_prepare_gets_the_same_mask(config):
    model, masks = nn.Sequential(nn.Conv2d(8, 4, 3)), []
    for moved in (nn.Sequential(nn.Conv2d(8, 4, 3)), model):
        moved.load_state_dict(model.state_dict())
        sparsifier = prepared(moved, [{"tensor_fqn": "0.weight", **config}])
        if moved is model:
            moved.to(memory_format=torch.channels_last)
        sparsifier.step()
        masks.append(sparsifier.mask("0.weight").clone(memory_format=torch.contiguous_format))
    assert torch.equal(*masks) and not masks[0].all()


def test_a_layer_that_is_smaller_when_it_is_prepared_again_gets_a_mask_of_its_shape():
    model, sparsifier = linear_model(8, 4), ScopeSparsifier("2:4")
    for inputs in (8, 4):
        model[0].weight = nn.Parameter(model[0].weight[:, :inputs].detach().clone())
        sparsifier.prepare(model)
        sparsifier.step()
        assert sparsifier.mask("0.weight").shape == (4, inputs) and sparsifier.check() == inputs
        sparsifier.squash_mask()


def test_an_overridden_make_config_from_model_is_used():
    class OnlyLast(WeightNormSparsifier):
        def make_config_from_model(self, model):
            self.config = [{"tensor_fqn": "2.weight"}]

    sparsifier = OnlyLast()
    sparsifier.prepare(linear_model(8, 4, 4), None)
    assert [g["tensor_fqn"] for g in sparsifier.groups] == ["2.weight"]
    sparsifier = ScopeSparsifier()
    sparsifier.make_config_from_model(nn.Sequential(nn.Linear(2, 2), nn.Conv1d(2, 2, 1)), {nn.Conv1d})
    assert sparsifier.config == [{"tensor_fqn": "1.weight"}]


def test_an_nnz_group_with_a_following_stage_starts_its_schedule_at_that_count():
    stages = [{"block_shape": (4, 1), "scope_shape": (1, 8), "nnz": 4}, {"scope_shape": (1, 8)}]
    sparsifier = prepared(Holder(w=torch.randn(4, 8)), [{"tensor_fqn": "w", "stages": stages, "nnz": 2}])
    assert sparsifier.groups[0]["sparsity_level"] == 0.75
    kept = []
    for level in (0.5, 0.625, 0.75, 0.875):
        sparsifier.groups[0]["sparsity_level"] = level
        sparsifier.step()
        kept.append(sparsifier.mask("w").sum(1).tolist())
    assert kept == [[4] * 4, [3] * 4, [2] * 4, [1] * 4]


def test_loading_keeps_functions_in_stages():
    def inverse(w, name):
        return 1 / w.abs()

    config = [{"tensor_fqn": "0.weight", "stages": [{"scope_shape": (1, 4), "nnz": 2, "score": inverse}]}]
    staged = masks_after_step(linear_model(8, 4), config)
    before = staged.mask("0.weight").clone()
    staged.load_state_dict(staged.state_dict())
    staged.step()
    assert torch.equal(staged.mask("0.weight"), before) and "stages" in staged.groups[0]


@pytest.mark.parametrize("change", [1, -1])
def test_check_names_the_wrong_scope(change):
    sparsifier = masks_after_step(linear_model(8, 4), [{"tensor_fqn": "0.weight", **patterns.n_m(2, 4)}])
    row = sparsifier.mask("0.weight")[1, 4:]
    row[int((row if change < 0 else ~row).nonzero()[0])] = change > 0
    with refuses(f"0.weight: 1 of 8 scopes are wrong; scope 3 keeps {2 + change} blocks, its budget is 2"):
        sparsifier.check()
    sparsifier = masks_after_step(linear_model(8, 4), [{"tensor_fqn": "0.weight", **patterns.rows(0.5)}])
    row = int(sparsifier.mask("0.weight").any(1).nonzero()[0])
    sparsifier.mask("0.weight")[row, 0] = False
    with pytest.raises(SparsityError, match="0.weight: some block is neither kept whole nor dropped whole"):
        sparsifier.check()


def test_check_and_report_as_numbers():
    model = linear_model(8, 4, 4)
    sparsifier = masks_after_step(model, None, ScopeSparsifier(0.75))
    report = sparsifier.report()
    assert sparsifier.check() == 2
    assert (report[0].shape, report[0].kept, report[0].blocks, report[0].mask_bytes) == ((4, 8), 8, 32, 32)
    assert report.metrics() == {
        "sparsity/0.weight": 0.75,
        "sparsity/2.weight": 0.75,
        "sparsity": 0.75,
        "mask_bytes": 48.0,
    }
    assert "0.weight" in str(report)
    sparsifier.squash_mask()
    assert sparsifier.check() == 2
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    with pytest.raises(SparsityError, match="0.weight: 1 of 1 scopes are wrong"):
        sparsifier.check()


@pytest.mark.parametrize("most", [1 << 40, 150])
def test_all_layers_together_get_the_masks_that_they_get_one_by_one(monkeypatch, most):
    """In batches of all layers, as on a GPU, and of few elements, as on CPU."""
    config = [
        {"tensor_fqn": "0.weight", **patterns.v_n_m(4, 2, 8)},
        {"tensor_fqn": "2.weight", "scope_coupling": "g"},
        {"tensor_fqn": "4.weight", "scope_coupling": "g", "block_shape": (1, 2)},
    ]
    masks = []
    for at_once in (0, most):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        sparsifier = prepared(model, config, sparsity_level=0.75)
        monkeypatch.setattr("sparsekit_ao.sparsifiers.scope.AT_ONCE", at_once)
        sparsifier.step()
        assert sparsifier.check() > 2
        masks.append([sparsifier.mask(g["tensor_fqn"]).clone() for g in sparsifier.groups])
    assert all(torch.equal(a, b) for a, b in zip(*masks, strict=True))


def test_values_of_keys_that_hold_tensors_are_compared_with_other_keys_lengths_and_arrays():
    budgets = [torch.tensor([1, 2]), torch.tensor([1, 2])]
    for value, other, equal in (
        ({"nnz": budgets[0], "norm": 1}, {"nnz": budgets[1], "edge": "error"}, False),
        ((budgets[0], 1), (budgets[1], 1, 2), False),
        ([{"nnz": budgets[0]}], [{"nnz": budgets[1]}], True),
        (numpy.array([1, 4]), (1, 4), True),
        (numpy.array([1, 4]), (1, 2), False),
        (numpy.array([1, 4]), (1, 4, 1), False),
        (numpy.array([0.1, 0.2]), 0.5, False),
    ):
        assert is_same(value, other) == equal

    sparsifier, counts = ScopeSparsifier(), torch.tensor([[1, 2], [3, 4]])
    stage = {"scope_shape": (1, 4), "nnz": counts}
    sparsifier.prepare(model := nn.Sequential(nn.Linear(8, 2)), [{"tensor_fqn": "*.weight", "stages": [stage]}])
    sparsifier.update_mask(model[0], "weight", stages=[{"nnz": counts.clone(), "scope_shape": (1, 4)}])
    assert sparsifier.mask("0.weight").view(2, 2, 4).sum(2).equal(counts)
    with pytest.raises(SparsityError, match="scope"):
        sparsifier.update_mask(model[0], "weight", stages=[{"nnz": counts.clone(), "norm": 1}])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("numel", [64, 1 << 15])
@pytest.mark.parametrize("block", [(), (1, 2), (2, 1), (1, -1)])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (2,)])
@pytest.mark.parametrize("value", [0.0, 1e4])
def test_numbers_and_vectors_share_a_budget_with_blocks_of_matrices(value, shape, block, numel, dtype):
    model = nn.Module()
    model.small = nn.Parameter(torch.full(shape, value, dtype=dtype))
    model.matrix = nn.Parameter(torch.rand(4, numel // 4, dtype=dtype))
    sparsifier = ScopeSparsifier(0.5)
    shared = {"scope_coupling": "all"}
    sparsifier.prepare(
        model, [{"tensor_fqn": "small", **shared}, {"tensor_fqn": "matrix", "block_shape": block, **shared}]
    )
    sparsifier.step()
    assert sparsifier.check() == 1 and bool((sparsifier.mask("small") == (value > 0)).all())
    rows, columns = [size if n == -1 else n for n, size in zip(block or (1, 1), model.matrix.shape, strict=True)]
    tiles = model.matrix.detach().double().unfold(0, rows, rows).unfold(1, columns, columns)
    total = tiles.shape[0] * tiles.shape[1] + model.small.numel()
    kept = total - total // 2 - (model.small.numel() if value else 0)
    assert sparsifier.mask("matrix").sum() == rows * columns * kept
    sparsifier.squash_mask()
    assert bool((model.small == value).all())


EMPTY = {
    "one-shot": lambda o: ScopeSparsifier(0.5),
    "RigL": lambda o: RigL(0.5, o, until=9, update_every=1),
    "SNFS": lambda o: SNFS(0.5, o, until=9, update_every=1),
    "proximal": lambda o: ProximalSparsifier(sparsity_level=0.5, optimizer=o),
}


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0)])
@pytest.mark.parametrize("name", EMPTY)
def test_empty_weights_train_beside_others_and_cannot_share_a_budget(name, shape):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    model.none = nn.Parameter(torch.empty(shape))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sparsifier = EMPTY[name](optimizer)
    sparsifier.prepare(model, [{"tensor_fqn": "*.weight"}, {"tensor_fqn": "none"}])
    for _ in range(4):
        (model[:2](torch.randn(5, 8)).square().sum() + model.none.sum()).backward()
        optimizer.step()
        sparsifier.step()
    assert sum(int(sparsifier.mask(f"{k}.weight").sum()) for k in range(2)) == 48
    assert name == "proximal" or sparsifier.check() == 2  # scopes
    sparsifier.squash_mask()
    with refuses("scope coupling 'all': none has no elements; leave it out of the shared budget"):
        ScopeSparsifier(scope_coupling="all").prepare(model, [{"tensor_fqn": ["*.weight", "none"]}])
    ScopeSparsifier(scope_coupling="all").prepare(model, [{"tensor_fqn": "*.weight"}])
