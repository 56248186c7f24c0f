"""A dry run of `shrink` has the sizes of the real one, and changes nothing."""

import copy

import pytest
import torch
from grids import nightly_except
from networks import NETWORKS, Net, skip
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from sparsekit_ao import SparsityError, shrink


def llama():
    keys = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 50}
    return LlamaForCausalLM(LlamaConfig(**keys, num_hidden_layers=2, num_key_value_heads=2)).eval()


IDS = [torch.randint(50, (2, 8), generator=torch.Generator().manual_seed(k)) for k in range(3)]
ROWS = [torch.randn(5, 8, generator=torch.Generator().manual_seed(k)) for k in range(3)]


def blocks():
    """Two blocks around a residual stream."""
    layers = (skip(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(2))
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(*layers), nn.Linear(8, 3)).eval()


CASES = {
    "llama": (llama, lambda: None, {"ratio": 0.5, "batches": IDS, "recover": True}),
    "llama, flops": (llama, lambda: IDS[0], {"ratio": 0.3, "budget": "flops", "keep_config": False}),
    "VGG, flops": (*NETWORKS["VGG"], {"ratio": 0.3, "budget": "flops"}),
}


@pytest.mark.parametrize("case", nightly_except(CASES, "llama", "VGG, flops"))
def test_a_dry_run_has_the_sizes_of_the_real_one_and_changes_nothing(case):
    torch.manual_seed(0)
    make, inputs, options = CASES[case]
    model = make()
    example, before, state = inputs(), copy.deepcopy(model.state_dict()), torch.get_rng_state()
    same, plan = shrink(model, example, **options, dry_run=True)
    assert same is model and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    report = shrink(model, example, **options)[1]
    assert (plan.before, plan.after) == (report.before, report.after) and plan.after.parameters < plan.before.parameters
    assert plan.couplings == report.couplings and plan.left_out == report.left_out and plan.frozen == report.frozen
    assert str(plan).startswith("dry run: nothing was removed") and "largest relative difference" not in str(plan)


def test_a_dry_run_reads_one_batch_alone():
    seen = []

    def forward(model, batch):
        seen.append(batch)
        return model(batch)

    shrink(blocks(), batches=ROWS, forward=forward, recover=True, dry_run=True)
    assert seen and all(torch.equal(batch, seen[0]) for batch in seen)


@pytest.mark.parametrize("how", ["tensor", "padded", "images", "tuple"])
def test_the_trials_of_a_dry_run_read_few_rows_and_tokens(how, monkeypatch):
    def run(m, input_ids, attention_mask=None):
        x = m.embed(input_ids)
        return m.blocks(x if attention_mask is None else x * attention_mask[..., None])

    ids, most = torch.randint(50, (6, 80), generator=torch.Generator().manual_seed(0)), 12
    if how == "images":
        head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), *head).eval()
        inputs = torch.randn(6, 3, 12, 12)
    elif how == "tuple":
        model, inputs = Pair().eval(), (torch.randn(6, 5, 8), torch.randn(6, 5, 8))
    else:
        mask = torch.ones_like(ids)
        mask[:, :70] = 0  # the first 64 tokens of each row are padding alone
        inputs = ids if how == "tensor" else {"input_ids": ids, "attention_mask": mask}
        model = type("Tokens", (Net,), {})(run, embed=nn.Embedding(50, 8), blocks=blocks())
    rows, call = [], type(model).__call__

    def counted(self, *args, **kwargs):
        rows.append(len(next(x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))))
        return call(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "__call__", counted)
    plan = shrink(model, inputs, 0.5, dry_run=True)[1]
    assert sum(count > 2 for count in rows) <= most < len(rows)
    assert plan.couplings == shrink(model, inputs, 0.5)[1].couplings


@pytest.mark.parametrize("shape", [(2, 80), (80, 4)])
def test_what_fails_on_all_rows_and_tokens_alone_is_left_out(shape):
    def run(m, ids):
        x = m.up(m.words(ids)).relu()
        x = x.unflatten(-1, (2, 8)).flatten(-2) if max(ids.shape) > 64 else x
        return m.last(m.other(m.down(x)).relu())

    layers = {"up": nn.Linear(8, 16), "down": nn.Linear(16, 8), "other": nn.Linear(8, 12), "last": nn.Linear(12, 3)}
    model, ids = Net(run, words=nn.Embedding(20, 8), **layers), torch.randint(20, shape)
    small, report = shrink(model, ids, 0.5)
    assert (small.up.out_features, small.other.out_features) == (16, 6)
    assert report.left_out and all("does not run" in why for why in report.left_out)
    assert shrink(model, ids, 0.5, dry_run=True)[1].left_out == report.left_out
    small, _ = shrink(model, ids, 0.5, budget="flops")
    assert small.up.out_features == 16 > 12 > small.other.out_features


