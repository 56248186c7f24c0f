"""discover: the couplings of a forward, the lines that are printed, what is frozen and why, and that it is exact."""

import copy
import fnmatch
import functools
import logging
import math
import threading

import pytest
import torch
import torch.nn.functional as F
from discovered import assert_exact, fill
from hypothesis import given
from hypothesis import strategies as st
from networks import Net
from strategies import examples
from torch import nn

from sparsekit_ao import Coupling, ScopeSparsifier, SparsityError, prune, shrink
from sparsekit_ao.coupling import discover
from sparsekit_ao.coupling.discovery import axis_rules
from sparsekit_ao.coupling.discovery.factors import AxisFactor, Factor, fixed, reshape_axes, unify


def rand(*shape):
    return nn.Parameter(torch.zeros(shape))


def squeeze_excite(m, x):
    y = F.relu6(m.bn(m.a(x)))
    return m.c(y * torch.sigmoid(m.up(F.relu(m.down(y.mean((2, 3), keepdim=True))))))


def skip(m, x):
    x = m.stem(x)
    for block in m.blocks:
        x = x + block(x)
    return m.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def block():
    return nn.Sequential(nn.Conv2d(8, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 1))


def written_by_index(m, x):
    y = m.a(x).clone()
    y[[0, 2]] = m.b(x)[[1, 1]]
    z = m.c(y.index_add(0, torch.tensor([1]), m.b(x[:1])))
    z[torch.tensor([True, False, True])] = 0.0
    return m.d(z)


def grouped(m, x):
    """Four query heads on two key heads of size 3; keys and values come from one projection."""
    n, each = x.shape[:2], m.heads // m.kv_heads
    q = m.q(x).view(*n, m.heads, m.size).transpose(1, 2)
    k, v = (y.view(*n, m.kv_heads, m.size).transpose(1, 2) for y in m.kv(x).chunk(2, dim=-1))
    k, v = (y[:, :, None].expand(-1, -1, each, -1, -1).reshape(q.shape) for y in (k, v))
    return m.o(F.scaled_dot_product_attention(q, k, v, scale=0.5).transpose(1, 2).flatten(2))


def quantized(m, x):
    """Weights rounded in each output, activations in all; scales are buffers, as torch.ao.quantization has them."""
    weight = torch.fake_quantize_per_channel_affine(m.a.weight, m.s, m.z, 0, -128, 127)
    y = F.relu(F.linear(x, weight, m.a.bias))
    return m.c(torch.fake_quantize_per_tensor_affine(y, 0.01, 3, -128, 127))


SCALES = {"s": nn.Buffer(torch.full((8,), 0.01)), "z": nn.Buffer(torch.zeros(8, dtype=torch.int32))}


def convs(channels):
    return {"a": nn.Conv2d(3, 8, 1), "b": nn.Conv2d(3, channels, 1)}


