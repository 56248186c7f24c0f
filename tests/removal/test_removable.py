"""removable, shrink, joint entries and attention of torch: what is found is removed, what cannot be is listed apart."""

import itertools
import logging
import re
from collections import OrderedDict

import hf_models
import pytest
import torch
from compact_models import close, rebuilt
from discovered import fill, pruned_jointly
from grids import nightly_except
from networks import NETWORKS, Heads, Net
from stock import EVERYTHING, refuses
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only
from tqdm import tqdm

from sparsekit_ao import Coupling, ScopeSparsifier, SparsityError, prune
from sparsekit_ao.coupling import discover, joint_entries
from sparsekit_ao.models import progress
from sparsekit_ao.removal import compact, removable, shrink
from sparsekit_ao.schedules import ScheduleSL

HEAD = "self_attn.head_dim"
GROUPS = "model.layers.*.self_attn.num_key_value_groups"
ATTRS = {  # what is found by itself, as a person listed it in test_architectures.py
    "Llama": [{GROUPS: "u"}, {f"model.layers.**.{HEAD}": "u a"}, {"model.layers.*.mlp.intermediate_size": "u"}],
    "Mixtral": [
        {"model.layers.**.mlp.gate.hidden_dim": "u"},
        {GROUPS: "u"},
        {f"model.layers.**.{HEAD}": "u a"},
        {"model.layers.*.mlp.experts.intermediate_dim": "u"},
    ],
    "GPT-2": [
        {"transformer.h.*.attn.split_size": "u d", "transformer.h.*.attn.num_heads": "u"},
        {"transformer.h.*.attn.head_dim": "u", "transformer.h.*.attn.split_size": "u s"},
    ],
}


def outputs(model, inputs):
    with torch.no_grad():
        return model(**inputs).logits if hasattr(model(**inputs), "logits") else model(**inputs)[0]


@pytest.mark.parametrize("name", ATTRS)
def test_integers_are_found_and_all_that_is_suggested_is_pruned_at_once(name):
    model, inputs = hf_models.make(name)
    found = removable(model, inputs)
    assert [c.attrs for c in found.couplings if c.attrs] == ATTRS[name]
    assert len(found.couplings) == len({c.name for c in found.couplings})
    small, report = compact(pruned_jointly(model, found.couplings, level=0.4), found.couplings, inputs)
    assert report.difference <= 1e-5 and not report.notes and close(outputs(model, inputs), outputs(small, inputs))
    assert report.changed and report.changed[0] in str(report)
    names = {"Coupling": Coupling}
    exec(str(found), names)  # what is printed is Python, attributes and names included
    assert tuple(names["couplings"]) == found.couplings


def test_entries_of_tuples_and_products_are_found():
    model = fill(NETWORKS["ViT"][0]())
    heads = next(coupling for coupling in removable(model, torch.randn(2, 3, 12, 12)).couplings if coupling.attrs)
    read = {"blocks.*.attention.inner": "u d", "blocks.*.attention.shapes[1]": "u"}
    assert heads.attrs == {**read, "blocks.*.attention.num_heads": "u"}  # which is not read


def test_lists_and_tuples_keep_their_kind_and_are_rebuilt():
    def make():
        model = fill(nn.Sequential(Heads(8, 4, 2)))
        model[0].shapes = list(model[0].shapes)
        return model

    x = torch.randn(2, 5, 8)
    small, report = shrink(make(), x, EVERYTHING)
    assert small[0].shapes == [3, 2, 2] and small[0].inner == 4
    assert report.changed == ("*.inner: 8 -> 4", "*.shapes[1]: 4 -> 2", "*.num_heads: 4 -> 2")
    assert torch.equal(rebuilt(make(), small, report)(x), small(x))


def test_what_cannot_be_removed_is_listed_with_the_reason():
    model, inputs = fill(NETWORKS["maxout"][0]()), torch.randn(2, 6)
    found = removable(model, inputs)
    ((name, why),) = found.left_out
    assert not found.couplings and name == "hidden.weight" and why.startswith("does not run: unflatten: Provided")
    assert "\n# Left out, they cannot be removed:\n#   hidden.weight: does not run: " in str(found)
    small, report = shrink(model, inputs, EVERYTHING)
    assert report.left_out == (f"{name}: {why}",) and report.after == report.before and not report.couplings
    assert torch.equal(small(inputs), model(inputs)) and small is not model


