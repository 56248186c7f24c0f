"""Batches for which the model does different things, and modules that change something when they run."""

import copy

import pytest
import torch
from networks import Net
from torch import nn
from torch.nn import functional as F

from sparsekit_ao import ScopeSparsifier, SparsityError, one_shot, prune, quality, recover
from sparsekit_ao.removal import shrink


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.scale = nn.Linear(16, 16), 1.0

    def forward(self, x):
        return x + torch.relu(self.fc(x * self.scale))


class Noisy(Block):
    def forward(self, x):
        return x + torch.relu(self.fc(F.dropout(x, 0.1, training=True)))


class WritesToABuffer(Block):
    """Its outputs for inputs of one length lie in one tensor, as long as no gradients are recorded."""

    def __init__(self):
        super().__init__()
        self.made = {}

    def forward(self, x):
        made = torch.empty_like(x) if torch.is_grad_enabled() else self.made.setdefault(len(x), torch.empty_like(x))
        return made.copy_(super().forward(x))


class Counting(Block):
    """Counts its calls in a buffer, and replaces another one."""

    def __init__(self):
        super().__init__()
        self.calls, self.mean = nn.Buffer(torch.zeros(())), nn.Buffer(torch.zeros(16))

    def forward(self, x):
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().flatten(0, -2).mean(0)
        return super().forward(x)


