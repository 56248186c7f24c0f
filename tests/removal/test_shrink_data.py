"""shrink with data: compensation and recovery; numbers for single layers, and one budget for all layers."""

import copy

import hf_models
import pytest
import torch
from discovered import fill
from grids import nightly_for
from networks import NETWORKS, Net
from stock import EVERYTHING
from stock import linear_model as mlp
from torch import nn

from sparsekit_ao import Coupling, SparsityError, prune, recover
from sparsekit_ao.removal import shrink


def error(small, model, batches):
    """The relative output error."""
    with torch.no_grad():
        expected, actual = (torch.cat([one(x) for x in batches]) for one in (model, small))
    return float((actual - expected).norm() / expected.norm())


def test_layers_that_read_dropped_units_have_the_best_weights_for_the_others():
    model, batches = mlp(6, 12, 5), [torch.randn(50, 6) for _ in range(4)]
    small, report = shrink(model, ratio=0.5, batches=batches)
    plain, uncompensated = shrink(model, ratio=0.5, batches=batches, compensate=None)
    assert torch.equal(small[0].weight, plain[0].weight) and not uncompensated.compensation
    with torch.no_grad():
        hidden, kept = (torch.cat([one[:2](x) for x in batches]) for one in (model, small))
        best = torch.linalg.lstsq(kept, hidden @ model[2].weight.T).solution.T
    assert torch.allclose(small[2].weight, best, rtol=0.05, atol=0.02)  # a hundredth of the mean square is added
    assert torch.equal(small[2].bias, model[2].bias)
    (row,) = report.compensation
    assert row.tensor == "2.weight" and row.after < 0.8 * row.before
    assert "mean output error of what makes up for the removed parts (1 layers): " in str(report)
    assert error(small, model, batches) < 0.8 * error(plain, model, batches)


def test_what_a_dropped_unit_repeats_is_given_by_the_one_that_stays():
    model = mlp(4, 16, 16, 3)
    with torch.no_grad():
        for layer in (model[0], model[2]):  # of each pair of equal units the score keeps the larger one
            layer.weight[8:] = layer.weight[:8] * 0.5
            layer.bias[8:] = layer.bias[:8] * 0.5
    batches = [torch.randn(40, 4) for _ in range(3)]
    small, _ = shrink(model, ratio=0.5, batches=batches)
    plain, _ = shrink(model, ratio=0.5, batches=batches, compensate=None)
    assert error(small, model, batches) < 0.1 < error(plain, model, batches)


def test_convolutions_make_up_for_filters():
    network, inputs = NETWORKS["VGG"]
    torch.manual_seed(0)
    model, batches = fill(network()), [torch.randn_like(inputs()) for _ in range(4)]
    plain, _ = shrink(model, ratio=0.5, batches=batches, compensate=None)
    better, report = shrink(model, ratio=0.5, batches=batches)
    assert report.compensation and all(row.after < row.before for row in report.compensation)
    assert error(better, model, batches) < error(plain, model, batches)
    small, report = shrink(model, ratio=0.5, batches=batches, recover=True)
    assert error(small, model, batches) < error(better, model, batches)


def test_one_call_from_a_model_to_a_recovered_smaller_one():
    model, _ = hf_models.make("BERT")
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(0)
    ids = [torch.randint(2, 30, (4, 12)) for _ in range(4)]
    masks = [torch.ones(4, 12, dtype=torch.long).index_fill(1, torch.arange(9, 12), 0) for _ in range(4)]
    batches = [{"input_ids": x, "attention_mask": mask} for x, mask in zip(ids, masks, strict=True)]
    small, report = shrink(model, ratio=0.5, score="obs", batches=batches, recover=True)
    assert report.couplings and report.recovery is not None
    assert all(row.after <= row.before for row in report.recovery) and "144 of 192 tokens count" in str(report)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert report.not_in_config == "" and type(small)(small.config).state_dict().keys() == small.state_dict().keys()


def stream():
    """Blocks that read and write one stream, so each of their weights has its units in two dimensions, and batches."""

    def run(m, x):
        x = m.first(x)
        for block in m.blocks:
            x = x + block(x).relu()
        return m.last(x)

    torch.manual_seed(0)
    ends = {"first": nn.Linear(4, 16), "last": nn.Linear(16, 3)}
    model = Net(run, **ends, blocks=nn.ModuleList(nn.Linear(16, 16) for _ in range(2)))
    return model.eval(), [torch.randn(60, 4) for _ in range(4)]