@pytest.mark.parametrize("has_attrs", [False, True])
def test_a_coupling_that_is_wrong_only_together_with_others_is_left_out(has_attrs):
    def run(m, x):
        a, b = (layer(x).reshape(-1, n if has_attrs else layer.out_features) for layer, n in ((m.a, m.n), (m.b, m.k)))
        return m.c(a) + m.d(b) + (3.0 if a.shape[1] + b.shape[1] == 8 else 0.0)

    model = Net(run, a=nn.Linear(4, 8), b=nn.Linear(4, 8), c=nn.Linear(8, 2), d=nn.Linear(8, 2), n=8, k=8)
    model = fill(model)
    found = removable(model, torch.randn(3, 4))
    assert [coupling.name for coupling in found.couplings] == ["a.weight"]
    assert found.left_out[0][0] == "b.weight" and found.left_out[0][1].startswith("together with others: gives other")


def test_couplings_are_excluded_by_tensor_module_class_or_because_nothing_of_them_would_be_dropped():
    model, x = fill(NETWORKS["VGG"][0]()), torch.randn(2, 3, 12, 12)
    _, report = shrink(model, x, 0.1, exclude=["6.*", nn.MaxPool2d])
    assert [line.partition(": ")[2] for line in report.left_out] == [
        "left out by exclude[0] ('6.*')",
        "a ratio of 0.1 drops none of its units: 8 in each scope",
        "a ratio of 0.1 drops none of its units: 8 in each scope",
    ]
    for normed in (False, True):  # trials then run on a copy
        if normed:
            nn.utils.parametrizations.weight_norm(model[0][0])
        ((_, why),) = removable(model, x, exclude=[model[6]]).left_out
        assert why == "left out by exclude[0] ('6')"
    with pytest.raises(SparsityError, match="matches no parameter or module of the model"):
        removable(model, x, exclude=["nothing"])


def test_shrink_drops_a_fraction_of_every_dimension_once():
    model, inputs = hf_models.make("Llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    small, report = shrink(model, inputs, EVERYTHING, keep_config=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    q = small.model.layers[0].self_attn.q_proj
    assert (q.out_features, q.in_features) == (16, 16)
    assert len(report.left_out) == 2
    shared = "only one coupling may divide dimension 0 of model.layers.0.self_attn.q_proj.weight: 'model.l"
    assert all(shared in text and " (s u d) i" not in text for text in report.left_out)
    assert report.difference <= 1e-5
    assert all(row.kept == row.of // 2 for row in report.couplings)


@pytest.mark.parametrize("score", ["wanda", "taylor", lambda weight, name: weight.abs()])
def test_shrink_takes_scores_and_records_their_statistics(score):
    model, x = fill(NETWORKS["VGG"][0]()), torch.randn(2, 3, 12, 12)
    forward = (lambda m, batch: m(batch).square().mean()) if score == "taylor" else None
    _, report = shrink(model, x, 0.25, score, ["1"], forward=forward, multiple_of={"5.weight": 8})
    assert [row.kept for row in report.couplings] == [9, 16]
    assert report.difference <= 1e-5


def test_masks_of_couplings_that_share_a_tensor_are_those_of_each_and_follow_one_schedule():
    model = fill(nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4))))
    couplings = [Coupling({f"{k}.weight": "u i", f"{k + 1}.weight": "o u"}) for k in range(3)]
    sparsifier = ScopeSparsifier(scope_coupling=None)
    entries = joint_entries(couplings, model, sparsity_level=0.0, norm=1)
    assert [len(entry.get("stages", [1])) for entry in entries] == [1, 2, 2, 1]
    sparsifier.prepare(model, entries)
    scheduler = ScheduleSL(sparsifier, lambda step: 0.25 * step)
    for step in range(3):
        sparsifier.step()
        sparsifier.check()
        masks = [sparsifier.mask(f"{k}.weight") for k in range(4)]
        for a, b in itertools.pairwise(masks):
            assert torch.equal(a.any(1), b.any(0)) and int(a.any(1).sum()) == 8 - 2 * step
        for mask in masks:
            assert torch.equal(mask, mask.any(1)[:, None] & mask.any(0))
        scheduler.step()


def test_masks_recover_where_a_later_stage_is_the_first_of_a_tensor():
    model = fill(nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(3))))
    couplings = [Coupling({"1.weight": "u i", "2.weight": "o u"}), Coupling({"0.weight": "u i", "1.weight": "o u"})]
    sparsifier = ScopeSparsifier(0.5)
    sparsifier.prepare(model, joint_entries(couplings, model))
    sparsifier.step()
    first = sparsifier.mask("0.weight").clone()
    with torch.no_grad():
        for name in ("0", "1"):
            weight = model.get_submodule(name).parametrizations.weight.original
            weight.copy_(torch.where(first if name == "0" else first[:, :1].T, 1e-3, 1.0) * torch.ones(6, 6))
    sparsifier.step()
    assert torch.equal(sparsifier.mask("0.weight"), ~first)


