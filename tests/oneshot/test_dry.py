"""A dry run: what it says is what the call does, it runs on one batch, and it changes nothing, also after an error."""

import copy
import itertools
import math
from collections import OrderedDict

import accelerate
import pytest
import torch
import transformers
from grids import turns
from networks import Net
from pruned_models import Model, correlated
from torch import nn
from torch.optim.swa_utils import update_bn
from transformers import LlamaConfig, LlamaForCausalLM

from sparsekit_ao import SparsityError, patterns, prune, shrink
from sparsekit_ao.oneshot import dry

IMAGES = [torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(k)) for k in range(3)]


def convolutions():
    torch.manual_seed(0)
    first, second = nn.Conv2d(4, 16, 3), nn.utils.parametrizations.weight_norm(nn.Conv2d(16, 16, 3))
    return nn.Sequential(first, nn.ReLU(), second, nn.Flatten(), nn.Linear(256, 6))


def with_parts_that_are_not_compensated():
    def run(m, x):
        return m.blocks(x) + m.table(x.argmax(-1))

    blocks = nn.Sequential(*[nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 12)) for _ in range(3)])
    return Net(run, blocks=blocks, table=nn.Embedding(12, 12), unused=nn.Linear(12, 12))


def unchanged(model, before, state):
    same = all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), before.values(), strict=True))
    return same and torch.equal(torch.get_rng_state(), state)