PAIR_OF_C = {"a": nn.Linear(4, 8), "c": nn.Linear(8, 2)}
PAIR = {"a": nn.Linear(4, 8), "b": nn.Linear(8, 2)}
IMAGE, ROWS = torch.zeros(2, 3, 4, 4), torch.zeros(2, 4)
CASES = {  # (model, example inputs if these are no rows, couplings as "name: axes, ... | scope")
    "two layers": (
        nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 2)),
        ["0.weight: u i, 0.bias: u, 2.weight: o u"],
    ),
    "conv, norm, depthwise, squeeze-excite": (
        Net(
            squeeze_excite,
            a=nn.Conv2d(3, 8, 3, bias=False),
            bn=nn.BatchNorm2d(8),
            down=nn.Conv2d(8, 2, 1),
            up=nn.Conv2d(2, 8, 1),
            c=nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 5, 1)),
        ),
        IMAGE,
        [
            "a.weight: u i h w, bn.weight: u, bn.bias: u, down.weight: o u 1 1, up.weight: u i 1 1, up.bias: u, "
            "c.0.weight: u 1 h w, c.0.bias: u, c.1.weight: o u 1 1, bn.running_mean: u, bn.running_var: u",
            "down.weight: u i 1 1, down.bias: u, up.weight: o u 1 1",
        ],
    ),
    "flatten": (
        nn.Sequential(nn.Conv2d(3, 8, 1), nn.Flatten(), nn.Linear(8 * 16, 2)),
        IMAGE,
        ["0.weight: u i 1 1, 0.bias: u, 2.weight: o (u d)"],
    ),
    "written in place": (
        nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Dropout(inplace=True), nn.Linear(6, 2)),
        torch.zeros(2, 3, 4),
        ["0.weight: u i, 0.bias: u, 3.weight: o u"],
    ),
    "written into a view of what nobody else reads": (
        Net(
            lambda m, x: m.b(m.a(x).unsqueeze(1).add_(2) * m.c(x).unsqueeze(1)),
            **{"a": nn.Linear(4, 6), "b": nn.Linear(6, 3), "c": nn.Linear(4, 6)},
        ),
        ["a.weight: u i, a.bias: u, b.weight: o u, c.weight: u i, c.bias: u"],
    ),
    "complex numbers": (
        Net(
            lambda m, x: m.b(torch.view_as_real(torch.view_as_complex(m.a(x).unflatten(1, (-1, 2))) * 1j).flatten(1)),
            **PAIR,
        ),
        ["a.weight: (u d) i, a.bias: (u d), b.weight: o (u d)"],
    ),
    "packed halves": (
        Net(lambda m, x: m.b(F.glu(m.a(x))), a=nn.Linear(4, 12), b=nn.Linear(6, 3)),
        ["a.weight: (d u) i, a.bias: (d u), b.weight: o u"],
    ),
    "the larger of two": (
        Net(lambda m, x: m.c(torch.max(m.a(x), m.b(x))), a=nn.Linear(4, 6), b=nn.Linear(4, 6), c=nn.Linear(6, 3)),
        ["a.weight: u i, a.bias: u, b.weight: u i, b.bias: u, c.weight: o u"],
    ),
    "matrices that are buffers": (
        Net(
            lambda m, x: m.b(m.a(x @ m.p @ m.q)),
            p=nn.Buffer(torch.randn(4, 7)),
            q=nn.Buffer(torch.randn(7, 4)),
            a=nn.Linear(4, 6),
            b=nn.Linear(6, 3),
        ),
        ["a.weight: u i, a.bias: u, b.weight: o u", "a.weight: o u, q: o u"],  # none of p and q
    ),
    "low rank beside a frozen weight": (
        Net(lambda m, x: m.w(x) + m.b(m.a(x)), w=nn.Linear(4, 6), a=nn.Linear(4, 3, False), b=nn.Linear(3, 6, False)),
        ["a.weight: u i, b.weight: o u"],
    ),
    "concatenated": (
        Net(lambda m, x: m.c(torch.cat([m.a(x), m.b(x)], 1)), **convs(8), c=nn.Conv2d(16, 2, 1)),
        IMAGE,
        ["a.weight: u i 1 1, a.bias: u, b.weight: u i 1 1, b.bias: u, c.weight: o (d u) 1 1"],
    ),
    "transposed and grouped convolutions": (
        nn.Sequential(
            nn.Conv2d(3, 8, 1), nn.ReLU(), nn.ConvTranspose2d(8, 6, 2, 2), nn.ConvTranspose2d(6, 2, 2, groups=2)
        ),
        IMAGE,
        [
            "0.weight: u i 1 1, 0.bias: u, 2.weight: u i h w",
            "2.weight: o (d u) h w, 2.bias: (d u), 3.weight: (d u) 1 h w",
        ],
    ),
    "GroupNorm": (
        nn.Sequential(nn.Conv2d(3, 8, 1), nn.GroupNorm(4, 8), nn.ReLU(), nn.Conv2d(8, 4, 1)),
        IMAGE,
        ["0.weight: (u d) i 1 1, 0.bias: (u d), 1.bias: (u d), 1.weight: (u d), 3.weight: o (u d) 1 1"],
    ),
    "RMSNorm": (
        nn.Sequential(nn.Linear(4, 8), nn.RMSNorm(8), nn.Linear(8, 2)),
        ["0.weight: u i, 0.bias: u, 1.weight: u, 2.weight: o u"],
    ),
    "einsum on a plain parameter": (
        Net(lambda m, x: m.c(torch.einsum("bi,hid->bhd", x, m.w).flatten(1)), w=rand(2, 4, 3), c=nn.Linear(6, 2)),
        ["w: u i h, c.weight: o (u d)", "w: s i u, c.weight: o (s u) | s"],
    ),
    "pixel shuffle": (
        nn.Sequential(nn.Conv2d(3, 16, 1), nn.PixelShuffle(2), nn.Conv2d(4, 2, 1)),
        IMAGE,
        ["0.weight: (u d) i 1 1, 0.bias: (u d), 2.weight: o u 1 1"],
    ),
    "pooled and resized": (
        nn.Sequential(
            nn.Conv2d(3, 8, 1),
            nn.Upsample(scale_factor=2),
            nn.MaxPool2d(2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 2),
        ),
        IMAGE,
        ["0.weight: u i 1 1, 0.bias: u, 5.weight: o u"],
    ),
    "an empty piece": (  # as in rotary embeddings of all of a head
        Net(lambda m, x: m.b((lambda y: torch.cat([torch.tanh(y[:, :8]), y[:, 8:]], -1))(m.a(x))), **PAIR),
        ["a.weight: u i, a.bias: u, b.weight: o u"],
    ),
    "an image without a batch": (
        nn.Sequential(nn.Conv2d(3, 8, 1), nn.AvgPool2d(2), nn.Conv2d(8, 2, 1)),
        torch.zeros(3, 4, 4),
        ["0.weight: u i 1 1, 0.bias: u, 2.weight: o u 1 1"],
    ),
    "grouped queries": (
        Net(
            grouped,
            **{"q": nn.Linear(6, 12, False), "kv": nn.Linear(6, 12, False), "o": nn.Linear(12, 6)},
            **{"heads": 4, "kv_heads": 2, "size": 3},
        ),
        torch.zeros(2, 5, 6),
        [
            "q.weight: (u g d) i, kv.weight: (g u d) i, o.weight: o (u g d)",
            "q.weight: (s u d) i, o.weight: o (s u d) | s",
            "q.weight: (s d u) i, kv.weight: (d s u) i, o.weight: o (s d u) | s",
        ],
    ),
    "two axes of one tensor": (
        Net(lambda m, x: m.c((lambda y: y + m.b(y))(m.a(x))), a=nn.Linear(4, 8), b=nn.Linear(8, 8), c=nn.Linear(8, 2)),
        ["a.weight: u i, a.bias: u, b.weight: u u, b.bias: u, c.weight: o u"],
    ),
    "concatenated, of other lengths": (
        Net(
            lambda m, x: m.c(torch.cat([m.a(x), torch.tanh(m.b(x)), m.a(x)[:, :1], x], 1).flatten(1)),
            **convs(6),
            c=nn.Linear(18 * 16, 2),
        ),
        IMAGE,
        ["b.weight: u i 1 1, b.bias: u, c.weight: o (128 + u d + 64)"],
    ),
    "norm and depthwise convolution of a concatenation": (
        Net(
            lambda m, x: m.e(F.relu(m.d(m.c(torch.cat([m.a(x), m.b(x)], 1))))),
            **convs(6),
            c=nn.BatchNorm2d(14),
            d=nn.Conv2d(14, 14, 3, groups=14),
            e=nn.Conv2d(14, 2, 1),
        ),
        IMAGE,
        [
            f"{name}.weight: u i 1 1, {name}.bias: u, c.weight: {part}, c.bias: {part}, d.weight: {part} 1 h w, "
            f"d.bias: {part}, e.weight: o {part} 1 1, c.running_mean: {part}, c.running_var: {part}"
            for name, part in (("a", "(u + 6)"), ("b", "(8 + u)"))
        ],
    ),
    "concatenations of concatenations of equal length": (
        Net(
            lambda m, x: m.e(torch.cat([torch.cat([m.a(x), m.b(x)], 1), torch.cat([m.c(x), m.d(x)], 1)], 1)),
            **{name: nn.Linear(4, n) for name, n in (("a", 4), ("b", 8), ("c", 6), ("d", 6))},
            e=nn.Linear(24, 2),
        ),
        [
            "a.weight: u i, a.bias: u, e.weight: o (u + 20)",
            "b.weight: u i, b.bias: u, e.weight: o (4 + u + 12)",
            "c.weight: u i, c.bias: u, d.weight: u i, d.bias: u, e.weight: o (12 + d u)",
        ],
    ),
    "blocks that are concatenated to all before them": (
        Net(
            lambda m, x: m.d(torch.cat([y := torch.cat([m.a(x), m.b(x)], 1), torch.relu(m.c(y))], 1)),
            a=nn.Linear(4, 4),
            b=nn.Linear(4, 8),
            c=nn.Linear(12, 12),
            d=nn.Linear(24, 2),
        ),
        [
            "a.weight: u i, a.bias: u, c.weight: o (u + 8), d.weight: o (u + 20)",
            "b.weight: u i, b.bias: u, c.weight: o (4 + u), d.weight: o (4 + u + 12)",
            "c.weight: u i, c.bias: u, d.weight: o (12 + u)",
        ],
    ),
    "Bilinear": (
        Net(
            lambda m, x: m.c(F.relu(m.a(x)), torch.sigmoid(m.b(x))),
            a=nn.Linear(4, 8),
            b=nn.Linear(4, 6),
            c=nn.Bilinear(8, 6, 2),
        ),
        ["a.weight: u i, a.bias: u, c.weight: o u h", "b.weight: u i, b.bias: u, c.weight: o i u"],
    ),
    "Bilinear of one tensor, and its outputs": (
        Net(
            lambda m, x: m.c((lambda y: F.relu(m.b(y, y)))(torch.tanh(m.a(x)))),
            a=nn.Linear(4, 8),
            b=nn.Bilinear(8, 8, 6),
            c=nn.Linear(6, 2),
        ),
        torch.zeros(2, 3, 4),
        ["a.weight: u i, a.bias: u, b.weight: o u u", "b.weight: u i h, b.bias: u, c.weight: o u"],
    ),
    "written by index": (
        Net(
            written_by_index, **{"a": nn.Linear(4, 8), "b": nn.Linear(4, 8), "c": nn.Linear(8, 6), "d": nn.Linear(6, 2)}
        ),
        torch.zeros(3, 4),
        [
            "a.weight: u i, a.bias: u, b.weight: u i, b.bias: u, c.weight: o u",
            "c.weight: u i, c.bias: u, d.weight: o u",
        ],
    ),
    "bags of embeddings": (
        Net(
            lambda m, x: m.b(m.a(torch.tensor([[0, 1], [2, 1]]))) + x[:, :2],
            a=nn.EmbeddingBag(5, 8, mode="max"),
            b=nn.Linear(8, 2),
        ),
        ["a.weight: o u, b.weight: o u"],
    ),
    "fake quantization": (
        Net(quantized, **PAIR_OF_C, **SCALES),
        ["a.weight: u i, a.bias: u, c.weight: o u, s: u, z: u"],
    ),
    "residual stream": (
        Net(skip, stem=nn.Conv2d(3, 8, 1), blocks=nn.ModuleList([block(), block()]), head=nn.Linear(8, 2)),
        IMAGE,
        [
            "stem.weight: u i 1 1, stem.bias: u, blocks.**.0.weight: o u h w, blocks.**.3.weight: u i 1 1, "
            "blocks.**.3.bias: u, head.weight: o u",
            "blocks.*.0.weight: u i h w, blocks.*.1.weight: u, blocks.*.1.bias: u, blocks.*.3.weight: o u 1 1, "
            "blocks.*.1.running_mean: u, blocks.*.1.running_var: u",
        ],
    ),
}