def test_weights_that_read_and_write_one_stream_make_up_for_it():
    model, batches = stream()
    small, report = shrink(model, ratio=EVERYTHING, batches=batches)
    plain, _ = shrink(model, ratio=EVERYTHING, batches=batches, compensate=None)
    assert {row.tensor for row in report.compensation} == {"blocks.0.weight", "blocks.1.weight", "last.weight"}
    assert small.blocks[0].weight.shape == (8, 8)
    assert error(small, model, batches) < 0.8 * error(plain, model, batches)


def test_weights_that_modules_share_stay_as_they_are():
    model, batches = stream()
    model.blocks[1].weight = model.blocks[0].weight
    small, report = shrink(model, ratio=EVERYTHING, batches=batches)
    assert [row.tensor for row in report.compensation] == ["last.weight"]
    assert small.blocks[0].weight is small.blocks[1].weight


def test_names_of_couplings_hold_when_their_layers_differ():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)) for _ in range(3))).eval()
    units = Coupling({"*.0.weight": "u i", "*.0.bias": "u", "*.2.weight": "o u"}, name="units *")
    x = torch.randn(5, 8)

    def kept(**keys):
        small, _ = shrink(model, x, couplings=[units], **keys)
        return [block[0].out_features for block in small]

    assert kept(ratio={"units *": 0.5}, multiple_of={"1": 12}) == [16, 24, 16]
    assert kept(ratio={"units *": 0.5, "1": 0.25}) == [16, 24, 16]
    assert kept(ratio={"mlp": 0.5, "1.0.bias": 0.25}) == [16, 24, 16]
    numbers = {"max_sparsity": {"units *": 0.25}, "multiple_of": {"1": 2}}
    assert all(units >= 24 for units in kept(ratio=0.2, budget="units", **numbers))


def test_numbers_for_the_tensors_and_modules_of_single_layers():
    model, x = mlp(4, 16, 16, 16, 2), torch.randn(5, 4)
    small, report = shrink(model, x, {"0": 0.25, "4.bias": 0.75})
    assert [small[k].out_features for k in (0, 2, 4)] == [12, 16, 4]
    assert report.left_out == ("2.weight: ratio is 0 for it, or does not name it",)
    small, _ = shrink(model, x, {"0": 0.25, "*": 0.5})
    assert [small[k].out_features for k in (0, 2, 4)] == [12, 8, 8]
    small, _ = shrink(model, x, 0.5, multiple_of={"2.bias": 12})
    assert [small[k].out_features for k in (0, 2, 4)] == [8, 12, 8]
    for name in ("6", "6.weight"):
        with pytest.raises(SparsityError, match=f"shrink: ratio names '{name}', but none of its outputs can be"):
            shrink(model, x, {name: 0.5})
    with pytest.raises(SparsityError, match="shrink: ratio names 'o', but the couplings are"):
        shrink(model, x, {"o": 0.5})


def test_one_layer_of_many_that_are_alike():
    model, inputs = hf_models.make("Llama")
    small, report = shrink(model, inputs, {"model.layers.0.mlp": 0.5, "model.layers.1.mlp.gate_proj.weight": 0.25})
    widths = [layer.mlp.up_proj.out_features / model.config.intermediate_size for layer in small.model.layers]
    assert widths == [0.5, 0.75] and report.not_in_config
    with pytest.raises(SparsityError, match="ratio has different numbers for .*, whose units are removed together"):
        shrink(model, inputs, {"model.layers.0.mlp.gate_proj": 0.5, "model.layers.0.mlp.up_proj": 0.25})