CASES = {
    "blocks": (Model, correlated, {"sparsity_level": "2:4"}),
    "blocks, recovered": (
        Model,
        correlated,
        {"sparsity_level": "2:4", "recover": True, "device": "cpu", "inplace": True},
    ),
    "rows": (Model, correlated, {"sparsity_level": patterns.rows(0.3), "compensate": "least_squares"}),
    "no blocks": (convolutions, lambda: IMAGES, {"sparsity_level": 0.7}),
    "no blocks, recovered": (
        convolutions,
        lambda: IMAGES,
        {"sparsity_level": "2:4", "recover": True, "compensate": None},
    ),
    "no batches": (convolutions, lambda: None, {"sparsity_level": 0.5}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_dry_run_says_what_the_call_does_and_changes_nothing(case):
    make, data, options = CASES[case]
    model, batches = make(), data()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    same, plan = prune(model, batches=batches, dry_run=True, **options)
    assert same is model and unchanged(model, before, state)
    pruned, report = prune(model, batches=batches, **options)
    names = {row.tensor: row.density for row in report}
    assert {row.tensor: row.density for row in plan} == names and plan.left_out == report.left_out
    if batches is not None:
        assert [row.tensor for row in plan] == [row.tensor for row in report]
    if not any("parametrizations" in name for name in before):  # which has more parameters
        assert plan.parameters == tuple(sum(int((p != 0).sum()) for p in m.parameters()) for m in (make(), pruned))
    assert len(plan.chains) == bool(report.blocks) and plan.coverage == report.coverage
    assert plan.seconds > 0 and (plan.flops[1] < plan.flops[0] if batches is not None else plan.flops == (0, 0))
    assert "dry run: nothing was changed" in str(plan)


def test_it_says_why_a_tensor_is_not_compensated():
    with pytest.warns(UserWarning, match="no batch reached") as warned:
        plan = prune(with_parts_that_are_not_compensated(), "2:4", batches=[torch.randn(8, 12)], dry_run=True)[1]
    assert all(w.filename == __file__ for w in warned)
    reasons = {row.tensor: row.note.partition("; ")[2] for row in plan}
    assert (
        reasons["unused.weight"] == "not compensated: not reached by any batch"
        and reasons["blocks.1.0.weight"] == "compensated"
    )
    assert plan.chains == (("blocks.0", "blocks.1", "blocks.2"),)
    for options, why in (
        ({"batches": [torch.randn(8, 16)], "compensate": None}, "compensate is None"),
        ({}, "no batch"),
    ):
        assert all(why in row.note for row in prune(nn.Linear(16, 4), "2:4", dry_run=True, **options)[1])


@pytest.mark.parametrize("make", [Model, convolutions])
def test_it_runs_on_one_batch_and_an_error_at_any_call_changes_nothing(make):
    model, batches = make(), correlated()[:3] if make is Model else IMAGES
    before, state, seen, last = copy.deepcopy(model.state_dict()), torch.get_rng_state(), [], math.inf

    def forward(m, batch):
        seen.append(batch)
        if len(seen) > last:
            raise RuntimeError("interrupted")
        return m(batch)

    def runs(last_call):
        nonlocal last
        last = last_call
        seen.clear()
        try:
            prune(model, "2:4", batches=batches, forward=forward, recover=True, inplace=make is Model, dry_run=True)
        except (RuntimeError, SparsityError):
            return False
        return True

    assert not all(runs(calls) for calls in range(1, 20, 3)) and unchanged(model, before, state)
    assert runs(math.inf) and unchanged(model, before, state)
    assert all(torch.equal(batch, batches[1]) for batch in seen)  # all have one size


def test_an_error_inside_the_block_that_is_measured_changes_nothing(monkeypatch):
    model, batches = Model(), correlated()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    for last in range(6):
        count = itertools.count()

        def seconds(function, last=last, count=count):
            function()
            if next(count) == last:
                raise RuntimeError("interrupted")
            return 1.0

        monkeypatch.setattr(dry, "seconds_of", seconds)
        how = {"batches": batches, "recover": True, "inplace": True, "dry_run": True}
        if last < 4:
            with pytest.raises(RuntimeError, match="interrupted"):
                prune(model, "2:4", **how)
        else:
            prune(model, "2:4", **how)
        assert unchanged(model, before, state)


def test_time_and_memory_follow_from_one_block_and_one_batch(monkeypatch):
    """One second each for recording, solving and a forward, and five for a pass of training with its three forwards."""
    seconds = itertools.cycle((1.0, 1.0, 1.0, 5.0))
    monkeypatch.setattr(dry, "seconds_of", lambda function: (function(), next(seconds))[1])
    blocks = nn.Sequential(*[nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3)])
    batches = [torch.randn(rows, 16) for rows in (64, 32, 16, 32, 16)]  # as much as five of the one of median size
    plan = prune(blocks, "2:4", batches=batches, dry_run=True)[1]
    assert plan.seconds == pytest.approx(3 + 3 * 5 * (1 + 1), abs=2) and plan.runs == (2, 2)
    recovered = prune(blocks, "2:4", batches=batches, recover=True, dry_run=True)[1]
    measured = 3 * 5 * 4  # before, after the second and the last pass, and for the scale of the loss
    trained = 3 * 5 * 4 * (5 - 3)
    assert recovered.seconds == pytest.approx(3 + 3 * 5 * (1 + 2) + measured + trained, abs=2) and recovered.runs == (
        2,
        7,
    )
    numel = sum(p.numel() for p in blocks.parameters())
    here = prune(blocks, "2:4", batches=batches, inplace=True, dry_run=True)[1]
    streams, outputs = 160 * 16 * 4, 32 * 16 * 4  # the outputs of the dense model are kept
    assert plan.memory - here.memory == 4 * numel and here.memory == 8 * 4 * numel // 3 + streams + outputs
    kept = prune(blocks, "2:4", batches=batches, inplace=True, stream_memory=3000, dry_run=True)[1]
    assert kept.memory == here.memory - streams + 3000
    dropped = prune(blocks, "2:4", batches=batches, inplace=True, compensate=None, dry_run=True)[1]
    assert dropped.memory == 2 * 4 * numel // 3 + streams + outputs
    headed = nn.Sequential(blocks, nn.Linear(16, 5000))  # logits, compared with the dense ones after the walk
    large = prune(headed, "2:4", batches=batches, exclude=["1"], inplace=True, dry_run=True)[1]
    assert large.memory == 2 * 32 * 5000 * 4
    assert recovered.memory > plan.memory + streams  # what training keeps for the backward pass


def test_like_tensors_share_a_line_and_recover_may_be_a_number_of_passes():
    blocks = (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(4, 8)) for _ in range(20))
    model = nn.Sequential(OrderedDict(layers=nn.Sequential(*blocks)))
    batches = [torch.randn(16, 8)]
    plan = prune(model, "2:4", batches=batches, recover=2, dry_run=True)[1]
    assert "layers.*.*.weight (60)   0.5000  block 1x1" in str(plan) and plan.runs[1] == 2 + 1 + 2
    assert len(plan.table().splitlines()) == 61
    report = prune(model, "2:4", batches=batches, recover=1)[1]
    assert all(row.passes <= 1 for row in report.recovery)
    for bad in (-1, "2", 2.0, model):
        with pytest.raises(SparsityError, match="recover must be True, False or a number of passes"):
            prune(model, "2:4", batches=batches, recover=bad)