ATTRS = {  # integers of the forward that hold a size, as a person lists them; by case and place of the coupling
    ("grouped queries", 0): {"heads": "u g", "kv_heads": "u"},
    ("grouped queries", 1): {"heads": "s u"},
    ("grouped queries", 2): {"size": "u"},
}


def case(table, name):
    """(model, example inputs, what is expected)."""
    model, *inputs, expected = table[name]
    return model, *(inputs or [ROWS]), expected


def written(coupling):
    members = ", ".join(f"{name}: {axes}" for name, axes in coupling.members.items())
    return f"{members} | {coupling.scope}" if coupling.scope else members


def test_axes_of_buffers_alone_are_not_listed():
    model, inputs, _ = case(CASES, "matrices that are buffers")
    assert "p[" not in str(discover(model, inputs)) and discover(model, inputs).frozen


@pytest.mark.parametrize("name", CASES)
def test_couplings_are_written_as_a_person_would_write_them(name):
    model, inputs, couplings = case(CASES, name)
    assert [written(coupling) for coupling in discover(model, inputs).couplings] == couplings


@pytest.mark.parametrize("name", CASES)
def test_half_of_every_axis_is_removed_and_outputs_stay(name):
    model, inputs, _ = case(CASES, name)
    model, inputs = fill(model), torch.randn_like(inputs)
    for at, coupling in enumerate(discover(model, inputs).couplings):
        assert_exact(model, coupling, inputs, ATTRS.get((name, at)))