def test_single_layers_of_many_are_excluded():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(4))).eval()
    units = Coupling({"*.0.weight": "u i", "*.0.bias": "u", "*.2.weight": "o u"}, name="units *")
    for couplings in (None, [units]):
        small, report = shrink(model, torch.randn(5, 8), exclude=["1.0", "2"], couplings=couplings)
        assert [block[0].out_features for block in small] == [8, 16, 16, 8]
        assert sum("left out by exclude" in text for text in report.left_out) >= 2
    llama, inputs = hf_models.make("Llama")
    small, report = shrink(llama, inputs, {"mlp": 0.5}, keep_config=False, exclude=["model.layers.0"])
    widths = [layer.mlp.up_proj.out_features / llama.config.intermediate_size for layer in small.model.layers]
    assert widths == [1] + [0.5] * (len(widths) - 1)
    # The config has one number for all.
    small, report = shrink(llama, inputs, {"mlp": 0.5}, keep_config=True, exclude=["model.layers.0.mlp"])
    assert small.config.intermediate_size == llama.config.intermediate_size and report.not_in_config == ""
    assert any("the config cannot hold it" in text for text in report.left_out)


def test_reasons_and_hints():
    llama, inputs = hf_models.deep("Llama", 1)
    with pytest.raises(SparsityError, match="ratio names 'heads', but the couplings are .*; did you mean 'key heads'"):
        shrink(llama, inputs, {"heads": 0.5})
    _, report = shrink(llama, inputs, {"mlp": 0.5})
    assert any(text.endswith(": ratio is 0 for it, or does not name it") for text in report.left_out)
    model, x = mlp(4, 16, 16, 2), torch.randn(5, 4)
    with torch.no_grad():
        model[0].weight[4:] *= 1e-4
        model[0].bias[4:] *= 1e-4
        model[2].weight[:, 4:] *= 1e-4
    _, report = shrink(model, x, 0.25, budget="units")
    assert [text for text in report.left_out if "the budget is met although it keeps all of its 16 units" in text]


def test_units_of_all_layers_compete_for_one_budget_with_caps():
    model, x = mlp(4, 32, 32, 32, 2), torch.randn(5, 4)
    with torch.no_grad():
        for at in (2, 3):  # the units of one layer matter little
            model[at if at == 2 else 4].weight[8:] *= 1e-3 if at == 2 else 1
        model[2].bias[8:] *= 1e-3
        model[4].weight[:, 8:] *= 1e-3
    small, _ = shrink(model, x, 0.25, "norm", budget="units", max_sparsity=0.75)
    kept = [small[k].out_features for k in (0, 2, 4)]
    assert sum(kept) == 72 and kept[1] == 8
    small, _ = shrink(model, x, 0.25, "norm", budget="units", max_sparsity={"2": 0.5})
    kept = [small[k].out_features for k in (0, 2, 4)]
    assert sum(kept) == 72 and kept[1] == 16
    with pytest.raises(SparsityError, match="a ratio of 0.9 allows a cost of 9.6, but without all units that may be"):
        shrink(model, x, 0.9, budget="units", max_sparsity=0.5)


def test_arguments_of_no_use_are_refused():
    model, batches = mlp(4, 16, 2), [torch.randn(5, 4)]
    for text, keys in {
        "shrink: compensate must be 'least_squares' or None, got 'admm'": {"batches": batches, "compensate": "admm"},
        "shrink: recover must be True, False or a number of passes, got Sequential": {
            "batches": batches,
            "recover": model,
        },
        "shrink: recover and token_mask need batches": {"example_inputs": batches[0], "recover": True},
        "shrink: max_sparsity=0.5 needs one budget for all layers": {"batches": batches, "max_sparsity": 0.5},
        "multiple_of must be a positive int, got 0": {"batches": batches, "multiple_of": {"0": 0}},
        "a dict of ratios, .* cannot be combined with a budget= .*; call shrink twice": {
            "batches": batches,
            "budget": "units",
            "ratio": {"0": 0.5},
        },
        "shrink: the score needs a forward that returns the loss, but recover": {
            "batches": batches,
            "recover": True,
            "score": "taylor",
            "forward": lambda m, x: m(x).square().mean(),
        },
    }.items():
        with pytest.raises(SparsityError, match=text):
            shrink(model, **keys)


@pytest.mark.parametrize("name", ["*", "a", "a.bias", "hidden"])
def test_trials_keep_the_multiples_that_any_name_gives(name):
    class Aligned(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 16), nn.Linear(16, 2)

        def forward(self, x):
            hidden = self.a(x).relu()
            if hidden.shape[-1] % 4:
                raise RuntimeError("the kernel needs a multiple of 4")
            return self.b(hidden)

    hidden = Coupling({"a.weight": "u i", "a.bias": "u", "b.weight": "o u"}, name="hidden")
    small, _ = shrink(Aligned(), torch.randn(3, 4), 0.4, couplings=[hidden], multiple_of={name: 4})
    assert small.a.out_features == 12


