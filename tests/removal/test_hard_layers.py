"""Layers of which little could be removed: what leaves them now, with equal outputs, and the reason for what stays."""

import math
import re

import pytest
import torch
from compact_models import rebuilt
from grids import turns
from networks import Net
from stock import EVERYTHING, refuses
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from sparsekit_ao.removal import shrink


class Cell(nn.Module):
    """A recurrent cell in a loop; its first state has as many units as `size` says, if it is given."""

    def __init__(self, kind, size=None):
        super().__init__()
        self.size, self.first, self.cell, self.last = size, nn.Linear(6, 8), kind(8, 16), nn.Linear(16, 3)

    def forward(self, x):
        x, state = self.first(x).relu(), None
        if self.size is not None:
            state = x.new_zeros(len(x), 16 if self.size == "in the code" else self.size)
            state = (state, state) if isinstance(self.cell, nn.LSTMCell) else state
        for at in range(x.shape[1]):
            state = self.cell(x[:, at], state)
        return self.last(state[0] if isinstance(state, tuple) else state)


class Packed(nn.Module):
    """A recurrent layer of packed sequences."""

    def __init__(self, kind):
        super().__init__()
        self.first, self.rnn, self.last = nn.Linear(6, 8), kind(8, 16, batch_first=True), nn.Linear(16, 3)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(self.first(x).relu(), lengths, batch_first=True, enforce_sorted=False)
        return self.last(pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0])


class ResponseNorm(nn.Module):
    """The global response norm of ConvNeXt V2 (arXiv 2301.00808), with its epsilon in the code or as an attribute."""

    def __init__(self, width, eps=None):
        super().__init__()
        shape = (1, 1, 1, width) if eps is None else (width,)
        self.weight, self.bias = nn.Parameter(torch.randn(shape)), nn.Parameter(torch.randn(shape))
        if eps is not None:
            self.eps = eps

    def forward(self, x):
        response = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
        response = response / (response.mean(-1, keepdim=True) + getattr(self, "eps", 1e-6))
        return self.weight * (x * response) + self.bias + x


class ConvNeXtV2(nn.Module):
    def __init__(self, eps=None):
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.LayerNorm(8)
        self.up, self.response, self.down = nn.Linear(8, 32), ResponseNorm(32, eps), nn.Linear(32, 8)

    def forward(self, x):
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + self.down(self.response(F.gelu(self.up(y)))).permute(0, 3, 1, 2)