def nonzero(m, x):
    y = F.relu(m.a(x))
    if x.abs().max().item() < 0:
        y = m.b(y)
    chosen = (x[:, 0] < 1).nonzero()[:, 0]
    return m.c(F.relu(m.b(torch.zeros_like(y).index_add(0, chosen, y[chosen]))))


def packed(m, x):
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]), batch_first=True)
    return m.c(nn.utils.rnn.pad_packed_sequence(m.a(packed)[0], batch_first=True)[0])


def masked_encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, dropout=0.0), 2)


THREE = {"a": nn.Linear(4, 8), "b": nn.Linear(8, 8), "c": nn.Linear(8, 2)}
READS = {  # forwards that read values: (model, inputs, couplings, attrs, what was read, by which code)
    "item and nonzero": (
        Net(nonzero, **THREE),
        torch.randn(3, 4),
        ["a.weight: u i, a.bias: u, b.weight: o u", "b.weight: u i, b.bias: u, c.weight: o u"],
        ["test_discover.py:*: if x.abs().max().item() < 0 (read ", "nonzero()[:, 0] (read shape ("],
    ),
    "packed sequences": (
        Net(packed, a=nn.LSTM(4, 8, batch_first=True), c=nn.Linear(8, 2)),
        torch.randn(2, 5, 4),
        ["a.weight_ih_l0: (d u) i, a.weight_hh_l0: (d u) u, a.bias_ih_l0: (d u), a.bias_hh_l0: (d u), c.weight: o u"],
        ["packed = nn.utils.rnn.pack_padded_sequence(x, "],
    ),
    "a mask of TransformerEncoder": (
        masked_encoder(),
        {"src": torch.randn(2, 5, 8), "mask": nn.Transformer.generate_square_subsequent_mask(5)},
        ["layers.*.linear1.weight: u i, layers.*.linear1.bias: u, layers.*.linear2.weight: o u"],
        ["transformer.py:*: make_causal = bool((mask == causal_comparison).all()) (read True)"],
    ),
}


@pytest.mark.parametrize("name", READS)
def test_a_forward_that_reads_values_runs_with_those_of_the_example(name):
    model, inputs, couplings, lines = READS[name]
    model = fill(model)
    before, state = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()
    found = discover(model, inputs)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert set(couplings) <= {written(coupling) for coupling in found.couplings}
    for line in lines:
        assert fnmatch.filter(found.values, f"*{glob_of(line)}*"), found.values
        assert f"others may lead to another branch:\n#   {found.values[0]}" in str(found)
    for coupling in found.couplings:
        if written(coupling) in couplings:
            assert_exact(model, coupling, inputs)


def glob_of(line):
    return line.replace("[", "?")


def test_what_a_value_depends_on_is_not_removed():
    def run(m, x):
        y = torch.sigmoid(m.a(x))
        return m.c(y) * (2 if y.mean(-1).max().item() > 0.5 else 1)

    found = discover(Net(run, **PAIR_OF_C), torch.randn(3, 4))
    assert not found.couplings and "8 in a.weight[0] and 2 more: mean in the model" in str(found)


def asserted(m, h):
    assert torch.isfinite(h).all()


def refused(m, h):
    if not torch.isfinite(h).all():
        raise ValueError("not finite")


def limited(m, h):
    mean = h.mean()
    if mean.item() > 1e6:
        raise ValueError(
            "large",
        )


def averaged(m, h):
    m.mean = 0.9 * getattr(m, "mean", 0.0) + 0.1 * h.abs().mean().item()


LOGGED = {
    "mean": lambda h: h.mean().item(),
    "max and min": lambda h: float(h.max()) - float(h.min()),
    "std and var": lambda h: (h.std().item(), h.var(1).mean().item()),
    "argmax": lambda h: h.argmax(1).float().mean().item(),
    "amax": lambda h: bool(h.amax() > 5),
    "histc": lambda h: torch.histc(h, 5).tolist(),
    "dead units": lambda h: (h == 0).all(0).sum().item(),
    "entropy": lambda h: -(h.softmax(-1) * h.log_softmax(-1)).sum().item(),
    "sort": lambda h: h.sort(-1)[0].mean().item(),
    "rank": lambda h: torch.linalg.svdvals(h)[0].item(),
}
UNUSED = {**LOGGED, "assert": asserted, "raise": refused, "a limit": limited, "an average": averaged}


@pytest.mark.parametrize("name", UNUSED)
def test_numbers_that_are_only_checked_or_logged_freeze_nothing(name):
    def run(m, x):
        h = m.a(x)
        UNUSED[name](h) if name in LOGGED else UNUSED[name](m, h)
        return m.b(h)

    found = discover(Net(run, **PAIR), torch.randn(3, 4))
    assert [written(c) for c in found.couplings] == ["a.weight: u i, a.bias: u, b.weight: o u"] and not found.values


def test_a_hook_that_logs_freezes_nothing():
    model, seen = copy.deepcopy(nn.Sequential(PAIR["a"], PAIR["b"])), []
    model[0].register_forward_hook(lambda m, x, y: seen.append(y.std().item()))
    assert len(discover(model, torch.randn(3, 4)).couplings) == 1


