"""Trials on a short twin: the same models and reports as by trials of the whole model, which is the fallback."""

import hf_models
import pytest
import torch
import transformers
from stock import EVERYTHING
from torch import nn
from torch.nn import functional as F

from sparsekit_ao import Coupling
from sparsekit_ao.coupling import discover
from sparsekit_ao.removal import choose, find, removable, shrink
from sparsekit_ao.removal.twin import make_twin

IDS = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(0))
PIXELS = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))

TYPES = {"sliding_window": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"] * 3}
UNITS = {f"{up}_proj.{name}": axes for up in ("gate", "up") for name, axes in (("weight", "u i"), ("bias", "u"))}


@pytest.fixture(autouse=True)
def _no_gradients():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def llama(layers=5):
    return hf_models.deep("Llama", layers)


def gemma():
    return hf_models.deep("Gemma3", 6, **TYPES)


def vit():
    return hf_models.deep("ViT", 5)


def t5():
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4}
    config = transformers.T5Config(**sizes, num_layers=5, num_decoder_layers=4)
    return transformers.T5ForConditionalGeneration(config), {"input_ids": IDS, "decoder_input_ids": IDS}


def resnet():
    config = transformers.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[3, 5], layer_type="bottleneck")
    return transformers.ResNetForImageClassification(config), PIXELS


class Attention(nn.Module):
    """Attention whose number of heads is in `heads`, which may be an attribute or hidden in a dict."""

    def __init__(self, heads):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.sizes = {"heads": heads}
        self.heads = heads

    def number(self):
        return self.heads

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.number(), 4)).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Hidden(Attention):
    """One that reads the number from where no trial can change it, if a flag in a dict says so."""

    def number(self):
        return self.sizes["heads"] if self.sizes.get("is_hidden") else self.heads


class Stack(nn.Module):
    """Blocks, called by their number."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(16, 3)

    def forward(self, x):
        for at in range(len(self.blocks)):
            x = self.blocks[at](x)
        return self.head(x)


class FixedLength(Stack):
    """A model that cannot run with fewer blocks."""

    def forward(self, x):
        for at in range(5):
            x = self.blocks[at](x)
        return self.head(x)


def nightly(*values):
    return pytest.param(*values, marks=pytest.mark.nightly)


def states(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def check_equal(a, b):
    assert a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())


def shrunk(model, inputs, monkeypatch, *, whole, **keys):
    """The smaller model, its report, and how many blocks each twin had."""
    made = []

    def make(model, plans, fields):
        twin = None if whole else make_twin(model, plans, fields)
        made.append({} if twin is None else dict(twin.kept))
        return twin

    with monkeypatch.context() as patch:
        patch.setattr(find, "make_twin", make)
        patch.setattr(choose, "make_twin", make)
        if whole:
            patch.setattr(find, "discover_in_twin", lambda *_: None)
        return *shrink(model, inputs, **{"ratio": EVERYTHING, **keys}), made


def compared(model, inputs, monkeypatch, **keys):
    """The smaller model, which is the one by trials of the whole, both reports, and the blocks of the twins."""
    small, report, made = shrunk(model.eval(), inputs, monkeypatch, whole=False, **keys)
    other, wanted, _ = shrunk(model, inputs, monkeypatch, whole=True, **keys)
    check_equal(states(small), states(other))
    assert not hasattr(small, "config") or small.config.to_dict() == other.config.to_dict()
    return small, report, wanted, made


@pytest.mark.parametrize(
    ("make", "kept"),
    [
        nightly(llama, {"model.layers.": [0, 1]}),
        nightly(gemma, {"model.layers.": [0, 1, 3, 4]}),
        nightly(t5, {"encoder.block.": [0, 1, 2], "decoder.block.": [0, 1, 2]}),
        (vit, {"vit.layers.": [0, 1]}),
        nightly(resnet, {"resnet.encoder.stages.0.layers.": [0, 1], "resnet.encoder.stages.1.layers.": [0, 1, 2]}),
    ],
)
def test_the_smaller_model_and_the_report_are_those_of_trials_of_the_whole(make, kept, monkeypatch):
    model, inputs = make()
    before, config = states(model.eval()), model.config.to_dict()
    _, report, wanted, made = compared(model, inputs, monkeypatch)
    assert made == [kept, kept] and report.after.parameters < report.before.parameters
    for field in ("couplings", "changed", "left_out", "frozen", "values", "notes", "not_in_config", "manifest"):
        assert getattr(report, field) == getattr(wanted, field), field
    check_equal(states(model), before)
    assert model.config.to_dict() == config and all(p.requires_grad for p in model.parameters())


MLP = UNITS | {"down_proj.weight": "o u"}
ONE_BLOCK = [Coupling({f"model.layers.3.mlp.{name}": axes for name, axes in MLP.items()})]


@pytest.mark.parametrize(
    "how",
    [
        nightly({"keep_config": False}),
        nightly({"ratio": 0.5, "budget": "flops", "max_sparsity": {"width": 0.9}}),
        nightly({"exclude": ["*.v_proj.weight"]}),
        {"couplings": ONE_BLOCK, "keep_config": False},
    ],
)
def test_arguments_of_shrink_give_the_same_model(how, monkeypatch):
    model, inputs = llama(4)
    _, report, wanted, _ = compared(model, inputs, monkeypatch, **how)
    assert report.manifest == wanted.manifest and report.left_out == wanted.left_out
    assert report.after.parameters < report.before.parameters


@pytest.mark.parametrize("make", [nightly(llama), vit])
def test_what_is_found_in_a_short_model_is_what_the_whole_has(make, monkeypatch):
    model, inputs = make()
    found = find.discover_in_twin(model.eval(), inputs, None)
    wanted = discover(model, inputs)
    assert found.couplings == wanted.couplings
    assert (found.values, found.uncalled) == (wanted.values, wanted.uncalled)


class Mlp(nn.Module):
    """Hidden units between two layers."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def hidden(self, x):
        return self.up(x).relu()

    def forward(self, x):
        return x + self.down(self.hidden(x))


