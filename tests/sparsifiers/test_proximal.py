"""ProximalSparsifier: strengths and budgets in the optimizer's metric, torch.ao's interface, hand-over of the zeros."""

import copy
import itertools
from functools import partial

import pytest
import torch
from stock import prepared, refuses, stepped
from torch import nn
from torch.nn import functional as F

from sparsekit_ao import (
    BlockCoupling,
    BlockSpec,
    DynamicSparsifier,
    ProximalSparsifier,
    ScopeSparsifier,
    patterns,
    schedules,
)
from sparsekit_ao.schedules import ScheduleSL

proximal = partial(prepared, kind=ProximalSparsifier)


def linear(out=4, inputs=8, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, out, bias=False)).to(dtype)


def train(model, optimizer, steps=1, sparsifier=None, seed=0, inputs=8):
    g = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        x = torch.randn(16, inputs, generator=g).to(dtype)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if sparsifier is not None:
            sparsifier.step()


OPTIMIZERS = {
    "SGD": (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), lambda s, o: torch.tensor(1 / 0.1)),
    "Adam": (
        lambda p: torch.optim.Adam(p, 0.01, betas=(0.8, 0.9), eps=1e-3),
        lambda s, o: ((s["exp_avg_sq"] / (1 - 0.9**3)).sqrt() + 1e-3) / 0.01,
    ),
    "AdamW, amsgrad": (
        lambda p: torch.optim.AdamW(p, torch.tensor(0.01), amsgrad=True, foreach=False),
        lambda s, o: ((s["max_exp_avg_sq"] / (1 - 0.999**3)).sqrt() + 1e-8) / 0.01,
    ),
    "RMSprop": (lambda p: torch.optim.RMSprop(p, 0.01), lambda s, o: (s["square_avg"].sqrt() + 1e-8) / 0.01),
    "RMSprop, centered": (
        lambda p: torch.optim.RMSprop(p, 0.01, centered=True),
        lambda s, o: ((s["square_avg"] - s["grad_avg"] ** 2).sqrt() + 1e-8) / 0.01,
    ),
    "Adagrad": (
        lambda p: torch.optim.Adagrad(p, 0.1, lr_decay=0.5),
        lambda s, o: (s["sum"].sqrt() + 1e-10) / (0.1 / (1 + 2 * 0.5)),
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_the_operator_in_the_optimizers_metric(name):
    make, diagonal = OPTIMIZERS[name]
    model = linear()
    optimizer = make(model.parameters())
    sparsifier = proximal(model, strength=0.5, optimizer=optimizer, pattern=patterns.columns())
    train(model, optimizer, 3)
    weight = model[0].weight
    expected = weight.detach().clone()
    BlockSpec(expected, (-1, 1)).soft_threshold(0.5, diagonal(optimizer.state[weight], None).expand(4, 8).contiguous())
    sparsifier.step()
    torch.testing.assert_close(weight.detach(), expected)
    assert torch.equal(sparsifier.mask("0.weight"), (weight != 0).any(0).expand(4, 8))


@pytest.mark.parametrize("conditioner", [None, lambda o, p: 1 / o.param_groups[0]["lr"]])
@pytest.mark.parametrize("make", [lambda p: torch.optim.Adam(p, 0.1), lambda p: torch.optim.SGD(p, 0.1)])
def test_without_a_diagonal_the_step_size_is_the_learning_rate(make, conditioner):
    model = linear()
    optimizer = make(model.parameters())
    sparsifier = proximal(model, strength=3.0, optimizer=optimizer, conditioner=conditioner, block_shape=(1, -1))
    train(model, optimizer)
    expected = model[0].weight.detach().clone()
    BlockSpec(expected, (1, -1)).soft_threshold(0.1 * 3.0)
    sparsifier.step()
    torch.testing.assert_close(model[0].weight.detach(), expected)


N = 32


UNITS = {"unit": "u", "block_coupling": "units", "nnz": 7}
PATTERNS = {  # config entries of a model of two layers of N x N, or of a convolution
    "in every row": [{"tensor_fqn": "*.weight", "scope_shape": (1, -1), "nnz": 5}],
    "2:4": [{"tensor_fqn": "*.weight", **patterns.n_m(2, 4)}],
    "blocks": [{"tensor_fqn": "*.weight", **patterns.blocks(8, 8, sparsity_level=0.5)}],
    "rows": [{"tensor_fqn": "*.weight", **patterns.rows(0.5)}],
    "V:N:M": [{"tensor_fqn": "*.weight", **patterns.v_n_m(16, 2, 8)}],
    "partial": [{"tensor_fqn": "*", "block_shape": (5, 3), "scope_shape": (2, 4), "edge": "partial", "nnz": 3}],
    "global": [{"tensor_fqn": "*.weight", "scope_coupling": "global", "sparsity_level": 0.8}],
    "coupled": [{"tensor_fqn": "0.weight", "axes": "u i", **UNITS}, {"tensor_fqn": "2.weight", "axes": "o u", **UNITS}],
    "filters": [{"tensor_fqn": "*.weight", **patterns.filters(0.5)}],
}


def model_of(name):
    torch.manual_seed(0)
    if name == "filters":
        return nn.Sequential(nn.Unflatten(1, (8, 2, 2)), nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.Flatten())
    return nn.Sequential(nn.Linear(N, N, bias=False), nn.ReLU(), nn.Linear(N, N, bias=False))


@pytest.mark.parametrize("shape", [(7, 6), (8, 5), (9, 9), (3, 4), (6, 10)])
def test_blocks_of_different_sizes_shrink_by_the_threshold_per_element(shape):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(shape[1], shape[0], bias=False, dtype=torch.float64))
    entry = {"tensor_fqn": "0.weight", "block_shape": (2, 3), "edge": "partial", "sparsity_level": 0.4}
    sparsifier, before = proximal(model, [entry], conditioner=None), model[0].weight.detach().clone()
    sparsifier.step()
    after, corners = model[0].weight.detach(), itertools.product(range(0, shape[0], 2), range(0, shape[1], 3))
    blocks = [(slice(i, i + 2), slice(j, j + 3)) for i, j in corners]
    means = {at: float(before[block].square().mean().sqrt()) for at, block in enumerate(blocks)}
    kept = [at for at, block in enumerate(blocks) if after[block].any()]
    middle = (min(means[at] for at in kept) + max(means[at] for at in means.keys() - {*kept})) / 2
    for at in kept:  # each is multiplied by one minus the ratio of the threshold and its root mean square
        torch.testing.assert_close(after[blocks[at]], before[blocks[at]] * (1 - middle / means[at]))


