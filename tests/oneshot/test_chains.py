"""Models with several chains of blocks, and blocks that pass on more than hidden states."""

import collections
import copy
import functools
import inspect

import pytest
import torch
import transformers
from grids import turns
from networks import Net
from torch import nn
from torch.nn import functional as F

from sparsekit_ao import prune, recover, shrink
from sparsekit_ao.oneshot import walk

SIZE = 8


class Block(nn.Module):
    """An MLP beside a residual stream, with what else a block may read."""

    def __init__(self, makes_bias=False, reads=0):
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, 16), nn.Linear(16, SIZE)
        self.cross = nn.Linear(SIZE, SIZE) if reads else None
        self.bias = nn.Parameter(torch.randn(SIZE)) if makes_bias else None

    def forward(self, x, memory=None, bias=None, *, scale=1.0):
        bias = self.bias * x.mean() if bias is None and self.bias is not None else bias
        x = x + self.down((self.up(x) + (0 if bias is None else bias.mean())).relu()) * scale
        x = x if self.cross is None else x + self.cross(memory).mean(1, keepdim=True)
        return x, bias


class EncoderDecoder(nn.Module):
    """The decoder reads what the encoder gives, and each first block makes a bias that is passed on, as in T5."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList(Block(makes_bias=not k) for k in range(3))
        self.between = nn.Linear(SIZE, SIZE)
        self.decoder = nn.ModuleList(Block(makes_bias=not k, reads=1) for k in range(2))
        self.head = nn.Linear(SIZE, SIZE)

    def forward(self, x):
        memory, bias = x, None
        for block in self.encoder:
            memory, bias = block(memory, None, bias)
        memory, bias, y = self.between(memory), None, x.flip(1)
        for block in self.decoder:
            y, bias = block(y, memory, bias, scale=0.5)
        return self.head(y)


class Towers(nn.Module):
    """Two towers that read the same input, and a layer after each."""

    def __init__(self):
        super().__init__()
        self.left = nn.ModuleList(Block() for _ in range(2))
        self.right = nn.ModuleList(Block() for _ in range(3))
        self.left_head, self.right_head = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x):
        outputs = []
        for blocks, head in ((self.right, self.right_head), (self.left, self.left_head)):
            y = x
            for block in blocks:
                y = block(y)[0]
            outputs.append(head(y))
        return outputs[0] * outputs[1]


class Stages(nn.Module):
    """Stages of blocks with a layer between them, in a list that is no chain itself, as in Swin."""

    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(
            nn.ModuleDict({"blocks": nn.ModuleList(Block() for _ in range(2)), "down": nn.Linear(SIZE, SIZE)})
            for _ in range(2)
        )

    def forward(self, x):
        for stage in self.stages:
            for block in stage["blocks"]:
                x = block(x)[0]
            x = stage["down"](x)
        return x


class Skips(nn.Module):
    """The way up reads what the blocks of the way down gave, as in a U-Net."""

    def __init__(self):
        super().__init__()
        self.down, self.up = (nn.ModuleList(Block() for _ in range(2)) for _ in range(2))

    def forward(self, x):
        given = []
        for block in self.down:
            x = block(x)[0]
            given.append(x)
        for block in self.up:
            x = block(x + given.pop())[0]
        return x


class LooksBack(nn.Module):
    """The second chain reads what the first block of the first chain gave."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.ModuleList(Block(reads=1) for _ in range(2)) for _ in range(2))

    def forward(self, x):
        y, _ = self.first[0](x, x)
        z, _ = self.first[1](y, x)
        for block in self.second:
            z, _ = block(z, y)
        return z