def test_scores_are_computed_once_whatever_is_left_out():
    def run(m, x):
        a, b = m.a(x), m.b(x)
        return m.c(a) + m.d(b) + (3.0 if 8 > a.shape[1] != b.shape[1] < 8 else 0.0)

    def score(weight, name):
        names.append(name)
        return weight.abs()

    torch.manual_seed(0)
    layers, names = {"a": nn.Linear(4, 8), "b": nn.Linear(4, 8), "c": nn.Linear(8, 2), "d": nn.Linear(8, 2)}, []
    model = Net(run, **layers)
    with torch.no_grad():  # of one layer, all units but one matter little
        model.b.weight[1:] *= 1e-3
        model.b.bias[1:] *= 1e-3
        model.d.weight[:, 1:] *= 1e-3
    rows = ("ac", "bd")
    couplings = [Coupling({f"{a}.weight": "u i", f"{a}.bias": "u", f"{b}.weight": "o u"}) for a, b in rows]
    _, report = shrink(model, torch.randn(5, 4), 0.75, score, budget="units", couplings=couplings)
    assert [row.kept for row in report.couplings] == [2] and "together with others" in report.left_out[0]
    assert sorted(names) == ["a.bias", "a.weight", "b.bias", "b.weight", "c.weight", "d.weight"]


@pytest.mark.parametrize("score", [None, "norm"])
def test_the_default_score_reads_what_units_give_on_the_data(score):
    model, x = mlp(4, 12, 3), torch.randn(200, 4)
    with torch.no_grad():
        model[0].weight[::2] *= 100  # by norm, these units matter most
        model[0].bias[::2] = -1e6  # but none of them is ever active
    small, _ = shrink(model, x, 0.5, score)
    is_active = (torch.arange(12) % 2 == (1 if score is None else 0)).nonzero()[:, 0]
    assert torch.equal(small[0].weight, model[0].weight[is_active])


@pytest.mark.parametrize("why", ["no reader records its inputs", "the reader is zero"])
def test_units_that_data_cannot_score_are_scored_by_norms(why):
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 6), nn.Parameter(torch.randn(6))
            self.c = None if why.startswith("no") else nn.Linear(6, 3)

        def forward(self, x):
            h = self.a(x) * self.b
            return h.sum(1, keepdim=True) if self.c is None else x[:, :3] + self.c(h)

    model, x = Last(), torch.randn(50, 4)
    with torch.no_grad():
        if model.c is not None:
            model.c.weight.zero_()
        model.a.weight[::2] *= 100
    small, report = shrink(model, x, 0.5)
    assert torch.equal(small.a.weight, model.a.weight[::2]), report


def test_reports_begin_with_how_far_the_outputs_are_from_those_of_the_dense_model():
    dense, batches = mlp(6, 24, 5), [torch.randn(50, 6) for _ in range(4)]
    pruned, of_prune = prune(dense, 0.5, batches=batches)
    small, of_shrink = shrink(dense, batches[0], 0.5)
    again, of_both = shrink(dense, ratio=0.5, batches=batches, recover=True)
    of_recover = recover(small, dense, batches)
    for model, report in ((pruned, of_prune), (small, of_recover), (again, of_both)):
        with torch.no_grad():
            wanted, got = dense(batches[0]), model(batches[0])
        expected = float((got - wanted).norm() / (wanted - wanted.mean(0)).norm())
        assert report.error_to_dense == pytest.approx(expected, rel=1e-5)
        first = f"relative error of the outputs to those of the dense model: {expected:.3f}"
        assert str(report).splitlines()[0] == first and str(report).count(first) == 1
        assert report._repr_html_().startswith(f"<p>{first}")
    assert of_recover.error_to_dense < of_shrink.error_to_dense
    _, report = shrink(dense, batches[0], 0.9)
    assert report.error_to_dense > 0.7 and "they have little in common" in str(report).splitlines()[1]