@pytest.mark.parametrize("name", PATTERNS)
def test_exactly_the_budget_is_left_in_every_scope_by_adam(name):
    model = model_of(name)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    sparsifier = proximal(model, PATTERNS[name], optimizer=optimizer)
    target = torch.randn(16, N, generator=torch.Generator().manual_seed(1))
    for step in range(40):
        optimizer.zero_grad()
        F.mse_loss(model(target), target).backward()
        optimizer.step()
        sparsifier.step()
        if step % 20 in (0, 19):
            assert sparsifier.check() > 0
            assert all(torch.equal(sparsifier.mask(n), p != 0) for n, p in model.named_parameters()), step
    assert sparsifier.iteration == 40 and sparsifier.check() > 0
    sparsifier.squash_mask()
    assert sparsifier.check() > 0 and not hasattr(model[0], "parametrizations")


def test_the_budgets_threshold_is_between_the_last_kept_and_the_first_dropped():
    model = linear()
    sparsifier = proximal(model, nnz=3, conditioner=None, block_shape=(1, 1))
    before = model[0].weight.detach().clone()
    sparsifier.step()
    ordered = before.abs().flatten().sort(descending=True).values
    expected = before.clone()
    BlockSpec(expected).soft_threshold(float(ordered[2:4].mean()))
    torch.testing.assert_close(model[0].weight.detach(), expected)
    assert int((expected != 0).sum()) == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_ties_of_small_weights_leave_the_budget_in_any_dtype(dtype):
    model = linear(16, 16)
    with torch.no_grad():
        model[0].weight.copy_(torch.randint(-3, 4, (16, 16)) * 1e-3)
    model.to(dtype)
    stepped(model, kind=ProximalSparsifier, nnz=7, conditioner=None)
    assert int((model[0].weight != 0).sum()) == 7