MATTER = {
    "a factor": lambda m, h: m.b(h) * h.std().item(),
    "a factor in a tensor": lambda m, h: m.b(h) * torch.tensor(h.std().item()),
    "a threshold": lambda m, h: m.b(h) * (2 if h.mean().item() > 0.3 else 1),
    "another tensor": lambda m, h: F.linear(h, m.b.weight if h.mean().item() > 0.3 else m.c.weight),
    "another output": lambda m, h: (lambda y, z: y if h.mean().item() > 0.3 else z)(m.b(h), m.c(h)),
    "a branch": lambda m, h: m.b(h.clamp(max=6e4) if torch.isinf(h).any() else h),
    "a count": lambda m, h: m.b(functools.reduce(lambda y, _: y * 2, range(int(h.abs().max().item())), h)),
    "a check and a factor in one line": lambda m, h: m.b(h) * (limited(m, h) or (2 if h.sum().item() > 0 else 1)),
}


@pytest.mark.parametrize("name", MATTER)
def test_numbers_that_come_back_into_the_forward_freeze_what_they_depend_on(name):
    model = Net(lambda m, x: MATTER[name](m, torch.sigmoid(m.a(x))), **PAIR, c=nn.Linear(8, 2))
    found = discover(model, torch.randn(3, 4))
    assert not any("a.weight" in coupling.members for coupling in found.couplings) and found.values


def test_modules_that_were_never_called_are_named():
    model = Net(lambda m, x: m.a(x), a=nn.Linear(4, 3), b=nn.Sequential(nn.Linear(3, 5), nn.ReLU()), d=nn.ReLU())
    found = discover(model, ROWS)
    assert found.uncalled == ("b",) and str(found).endswith("\n# Never called with these example inputs:\n#   b")
    tied = Net(lambda m, x: m.b(m.a(x)), a=nn.Linear(4, 4, bias=False), b=nn.Linear(4, 4, bias=False))
    tied.b.weight = tied.a.weight
    assert not discover(tied, ROWS).uncalled


FROZEN = {  # (model, example inputs if these are no rows, a line with what is frozen and why)
    "input and output": (nn.Linear(4, 3), "#   3 in weight[0] and bias[0]: output\n#   4 in weight[1]: input[0]"),
    "LayerNorm": (
        nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)),
        "#   8 in 0.weight[0] and 4 more: native_layer_norm in 1: its mean and variance are those of all units",
    ),
    "LayerNorm by hand": (
        Net(lambda m, x: m.b((lambda y: y - y.mean(-1, keepdim=True))(m.a(x))), **PAIR),
        "#   8 in a.weight[0] and 2 more: mean in the model",
    ),
    "softmax": (
        nn.Sequential(nn.Linear(4, 8), nn.Softmax(-1), nn.Linear(8, 2)),
        "#   8 in 0.weight[0] and 2 more: _softmax in 1",
    ),
    "rows of a lower triangle": (
        Net(lambda m, x: m.b(torch.tril(m.a(x).mT).mT), **PAIR),
        "#   8 in a.weight[0] and 2 more: tril in the model",
    ),
    "padded at one end": (
        Net(lambda m, x: m.b(F.pad(m.a(x), (0, 2))), a=nn.Linear(4, 8), b=nn.Linear(10, 2)),
        "#   8 in a.weight[0] and a.bias[0]: constant_pad_nd in the model\n",
    ),
    "read by index": (
        nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 2)),
        torch.zeros(3, dtype=torch.long),
        "#   9 in 0.weight[0]: embedding in 0: read by index",
    ),
    "a sum of what is not zero": (
        Net(lambda m, x: torch.sigmoid(m.a(x)).sum(-1), a=nn.Linear(4, 8)),
        "#   8 in a.weight[0] and a.bias[0]: sum in the model: what it sums over is not zero where a unit is",
    ),
    "not understood": (
        Net(lambda m, x: m.b(torch.linalg.qr(m.a(x))[0]), a=nn.Linear(4, 8), b=nn.Linear(2, 2)),
        "removed there:\n#   8 in a.weight[0] and a.bias[0]: linalg_qr in the model: not understood",
    ),
    "a Fourier transform": (
        Net(lambda m, x: m.b(torch.fft.rfft(m.a(x)).real), a=nn.Linear(4, 8), b=nn.Linear(5, 2)),
        "removed there:\n#   8 in a.weight[0] and a.bias[0]: _fft_r2c in the model",
    ),
    "a parametrization": (
        nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 8)), nn.Linear(8, 2)),
        "#   8 in 0.bias[0] and 3 more: 0.weight is computed by a parametrization",
    ),
    "a constant": (
        Net(lambda m, x: m.b(m.a(x) * torch.arange(8)), **PAIR),
        "#   8 in a.weight[0] and 2 more: a constant made in the model",
    ),
    "divided after a concatenation": (
        Net(
            lambda m, x: m.c(torch.cat([m.a(x), m.b(x)], 1).unflatten(1, (2, 6)).sum(1)),
            **{"a": nn.Linear(4, 8), "b": nn.Linear(4, 4), "c": nn.Linear(6, 2)},
        ),
        "#   8 in a.weight[0] and a.bias[0]: a concatenation of unequal parts that is divided",
    ),
    "twice in one dimension": (
        Net(
            lambda m, x: (lambda y: m.c(torch.cat([y, m.b(x), y], 1)))(m.a(x)),
            **{"a": nn.Linear(4, 8), "b": nn.Linear(4, 6), "c": nn.Linear(22, 2)},
        ),
        "#   8 in a.weight[0] and 2 more: c.weight has it twice in one dimension, which a coupling cannot express",
    ),
    "two axes of one tensor, not zero": (
        Net(lambda m, x: m.b(torch.sigmoid(m.b(m.a(x)))).sum(), a=nn.Linear(4, 8), b=nn.Linear(8, 8)),
        "in a.weight[0] and 4 more: addmm in b: what it sums over is not zero where a unit is",
    ),
    "a shape across factors": (
        Net(
            lambda m, x: m.b(m.a(x).view(2, 2, 3).transpose(0, 1).reshape(-1, 4)), a=nn.Linear(4, 6), b=nn.Linear(4, 2)
        ),
        "#   2 in a.weight[0] and a.bias[0]: reshape in the model: the new shape cuts across its factors",
    ),
    "written into a view": (
        Net(lambda m, x: (lambda y: (y[:, :4].add_(2), m.b(y))[1])(m.a(x)), **PAIR),
        "#   4 in a.weight[0] and 2 more: add_ in the model: it writes into memory that other tensors share",
    ),
    "not used": (
        Net(lambda m, x: m.a(x), a=nn.Linear(4, 3), b=nn.Linear(3, 5, bias=False)),
        "#   5 in b.weight[0]: not used in this forward",
    ),
    "alike in every layer": (
        nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(3)), nn.Linear(4, 4)),
        "#   2 x 4 in *.0.weight[0] and 4 more: native_layer_norm in *.1: its mean and variance are those of all "
        "units\n",
    ),
}