class Records(nn.Module):
    """Hooks record what blocks give, and the second chain reads what the last but one gave, as in LLaVA."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.ModuleList(Block() for _ in range(2 + k)) for k in range(2))
        self.given = []
        for block in self.first:
            block.register_forward_hook(self.record)

    def record(self, block, args, output):
        self.given.append(output[0])

    def forward(self, x):
        self.given.clear()
        for block in self.first:
            x, _ = block(x)
        x = self.given[-2]
        for block in self.second:
            x, _ = block(x)
        return x


OWN = {
    EncoderDecoder: ["encoder.0", "encoder.1", "encoder.2", "decoder.0", "decoder.1"],
    Towers: ["right.0", "right.1", "right.2", "left.0", "left.1"],
    Stages: [f"stages.{s}.blocks.{k}" for s in range(2) for k in range(2)],
    Skips: ["down.0", "down.1"],  # those of the way up read more than the one before gives
    LooksBack: ["first.0", "first.1", "second.0", "second.1"],
    Records: ["first.0", "first.1", "second.0", "second.1", "second.2"],
}
KEPT = {key: ["down"] for key in OWN} | {LooksBack: ["down", "cross"]}
SMALL = {"vocab_size": 64, "d_model": 32, "decoder_start_token_id": 1, "pad_token_id": 0, "eos_token_id": 2}
HALVES = {f"{half}_{name}": n for half in ("encoder", "decoder") for name, n in (("layers", 2), ("attention_heads", 4))}
HALVES |= {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, **SMALL}
LAYERS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TOWER = {**LAYERS, "projection_dim": 16}
TRANSFORMERS = {  # {model: (its config, how many blocks are in chains)}
    "T5ForConditionalGeneration": ("T5Config", {**SMALL, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}, 4),
    "BartForConditionalGeneration": ("BartConfig", HALVES, 4),
    "MarianMTModel": ("MarianConfig", HALVES, 4),
    "WhisperForConditionalGeneration": ("WhisperConfig", {**HALVES, "num_mel_bins": 8, "max_source_positions": 8}, 4),
    "CLIPModel": (
        "CLIPConfig",
        {"text_config": {**TOWER, "vocab_size": 64}, "vision_config": {**TOWER, "image_size": 16, "patch_size": 8}},
        4,
    ),
    "LlamaForCausalLM": ("LlamaConfig", {**LAYERS, "vocab_size": 64}, 2),
    "SwinModel": (
        "SwinConfig",
        {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
        4,
    ),
}
READ = {  # {name of an input: what draws it}
    "input_ids": lambda: torch.randint(3, 64, (4, 6)),
    "decoder_input_ids": lambda: torch.randint(3, 64, (4, 5)),
    "pixel_values": lambda: torch.randn(4, 3, 16, 16),
    "input_features": lambda: torch.randn(4, 8, 16),
}


def batches(count=3):
    torch.manual_seed(1)
    return [torch.randn(4, 5, SIZE) for _ in range(count)]


@pytest.mark.parametrize("model", OWN)
def test_chains_are_pruned_as_if_the_whole_model_ran_for_each_layer(model, monkeypatch):
    torch.manual_seed(0)
    # One layer of each block, since the inputs of all layers of a block are recorded before any of them changes.
    dense, how = model(), {"batches": batches(), "exclude": [f"{name}.{k}" for name in OWN[model] for k in KEPT[model]]}
    pruned, report = prune(dense, "2:4", **how)
    assert report.blocks == len(OWN[model])
    monkeypatch.setattr(walk, "find_chains", lambda *_: [])
    whole, wanted = prune(dense, "2:4", **how)
    by_name = {row.tensor: row for row in wanted}
    for row in report:
        assert (row.before, row.after) == pytest.approx((by_name[row.tensor].before, by_name[row.tensor].after), 1e-4)
    for a, b in zip(pruned.state_dict().values(), whole.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("model", OWN)
def test_every_chain_is_recovered_in_one_walk_or_by_itself(model):
    torch.manual_seed(0)
    dense = model()
    pruned, before = prune(dense, "2:4", batches=batches(), compensate=None)
    in_one, report = prune(dense, "2:4", batches=batches(), compensate=None, recover=True)
    assert [row.block for row in report.recovery] == OWN[model] and report.error_to_dense < before.error_to_dense
    rows = recover(pruned, dense, batches())
    assert [row.block for row in rows] == OWN[model] and all(row.after <= row.before for row in rows)
    outside = {row.tensor.rpartition(".")[0] for row in before} - {
        name for block in OWN[model] for name in (f"{block}.up", f"{block}.down", f"{block}.cross")
    }
    assert {*rows.untrained} == {*report.recovery.untrained} == outside
    assert not outside or "in no chain of blocks, hence not trained: " in str(rows)
    with torch.no_grad():
        outputs = [m(batches()[0]) for m in (in_one, pruned, dense)]
    assert F.mse_loss(outputs[0], outputs[2]) < 1.2 * F.mse_loss(outputs[1], outputs[2])


class Passing(nn.Module):
    """Blocks that pass on what no walk could train or know."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.blocks = kind, nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(3))
        for block in self.blocks:
            block.forward = functools.partial(self.run, block)

    def run(self, block, *args):
        if self.kind == "hidden states second":
            (x,) = args
            y = F.linear(x, block.weight)
            return y, x + y
        if self.kind == "two residual streams":
            x, y = args
            return F.linear(y, block.weight).tanh(), y + x
        x, one, other = args  # masks that are equal in the first batch only
        one = torch.ones_like(x[..., :1]) if one is None else one
        other = one * float(x.abs().amax() < 50) if other is None else other
        return x + F.linear(x, block.weight).relu() * one * (0.2 + other), one, other

    def forward(self, x):
        if self.kind == "hidden states second":
            for block in self.blocks:
                _, x = block(x)
            return x
        state = (x, x * 2) if self.kind == "two residual streams" else (x, None, None)
        for block in self.blocks:
            state = block(*state)
        return state[0]