def test_levels_follow_a_scheduler():
    model = linear()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    sparsifier = proximal(model, sparsity_level=0.75, optimizer=optimizer)
    scheduler = ScheduleSL(sparsifier, schedules.linear(0.0, 0.75, 8))
    left = []
    for _ in range(9):
        train(model, optimizer, 1, sparsifier)
        left.append(int((model[0].weight != 0).sum()))
        scheduler.step()
    assert left == [32, 29, 26, 23, 20, 17, 14, 11, 8]


def test_a_strength_may_be_a_schedule_and_an_entry_may_have_its_own():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sparsifier = proximal(
        model,
        [{"tensor_fqn": "0.weight"}, {"tensor_fqn": "1.weight", "strength": 0.5}, {"tensor_fqn": "2.weight", "nnz": 9}],
        strength=schedules.linear(0.0, 2.0, 4),
        optimizer=optimizer,
    )
    for step in range(6):
        train(model, optimizer)
        expected = [layer.weight.detach().clone() for layer in model]
        BlockSpec(expected[0]).soft_threshold(0.1 * min(step / 4, 1) * 2.0)
        BlockSpec(expected[1]).soft_threshold(0.1 * 0.5)
        sparsifier.step()
        for layer, value in zip(model[:2], expected, strict=False):
            torch.testing.assert_close(layer.weight.detach(), value)
        assert int((model[2].weight != 0).sum()) == 9
    assert "strength" not in sparsifier.groups[2] and sparsifier.groups[1]["sparsity_level"] == 0


def test_coupled_tensors_share_the_norm_of_their_union():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3, bias=False))
    optimizer = torch.optim.Adam([{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.5}], 0.1)
    units = {"unit": "u", "block_coupling": "units"}
    sparsifier = proximal(
        model,
        [
            {"tensor_fqn": "0.weight", "axes": "u i", **units},
            {"tensor_fqn": "0.bias", "axes": "u", **units},
            {"tensor_fqn": "1.weight", "axes": "o u", **units},
        ],
        strength=0.7,
        optimizer=optimizer,
    )
    train(model, optimizer, 2, inputs=6)
    params = [model[0].weight, model[0].bias, model[1].weight]
    copies = [p.detach().clone() for p in params]
    state = [(optimizer.state[p]["exp_avg_sq"] / (1 - 0.999**2)).sqrt() + 1e-8 for p in params]
    diagonals = {c: s / lr for c, s, lr in zip(copies, state, (0.1, 0.1, 0.5), strict=True)}
    specs = [BlockSpec(copies[0], (1, -1)), BlockSpec(copies[1]), BlockSpec(copies[2], (-1, 1))]
    BlockCoupling(specs, [None, None, (1, 0)]).soft_threshold(0.7, diagonals)
    sparsifier.step()
    for parameter, expected in zip(params, copies, strict=True):
        torch.testing.assert_close(parameter.detach(), expected)


def test_a_channels_last_weight_under_a_row_major_view():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 4, 3, bias=False)).to(memory_format=torch.channels_last)
    sparsifier = stepped(
        model,
        [{"tensor_fqn": "0.weight", "view": ((4, 36), (36, 1)), "block_shape": (1, 4), "scope_shape": (1, -1)}],
        kind=ProximalSparsifier,
        nnz=2,
        conditioner=None,
    )
    weight = model[0].weight.detach().contiguous().view(4, 9, 4)
    assert weight.ne(0).any(2).sum(1).tolist() == [2] * 4
    assert torch.equal(sparsifier.mask("0.weight").contiguous().view(4, 9, 4).any(2), weight.ne(0).any(2))