def test_an_offloaded_model_is_read_and_not_written(tmp_path):
    keys = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 50}
    ids = [torch.randint(50, (4, 8), generator=torch.Generator().manual_seed(k)) for k in range(3)]
    model = LlamaForCausalLM(LlamaConfig(**keys, num_hidden_layers=3, tie_word_embeddings=False)).eval()
    here = prune(model, "2:4", batches=ids, recover=True, inplace=True, dry_run=True)[1]
    expected = model(ids[0]).logits
    offloaded = accelerate.disk_offload(model, tmp_path, execution_device="cpu")
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    plan = prune(offloaded, "2:4", batches=ids, recover=True, inplace=True, dry_run=True)[1]
    assert torch.equal(offloaded(ids[0]).logits, expected) and all(p.is_meta for p in offloaded.parameters())
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == files
    assert (plan.chains, plan.parameters, plan.flops) == (here.chains, here.parameters, here.flops)
    outside = 4 * (2 * 50 * 32 + 32)  # the embedding, the head and the last norm are read, too
    assert plan.memory == pytest.approx(here.memory + outside, rel=0.05)


def test_flops_are_counted_wherever_forward_begins():
    model, batches = nn.Sequential(Model()), correlated()
    plans = [
        prune(model, "2:4", batches=batches, forward=forward, dry_run=True)[1]
        for forward in (None, lambda m, batch: m[0](batch))
    ]
    assert plans[0].flops == plans[1].flops and plans[0].flops[1] < plans[0].flops[0]


def attended(m, z, x):
    return m.o((m.q(m.norm(z)) @ m.k(x).mT).softmax(-1) @ m.k(x))


def attention(**more):
    return {"q": nn.Linear(16, 16), "k": nn.Linear(8, 16), "o": nn.Linear(16, 4), "norm": nn.LayerNorm(16), **more}


def parameter(*shape):
    return nn.Parameter(torch.randn(*shape))


VIEWS = {  # {model: (its parts, what a module of it reads: a view of a parameter)}
    "latents": (lambda: {"z": parameter(1, 4, 16)}, lambda m, x: m.z.expand(len(x), -1, -1)),
    "queries": (lambda: {"z": parameter(4, 16)}, lambda m, x: m.z.unsqueeze(0)),
    "queries of a table": (lambda: {"z": nn.Embedding(4, 16)}, lambda m, x: m.z.weight[None]),
    "seeds": (lambda: {"z": parameter(16, 4)}, lambda m, x: m.z.T),
    "a part": (lambda: {"z": parameter(9, 16)}, lambda m, x: m.z[2:6]),
    "a prompt": (lambda: {"z": parameter(64)}, lambda m, x: m.z.view(4, 16)),
    "a class token": (lambda: {"z": parameter(16)}, lambda m, x: m.z.expand(len(x), 1, -1)),
    "one of several": (lambda: {"z": parameter(2, 4, 16)}, lambda m, x: m.z.unbind(0)[1]),
}