@pytest.mark.parametrize("kind", ["hidden states second", "two residual streams", "two masks"])
def test_blocks_that_pass_on_more_than_hidden_states_and_biases_are_no_chain(kind):
    torch.manual_seed(0)
    dense, data = Passing(kind), batches()
    data[1:] = [80 * batch for batch in data[1:]]
    _, report = prune(dense, 0.5, batches=data)
    assert report.blocks == 0
    same = Passing(kind)
    same.load_state_dict(dense.state_dict())
    recover(same, dense, data)
    assert all(torch.equal(p, q) for p, q in zip(same.parameters(), dense.parameters(), strict=True))


class Padded(nn.Module):
    """An encoder of torch, which passes nested tensors from block to block if there is padding."""

    def __init__(self, nested, **keys):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **keys)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)
        self.head = nn.Linear(8, 4)

    def forward(self, x, attention_mask=None):
        return self.head(self.encoder(x, src_key_padding_mask=attention_mask == 0))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("keys", [{}, {"activation": "gelu"}, {"dropout": 0.5}])
def test_an_encoder_of_torch_with_padding_is_pruned_and_recovered(keys, training):
    x, mask = torch.randn(3, 5, 8), torch.ones(3, 5)
    mask[1, 3:] = 0
    batches, results = [{"x": x, "attention_mask": mask}], list[nn.Module]()
    for nested in (True, False):
        torch.manual_seed(0)
        model = Padded(nested, **keys).train(training)
        results.append(prune(model, "2:4", batches=batches)[0])
        recover(results[-1], model, batches, passes=2)
        assert results[-1].training == training and torch.backends.mha.get_fastpath_enabled()
    for p, other in zip(*(result.parameters() for result in results), strict=True):
        assert torch.equal(p, other)
    small, report = shrink(Padded(True).eval(), batches[0], batches=batches, recover=1)
    assert report.after.parameters < report.before.parameters and small(**batches[0]).isfinite().all()


def test_a_list_by_its_name_is_the_only_chain():
    model = EncoderDecoder()
    pruned, _ = prune(model, 0.5)
    assert [row.block for row in recover(pruned, model, batches(), layers="decoder")] == ["decoder.0", "decoder.1"]
    model.decoder = model.decoder[:1]
    pruned, _ = prune(model, 0.5)
    assert [row.block for row in recover(pruned, model, batches(), layers="decoder")] == ["decoder.0"]


class Doubled(nn.Sequential):
    """A subclass of Sequential."""

    def forward(self, x):
        return super().forward(x) * 2


def of_layer():
    return nn.TransformerEncoderLayer(SIZE, 2, SIZE, batch_first=True)


def skipping():
    return Net(lambda m, x: x + m.down(m.up(x).relu()), up=nn.Linear(SIZE, 2 * SIZE), down=nn.Linear(2 * SIZE, SIZE))


def small(before=SIZE, after=SIZE):
    return nn.Sequential(nn.Linear(before, after), nn.GELU())


ROOTS = {  # {what: (a model, the names of its blocks)}
    "all": (lambda: nn.Sequential(*[skipping() for _ in range(4)]), "0 1 2 3"),
    "embedding and head": (
        lambda: nn.Sequential(
            nn.Linear(SIZE, SIZE), *[skipping() for _ in range(4)], nn.LayerNorm(SIZE), nn.Linear(SIZE, 3)
        ),
        "1 2 3 4",
    ),
    "transformer layers": (
        lambda: nn.Sequential(small(), *[of_layer() for _ in range(3)], nn.Linear(SIZE, 3)),
        "1 2 3",
    ),
    "between norms": (lambda: nn.Sequential(nn.LayerNorm(SIZE), *[skipping() for _ in range(3)], nn.GELU()), "1 2 3"),
    "names": (
        lambda: nn.Sequential(
            collections.OrderedDict(
                first=nn.Linear(SIZE, SIZE), a=skipping(), b=skipping(), c=skipping(), last=nn.Tanh()
            )
        ),
        "a b c",
    ),
    "a subclass": (lambda: Doubled(nn.Tanh(), *[skipping() for _ in range(3)], nn.Linear(SIZE, 3)), "1 2 3"),
    "inside": (
        lambda: Net(lambda m, x: m.body(x), body=nn.Sequential(nn.Tanh(), skipping(), skipping())),
        "body.1 body.2",
    ),
    "one of another shape": (
        lambda: nn.Sequential(small(SIZE, 3), small(3, SIZE), small(), small(), small()),
        "0 1 2 3 4",
    ),  # one class alone
    "others between": (lambda: nn.Sequential(skipping(), nn.Tanh(), skipping(), nn.Tanh(), skipping()), ""),
    "a plain MLP": (lambda: nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(), nn.Linear(SIZE, SIZE), nn.ReLU()), ""),
    "single layers in a row": (lambda: nn.Sequential(*[nn.Linear(SIZE, SIZE) for _ in range(3)], nn.ReLU()), ""),
    "less than half": (
        lambda: nn.Sequential(skipping(), skipping(), nn.Tanh(), *[nn.Linear(SIZE, SIZE) for _ in range(5)]),
        "",
    ),
}