def test_without_an_optimizers_step_nothing_changes():
    """Gradient accumulation: `sparsifier.step()` after every backward acts after the optimizer's steps alone."""
    model = linear()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    sparsifier = proximal(model, strength=0.5, optimizer=optimizer)
    for micro in range(1, 9):
        model(torch.ones(2, 8)).square().mean().backward()
        if micro % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
        before = model[0].weight.detach().clone()
        sparsifier.step()
        assert torch.equal(model[0].weight, before) == (micro % 4 != 0)
    assert sparsifier.iteration == 2


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_gradient_scaling_skips_are_skipped(fused):
    model = linear()
    optimizer = torch.optim.Adam(model.parameters(), 0.01, fused=fused)
    sparsifier = proximal(model, strength=0.5, optimizer=optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(6):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 8)).square().mean()
        scaler.scale(loss * (float("inf") if step in (0, 3) else 1)).backward()
        before = model[0].weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        sparsifier.step()
        assert torch.equal(model[0].weight, before) == (step in (0, 3))
    assert sparsifier.iteration == 4


def test_an_optimizer_that_was_not_attached_is_noticed():
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    sparsifier = proximal(model, strength=0.5, optimizer=optimizer)
    train(model, optimizer, sparsifier=sparsifier)
    another = torch.optim.Adam(model.parameters(), 0.01)
    with pytest.warns(UserWarning, match="0.weight was changed, but not by an attached optimizer, so it is not shrunk"):
        train(model, another, sparsifier=sparsifier)
    sparsifier.attach(another)
    train(model, another, 2, sparsifier)
    assert sparsifier.iteration == 3


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_tensor_without_gradient_stays_in_the_step_that_shrinks_others(kind):
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    model[2].weight.requires_grad_(False)
    optimizer = kind(model.parameters(), lr=0.1)
    sparsifier = proximal(model, [{"tensor_fqn": f"{k}.weight"} for k in range(3)], strength=0.1, optimizer=optimizer)
    before = [layer.weight.detach().clone() for layer in model]

    def closure():  # gradients that appear inside of the step count too, and so do those that are freed there
        optimizer.zero_grad()
        loss = model[0](torch.ones(2, 8)).square().sum()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
        twin = copy.deepcopy((model, optimizer, sparsifier))
        for own, _, one in ((model, optimizer, sparsifier), twin):
            moved = own[0].weight.detach().clone()
            one.step()
            assert not torch.equal(own[0].weight, moved)
            assert all(torch.equal(own[k].weight, before[k]) for k in (1, 2))


def run_of(strength):
    model = linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    sparsifier = proximal(model, strength=strength, optimizer=optimizer, pattern=patterns.rows())
    return model, optimizer, sparsifier


def test_a_snapshot_can_be_squashed_alone():
    model, optimizer, sparsifier = run_of(2.0)
    train(model, optimizer, 30, sparsifier)
    snapshot = copy.deepcopy(model)
    with torch.no_grad():
        snapshot[0].weight.add_(1.0)
    sparsifier.squash_mask(model=snapshot)
    assert torch.equal(snapshot[0].weight != 0, sparsifier.mask("0.weight")) and sparsifier.report()


def test_squash_writes_the_zeros_that_the_optimizer_has_moved_since():
    model, optimizer, sparsifier = run_of(0.5)
    train(model, optimizer, 5, sparsifier)
    sparsifier.groups[0].pop("strength")
    sparsifier.groups[0]["nnz"] = 3
    train(model, optimizer, 1, sparsifier)
    mask = sparsifier.mask("0.weight").clone()
    assert mask.any(1).sum() == 3
    train(model, optimizer)
    assert model[0].weight.all()
    sparsifier.squash_mask(params_to_keep=("nnz",))
    assert torch.equal(model[0].weight != 0, mask) and model[0].sparse_params == {"nnz": 3}
    with refuses("squash_mask: the masks were squashed already"):
        sparsifier.squash_mask()


