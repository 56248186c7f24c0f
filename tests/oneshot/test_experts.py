"""`prune` of mixtures of experts of transformers, and of weights that other modules than Linear multiply by."""

import re

import pytest
import torch
from grids import nightly_except
from hf_models import make
from networks import Net
from torch import nn
from torch.nn import functional as F

from sparsekit_ao import prune, recover
from sparsekit_ao.removal import shrink_experts

IN_EVERY_RUN = ("Mixtral", "GPT-OSS", "DeepSeek-V3")
MIXTURES = nightly_except([*IN_EVERY_RUN, "GraniteMoE", "Llama 4", "Qwen3-MoE", "OLMoE", "PhiMoE"], *IN_EVERY_RUN)
DENSE = re.compile(r"embed_tokens|lm_head|norm|router|\.gate\.weight|bias")
BATCHES = [torch.randint(1, 50, (4, 24), generator=torch.Generator().manual_seed(k)) for k in range(4)]


@pytest.mark.parametrize("kind", MIXTURES)
def test_half_of_every_scope_is_zero_and_the_model_loads_and_generates(kind, tmp_path):
    model, _ = make(kind)
    pruned, report = prune(model, "2:4", batches=BATCHES, progress=False)
    weights = {name: p for name, p in pruned.named_parameters() if p.ndim > 1 and not DENSE.search(name)}
    assert {row.tensor for row in report} == weights.keys()
    assert report.left_out.keys() == set(report.dense)  # routers, and the output embedding
    for row in report:
        weight, dense = weights[row.tensor], model.get_parameter(row.tensor)
        along = 1 if kind in ("GPT-OSS", "Llama 4") and weight.ndim == 3 else -1  # the dimension of the inputs
        zeros = weight.movedim(along, -1).unflatten(-1, (-1, 4)).eq(0).sum(-1)
        assert zeros.eq(2).all() and row.density == 0.5, row.tensor
        assert 0 < row.after < row.before and dense.ne(0).all()
    for name, p in pruned.named_parameters():
        assert name in weights or torch.equal(p, model.get_parameter(name)), name
    pruned.save_pretrained(tmp_path)
    again = type(pruned).from_pretrained(tmp_path, experts_implementation="batched_mm")  # as of the model
    with torch.no_grad():
        assert torch.equal(again(BATCHES[0]).logits, pruned(BATCHES[0]).logits)
    ids = again.generate(BATCHES[0][:, :4], max_new_tokens=4, do_sample=False)
    assert ids.shape == (4, 8)


def test_the_report_counts_the_tokens_of_experts():
    (model, _), chosen = make("Mixtral"), []
    _, report = prune(model, "2:4", batches=BATCHES, progress=False)
    hook = lambda _, args: chosen.append(args[1])  # noqa: E731
    with torch.no_grad(), model.model.layers[0].mlp.experts.register_forward_pre_hook(hook):
        for ids in BATCHES:
            model(ids)
    counts = torch.cat(chosen).flatten().bincount(minlength=4)
    note = f"tokens of an expert: {counts.min()} at least, {counts.median()} in the median"
    assert {row.note for row in report if row.tensor.startswith("model.layers.0.mlp.experts")} == {note}


@pytest.mark.parametrize("kind", ["Mixtral", "GPT-OSS"])
@pytest.mark.parametrize("level", [0.5, 0.7])
def test_sparsegpt_keeps_the_same_share_of_every_expert(kind, level):
    keys = {"compensate": "sparsegpt", "batches": BATCHES, "progress": False}
    pruned, report = prune(make(kind)[0], level, **keys)
    for row in report:
        weight = pruned.get_parameter(row.tensor)
        assert int((weight == 0).sum()) == int(level * weight.numel()) and 0 < row.after < row.before
        if weight.ndim == 3:
            zeros = (weight == 0).sum((1, 2))
            assert int(zeros.max() - zeros.min()) <= 1


@pytest.mark.parametrize(("kind", "path"), [("Mixtral", "mlp"), ("DeepSeek-V3", "mlp"), ("Llama 4", "feed_forward")])
def test_a_mixture_that_lost_experts_is_recovered(kind, path):
    dense, _ = make(kind)
    small, _ = shrink_experts(dense, BATCHES, 0.5)
    rows = recover(small, dense, BATCHES, passes=2, progress=False)
    assert len(rows) == 2 and 0 < rows[1].after < rows[1].before  # the first block of DeepSeek has no experts
    assert len(small.model.layers[1].get_submodule(path).experts.down_proj) == 2


def raw():
    """Raw Parameters, one of them transposed, and one that is used twice."""

    def run(m, x):
        x = F.linear(x, m.straight).relu() @ m.transposed
        return F.linear(F.linear(x, m.twice).relu(), m.twice)

    names = "straight", "transposed", "twice"
    return Net(run, **{name: nn.Parameter(torch.randn(16, 16) / 4) for name in names})


def tagger():
    """An LSTM, and a label for each token."""
    layers = {"lstm": nn.LSTM(16, 16, batch_first=True, bidirectional=True), "head": nn.Linear(32, 4)}
    return Net(lambda m, x: m.head(m.lstm(x)[0]), **layers)


def attention():
    """Attention of tokens to themselves."""
    layer = nn.MultiheadAttention(16, 2, batch_first=True)
    return Net(lambda m, x: m.attention(x, x, x, need_weights=False)[0], attention=layer)


NAMES = {
    raw: ["straight", "transposed", "twice"],
    tagger: [*(f"lstm.weight_{w}_l0{way}" for way in ("", "_reverse") for w in ("ih", "hh")), "head.weight"],
    attention: ["attention.in_proj_weight", "attention.out_proj.weight"],
}


@pytest.mark.parametrize("kind", NAMES)
def test_weights_that_other_products_read_are_compensated_and_outputs_are_nearer(kind):
    torch.manual_seed(0)
    model = kind().eval()
    mix = torch.randn(16, 16) / 4
    batches = [torch.randn(8, 12, 16) @ mix for _ in range(4)]
    pruned, report = prune(model, "2:4", batches=batches)
    by_size, _ = prune(model, "2:4", batches=batches, compensate=None)
    assert sorted(row.tensor for row in report) == sorted(NAMES[kind]) and not report.dense
    for row in report:
        weight = pruned.get_parameter(row.tensor)
        weight = weight.T if row.tensor == "transposed" else weight  # along the inputs
        assert weight.unflatten(-1, (-1, 4)).eq(0).sum(-1).eq(2).all()
        assert 0 < row.after < row.before and not row.note
    with torch.no_grad():
        errors = [sum(float((one(x) - model(x)).norm()) for x in batches) for one in (pruned, by_size)]
    assert errors[0] < errors[1]