class Merging(nn.Linear):
    """A layer with an adapter, which eval mode adds to the weight, and train mode subtracts."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.a, self.b = nn.Parameter(torch.randn(2, sizes[0])), nn.Parameter(torch.randn(sizes[1], 2))
        self.is_merged = False

    def train(self, mode=True):
        super().train(mode)
        if mode == self.is_merged:
            self.weight.data += (self.b @ self.a) * (-1 if mode else 1)
            self.is_merged = not mode
        return self

    def forward(self, x):
        return super().forward(x) + (0 if self.is_merged else x @ self.a.T @ self.b.T)


def blocks(kind=Block):
    torch.manual_seed(0)
    return nn.ModuleList(kind() for _ in range(3))


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_hidden_states_that_a_later_batch_changes_between_blocks():
    def run(m, x, image=None):
        for k, block in enumerate(m.blocks):
            x = block(x)
            x = x if image is None or k == 2 else x + image
        return x

    model = Net(run, blocks=blocks())
    text, image = (normal(64, 16),), (normal(64, 16, seed=1), 10 * normal(64, 16, seed=2))
    assert prune(model, "2:4", batches=[text, text])[1].blocks == 3
    first, second = (prune(model, "2:4", batches=batches) for batches in ([text, image], [image, text]))
    assert first[1].blocks == second[1].blocks == 0
    for a, b in zip(first[0].parameters(), second[0].parameters(), strict=True):
        torch.testing.assert_close(a, b)


def sets_scales(m, x, scale):
    for block in m.blocks:
        block.scale = scale
    for block in m.blocks:
        x = block(x)
    return x


def test_blocks_that_read_what_the_model_has_set_for_a_batch():
    model, x = Net(sets_scales, blocks=blocks()), normal(128, 16)
    scale = (torch.arange(16) % 2).float()
    halves = [(x[:64], scale), (x[64:], 1 - scale)]
    whole = [(x, torch.cat([scale.expand(64, 16), (1 - scale).expand(64, 16)]))]
    (pruned, report), (expected, _) = (prune(model, "2:4", batches=batches) for batches in (halves, whole))
    assert report.blocks == 0
    for a, b in zip(pruned.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    lengths = [(normal(1, n, 16), torch.rand(1, n, 1)) for n in (5, 7, 9)]
    assert prune(model, "2:4", batches=lengths)[1].blocks == 0


class Holds(Block):
    def __init__(self, kind):
        super().__init__()
        if kind == "a buffer":
            self.register_buffer("held", torch.ones(1))
        else:
            self.held = [1.0] if kind == "a list" else torch.ones(1)

    def forward(self, x):
        return super().forward(x * self.held[0])


@pytest.mark.parametrize("kind", ["a tensor", "a buffer", "a list"])
@pytest.mark.parametrize("first", [0, 1])
def test_blocks_that_read_what_the_model_has_set_for_a_batch_in_the_middle(kind, first):
    def sets(m, x, scale):
        for block in m.blocks[first:]:
            block.held[0] = scale
        for block in m.blocks:
            x = block(x)
        return x

    model = Net(sets, blocks=nn.ModuleList(Holds(kind) for _ in range(3)))
    batches = [(normal(64, 16, seed=k), scale) for k, scale in enumerate((1.0, 5.0, 1.0))]
    assert prune(model, "2:4", batches=batches)[1].blocks == 0
    assert prune(model, "2:4", batches=[batches[0], batches[2]])[1].blocks == 3


def test_outputs_of_the_last_block_that_lie_in_one_tensor():
    batches = [normal(32, 16), normal(64, 16, seed=1), 100 * normal(64, 16, seed=2)]
    found = []
    for kind in (Block, WritesToABuffer):
        model = nn.Sequential(nn.Sequential(*blocks(kind)), nn.Linear(16, 8))
        model[1].weight.data.copy_(normal(8, 16))
        pruned, report = prune(model, "2:4", batches=batches)
        assert report.blocks == 3
        found.append(pruned[1].weight)
    assert torch.equal(*found)


def test_a_layer_that_a_later_batch_calls_more_often():
    def run(m, x, times):
        for _ in range(times):
            x = torch.tanh(m.a(x))
        return m.b(x)

    model = Net(run, a=nn.Linear(16, 16), b=nn.Linear(16, 4))
    batches = [(normal(8, 16), 1), (normal(8, 16, seed=1), 3)]
    first, second = (prune(model, "2:4", batches=of)[0].a.weight for of in (batches, batches[::-1]))
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.flip(1),
        lambda w: w.roll(1, 1),
        lambda w: w[:, torch.arange(15, -1, -1)],
        lambda w: w.cumsum(1),
        lambda w: w.msort(),
        lambda w: torch.linalg.inv(w + 16 * torch.eye(16)),
        lambda w: torch.linalg.matrix_exp(w),
        lambda w: w.index_copy(1, torch.arange(16).flip(0), w),
        lambda w: torch.zeros_like(w).scatter_add(1, torch.arange(16).flip(0).expand(16, 16), w),
    ],
)
def test_a_weight_whose_elements_move_is_not_the_weight(change):
    model = Net(lambda m, x: F.linear(x, change(m.a.weight), m.a.bias), a=nn.Linear(16, 16))
    with pytest.warns(UserWarning, match="no batch reached a.weight"):
        (row,) = prune(model, "2:4", batches=[normal(256, 16) * torch.logspace(-2, 2, 16)])[1]
    assert row.note and row.after != row.after  # nothing is known of its inputs


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("outputs", [None, "mse", "kl"])
def test_batches_that_are_not_finite_are_refused(at, outputs):
    dense, batches = nn.Sequential(*blocks()), [normal(32, 16, seed=k) for k in range(16)]
    model = prune(dense, "2:4", batches=batches)[0]
    batches[at][0, 0] = float("nan")
    with pytest.raises(SparsityError, match="recover: .*not finite"):
        recover(model, dense, batches, outputs=outputs)


def test_random_numbers_of_blocks_are_those_of_the_batch(tmp_path):
    model, batches = nn.Sequential(*blocks(Noisy)), [normal(64, 16, seed=k) for k in range(2)]
    state = torch.random.get_rng_state()
    first = prune(model, "2:4", batches=batches, recover=1)[0]
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.rand(3)
    again = prune(model, "2:4", batches=batches, recover=1)[0]
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))


def test_buffers_stay_in_a_dry_run_and_in_a_comparison():
    model, batches = nn.Sequential(nn.Linear(16, 16), Counting()), [normal(64, 16, seed=k) for k in range(2)]
    other = copy.deepcopy(model)
    for options in ({}, {"recover": True}, {"inplace": True}):
        prune(model, "2:4", batches=batches, dry_run=True, **options)
    quality(model, other, batches)
    assert all(not b.any() for one in (model, other) for b in one.buffers())
    model(batches[0])
    assert model[1].calls == 1


class Remembers(nn.Module):
    """Keeps state in attributes beside its buffers, some of which come, go or grow with a forward."""

    def __init__(self, kind):
        super().__init__()
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("seen", None)
        self.kind, self.done, self.calls = kind, False, torch.zeros(())

    def forward(self, x):
        if self.kind == "a flag" and not self.done:
            self.scale.copy_(x.abs().max())
            self.done = True
        if self.kind == "a size":
            self.scale.resize_(len(x)).fill_(2)
        if self.kind == "a buffer that is empty":
            self.seen = x.mean() if self.seen is None else self.seen
        if self.kind == "a tensor":
            self.calls += 1
        if self.kind == "a new buffer" and not hasattr(self, "other"):
            self.register_buffer("other", x.mean())
        return x / self.scale.max() + (0 if self.seen is None else self.seen) + getattr(self, "other", 0) + self.calls


@pytest.mark.parametrize("kind", ["a flag", "a size", "a tensor", "a buffer that is empty", "a new buffer"])
@pytest.mark.parametrize("call", ["a dry run", "in place", "quality"])
def test_states_of_modules_stay(kind, call):
    model, batches = nn.Sequential(nn.Linear(16, 16), Remembers(kind)).eval(), [normal(64, 16, seed=k) for k in (0, 1)]
    wanted = [copy.deepcopy(model)(batch) for batch in (torch.ones(3, 16), *batches)]
    if call == "quality":
        quality(copy.deepcopy(model), model, batches)
    else:
        prune(model, "2:4", batches=batches, dry_run=True, inplace=call == "in place")
    found = [copy.deepcopy(model)(batch) for batch in (torch.ones(3, 16), *batches)]
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


@pytest.mark.parametrize("lazy", [nn.LazyLinear, lambda n: nn.Sequential(nn.LazyBatchNorm1d(), nn.LazyLinear(n))])
def test_lazy_modules_that_a_comparison_runs_are_whole(lazy):
    model, batches = nn.Sequential(lazy(8), nn.Linear(8, 8)).eval(), [normal(8, 16)]
    quality(nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 8)), model, batches)
    assert model(batches[0]).shape == (8, 8) and "features=0" not in str(model) and "(0," not in str(model)


def test_batches_stay_where_a_model_changes_its_inputs():
    model = Net(lambda m, x: m.fc(x.mul_(2.0)), fc=nn.Linear(16, 4))
    batches = [normal(8, 16)]
    loss = {"forward": lambda m, x: m(x).square().mean(), "compensate": "least_squares"}
    prune(model, "2:4", batches=batches, score="taylor", **loss)
    sparsifier = ScopeSparsifier(nnz=2, scope_shape=(1, 4), score="wanda")
    sparsifier.prepare(model)
    sparsifier.calibrate(batches)
    assert torch.equal(batches[0], normal(8, 16))


@pytest.mark.parametrize("call", ["quality", "prune", "shrink"])
def test_layers_that_act_in_eval_mode_are_as_they_were(call):
    model = nn.Sequential(Merging(8, 32), nn.ReLU(), Merging(32, 4)).train()
    weight, batches = model[0].weight.clone(), [normal(16, 8)]
    if call == "quality":
        made = copy.deepcopy(model)
        quality(model, made, batches)
    else:
        pruned = prune(model, 0.5, batches=batches, exclude=["*.a", "*.b"]) if call == "prune" else None
        made = (pruned or shrink(model, ratio=0.5, batches=batches))[0]
    for one in (model, made):
        assert one.training and one[0].training and not one[0].is_merged
    torch.testing.assert_close(model[0].weight, weight)


def test_budgets_that_differ_between_scopes_are_not_for_sparsegpt():
    budgets = torch.ones(8, 4, dtype=torch.int64)
    budgets[4:] = 3
    sparsifier = ScopeSparsifier(scope_shape=(1, 4), nnz=budgets)
    sparsifier.prepare(nn.Sequential(nn.Linear(16, 8)))
    with pytest.raises(
        SparsityError, match="compensate='sparsegpt' knows only N:M along the inputs, the same everywhere"
    ):
        one_shot(sparsifier, [normal(64, 16)], compensate="sparsegpt")
    one_shot(sparsifier, [normal(64, 16)], compensate="admm")
    sparsifier.check()


def test_a_part_of_a_convolutions_weight_is_not_recorded():
    model = Net(lambda m, x: F.conv2d(x, m.b.weight[:, :8], m.b.bias), b=nn.Conv2d(16, 4, 3))
    with pytest.warns(UserWarning, match="no batch reached b.weight"):
        (row,) = prune(model, "2:4", batches=[normal(4, 8, 6, 6)])[1]
    assert row.note and row.after != row.after


def test_rows_of_zeros_in_both_models_are_alike():
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU())
    report = quality(model, copy.deepcopy(model), [normal(256, 8)])
    assert report.mean.cosine == pytest.approx(1) and report.mean.error == 0