@pytest.mark.parametrize("name", ["rows", "2:4", "in every row", "coupled", "V:N:M", "global", "blocks"])
def test_the_zeros_become_fixed_masks(name):
    model = model_of(name)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    sparsifier = proximal(model, PATTERNS[name], optimizer=optimizer)
    train(model, optimizer, 3, sparsifier, inputs=N)
    masks = {k: sparsifier.mask(k).clone() for k in ("0.weight", "2.weight")}
    fixed = sparsifier.to_masks()
    assert isinstance(fixed, ScopeSparsifier) and fixed.check() > 0
    train(model, optimizer, 3, fixed, inputs=N)
    for k, layer in ((0, model[0]), (2, model[2])):
        assert torch.equal(fixed.mask(f"{k}.weight"), masks[f"{k}.weight"])
        assert torch.equal(layer.weight != 0, masks[f"{k}.weight"])
    fixed.squash_mask()
    with refuses("to_masks: the masks were squashed already"):
        sparsifier.to_masks()


def test_a_strength_leaves_scopes_of_different_counts_which_become_budgets():
    model = linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sparsifier = proximal(model, strength=1.5, optimizer=optimizer, scope_shape=(1, -1))
    train(model, optimizer, 1, sparsifier)
    kept = sparsifier.mask("0.weight").sum(1)
    fixed = sparsifier.to_masks()
    assert len(kept.unique()) > 1 and torch.equal(fixed.groups[0]["nnz"].flatten(), kept)
    assert fixed.check() == 8
    fixed.enable_mask_update = True
    fixed.step()  # by magnitude: the same masks
    assert torch.equal(fixed.mask("0.weight").sum(1), kept) and fixed.check() == 8


def test_the_zeros_become_masks_that_move():
    model, optimizer, sparsifier = run_of(0.5)
    with torch.no_grad():
        model[0].weight[2:5] = 0
        model[0].weight[0, 3] = 0  # a stray zero in a kept block
    sparsifier.step()
    sparsifier._state["0.weight"]["mask"] = (model[0].weight != 0).any(1, keepdim=True).expand(8, 8).clone()
    with refuses('DynamicSparsifier would choose masks of its own; make a DynamicSparsifier with init="resume"'):
        sparsifier.to_masks(DynamicSparsifier(init="uniform"))
    moving = sparsifier.to_masks(DynamicSparsifier(optimizer=optimizer, init="resume", update_every=1))
    assert moving.mask("0.weight").all(1).tolist() == [True] * 2 + [False] * 3 + [True] * 3
    train(model, optimizer, 2, moving)
    assert int(moving.mask("0.weight").all(1).sum()) == 5


def test_what_a_proximal_sparsifier_cannot_honour_is_not_offered():
    model = linear()
    sparsifier = proximal(model, nnz=5, conditioner=None)
    before = model[0].weight.clone()
    with refuses("a proximal step changes weights; call step()"):
        sparsifier.update_mask(model[0], "weight", nnz=3)
    assert torch.equal(model[0].weight, before)
    assert not hasattr(sparsifier, "calibrate") and not hasattr(sparsifier, "statistics")


# mistakes


def attached(optimizer, **options):
    model = linear()
    sparsifier = proximal(model, strength=1.0, **options)
    sparsifier.attach(optimizer(model.parameters()))


def entry(defaults, **keys):
    return lambda: ProximalSparsifier(**defaults).prepare(linear(), [{"tensor_fqn": "0.weight", **keys}])


def new(**arguments):
    return lambda: ProximalSparsifier(**arguments)


def coupled_strengths():
    entries = [{"tensor_fqn": f"{k}.weight", "strength": s, "scope_coupling": "all"} for k, s in enumerate((1.0, 2.0))]
    ProximalSparsifier().prepare(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), entries)


def scheduled():
    _, _, sparsifier = run_of(0.5)
    sparsifier.groups[0]["sparsity_level"] = 0.5
    sparsifier.step()


def of_weight_norm():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 4)))
    ProximalSparsifier(strength=1.0).prepare(model, [{"tensor_fqn": "0.weight"}])


def without_an_optimizer():
    stepped(linear(), kind=ProximalSparsifier, strength=1.0)


def of_no_strength():
    model, optimizer, sparsifier = run_of(lambda step: -1.0)
    train(model, optimizer, 1, sparsifier)