class ByPosition(Stack):
    """Blocks that look alike, whose hidden units are read elsewhere by the number of the block."""

    def __init__(self, how):
        super().__init__([Mlp() for _ in range(6)])
        self.how = how
        self.beside = nn.ModuleList(nn.Linear(16, 16) for _ in range(6 if how == "layers beside the blocks" else 1))

    def forward(self, x):
        hidden, taps = [], []
        for at, block in enumerate(self.blocks):
            h = block.hidden(x)
            if self.how == "one block reads another" and at == 3:
                h = h + hidden[1]
            taps += [h] if (at == 3, at < 2)[self.how == "the first are outputs"] and "output" in self.how else []
            hidden.append(h)
            x = x + block.down(h)
            x = self.beside[at](x) if self.how == "layers beside the blocks" else x
        return self.head(x), taps


@pytest.mark.parametrize(
    "how", ["one is an output", "the first are outputs", "one block reads another", "layers beside the blocks"]
)
def test_blocks_that_differ_by_their_position_lose_what_the_whole_model_shows(how, monkeypatch):
    _, report, wanted, _ = compared(ByPosition(how), torch.randn(4, 16), monkeypatch)
    assert report.left_out == wanted.left_out and report.after.parameters < report.before.parameters


def test_a_model_that_is_a_sequence_itself():
    blocks = [Mlp() for _ in range(5)]
    model = nn.Sequential(*blocks, nn.Linear(16, 3)).eval()
    assert find.discover_in_twin(model, torch.randn(4, 16), None) is None
    assert shrink(model, torch.randn(4, 16), 0.5)[0][0].up.out_features == 16


def test_most_forwards_run_two_blocks():
    model, inputs = llama(layers=5)
    runs = []
    hook = lambda module, *_: runs.append(len(module.layers))  # noqa: E731
    model.model.register_forward_pre_hook(hook)  # copies keep it
    removable(model.eval(), inputs)
    assert runs.count(5) == 4  # discovery, and the dense, the masked and the smaller model that are compared at the end
    assert runs.count(2) > 5 and {*runs} == {2, 5}


def test_attributes_are_found_for_all_blocks():
    model = Stack([Attention(4) for _ in range(5)]).eval()
    (found,) = [coupling for coupling in removable(model, torch.randn(2, 6, 16)).couplings if coupling.attrs]
    assert found.attrs == {"blocks.*.heads": "u"} and len(found.bind(model)) == 5


def test_where_the_short_model_does_not_run_the_whole_is_tried(monkeypatch):
    model, x = FixedLength([Attention(4) for _ in range(5)]), torch.randn(2, 6, 16)
    small, report, wanted, made = compared(model, x, monkeypatch)
    assert made == [{"blocks.": [0, 1]}] and small.blocks[4].heads == 2
    assert report.left_out == wanted.left_out and report.changed == wanted.changed


def test_where_blocks_differ_in_secret_the_whole_is_tried(monkeypatch):
    model, x = Stack([Hidden(4) for _ in range(5)]).eval(), torch.randn(2, 6, 16)
    model.blocks[4].sizes["is_hidden"] = True
    assert not any(coupling.attrs for coupling in removable(model, x).couplings)
    _, report, wanted, made = compared(model, x, monkeypatch)
    assert made == [{"blocks.": [0, 1]}] and report.difference <= 1e-5
    assert [t.partition(":")[0] for t in report.left_out] == [t.partition(":")[0] for t in wanted.left_out]


def test_a_twin_shares_parameters():
    model, _ = llama()
    queries = [m.model.layers[1].self_attn.q_proj for m in (make_twin(model, []).model, model)]
    assert queries[0] is not queries[1] and queries[0].weight is queries[1].weight


@pytest.mark.parametrize("make", [lambda: llama(1)[0], lambda: llama(2)[0], lambda: Stack([Attention(4)] * 5)])
def test_a_model_without_repeated_blocks_has_no_twin(make):
    assert make_twin(make(), []) is None