@pytest.mark.parametrize(
    "outputs",
    [
        lambda x, y: (x.mean(-1), y),
        lambda x, y: {"positions": torch.arange(len(x)).float(), "logits": y},
        lambda x, y: (y.argmax(-1), y),
        lambda x, y: (y.square().mean(), y),
        lambda x, y: [None, (x, [y])],
        lambda x, y: (torch.zeros(2, 3), y),
    ],
)
def test_the_error_is_that_of_the_first_output_of_floats_that_differs(outputs):
    dense = Net(lambda m, x: outputs(x, m.b(m.a(x).relu())), a=nn.Linear(8, 32), b=nn.Linear(32, 5))
    x = torch.randn(64, 8)
    for model, report in (shrink(dense, x, 0.75), prune(dense, 0.75, batches=[x], progress=False)):
        wanted, got = (one.b(one.a(x).relu()).detach() for one in (dense, model))
        expected = float((got - wanted).norm() / (wanted - wanted.mean(0)).norm())
        assert report.error_to_dense == pytest.approx(expected, rel=1e-5)


def test_rows_of_images_are_their_pixels():
    dense, x = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 5, 3)), torch.randn(2, 3, 8, 8)
    dense[2].bias.data += 10 * torch.arange(5)  # a mean of each channel is no error
    pruned, report = prune(dense, 0.75, batches=[x], progress=False)
    with torch.no_grad():
        wanted, got = dense(x), pruned(x)
    expected = float((got - wanted).norm() / (wanted - wanted.mean((0, 2, 3), keepdim=True)).norm())
    assert report.error_to_dense == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_padding_does_not_count_in_the_error_of_outputs(scale):
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 16), nn.Linear(16, 3)

        def forward(self, x, attention_mask):
            return self.b(self.a(x).relu())

    dense, x, mask = Tokens(), torch.randn(8, 6, 4), torch.ones(8, 6)
    mask[:, 4:] = 0
    x[:, 4:] *= scale
    small, report = shrink(dense, {"x": x, "attention_mask": mask}, 0.5)
    with torch.no_grad():
        wanted, got = (one(x, mask)[:, :4].flatten(0, 1) for one in (dense, small))
    assert report.error_to_dense == pytest.approx(
        float((got - wanted).norm() / (wanted - wanted.mean(0)).norm()), rel=1e-5
    )


@pytest.mark.parametrize(
    ("keys", "width"),
    [
        ({}, 16),
        ({"ratio": {"*": 0.5}}, 16),
        ({"ratio": 0.2, "budget": "parameters"}, 16),
        ({"ratio": {"width": 0.25}}, 12),
        ({"ratio": {"*": 0.5, "width": 0.25}}, 12),
        ({"ratio": {"first": 0.25}}, 12),
        ({"ratio": {"width": 0.5}}, 8),
        ({"ratio": 0.7, "budget": "units", "max_sparsity": {"width": 0.25, "*": 0.9}}, 12),
    ],
)
def test_what_passes_between_blocks_stays_unless_it_is_named(keys, width):
    def run(m, x):
        x = m.first(x)
        for block in m.blocks:
            x = x + block(x)
        return m.last(x)

    blocks = nn.ModuleList(mlp(16, 32, 16) for _ in range(2))
    model = Net(run, first=nn.Linear(4, 16), blocks=blocks, last=nn.Linear(16, 3)).eval()
    small, report = shrink(model, torch.randn(9, 4), **keys)
    assert small.first.out_features == width and report.difference <= 1e-5
    assert any("ratio={'width': 0.5}" in text for text in report.left_out) == (width == 16)