class GMLP(nn.Module):
    """A block of gMLP (arXiv 2105.08050) for seven tokens."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 32), nn.Linear(16, 12)
        self.of_gate, self.tokens = nn.LayerNorm(16), nn.Linear(7, 7)

    def forward(self, x):
        value, gate = F.gelu(self.up(self.norm(x))).chunk(2, -1)
        return x + self.down(value * self.tokens(self.of_gate(gate).transpose(1, 2)).transpose(1, 2))


class MambaOut(nn.Module):
    """A gated block of MambaOut (arXiv 2405.07992): 12 of 32 channels pass a convolution."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 64), nn.Linear(32, 12)
        self.convolution = nn.Conv2d(12, 12, 3, padding=1, groups=12)

    def forward(self, x):
        gate, passed, mixed = self.up(self.norm(x)).split((32, 20, 12), -1)
        mixed = self.convolution(mixed.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return x + self.down(F.silu(gate) * torch.cat([passed, mixed], -1))


class S4D(nn.Module):
    """Diagonal state spaces (arXiv 2206.11893), as a convolution by the Fourier transform."""

    def __init__(self, width=8, states=8):
        super().__init__()
        self.first, self.last = nn.Linear(4, width), nn.Linear(width, 3)
        self.log_step, self.skip = nn.Parameter(torch.rand(width) - 3), nn.Parameter(torch.randn(width))
        self.C = nn.Parameter(torch.randn(width, states, 2))
        self.log_real = nn.Parameter(torch.full((width, states), math.log(0.5)))
        self.imaginary = nn.Parameter(math.pi * torch.arange(states).float().repeat(width, 1))

    def forward(self, x):
        u = self.first(x).transpose(1, 2)
        length = u.shape[-1]
        A, C = torch.complex(-self.log_real.exp(), self.imaginary), torch.view_as_complex(self.C)
        step = A * self.log_step.exp()[:, None]
        powers = torch.exp(step[..., None] * torch.arange(length))
        kernel = 2 * torch.einsum("hn,hnl->hl", C * (step.exp() - 1) / A, powers).real
        y = torch.fft.irfft(torch.fft.rfft(u, n=2 * length) * torch.fft.rfft(kernel, n=2 * length), n=2 * length)
        return self.last(F.gelu(y[..., :length] + u * self.skip[:, None]).transpose(1, 2))


SEQUENCES, LENGTHS = torch.randn(2, 5, 6), torch.tensor([5, 3])
REMOVED = {  # (model, inputs, {tensor: its shape})
    "GRUCell": (lambda: Cell(nn.GRUCell), SEQUENCES, {"cell.weight_hh": (24, 8), "cell.weight_ih": (24, 4)}),
    "LSTMCell": (lambda: Cell(nn.LSTMCell, 16), SEQUENCES, {"cell.weight_hh": (32, 8), "last.weight": (3, 8)}),
    "RNNCell": (lambda: Cell(nn.RNNCell, 16), SEQUENCES, {"cell.weight_hh": (8, 8), "first.weight": (4, 6)}),
    "packed GRU": (lambda: Packed(nn.GRU), (SEQUENCES, LENGTHS), {"rnn.weight_hh_l0": (24, 8), "first.weight": (4, 6)}),
    "packed LSTM": (
        lambda: Packed(nn.LSTM),
        (SEQUENCES, LENGTHS),
        {"rnn.weight_ih_l0": (32, 4), "last.weight": (3, 8)},
    ),
    "ConvNeXt V2": (ConvNeXtV2, torch.randn(2, 8, 5, 5), {"up.weight": (16, 8), "response.weight": (1, 1, 1, 16)}),
    "ConvNeXt V2, eps": (lambda: ConvNeXtV2(1e-6), torch.randn(2, 8, 5, 5), {"response.bias": (16,)}),
    "S4D": (S4D, torch.randn(2, 9, 4), {"C": (4, 4, 2), "log_real": (4, 4), "log_step": (4,), "first.weight": (4, 4)}),
}


@pytest.mark.parametrize("name", REMOVED)
def test_units_leave_and_outputs_are_those_of_the_masked_model(name):
    make, inputs, shapes = REMOVED[name]
    torch.manual_seed(0)
    model = make().eval()
    small, report = shrink(model, inputs, EVERYTHING)
    assert {key: tuple(small.state_dict()[key].shape) for key in shapes} == shapes
    assert report.difference <= 1e-5 and not report.left_out
    assert 2 * report.after.parameters < 1.3 * report.before.parameters
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    assert torch.equal(rebuilt(make().eval(), small, report)(*args), small(*args))


def spectral():
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 16)), nn.ReLU(), nn.Linear(16, 3))


STAYS = {  # (model, inputs, the reason)
    "size in the code": (
        lambda: Cell(nn.GRUCell, "in the code"),
        SEQUENCES,
        r"cell.weight_ih: does not run: .* got 16, expected 8 \(at test_hard_layers.py:\d+: state = self.cell",
    ),
    "spectral_norm": (
        spectral,
        SEQUENCES,
        r"16 in 0.bias\[0\]: 0.weight is computed by a parametrization; torch.* makes it plain",
    ),
    "gMLP": (GMLP, torch.randn(2, 7, 12), r"16 in up.weight\[0\]: native_layer_norm in of_gate: its mean and variance"),
    "MambaOut": (MambaOut, torch.randn(2, 5, 5, 12), r"8 in up.weight\[0\]: a concatenation of unequal parts"),
}


@pytest.mark.parametrize("name", STAYS)
def test_the_reason_for_what_stays_is_in_the_report(name):
    make, inputs, reason = STAYS[name]
    torch.manual_seed(0)
    _, report = shrink(make().eval(), inputs, EVERYTHING)
    assert len([text for text in (*report.left_out, *report.frozen) if re.search(reason, text)]) == 1


def test_what_spectral_norm_computed_leaves_once_it_is_plain():
    model = spectral().eval()
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    assert shrink(model, SEQUENCES)[0][0].out_features == 8


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, lambda m: nn.utils.spectral_norm(m, dim=1)])
@pytest.mark.parametrize("kind", [lambda i, o: nn.Linear(i, o), lambda i, o: nn.Conv1d(i, o, 1)])
def test_weights_that_a_hook_computes_stay_and_the_reason_is_given(kind, norm):
    torch.manual_seed(0)
    model = nn.Sequential(kind(8, 16), nn.ReLU(), norm(kind(16, 16)), nn.ReLU(), kind(16, 12), nn.ReLU(), kind(12, 4))
    x = torch.randn(6, 8) if kind(2, 2).weight.ndim == 2 else torch.randn(6, 8, 3)
    for _ in range(20):
        model(x)
    with torch.no_grad():
        before = model.eval()(x)
        weight = model[2].weight.clone()
        small, report = shrink(model, x, 0.5)
        small(x)
        assert torch.equal(small[2].weight, weight) and torch.equal(model(x), before)
    assert small[4].weight.shape[:2] == (6, 16) and any("2.weight is computed by a hook" in t for t in report.frozen)
    nn.utils.remove_spectral_norm(model[2])
    assert shrink(model, x, 0.5)[0][2].weight.shape[:2] == (8, 8)