class Pair(nn.Module):
    """A model of two inputs."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x, y):
        return self.out(F.relu(self.a(x)) * F.relu(self.b(y)))


def test_a_dry_run_says_what_the_call_would_take():
    for keys in ({}, {"recover": True}, {"compensate": None}):
        plan = shrink(blocks(), batches=ROWS, dry_run=True, **keys)[1]
        assert plan.seconds > 0 and plan.memory >= plan.after.bytes
        assert str(plan).splitlines()[1].startswith("the call would take about ")
    assert shrink(blocks(), ROWS[0])[1].seconds != plan.seconds


class Sizes:
    """A config that all layers share."""

    def __init__(self, **sizes):
        vars(self).update(sizes)

    def to_dict(self):
        return dict(vars(self))


def attend(m, x):
    q, k, v = (f(x).unflatten(-1, (m.config.heads, 4)).transpose(1, 2) for f in (m.q, m.k, m.v))
    return x + m.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def widened(m, x):
    return x + m.down(m.up(x).relu().view(*x.shape[:-1], m.config.inner))


def gated(m, x):
    gate, up = m.up(x).view(*x.shape[:-1], m.config.inner, 2).unbind(-1)
    return x + m.down(gate.sigmoid() * up)


def stack(run, config, **widths):
    def make():
        blocks = [
            Net(run, config=config(), **{name: nn.Linear(*sizes) for name, sizes in widths.items()}) for _ in range(3)
        ]
        for block in blocks[1:]:
            block.config = blocks[0].config
        ends = {"inp": nn.Linear(8, 16), "out": nn.Linear(16, 4)}
        return Net(lambda m, x: m.out(nn.Sequential(*m.layers)(m.inp(x))), layers=nn.ModuleList(blocks), **ends)

    return make


def alike(check):
    """Two branches that must have equally many units, as `check` finds out in the forward."""

    def run(m, x):
        check(m)
        return m.c(m.a(x).relu()) + m.d(m.b(x).relu())

    return lambda: Net(run, a=nn.Linear(8, 12), b=nn.Linear(8, 12), c=nn.Linear(12, 4), d=nn.Linear(12, 4))


def refuse(condition):
    if condition:
        raise RuntimeError("these layers differ")


QKVO = dict.fromkeys("qkvo", (16, 16))
CONTRADICTIONS = {  # {model: (how it is made, its ratios)}, of which the call leaves some out in its last step
    "one number of heads": (stack(attend, lambda: Sizes(heads=4), **QKVO), {"*": 0.5, "layers.0.q": 0.25}),
    "one inner size": (
        stack(widened, lambda: Sizes(inner=24), up=(16, 24), down=(24, 16)),
        {"*": 0.5, "layers.1": 0.25},
    ),
    "gates": (
        stack(gated, lambda: Sizes(inner=12), up=(16, 24), down=(12, 16)),
        {"layers.0.up": 0.25, "layers.2.up": 0.5},
    ),
    "branches": (alike(lambda m: refuse(len(m.a.weight) != len(m.b.weight))), {"a": 0.5, "b": 0.25}),
    "in training": (
        alike(lambda m: refuse(m.training and m.c.in_features != m.d.in_features)),
        {"a": 0.25, "b": 0.5},
    ),
    "a sum of sizes": (alike(lambda m: refuse(m.a.out_features + m.b.out_features == 15)), {"a": 0.5, "b": 0.25}),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_dry_run_leaves_out_what_the_call_leaves_out_in_its_last_step(name):
    torch.manual_seed(0)
    make, ratio = CONTRADICTIONS[name]
    model, x = make().eval(), torch.randn(2, 5, 8)
    plan, report = (shrink(model, x, ratio, dry_run=dry_run)[1] for dry_run in (True, False))
    assert report.left_out and plan.left_out == report.left_out
    assert plan.couplings == report.couplings and (plan.before, plan.after) == (report.before, report.after)


def test_a_dry_run_leaves_out_what_the_config_cannot_hold_together():
    model, ratio = llama(), {"mlp": 0.5, "model.layers.1.mlp": 0.25}
    plan, report = (shrink(model, IDS[0], ratio, keep_config=True, dry_run=dry_run)[1] for dry_run in (True, False))
    assert plan.couplings == report.couplings and plan.left_out == report.left_out
    assert any("the config cannot hold it (config.intermediate_size is one number for" in t for t in report.left_out)


def test_a_dry_run_has_nothing_to_save(tmp_path):
    report = shrink(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(4, 8), dry_run=True)[1]
    with pytest.raises(SparsityError, match="dry run, which removed nothing.*without dry_run=True"):
        report.save(tmp_path / "removal.json")
    assert not [*tmp_path.iterdir()]