def test_levels_by_coupling_and_errors_of_joint_entries():
    model = fill(nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3))))
    couplings = [Coupling({f"{k}.weight": "u i", f"{k + 1}.weight": "o u"}, name=f"c{k}") for k in range(2)]
    sparsifier = ScopeSparsifier(0.5)
    sparsifier.prepare(model, joint_entries(couplings, model, nnz={"c0": 3, "c1": 6}))
    sparsifier.step()
    assert [int(sparsifier.mask(f"{k}.weight").any(1).sum()) for k in range(3)] == [3, 6, 8]
    with pytest.raises(SparsityError, match="joint_entries: nnz names 'c2', but the couplings are c0, c1"):
        joint_entries(couplings, model, nnz={"c2": 3})
    with pytest.raises(SparsityError, match="joint_entries: two couplings have the name 'c0'; give them names"):
        joint_entries([couplings[0]] * 2, model)


def attending(**keys):
    """Attention of torch as a model that returns outputs alone."""
    return Net(
        lambda m, q, k, v, **given: m.attention(q, k, v, **given)[0], attention=nn.MultiheadAttention(8, 4, **keys)
    )


HEADS = Coupling(
    {
        "attention.in_proj_weight": "(three u d) i",
        "attention.in_proj_bias": "(three u d)",
        "attention.out_proj.weight": "o (u d)",
    },
    sizes={"three": 3, "d": 2},
)
ATTENTION = [  # (arguments of the module, of the forward); q, k, v are of 5, 3 and 3 tokens
    ({"batch_first": True}, {}),
    ({}, {"average_attn_weights": False}),
    ({"bias": False}, {"need_weights": False}),
    ({"add_bias_kv": True, "batch_first": True}, {"key_padding_mask": torch.tensor([[0, 1, 0], [0, 0, 0]]).bool()}),
    ({"add_zero_attn": True}, {"attn_mask": torch.rand(5, 3) > 0.7, "need_weights": False}),
    ({"kdim": 6, "vdim": 4, "batch_first": True}, {"attn_mask": torch.randn(5, 3)}),
]


@pytest.mark.parametrize(("keys", "given"), ATTENTION)
def test_heads_of_torchs_attention_are_removed(keys, given):
    torch.manual_seed(0)
    model = fill(attending(**keys))
    widths = (8, keys.get("kdim", 8), keys.get("vdim", 8))
    shapes = [(2, n, w) if keys.get("batch_first") else (n, 2, w) for n, w in zip((5, 3, 3), widths, strict=True)]
    inputs = dict(zip("qkv", (torch.randn(shape) for shape in shapes), strict=True)) | given
    found = removable(model, inputs)
    heads = found.couplings[0] if found.couplings else HEADS  # what is added to keys is a constant
    small, report = compact(pruned_jointly(model, [heads]), heads, inputs)
    assert small.attention.num_heads == 2 and report.difference <= 1e-5
    again = rebuilt(attending(**keys), small, report).eval()
    assert torch.equal(again(**inputs), small(**inputs))
    weights = again.attention(*(inputs[name] for name in "qkv"), **{**given, "need_weights": True})[1]
    assert weights.shape == ((2, 2, 5, 3) if "average_attn_weights" in given else (2, 5, weights.shape[-1]))
    if not given:
        single = [x[0] if keys.get("batch_first") else x[:, 0] for x in (inputs["q"], inputs["k"], inputs["v"])]
        with torch.no_grad():
            assert close(small(*single), model(*single)) and small.attention(*single)[1].shape == (5, 3)
        with pytest.raises(RuntimeError, match="is_causal needs attn_mask"):
            small(*single, is_causal=True)
        small.train()(*single).sum().backward()
        assert small.attention.in_proj_weight.grad is not None


def test_a_part_of_a_head_of_torchs_attention_is_refused():
    model = fill(attending(batch_first=True))
    members = {"attention.in_proj_weight": "(three u h) i", "attention.in_proj_bias": "(three u h)"}
    part = Coupling({**members, "attention.out_proj.weight": "o (u h)"}, sizes={"three": 3, "h": 1})
    x = torch.randn(1, 3, 8)
    with refuses("attention: its queries keep 5 rows, which is not a multiple of the head size 2"):
        compact(pruned_jointly(model, [part], level=0.4), part, {"q": x, "k": x, "v": x})