BOTH = "strength and a budget are mutually exclusive"
MISTAKES = [
    (new(strength=1.0, sparsity_level=0.5), "strength was given with a budget (sparsity_level, nnz, pattern); "),
    (new(strength=1.0, pattern=patterns.n_m(2, 4)), "strength was given with a budget"),
    (new(nnz=2, sparsity_level=0.5), "mutually exclusive"),
    (new(strength=-1.0), "strength must be a schedule or a finite number >= 0, got -1.0"),
    (new(strength="much"), "strength must be a schedule or a finite number"),
    (new(strength=float("nan")), "strength must be a schedule or a finite number"),
    (new(strength=1.0, conditioner="adam"), "conditioner must be 'auto', None or a function"),
    (new(strength=1.0, optimizer=3), "optimizer must be a torch optimizer or several, got int"),
    (entry({}), "config[0]: how much to drop is missing; give strength, sparsity_level or nnz, here or as a default"),
    (entry({}, strength=1.0, nnz=2), f"config[0]: {BOTH}"),
    (entry({}, strength=1.0, pattern=patterns.n_m(2, 4)), f"config[0]: {BOTH}"),
    (entry({"strength": 1.0}, stages=[{"nnz": 2, "scope_shape": (1, 4)}]), BOTH),
    (entry({}, strength=-1), "strength must be a schedule or a finite number"),
    (entry({}, strength=1.0, norm=1), "unknown key 'norm'"),
    (lambda: attached(torch.optim.NAdam), "0.weight: NAdam has no diagonal that is known here"),
    (lambda: attached(lambda p: torch.optim.SGD(linear().parameters(), 0.1)), "0.weight: exactly one optimizer must"),
    (coupled_strengths, "scope coupling 'all': members need the same strength, got [1.0, 2.0]"),
    (scheduled, "0.weight: sparsity_level was set to 0.5, but this tensor has a strength"),
    (of_weight_norm, "a parametrization computes this weight, so it cannot be changed in place"),
    (without_an_optimizer, "step: the learning rate is needed, but no optimizer is attached; call"),
    (of_no_strength, "0.weight: the schedule of the strength must return a finite number >= 0, got -1.0"),
]


@pytest.mark.parametrize(("call", "text"), MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake_is_explained(call, text):
    with refuses(text):
        call()
    attached(torch.optim.NAdam, conditioner=None)


@pytest.mark.parametrize("found", [torch.ones(2, 2), torch.zeros(4, 8), torch.full((4, 8), float("nan")), -1.0, None])
def test_a_function_must_return_a_positive_diagonal(found):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sparsifier = proximal(model, strength=1.0, optimizer=optimizer, conditioner=lambda o, p: found)
    train(model, optimizer)
    before = model[0].weight.clone()
    with refuses("0.weight: conditioner must return"):
        sparsifier.step()
    assert torch.equal(model[0].weight, before)


def test_sharded_weights_are_refused(tmp_path):
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/f", rank=0, world_size=1)
    try:
        model, _, _ = run_of(0.5)
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh, [Shard(0)]))
        with refuses("0.weight: it is sharded over ranks, and proximal steps need whole tensors"):
            ProximalSparsifier(strength=1.0).prepare(model)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("coupled", [False, True])
def test_check_says_which_weights_no_step_reaches(coupled):
    model = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("used", "unused", "also")})
    config = [{"tensor_fqn": f"{name}.weight"} for name in model]
    if coupled:  # also has a gradient, but is shrunk only together with unused
        config[1:] = [{**entry, "block_shape": (1, -1), "block_coupling": "c"} for entry in config[1:]]
    else:
        config = [{"tensor_fqn": "*weight"}]

    def trained(exclude):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        sparsifier = ProximalSparsifier(sparsity_level=0.5, optimizer=optimizer)
        sparsifier.prepare(model, config, exclude=exclude)
        for _ in range(2):
            optimizer.zero_grad()
            model["also"](model["used"](torch.randn(4, 8))).square().sum().backward()
            optimizer.step()
            sparsifier.step()
        return sparsifier

    sparsifier = trained([])
    with refuses("unused.weight, also.weight had no step yet" if coupled else "\nunused.weight had no step yet"):
        sparsifier.check()
    sparsifier.squash_mask()
    if not coupled:  # as the error advises
        assert trained(["unused"]).check() == 2