VECTORS = [torch.linspace(-2, 2, 192).sin().mul(99 + at).sin().view(24, 8) for at in range(3)]
SPARSE = {  # {name: (a function that returns a pruned model, batches, arguments of `shrink`)}
    "single elements": (lambda: prune(mlp(8, 16, 12, 5), 0.6)[0], VECTORS, {}),
    "obs": (lambda: prune(mlp(8, 16, 12, 5), 0.6)[0], VECTORS, {"score": "obs"}),
    "recover": (lambda: prune(mlp(8, 16, 12, 5), 0.6)[0], VECTORS, {"recover": 1}),
    "2:4 in bfloat16": (
        lambda: prune(mlp(8, 16, 12, 8).bfloat16(), "2:4")[0],
        [x.bfloat16() for x in VECTORS],
        {"compensate": "least_squares"},
    ),
    "rows": (lambda: prune(mlp(8, 16, 12, 5), "rows", exclude=["4"])[0], VECTORS, {}),
    "convolutions": (lambda: prune(fill(NETWORKS["VGG"][0]()), 0.5)[0], [NETWORKS["VGG"][1]()], {}),
    "depthwise convolutions": (
        lambda: prune(fill(NETWORKS["MobileNet v3"][0]()), 0.5)[0],
        [NETWORKS["MobileNet v3"][1]()],
        {},
    ),
    **{
        name: (lambda name=name: prune(hf_models.deep(name, 1)[0], "2:4")[0], None, {"exclude": ["width"]})
        for name in ("GPT-2", "Mixtral")
    },
}


@pytest.mark.parametrize("name", nightly_for(SPARSE, "Mixtral"))
def test_zeros_of_a_pruned_model_stay_when_weights_make_up_for_dropped_units(name):
    make, batches, keys = SPARSE[name]
    model, batches = make(), batches or [hf_models.make(name)[1]]
    small, report = shrink(model, ratio=0.5, batches=batches, **keys)
    keys = {name: value for name, value in keys.items() if name in ("score", "exclude")}
    plain, _ = shrink(model, ratio=0.5, batches=batches, compensate=None, **keys)
    pairs = [(small.get_parameter(name), p) for name, p in plain.named_parameters() if p.ndim > 1]
    assert all(torch.equal(fitted == 0, p == 0) for fitted, p in pairs)
    assert report.compensation and any(not torch.equal(fitted, p) for fitted, p in pairs)
    counts = [sum(int((p == 0).sum()) for p in one.parameters() if p.ndim > 1) for one in (model, small)]
    totals = [sum(p.numel() for p in one.parameters() if p.ndim > 1) for one in (model, small)]
    text = "weights that are zero: {:,} of {:,} before, {:,} of {:,} now"
    assert report.zeros == text.format(counts[0], totals[0], counts[1], totals[1]) and report.zeros in str(report)


def test_the_fit_is_the_best_one_that_keeps_zeros():
    model, batches = prune(mlp(6, 12, 5), 0.5)[0], [torch.randn(50, 6) for _ in range(4)]
    small, _ = shrink(model, ratio=0.5, batches=batches)
    with torch.no_grad():
        hidden, kept = (torch.cat([one[:2](x) for x in batches]) for one in (model, small))
        for before, after in zip(model[2].weight, small[2].weight, strict=True):
            inputs = kept[:, after != 0]
            best = torch.linalg.lstsq(inputs, hidden @ before).solution
            assert torch.allclose(after[after != 0], best, rtol=0.1, atol=0.03)


def test_a_few_zeros_and_a_layer_of_zeros_do_not_change_the_fit_of_a_dense_model():
    model, batches = mlp(6, 12, 9, 5), [torch.randn(50, 6) for _ in range(4)]
    nn.init.zeros_(model[4].weight)
    dense, report = shrink(model, ratio={"0": 0.5}, batches=batches)
    with torch.no_grad():
        model[2].weight[3, 7] = 0
    few, _ = shrink(model, ratio={"0": 0.5}, batches=batches)
    others = torch.arange(9) != 3
    assert torch.allclose(few[2].weight[others], dense[2].weight[others], rtol=1e-4, atol=1e-6)
    assert not dense[4].weight.any() and report.zeros.endswith("before, 45 of 135 now")
    _, report = shrink(mlp(6, 60, 60, 5), ratio={"0": 0.5}, batches=batches)
    assert report.zeros == "" and "zero" not in str(report)


def test_example_inputs_may_have_flags_and_numbers_before_rows():
    model = Net(
        lambda m, flag, scale, x: m.b((m.a(x) if flag else x).relu()) * scale, a=nn.Linear(4, 8), b=nn.Linear(8, 3)
    )
    small, report = shrink(model, {"flag": True, "scale": torch.tensor(2.0), "x": torch.randn(64, 4)}, 0.5)
    assert small.a.out_features == 4 and report.difference <= 1e-5