def test_layers_that_share_one_number_for_several_couplings_are_found_together():
    def run(m, x):
        x = m.stem(x)
        return m.head(F.relu(m.b(F.relu(m.a(x)).view(len(x), m.width, 36))))

    width = {"stem": nn.Conv2d(3, 8, 3, padding=1), "a": nn.Conv2d(8, 8, 1), "b": nn.Conv1d(8, 4, 1), "width": 8}
    model = fill(Net(run, **width, head=nn.Flatten()))
    found = removable(model, torch.randn(2, 3, 6, 6))
    assert [coupling.attrs for coupling in found.couplings] == [{}, {"width": "u"}]
    assert len(discover(model, torch.randn(2, 3, 6, 6)).couplings) == 2


def test_progress_is_shown_on_a_terminal_or_in_a_notebook_or_logged(monkeypatch, capsys, caplog):
    monkeypatch.setattr(progress, "LARGE", 1)
    monkeypatch.setattr(progress, "AFTER", 0.0)
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(2, 8)
    removable(model, x)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    removable(model, x)
    shown = capsys.readouterr().err
    assert "removable: " in shown and "compactions" in shown and "compact: " in shown
    shrink(model, x)
    assert re.search("shrink: .* 2/3 .*scores and removal", capsys.readouterr().err)
    shrink(model, batches=[x], progress=False)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    with caplog.at_level(logging.INFO, logger="sparsekit_ao"):
        shrink(model, batches=[x], progress=False)
        assert not caplog.messages
        shrink(model, x)
    lines = [f"shrink: {phase} finished, " for phase in ("trials", "trials of the config", "scores and removal")]
    assert len(caplog.messages) == 3 and all(map(str.startswith, caplog.messages, lines))
    monkeypatch.setattr(progress, "bar_class", lambda: type("Bar", (tqdm,), {"__module__": "tqdm.notebook"}))
    shrink(model, x)
    assert re.search("shrink: .* 2/3 .*scores and removal", capsys.readouterr().err)


def test_a_model_without_blocks_logs_at_most_ten_lines(monkeypatch, caplog):
    monkeypatch.setattr(progress, "AFTER", 0.0)
    layers = {f"layer{k}": nn.Linear(8 + k, 9 + k) for k in range(25)}  # no two alike
    with caplog.at_level(logging.INFO, logger="sparsekit_ao"):
        prune(nn.Sequential(OrderedDict(layers)), 0.5, batches=[torch.randn(16, 8)])
    lines = [message for message in caplog.messages if message.startswith("prune: layer ")]
    assert len(lines) == 10 and lines[-1].startswith("prune: layer 25 of 25, layer24, error")


class Divided(nn.Module):
    """Attention whose size of a head follows from the width of what it has normalized, which is no input."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.num_heads = nn.LayerNorm(width), 4
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        normed = self.norm(x)
        n, t, c = normed.shape
        q, k, v = self.qkv(normed).reshape(n, t, 3, self.num_heads, c // self.num_heads).permute(2, 0, 3, 1, 4)
        return x + self.proj(((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2).reshape(n, t, c))


def test_of_couplings_that_fail_alike_three_are_tried_and_the_code_is_quoted():
    widths = (4, 8, 12, 16, 20, 24, 28, 32)
    layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), Divided(b))]
    model, x = fill(nn.Sequential(*layers, nn.Linear(32, 2))), torch.randn(2, 3, 4)
    found = removable(model, x)
    assert len(found.left_out) == 8 and not found.couplings
    (line,) = [text for text in shrink(model, x)[1].left_out if "not tried" in text]
    code = "test_removable.py:[0-9]+: q, k, v = self.qkv\\(normed\\).reshape"
    assert re.fullmatch(
        f"\\*.qkv.weight \\(4\\): not tried, since 3 like it cannot be removed: .* \\(at {code}.*\\)", line
    )


class Fixed(nn.Module):
    """Hidden units, whose number may be in a dict, where no trial can change it."""

    def __init__(self, is_fixed):
        super().__init__()
        self.up, self.down, self.sizes = nn.Linear(4, 6), nn.Linear(6, 4), {"hidden": 6 if is_fixed else -1}

    def forward(self, x):
        return x + self.down(self.up(x).view(len(x), self.sizes["hidden"]))


def test_failures_of_others_like_it_do_not_stop_a_coupling_that_can_be_removed():
    def run(m, x):
        x = m.blocks(x)
        return m.b(m.a(x).view(len(x), m.width)) + m.d(m.c(x).view(len(x), m.width))

    layers = {"a": nn.Linear(4, 8), "b": nn.Linear(8, 4), "c": nn.Linear(4, 8), "d": nn.Linear(8, 4)}
    model = fill(Net(run, blocks=nn.Sequential(*map(Fixed, (False, True, True, True))), **layers, width=8))
    rows = [(f"blocks.{at}.up", f"blocks.{at}.down") for at in range(4)] + [("a", "b"), ("c", "d")]
    couplings = [Coupling({f"{a}.weight": "u i", f"{a}.bias": "u", f"{b}.weight": "o u"}) for a, b in rows]
    found = removable(model, torch.randn(5, 4), couplings)
    # `a` and `c`, which share a number, are merged, so that all that can be removed is tried once more.
    assert [coupling.name for coupling in found.couplings] == ["blocks.0.up.weight", "a.weight"]
    assert [name for name, _ in found.left_out] == [f"blocks.{at}.up.weight" for at in (1, 2, 3)]


@pytest.mark.parametrize("prefix", ["0.", "*."])
def test_a_coupling_that_names_a_missing_tensor_is_an_error(prefix):
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)))
    members = {f"{prefix}0.weight": "u i", f"{prefix}0.scale": "u", f"{prefix}2.weight": "o u"}
    with pytest.raises(SparsityError, match=r"0.scale.* matches no parameter or buffer of the model"):
        removable(model, torch.randn(3, 4), [Coupling(members)])


def with_layout(value):
    """Images, volumes and weights with their channels in the last place of the memory."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return value.to(memory_format=formats[value.ndim]) if value.ndim in formats else value