@torch.library.custom_op("sparsekit_tests::share", mutates_args={"out"})
def share(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x / x.sum(-1, keepdim=True))


@share.register_fake
def _(x, out):
    return None


def parts(h):
    return h / h.sum(-1, keepdim=True)


def into_halves(h, function):
    y = torch.empty_like(h)
    y[:2], y[2:] = function(h[:2]), h[2:]
    return y


def changed(h, change):
    """What `change` writes into a part of a copy."""
    change(y := h.clone())
    return y


def changed_view(h, change):
    """What `change` writes to a tensor of zeros, read through a view that is older."""
    zeros = torch.zeros_like(h)
    view = zeros.unsqueeze(1)
    change(zeros)
    return view.squeeze(1)


def written_by(function, *arguments, **written):
    function(*arguments, **written)
    return next(iter(written.values()))


WRITES = {  # {what happens to (3, 5, 8) or (3, 8) numbers before they are read: how many axes of 8 can be pruned}
    "softmax": (lambda h, z, a: changed(h, lambda y: y[:, 0].copy_(h[:, 0].softmax(-1))), 0),
    "a mean that is subtracted": (
        lambda h, z, a: changed(h, lambda y: y.flatten(0, 1).sub_(h.mean(-1).view(-1, 1))),
        0,
    ),
    "halves": (lambda h, z, a: into_halves(h, parts), 0),
    "halves, of single units": (lambda h, z, a: into_halves(h, torch.tanh), 1),
    "steps": (lambda h, z, a: changed(h, lambda y: [y[:, k].copy_(F.normalize(h[:, k], dim=-1)) for k in range(5)]), 0),
    "steps, of single units": (lambda h, z, a: changed(h, lambda y: [y[:, k].mul_(h[:, k - 1]) for k in range(5)]), 1),
    "sums of a view": (lambda h, z, a: changed(h, lambda y: (v := y.narrow(1, 0, 2)).div_(v.sum(-1, keepdim=True))), 0),
    "cumsum": (lambda h, z, a: changed(h, lambda y: y.unbind(1)[0].copy_(h[:, 0].cumsum(-1))), 0),
    "out=": (lambda h, z, a: changed(h, lambda y: torch.div(h, h.sum(-1, keepdim=True), out=y[:])), 0),
    "an operator that returns nothing": (lambda h, z, a: written_by(share, h, out=torch.empty_like(h)), 0),
    "an operator on a list": (lambda h, z, a: changed(h, lambda y: torch._foreach_div_([y], [parts(h)])), 0),
    "what nobody reads": (lambda h, z, a: (changed(h, lambda y: y[:, 0].copy_(h[:, 0].softmax(-1))), h)[1], 1),
    "a sum of what is not zero": (
        lambda h, z, a: z + changed_view(z, lambda y: torch.add(z, 1, out=y)).sum(-1, keepdim=True),
        0,
    ),
    "a sum of what is zero": (
        lambda h, z, a: z + changed_view(z, lambda y: torch.mul(z, 2, out=y)).sum(-1, keepdim=True),
        1,
    ),
    "a product": (lambda h, z, a: changed_view(h[:, 0], lambda y: torch.mm(torch.ones(3, 4), a.weight.mT, out=y)), 1),
    "transpose_": (lambda h, z, a: h.repeat(3, 2, 1)[:8, :8].clone().transpose_(1, 2), 0),
    "view of a wider dtype": (lambda h, z, a: h.view(torch.float64).view(torch.float32), 0),
    "view of another dtype": (lambda h, z, a: h.view(torch.int32).view(torch.float32), 1),
    "the least magnitude": (lambda h, z, a: h + torch.linalg.vector_norm(z, -math.inf, -1, keepdim=True), 0),
    "the norm of an order below 0": (lambda h, z, a: h + torch.linalg.vector_norm(z, -1, -1, keepdim=True), 0),
    "a batch norm without a weight": (
        lambda h, z, a: h + F.batch_norm(z.mT, z.new_zeros(8), z.new_ones(8), None, a.bias).sum(1)[..., None],
        0,
    ),
}