@pytest.mark.parametrize("what", ROOTS)
def test_equal_modules_in_a_row_of_a_sequential_are_blocks(what, monkeypatch):
    make, names = ROOTS[what]
    torch.manual_seed(0)
    dense, names, data = make().eval(), names.split(), batches()
    exclude = [f"{name}.down" for name in names if hasattr(dense.get_submodule(name), "down")]
    exclude += [f"{name}.linear2" for name in names if hasattr(dense.get_submodule(name), "linear2")]
    exclude += [f"{name}.self_attn" for name in names if hasattr(dense.get_submodule(name), "self_attn")]
    pruned, report = prune(dense, "2:4", batches=data, exclude=exclude)
    assert report.blocks == len(names)
    rows = recover(copy.deepcopy(pruned), dense, data, passes=1)
    assert [row.block for row in rows] == (names or [""])
    recovered = prune(dense, "2:4", batches=data, exclude=exclude, recover=1)[1]
    assert [row.block for row in recovered.recovery] == (names or [""])
    assert prune(dense, "2:4", batches=data, exclude=exclude, dry_run=True)[1].chains == (
        (tuple(names),) if names else ()
    )
    monkeypatch.setattr(walk, "find_chains", lambda *_: [])
    whole = prune(dense, "2:4", batches=data, exclude=exclude)[0]
    for a, b in zip(pruned.state_dict().values(), whole.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("recovers", [False, True])
def test_blocks_of_a_sequential_run_a_few_times_however_many_they_are(recovers):
    runs, block = [], Doubled(nn.Linear(SIZE, SIZE))
    for count in (4, 12):
        model = nn.Sequential(
            nn.Linear(SIZE, SIZE), *[copy.deepcopy(block) for _ in range(count)], nn.Linear(SIZE, SIZE)
        )
        calls = []
        for part in model[1:-1]:
            part.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        prune(model, "2:4", batches=batches(), recover=int(recovers), inplace=True, progress=False)
        runs.append(len(calls) / count)
    assert runs[1] <= 1.1 * runs[0]


@pytest.mark.parametrize("at", [0, 2, 3])
def test_blocks_of_a_sequential_match_those_of_the_dense_model(at):
    """A block that was not changed has no error, at its own place."""
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(SIZE, SIZE), *[skipping() for _ in range(4)], nn.Linear(SIZE, 3)).eval()
    pruned = copy.deepcopy(dense)
    with torch.no_grad():
        pruned[1 + at].up.weight[:, ::2] = 0
        pruned[1 + (at + 1) % 4].up.weight[:, ::2] = 0
    rows = recover(pruned, dense, batches(), passes=1)
    first = min(at, (at + 1) % 4)
    assert [row.block for row in rows] == ["1", "2", "3", "4"]
    assert all(row.before < 1e-6 for row in rows[:first]) and rows[first].before > 1e-3


@pytest.mark.parametrize(("name", "recovers"), turns(TRANSFORMERS, [(False,), (True,)]))
def test_blocks_run_in_the_model_a_few_times_for_each_batch_whatever_its_chains(name, recovers, monkeypatch):
    config, keys, count = TRANSFORMERS[name]
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, config)(**keys)).eval()
    reads = [key for key in READ if key in inspect.signature(model.forward).parameters]
    data = [{key: READ[key]() for key in reads} for _ in range(4)]
    inside, runs, forward_of_model = [], [], model.forward  # calls of the model that have not ended; of blocks in them

    @functools.wraps(forward_of_model)
    def run(*args, **keys):
        inside.append(1)
        try:
            return forward_of_model(*args, **keys)
        finally:
            inside.clear()

    monkeypatch.setattr(model, "forward", run)
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and {"mlp", "fc1", "layer"} & {*dir(m[0])}]
    for block in {type(block) for blocks in lists for block in blocks}:
        forward = block.forward  # blocks that are skipped have another one

        def counted(*args, forward=forward, **keys):
            runs.extend(inside)
            return forward(*args, **keys)

        monkeypatch.setattr(block, "forward", counted)
    _, report = prune(model, "2:4", batches=data, recover=int(recovers), inplace=True)
    assert report.blocks == count and 0 < len(runs) <= 3 * count * len(data), len(runs) / count / len(data)
    assert not recovers or (len(report.recovery) == count and all(r.after <= r.before for r in report.recovery))