def squeezed(m, x):
    x = m.a(x).relu()
    return m.head((x * m.gate(F.adaptive_avg_pool2d(x, 1)).sigmoid()).mean((2, 3)))


def pooled_twice(m, x):
    x = m.a(x).relu()
    x = m.b(x + F.adaptive_avg_pool2d(x, 1)).relu()
    return m.head(F.adaptive_avg_pool2d(x, (1, 1)).flatten(1))


POOLED = {
    "a chain": lambda: nn.Sequential(
        *(nn.Conv2d(3, 12, 3), nn.ReLU(), nn.Conv2d(12, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    ),
    "squeezed": lambda: Net(squeezed, a=nn.Conv2d(3, 8, 3), gate=nn.Conv2d(8, 8, 1), head=nn.Linear(8, 4)),
    "pooled twice": lambda: Net(pooled_twice, a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(8, 6, 1), head=nn.Linear(6, 4)),
    "one channel": lambda: Net(pooled_twice, a=nn.Conv2d(3, 1, 3), b=nn.Conv2d(1, 6, 1), head=nn.Linear(6, 4)),
    "depthwise": lambda: nn.Sequential(
        *(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8), nn.ReLU6(), nn.AdaptiveAvgPool2d(1)),
        *(nn.Conv2d(8, 16, 1), nn.Hardswish(), nn.Flatten(), nn.Linear(16, 4)),
    ),
    "volumes": lambda: nn.Sequential(
        *(nn.Conv3d(3, 8, 3), nn.ReLU(), nn.Conv3d(8, 6, 3), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(6, 4))
    ),
}
CONVOLUTIONAL = {
    name: rows
    for name, rows in NETWORKS.items()
    if any(isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) for module in rows[0]().modules())
}
CONVOLUTIONAL |= {
    name: (make, lambda three=name == "volumes": torch.randn(2, 3, *[8] * (2 + three))) for name, make in POOLED.items()
}


@pytest.mark.parametrize("name", nightly_except(CONVOLUTIONAL, *POOLED, "VGG"))
def test_the_same_is_removed_in_both_layouts(name):
    make, inputs = CONVOLUTIONAL[name]
    model, x = fill(make()), inputs()
    plain = shrink(model, x, 0.5)[1]
    for parameter in model.parameters():
        parameter.data = with_layout(parameter.data)
    last = shrink(model, tree_map_only(torch.Tensor, with_layout, x), 0.5)[1]
    assert "as_strided" not in str(last)
    assert last.couplings == plain.couplings and last.after == plain.after and last.left_out == plain.left_out
    assert last.couplings or name not in POOLED


@pytest.mark.parametrize(("size", "stride"), [((6, 6), (1, 6)), ((3, 6), (12, 1)), ((36,), (1,))])
def test_a_strided_view_of_other_elements_is_not_understood(size, stride):
    model = Net(lambda m, x: m.b(x) + m.a(x).as_strided(size, stride).sum(), a=nn.Linear(6, 6), b=nn.Linear(6, 6))
    assert "as_strided in the model: not understood" in str(discover(model, torch.randn(6, 6)))