@pytest.mark.parametrize("name", WRITES)
def test_units_on_which_others_depend_are_frozen(name):
    write, count = WRITES[name]
    model = fill(Net(lambda m, x: m.b(write(torch.sigmoid(z := m.a(x)), z, m.a)), **PAIR))
    x = torch.randn(3, 5, 4)
    found = [coupling for coupling in discover(model, x).couplings if "a.weight" in coupling.members]
    assert len(found) == count
    for coupling in found:
        assert_exact(model, coupling, x)


class Normed(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.weight, self.eps, self.run = nn.Parameter(torch.ones(8)), 1e-6, run

    def forward(self, x):
        return self.weight * self.run(x, x.pow(2).mean(-1, keepdim=True), self.eps)


MEAN_SQUARES = {  # {what a module does with the mean of squares: whether it is a norm}
    "rsqrt": (lambda x, mean, eps: x * torch.rsqrt(mean + eps), True),
    "sqrt and division": (lambda x, mean, eps: x / mean.clamp(min=eps).sqrt(), True),
    "reciprocal": (lambda x, mean, eps: x * (1 / torch.sqrt(mean + eps)), True),
    "a negative power": (lambda x, mean, eps: x * (mean.float() + eps) ** -0.5, True),
    "in place": (lambda x, mean, eps: x * mean.add_(eps).rsqrt_(), True),
    "read by nobody too": (lambda x, mean, eps: (mean.detach().max(), x * torch.rsqrt(mean + eps))[1], True),
    "a factor of one": (lambda x, mean, eps: x * torch.rsqrt(1.0 * mean.clone() + eps), True),
    "a gate": (lambda x, mean, eps: x * torch.sigmoid(mean + eps), False),
    "a factor": (lambda x, mean, eps: x * torch.sqrt(mean + eps), False),
    "what is subtracted": (lambda x, mean, eps: x - torch.sqrt(mean + eps), False),
}


@pytest.mark.parametrize("name", MEAN_SQUARES)
def test_a_mean_of_squares_is_that_of_a_norm_or_trials_find_out(name):
    run, is_norm = MEAN_SQUARES[name]
    model = fill(nn.Sequential(PAIR["a"], Normed(run), PAIR["b"]))
    report = shrink(model, x := torch.randn(3, 4))[1]
    assert len(report.couplings) == is_norm
    for coupling in discover(model, x).couplings if is_norm else ():
        assert_exact(model, coupling, x)


@pytest.mark.parametrize("name", FROZEN)
def test_frozen_axes_are_printed_with_the_reason(name):
    model, inputs, line = case(FROZEN, name)
    assert line in str(discover(model, inputs))


def test_a_rule_that_does_not_fit_the_result_is_not_applied(monkeypatch):
    monkeypatch.setitem(axis_rules.RULES, "gelu", lambda call: call.label("self")[:1])
    model, inputs, _ = case(CASES, "two layers")
    assert "6 in 0.weight[0] and 0.bias[0]: gelu in 1: not understood" in str(discover(model, inputs))


def test_what_is_printed_is_python_for_the_same_couplings():
    for model, inputs, _ in (case(CASES, name) for name in CASES):
        found = discover(model, inputs)
        names = {"Coupling": Coupling}
        exec(str(found), names)
        assert tuple(names["couplings"]) == found.couplings
        for coupling, (count, units) in zip(found.couplings, found.counts, strict=True):
            bound = coupling.bind(model)
            assert len(bound) == count and {b.grid[-1] for b in bound} == {units}


def test_the_model_stays_as_it_is():
    model = CASES["residual stream"][0].train()
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    before = {name: (id(t), t.clone()) for name, t in model.state_dict(keep_vars=True).items()}
    discover(model, IMAGE)
    assert all(m.training for m in model.modules())
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert id(tensor) == before[name][0] and torch.equal(tensor, before[name][1]) and tensor.grad is None


def test_only_shapes_matter_so_a_model_on_the_meta_device_works():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    for rows in (ROWS, torch.zeros(0, 4)):
        assert [written(coupling) for coupling in discover(model, rows).couplings] == CASES["two layers"][-1]


def test_inputs_are_a_tensor_a_tuple_or_a_dict():
    model = Net(lambda m, x, y=0: m.b(m.a(x) + y), **PAIR)
    assert len(discover(model, ROWS).couplings) == len(discover(model, (ROWS,)).couplings) == 1
    assert not discover(model, {"x": ROWS, "y": torch.zeros(2, 8)}).couplings  # y is an input, and added


def test_a_shared_parameter_has_its_first_name():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    found = discover(model, ROWS)
    assert not found.couplings  # its rows are the hidden axis and the output
    assert "4 in 0.weight[0] and 0.weight[1]: input[0]" in str(found) and "2.weight" not in str(found)


def test_attention_of_torch_nn_is_followed_through():
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    found = discover(layer, torch.zeros(2, 5, 16))
    heads, hidden = found.couplings
    assert heads.members == {
        "self_attn.in_proj_weight": "(g u d) i",
        "self_attn.in_proj_bias": "(g u d)",
        "self_attn.out_proj.weight": "o (u d)",
    }
    assert "4 in self_attn.in_proj_weight[0] and 2 more: attention in self_attn: its scale follows from the siz" in str(
        found
    )
    assert torch.backends.mha.get_fastpath_enabled()
    layer, inputs = fill(layer), torch.randn(2, 5, 16)
    assert_exact(layer, hidden, inputs)


def test_masks_of_an_earlier_forward_are_ignored_but_masked_tensors_are_refused():
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    sparsifier = ScopeSparsifier(sparsity_level=0.5)
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}])
    with pytest.raises(SparsityError, match="^discover: 0 is masked, so its axes .* before prepare, or after squ"):
        discover(model, ROWS)
    sparsifier.step()
    sparsifier.squash_mask()
    assert discover(model, ROWS).couplings


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_scripted_modules_are_refused():
    scripted = torch.jit.script(nn.Linear(4, 2))
    for model, where in ((scripted, "the model"), (nn.Sequential(nn.Linear(4, 4), scripted), "1")):
        with pytest.raises(SparsityError, match=f"^discover: {where} is scripted or traced, .* passed to torch.jit$"):
            discover(model, ROWS)