class Memory(nn.Module):
    """Learned keys and values under the names that are given."""

    def __init__(self, *names):
        super().__init__()
        self.names, self.first, self.last = names, nn.Linear(8, 16), nn.Linear(16, 4)
        for name in names:
            setattr(self, name, nn.Parameter(torch.randn(24, 16)))

    def forward(self, x):
        keys, values = (getattr(self, name) for name in self.names)
        return self.last((self.first(x).relu() @ keys.mT).relu() @ values)


@pytest.mark.parametrize("how", [{}, {"score": "norm"}, {"batches": [torch.randn(64, 8)]}])
@pytest.mark.parametrize("names", [("keys", "values"), ("items", "pop"), ("update", "clear"), ("first_one", "keys")])
def test_parameters_lose_units_under_names_that_methods_of_dicts_have(names, how):
    model = Memory(*names).eval()
    small, report = shrink(model, torch.randn(5, 8), EVERYTHING, **how)
    assert [getattr(small, name).shape for name in names] == [(12, 8), (12, 8)] and report.difference <= 1e-5
    assert {*small.state_dict()} == {*model.state_dict()} and not hasattr(model, "parametrizations")


class Frequencies(nn.Module):
    """A product for each of the lowest frequencies, as in Fourier neural operators (arXiv 2010.08895)."""

    def __init__(self, i, o):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(i, o, 4, dtype=torch.cfloat))

    def forward(self, x):
        spectrum = torch.fft.rfft(x)[..., :4]
        return torch.fft.irfft(torch.einsum("bim,iom->bom", spectrum, self.weight), n=x.shape[-1])


class Complex(nn.Module):
    """Products of complex numbers only."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(12, 16, dtype=torch.cfloat), nn.Linear(16, 3, dtype=torch.cfloat))

    def forward(self, x):
        return torch.view_as_real(self.inner(torch.complex(x, x)))


COMPLEX = [
    lambda: nn.Sequential(Frequencies(2, 16), Frequencies(16, 3)),
    lambda: nn.Sequential(Frequencies(2, 16), nn.Conv1d(16, 16, 1), nn.ReLU(), Frequencies(16, 3)),
    lambda: nn.Sequential(nn.Conv1d(2, 16, 1), nn.ReLU(), Frequencies(16, 16), nn.Conv1d(16, 3, 1)),
    Complex,
]
HOW = [{}, {"score": "norm"}, {"budget": "parameters"}, {"batches": [torch.randn(4, 2, 12)]}]


@pytest.mark.parametrize(("make", "how"), turns(COMPLEX, [(how,) for how in HOW], each=2))
def test_complex_weights_are_scored_by_their_norms(make, how):
    torch.manual_seed(0)
    more = {"max_sparsity": {"*": 0.9, "width": 0.9}} if "budget" in how else {"ratio": EVERYTHING}
    model = make().eval()
    report = shrink(model, torch.randn(4, 2, 12), **more, **how)[1]
    assert report.after.parameters < 0.6 * report.before.parameters and report.difference <= 1e-5


def test_units_of_largest_complex_values_stay():
    model = nn.Sequential(Frequencies(2, 16), Frequencies(16, 3)).eval()
    with torch.no_grad():
        model[0].weight[:, :8] *= 100j
    small = shrink(model, torch.randn(4, 2, 12), EVERYTHING, "norm")[0]
    assert torch.equal(small[0].weight, model[0].weight[:, :8])


def test_a_score_that_fits_nothing_names_the_weight_and_what_fits():
    model = nn.Sequential(Frequencies(2, 16), Frequencies(16, 3)).eval()
    with refuses("shrink: the score fits no coupling ('0.weight' is torch.complex64"):
        shrink(model, torch.randn(4, 2, 12), EVERYTHING, "wanda")


def test_units_that_no_weight_reads_are_left_out_with_advice_that_shrink_takes():
    towers = nn.ModuleList(nn.Sequential(nn.Linear(n, 32), nn.ReLU(), nn.Linear(32, 16)) for n in (8, 6))
    model = Net(lambda m, x, y: m.towers[0](x) @ m.towers[1](y).mT, towers=towers).eval()
    inputs = torch.randn(5, 8), torch.randn(7, 6)
    left_out = shrink(model, inputs, EVERYTHING, "obs")[1].left_out
    assert len(left_out) == 1 and left_out[0].endswith("score=None takes norms there")
    assert shrink(model, inputs, EVERYTHING)[0].towers[0][2].out_features == 8
