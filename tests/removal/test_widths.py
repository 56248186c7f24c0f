"""Attention that computes the size of a head from the width of its input loses heads: it reads another width."""

import copy
import math
import pickle
from functools import partial

import pytest
import torch
from stock import EVERYTHING
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from sparsekit_ao import SparsityError, recover
from sparsekit_ao.removal import cut_to, shrink


class Packed(nn.Module):
    """As in ViT, Swin and many others."""

    def __init__(self, width=32, num_heads=4):
        super().__init__()
        self.num_heads, self.qkv, self.proj = num_heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        return self.proj(scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, C))


class Separate(nn.Module):
    def __init__(self, width=32, num_heads=4):
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v, self.proj = (nn.Linear(width, width) for _ in range(4))


class Computing(Separate):
    """The size of a head is computed for the scale, too, and by `size()`."""

    def forward(self, x):
        (B, N), head_dim = x.shape[:2], x.size(-1) // self.num_heads
        q, k, v = (layer(x).view(B, N, -1, head_dim).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attention = (q @ k.transpose(-2, -1) * head_dim**-0.5).softmax(-1)
        return self.proj((attention @ v).transpose(1, 2).reshape(B, N, x.size()[2]))


class OfClass(Separate):
    """The attention of a class token, as in CaiT."""

    def forward(self, x):
        B, _, C = x.shape
        shape = (B, -1, self.num_heads, C // self.num_heads)
        q, k, v = self.q(x[:, 0]).reshape(shape), self.k(x).reshape(shape), self.v(x).reshape(shape)
        attended = scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        return self.proj(attended.transpose(1, 2).reshape(B, 1, C))


class Turned(Separate):
    """Time comes first, and a context has the same width, as in Mask2Former."""

    def forward(self, x, context=None):
        x, context = x.permute((1, 0, 2)), (x if context is None else context).transpose(0, 1)
        B, N, C = x.size()
        assert x.transpose(1, 2).shape[1:] == (32, N)  # the width itself moves
        shape = (B, -1, self.num_heads, context.shape[-1] // self.num_heads)
        q, k, v = (f(t).view(shape).transpose(1, 2) for f, t in ((self.q, x), (self.k, context), (self.v, context)))
        return self.proj(scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, C)).permute(1, 0, 2)


class OfSizes(Separate):
    """The size of a head is computed where it is used."""

    def forward(self, x):
        q, k, v = (f(x).unflatten(2, (self.num_heads, x.shape[2] // self.num_heads)) for f in (self.q, self.k, self.v))
        attended = scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        return self.proj(attended.transpose(1, 2).flatten(2))


KINDS = (Packed, Computing, OfClass, Turned)


def make(kind, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), kind(), nn.LayerNorm(32), nn.Linear(32, 5)).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_half_of_the_heads_leave(kind):
    model, x = make(kind), torch.randn(2, 7, 8)
    small, report = shrink(model, x)
    assert small[2].num_heads == 2 and small[2].proj.weight.shape == (32, 16) and report.difference <= 1e-5
    assert {"*.num_heads: 4 -> 2", "*.width_of_input: 32 -> 16"} <= set(report.changed)
    assert not hasattr(model[2], "width_of_input") and not model[2]._forward_pre_hooks
    for other in (torch.randn(3, 4, 8), torch.randn(1, 9, 8)):
        assert small(other).shape == model(other).shape
    copies = (copy.deepcopy(small), pickle.loads(pickle.dumps(small)), cut_to(make(kind, 1), report.manifest))
    for again in copies:
        again.load_state_dict(small.state_dict())
        assert torch.equal(again(x), small(x))


def test_what_lost_heads_is_shrunk_again_scored_recovered_and_trained():
    model, x = make(Packed), torch.randn(2, 7, 8)
    small, _ = shrink(model, x)
    smaller, report = shrink(small, x, score="wanda")
    assert smaller[2].num_heads == 1 and smaller[2].width_of_input == 8 and report.difference <= 1e-5
    assert recover(small, model, [x, x + 1])
    small(x).square().sum().backward()
    assert small[2].qkv.weight.grad.shape == (48, 32) and small[2].qkv.weight.grad.any()
    assert type(small(x)) is torch.Tensor


def test_it_is_compiled_as_one_graph():
    x = torch.randn(2, 7, 8)
    small, _ = shrink(make(Packed), x, EVERYTHING)
    torch.testing.assert_close(torch.compile(small, fullgraph=True, backend="aot_eager")(x), small(x))


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning", "ignore::DeprecationWarning")  # of torch.export
@pytest.mark.filterwarnings(
    "ignore:.*TracerWarning", "ignore::torch.jit.TracerWarning"
)  # of the assertion in a forward
@pytest.mark.parametrize("kind", [*KINDS, OfSizes])
def test_what_does_not_export_it_says_what_does(kind, tmp_path):
    x = torch.randn(2, 7, 8)
    small, report = shrink(make(kind), x, EVERYTHING)
    with pytest.raises(SparsityError, match=rf"{kind.__name__} reads width_of_input: use .*strict=True\)"):
        torch.export.export(small, (x,))
    assert "attention reads width_of_input: torch.export.export needs strict=True" in str(report)
    torch.export.save(torch.export.export(small, (x,), strict=True), tmp_path / "program.pt2")
    torch.jit.save(torch.jit.trace(small, x), tmp_path / "traced.pt")
    assert b"sparsekit" not in (tmp_path / "traced.pt").read_bytes()
    for again in (torch.export.load(tmp_path / "program.pt2").module(), torch.jit.load(tmp_path / "traced.pt")):
        torch.testing.assert_close(again(x), small(x))


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning", "ignore::DeprecationWarning")  # of torch.onnx
def test_onnxruntime_runs_it(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    x = torch.randn(2, 7, 8)
    small, _ = shrink(make(Packed), x, EVERYTHING)
    torch.onnx.export(small, (x,), tmp_path / "small.onnx", dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "small.onnx")
    (output,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(output), small(x).detach())


def test_a_width_that_is_not_read_stays_away():
    class Fixed(Packed):
        def forward(self, x):
            B, N, _ = x.shape
            q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, 8).permute(2, 0, 3, 1, 4)
            return self.proj(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    small, report = shrink(make(Fixed), torch.randn(2, 7, 8), EVERYTHING)
    assert small[2].num_heads == 2 and not any("width" in text for text in report.changed)
    assert not small[2]._forward_pre_hooks


def transformers_model(name):
    """A tiny model of transformers with random weights, and inputs."""
    import transformers
    from hf_models import fill

    torch.manual_seed(0)
    ids, images = {"input_ids": torch.randint(3, 50, (2, 8))}, {"pixel_values": torch.randn(1, 3, 32, 32)}
    sizes = {"depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32], "patch_sizes": [7, 3], "strides": [4, 2]}
    pyramid = {"image_size": 32, "num_encoder_blocks": 2, "num_attention_heads": [2, 4], "mlp_ratios": [1, 1], **sizes}
    local = {"vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "local_radius": 3}
    keys, inputs = {"PvtV2Model": (pyramid, images), "LongT5EncoderModel": (local, ids)}[name]
    model_class = getattr(transformers, name)
    return fill(model_class(model_class.config_class(**keys))).eval(), inputs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "heads", "kept"),
    [
        pytest.param(
            *("PvtV2Model", "encoder.layers.1.blocks.0.attention.num_attention_heads", 2), marks=pytest.mark.nightly
        ),
        ("LongT5EncoderModel", "encoder.block.0.layer.0.LocalSelfAttention.n_heads", 2),
    ],
)
def test_heads_leave_models_of_transformers(name, heads, kept, tmp_path):
    from sparsekit_ao import export

    model, inputs = transformers_model(name)
    small, report = shrink(model, inputs, EVERYTHING, keep_config=False)
    path, _, attribute = heads.rpartition(".")
    assert getattr(small.get_submodule(path), attribute) == kept and report.difference <= 1e-5
    export.save_pretrained(small, report, tmp_path)
    loaded = export.load_pretrained(tmp_path, type(model))
    torch.testing.assert_close(loaded(**inputs)[0], small(**inputs)[0])
    if name == "PvtV2Model":  # the first stage reads the width for an image, too
        assert small.encoder.layers[0].blocks[0].attention.num_attention_heads == 2
        assert any("encoder.layers.0.blocks.0.attention.query.weight" in text for text in report.left_out)


def unit(i, o, size=3):
    return nn.Sequential(nn.Conv2d(i, o, size, padding=size // 2, bias=False), nn.BatchNorm2d(o))


def summed(outputs):
    return sum(outputs).relu()


def in_place(outputs):
    total = torch.zeros_like(outputs[0])
    for output in outputs:
        total += output
    return total.relu()


def weighed(outputs):
    return (torch.stack(outputs, -1) * torch.tensor([0.5, 0.3, 0.2][: len(outputs)])).sum(-1)


class Parallel(nn.Module):
    """Branches of one input, in a list or under names of their own; both compute the same."""

    def __init__(self, join, branches, listed):
        super().__init__()
        self.join, self.names = join, [f"b{chr(97 + k)}" for k in range(len(branches))]
        if listed:
            self.branches = nn.ModuleList(branches)
        for name, branch in zip(self.names, branches, strict=True) if not listed else ():
            self.add_module(name, branch)

    def forward(self, x):
        branches = self.branches if hasattr(self, "branches") else [getattr(self, name) for name in self.names]
        return self.join([branch(x) for branch in branches])


def images_through(kind, listed, join=summed):
    sizes = [(3, 8), (8, 12), (12, 16)]
    blocks = [Parallel(join, kind(i, o), listed) for i, o in sizes]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)), torch.randn(2, 3, 8, 8)


def vectors_through(listed, first, second, join=summed):
    return nn.Sequential(Parallel(join, first(), listed), nn.ReLU(), Parallel(join, second(), listed)), torch.randn(
        5, 6
    )


def several(count, make):
    return lambda: [make() for _ in range(count)]


BRANCHES = {
    "MobileOne": lambda listed: images_through(lambda i, o: [unit(i, o), unit(i, o), unit(i, o, 1)], listed),
    "several kernels": lambda listed: images_through(lambda i, o: [unit(i, o, k) for k in (1, 3, 5)], listed),
    "added in place": lambda listed: images_through(lambda i, o: [unit(i, o), unit(i, o)], listed, in_place),
    "plain convolutions": lambda listed: images_through(lambda i, o: [nn.Conv2d(i, o, 1) for _ in range(3)], listed),
    "concatenated": lambda listed: (
        nn.Sequential(Parallel(partial(torch.cat, dim=1), [unit(3, 6), unit(3, 6)], listed), unit(12, 4)),
        torch.randn(2, 3, 8, 8),
    ),
    "heads of an ensemble": lambda listed: (
        nn.Sequential(nn.Linear(6, 16), nn.ReLU(), Parallel(weighed, [nn.Linear(16, 4) for _ in range(3)], listed)),
        torch.randn(5, 6),
    ),
    "deep heads": lambda listed: vectors_through(
        listed,
        several(1, lambda: nn.Linear(6, 16)),
        several(3, lambda: nn.Sequential(nn.Linear(16, 12), nn.Linear(12, 4))),
    ),
    "a mixture": lambda listed: vectors_through(
        listed, several(3, lambda: nn.Linear(6, 16)), several(2, lambda: nn.Linear(16, 4)), weighed
    ),
    "a product": lambda listed: vectors_through(
        listed,
        several(2, lambda: nn.Linear(6, 16, bias=False)),
        several(2, lambda: nn.Linear(16, 4)),
        lambda outputs: math.prod(outputs),
    ),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_branches_in_a_list_lose_as_much_as_branches_with_names(name):
    torch.manual_seed(0)
    (model, x), reports = BRANCHES[name](False), []
    listed, _ = BRANCHES[name](True)
    for there, here in zip(listed.parameters(), model.parameters(), strict=True):
        there.data = here.data
    for each in (model, listed):
        report = shrink(each.eval(), x, 0.5)[1]
        assert report.difference <= 1e-5 and report.after.parameters < 0.7 * report.before.parameters
        reports.append(report)
    assert len(reports[0].couplings) == len(reports[1].couplings) and reports[0].after == reports[1].after
    assert not any(row.kind == "width" for row in reports[1].couplings)


class Chained(nn.Module):
    """Modules of a list that read what the others have written, in one of several ways."""

    def __init__(self, way, block, count=3):
        super().__init__()
        self.way, self.blocks = way, nn.ModuleList(block() for _ in range(count))
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.last(self.way(self.blocks, self.first(x)))


def residual(blocks, x):
    for block in blocks:
        x = x + block(x)
    return x


def written(blocks, x):
    for block in blocks:
        x += block(x)
    return x


def collected(blocks, x):
    everything = x[None].repeat(1 + len(blocks), 1, 1)
    for at, block in enumerate(blocks):
        everything[at + 1] = block(everything.sum(0))
    return everything.sum(0)


def twice(blocks, x):
    return sum(block(sum(block(x) for block in blocks)) for block in blocks)


@pytest.mark.parametrize("way", [residual, written, collected, twice])
def test_what_passes_from_block_to_block_stays(way):
    torch.manual_seed(0)
    model = Chained(way, lambda: nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16)))
    report = shrink(model, torch.randn(5, 6), 0.5)[1]
    assert report.couplings and all(row.of == 24 for row in report.couplings)
    assert any("passes from block to block" in text for text in report.left_out)