def test_errors_name_the_place_and_the_remedy(caplog):
    with pytest.raises(SparsityError, match=r"needs a model \(an nn.Module\), got str"):
        discover("model", ROWS)
    with pytest.raises(SparsityError, match="^discover: weight has no shape yet; run one forward of the lazy module"):
        discover(nn.LazyLinear(3), ROWS)
    looks = nn.Sequential(nn.Linear(4, 4), Net(lambda m, x: x if x.sum() > 0 else -x)).to("meta")
    with pytest.raises(SparsityError, match="^discover: the forward failed in 1: DataDep.* if it reads values, move"):
        discover(looks, ROWS)
    with pytest.raises(SparsityError, match="^discover: the forward failed in 0: RuntimeError: .*Check"):
        discover(nn.Sequential(nn.Linear(3, 4)), ROWS)
    assert not caplog.text and not logging.getLogger("torch._subclasses.fake_tensor").filters


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_list_that_is_one_argument_is_given_in_a_tuple(count):
    def forward(self, images, targets=None):
        if targets is not None:
            return targets.items()
        return self.layer(torch.stack([image[: image.shape[0]] for image in images]))

    model, images = Net(forward, layer=nn.Linear(8, 4)), [torch.randn(8) for _ in range(count)]
    with pytest.raises(SparsityError, match=r"give a tuple: \(images,\)"):
        shrink(model, images)
    assert prune(model, 0.5, batches=[(images,)])[1] and discover(model, (images,))


SIZES = st.sampled_from([1, 2, 3, 4, 6, 8, 12])


@examples(100)
@given(st.lists(SIZES, min_size=1, max_size=4), st.data())
def test_a_reshaped_axis_numbers_elements_as_torch_does(shape, data):
    """Every element keeps its digits: those of its factors, read in the old shape and in the new one."""
    total = torch.Size(shape).numel()
    target = []
    for _ in range(3):
        left = total // torch.Size(target).numel()
        target.append(data.draw(st.sampled_from([n for n in range(1, left + 1) if left % n == 0])))
    target.append(total // torch.Size(target).numel())
    old = tuple(fixed(n, "") for n in shape)
    new = reshape_axes(old, target)
    if new is None:
        return
    sizes = [[f.size for axis in axes for part in axis for f in part.factor.leaves()] for axes in (old, new)]
    assert sizes[0] == sizes[1]  # row-major order is kept, so equal digits are equal elements
    for axis, n in zip(new, target, strict=True):
        assert torch.Size(part.factor.size for part in axis).numel() == n


@examples(100)
@given(st.permutations([2, 3, 2]), st.permutations([2, 3, 2]))
def test_unified_axes_have_the_same_factors_or_are_frozen(a, b):
    left, right = (tuple(AxisFactor(Factor(n)) for n in sizes) for sizes in (a, b))
    unify([left, right], "a reason")
    roots = [[f for part in axis for f in part.factor.leaves()] for axis in (left, right)]
    assert roots[0] == roots[1] or all(f.frozen == "a reason: its factors do not line up" for r in roots for f in r)


def test_a_model_that_cannot_be_copied_is_refused():
    model = nn.Linear(4, 6)
    model.lock = threading.Lock()
    with pytest.raises(SparsityError, match="^discover: the model cannot be copied: TypeError: .*Remove what"):
        discover(model, ROWS)


ONE = torch.tensor(0)
SINGLE = {  # functions of a number, or of a vector of numbers, that torch gives no dimension
    "quantile": lambda s: s.expand(3).quantile(0.5),
    "nanquantile": lambda s: s.nanquantile(0.5),
    "quantile of rows": lambda s: s.expand(2, 3).quantile(0.5, dim=1, keepdim=True).sum(),
    "gather": lambda s: s.gather(0, ONE) + s.expand(3).gather(0, ONE),
    "index_select": lambda s: s.index_select(0, ONE[None]) + s.expand(3).index_select(0, ONE),
    "index_add": lambda s: torch.zeros(()).index_add(0, ONE[None], s),
    "index_copy": lambda s: torch.zeros(()).index_copy(0, ONE, s) + torch.zeros(3).index_copy(0, ONE, s).sum(),
    "index_put": lambda s: torch.zeros(3, 2).index_put((ONE,), s).sum(),
    "take": lambda s: s.take(ONE),
    "median": lambda s: s.median(0)[0],
    "topk": lambda s: s.topk(1)[0],
    "softmax": lambda s: s.softmax(0),
    "unfold": lambda s: s.unfold(0, 1, 1)[0],
}


@pytest.mark.parametrize("name", SINGLE)
def test_operations_on_single_numbers_are_followed(name):
    model = Net(lambda m, x: m.b(m.a(x)) * SINGLE[name](m.s), **PAIR, s=nn.Parameter(torch.tensor(2.0)))
    assert [written(c) for c in discover(model, ROWS).couplings] == ["a.weight: u i, a.bias: u, b.weight: o u"]


def test_a_bound_that_is_a_quantile_of_the_outputs_keeps_no_hidden_unit():
    model = Net(lambda m, x: (lambda y: y.clamp(max=torch.quantile(y, 0.9, dim=1, keepdim=True)))(m.b(m.a(x))), **PAIR)
    assert_exact(fill(model), *discover(model, ROWS).couplings, torch.randn(2, 4))