@pytest.mark.parametrize(("name", "recover"), turns(VIEWS, [(False,), (True,)]))
def test_modules_may_read_views_of_parameters(name, recover):
    parts, view = VIEWS[name]
    torch.manual_seed(0)
    model = Net(lambda m, x: attended(m, m.read(m, x), x), read=view, **attention(**parts()))
    data = [torch.randn(3, 7, 8) for _ in range(3)]
    _, plan = prune(model, "2:4", batches=data, recover=recover, dry_run=True)
    copying = copy.deepcopy(model)
    copying.read = lambda m, x: view(m, x).clone()
    assert plan.flops == prune(copying, "2:4", batches=data, dry_run=True)[1].flops
    report = prune(model, "2:4", batches=data, recover=recover)[1]
    assert {row.tensor for row in report} == {row.tensor for row in plan} and plan.flops[1] < plan.flops[0]
    made_smaller = shrink(model.eval(), data[0])[1]  # its report counts FLOPs too
    assert made_smaller.before.flops == plan.flops[0] > made_smaller.after.flops


HALF = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
OF_VIEWS = {  # {architecture: (config, inputs)}
    "PerceiverModel": (
        {"d_model": 16, "d_latents": 16, "num_latents": 4, "num_blocks": 1, "num_self_attends_per_block": 1}
        | {"num_self_attention_heads": 2, "num_cross_attention_heads": 2},
        lambda: {"inputs": torch.randn(2, 6, 16)},
    ),
    "Blip2QFormerModel": (
        {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        | {"encoder_hidden_size": 16, "cross_attention_frequency": 1},
        lambda: {"query_embeds": torch.randn(2, 4, 16), "encoder_hidden_states": torch.randn(2, 6, 16)},
    ),
    "ViTModel": (
        {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        | {"image_size": 8, "patch_size": 4},
        lambda: {"pixel_values": torch.randn(2, 3, 8, 8)},
    ),
}


@pytest.mark.parametrize("name", OF_VIEWS)
def test_architectures_with_latents_and_queries(name):
    config, inputs = OF_VIEWS[name]
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model, data = kind(kind.config_class(**config)).eval(), [inputs() for _ in range(2)]
    plan = prune(model, "2:4", batches=data, dry_run=True)[1]
    report = prune(model, "2:4", batches=data)[1]
    assert {row.tensor for row in report} == {row.tensor for row in plan} and plan.flops[1] < plan.flops[0]


@pytest.mark.parametrize("compensate", ["admm", None])
@pytest.mark.parametrize("before", [nn.Conv2d(4, 4, 1), nn.Identity()])  # which layer is pruned on one batch
def test_statistics_of_batch_norms_stay(before, compensate):
    torch.manual_seed(0)
    inner = [nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)]
    model = nn.Sequential(before, *inner, nn.Flatten(), nn.Linear(128, 8))
    batches = [torch.randn(16, 4, 4, 4) for _ in range(8)]
    update_bn(batches, model)
    old = copy.deepcopy(model.eval().state_dict())
    prune(model, 0.8, batches=batches, compensate=compensate, recover=True, dry_run=True)
    assert all(torch.equal(tensor, old[name]) for name, tensor in model.state_dict().items())


def test_new_statistics_of_batch_norms_take_one_run_of_all_batches_and_are_measured(monkeypatch):
    """One second each for recording, solving and a forward, and nine for a pass of training with its five forwards."""
    seconds = itertools.cycle((1.0, 1.0, 1.0, 9.0))
    monkeypatch.setattr(dry, "seconds_of", lambda function: (function(), next(seconds))[1])
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)).eval()
    batches = [torch.randn(32, 16) for _ in range(5)]
    report = prune(model, "2:4", batches=batches, recover=2, dry_run=True)[1]
    assert report.seconds == pytest.approx(1 + 5 + 5 * (2 * (9 - 5) + 4 + 1), abs=2) and report.runs == (6, 0)
