"""What compact's comparison must see: each case gives other outputs, or changes what it is given, if it does not."""

from types import SimpleNamespace

import hf_models
import pytest
import torch
import torch.nn.functional as F
from compact_models import NET, PAIR, dropping, pair, pruned, refusal, x
from networks import Net
from stock import EVERYTHING
from torch import nn

from sparsekit_ao import Coupling, SparsityError
from sparsekit_ao.coupling import discover
from sparsekit_ao.removal import compact, shrink


class LinearAttention(nn.Module):
    """Attention without a softmax, along one dimension; of queries and keys it needs the number of their width."""

    def __init__(self, along=1):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.along = along

    def forward(self, x):
        q, k, v = (y.movedim(self.along, 0) for y in (self.q(x), self.k(x), self.v(x)))
        weights = (torch.einsum("i...u,j...u->ij...", q, k) / q.shape[-1]).exp()
        return (torch.einsum("ij...,j...v->i...v", weights, v) / weights.sum(1)[..., None]).movedim(0, self.along)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.attention = nn.Embedding(5, 8), LinearAttention()

    def forward(self, ids, mask, labels):
        logits = (self.attention(self.embed(ids)) * mask[..., None]).sum(1)
        return F.cross_entropy(logits, labels), logits


WRITERS = Coupling({"a.weight": "u i", "a.bias": "u"}, name="writers")


def halved(run, **parts):
    """A model of a layer `a`, of which every second unit is zero, and of others."""
    torch.manual_seed(0)
    model = Net(run, a=nn.Linear(4, 8), **parts)
    with torch.no_grad():
        model.a.weight[::2] = model.a.bias[::2] = 0
    return model


def doing(run, **parts):
    """The pair in a model that does something else besides."""
    return Net(run, net=dropping(pair(), 1, 3), **parts)


def masked_out(y):
    return y.masked_fill(torch.arange(5) > 3, torch.finfo(y.dtype).min)


def as_integers(y):
    return torch.cat([torch.full((3, 1), 10**9), (10 * y).long()], 1)


@pytest.mark.parametrize("last", [masked_out, as_integers, lambda y: y * 1j + 1])
def test_no_number_hides_a_difference_of_another(last):
    def run(m, x):  # where a unit is zero it adds sigmoid(0) = 1/2, so none can be removed
        return last(m.c(x) + torch.sigmoid(m.a(x)).sum(-1, keepdim=True))

    message = refusal(SparsityError, halved(run, c=nn.Linear(4, 5)), WRITERS, x())
    assert "coupling 'writers' by itself gives other outputs" in message


def test_numbers_that_are_masked_out_are_no_difference():
    model = nn.Sequential(*dropping(pair(), 1), nn.Linear(2, 5))
    model[3].register_forward_hook(lambda *args: masked_out(args[-1]))
    assert compact(model, PAIR, x())[1].couplings[0].kept == 7


def test_float64_decides_only_where_rounding_explains_the_difference():
    def mean(m, x):
        h = m.a(x)
        n = h.shape[-1] if x.dtype == torch.float32 else 8  # the units that there are, or those that there were
        return m.c(x) * h.square().sum(-1, keepdim=True) / n

    message = refusal(SparsityError, halved(mean, c=nn.Linear(4, 3)), WRITERS, x())
    assert "gives other outputs: a relative difference of 1.0e+00" in message


@pytest.mark.parametrize("inputs", [torch.zeros(3, 4), torch.zeros(0, 4)])
def test_outputs_of_zeros_check_nothing(inputs):
    model = dropping(pair(), 1)
    with torch.no_grad():
        model[0].bias.zero_()
        model[2].bias.zero_()
    assert refusal(SparsityError, model, PAIR, inputs) == (
        "the model returns only zeros on example_inputs, so nothing is compared; pass typical inputs"
    )


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_rows_that_are_read_by_index_stay(layer):
    model = nn.Sequential(layer(20, 8), nn.Linear(8, 3))
    with torch.no_grad():
        model[0].weight[[10, 12]] = 0
    message = refusal(SparsityError, model, Coupling({"0.weight": "u i"}), torch.arange(8)[None])
    assert message == (
        f"0.weight: axes 'u i' would keep 18 of the 20 rows of an {layer.__name__}. Rows are read by index, so the "
        "indices of later ones would change; use units of its second dimension, or leave it out."
    )


class Held:
    def __init__(self, held):
        self.held = held


def test_outputs_in_other_objects_are_reported():
    model = doing(lambda m, x: (m.net(x), Held(x), None))
    report = compact(model, NET, x())[1]
    assert report.not_compared == ("output[1], a Held",)
    assert "\nnot inspected, hence not compared: output[1], a Held" in str(report)
    found = discover(model, x())
    assert found.opaque == ("output[1], a Held",)
    assert str(found).endswith("# Not inspected, tensors in there are not frozen:\n#   output[1], a Held")


def test_models_and_inputs_that_a_forward_changes_stay_as_they_are():
    def run(m, x):  # the outputs depend on how often it ran
        m.calls += 1
        return m.net(x.mul_(2)) + m.calls

    model, inputs = doing(run, calls=nn.Buffer(torch.zeros(()))), x()
    report = compact(model, NET, (inputs,))[1]
    assert report.difference <= 1e-5 and model.calls == 0
    assert torch.equal(inputs, x())


def test_a_cache_among_the_inputs_is_not_filled_by_any_run():
    def run(m, x, cache):
        cache.held.append(x)
        return m.net(torch.cat(cache.held))

    cache = Held([])
    compact(doing(run), NET, (x(), cache))
    assert not cache.held


def test_inputs_that_were_computed_are_accepted():
    assert compact(dropping(pair(), 1), PAIR, nn.Linear(4, 4)(x()))[1].couplings[0].kept == 7


def test_random_states_of_unused_devices_are_unchanged(monkeypatch):
    model, seeded = dropping(pair(), 1), []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    compact(model, PAIR, x())
    assert not seeded


def test_a_mask_that_is_true_in_the_example_may_be_false():
    def run(m, x, mask):
        return m.c(x) + torch.where(mask[:, None], m.a(x), 1.0).sum(-1, keepdim=True)

    found = discover(halved(run, c=nn.Linear(4, 3)), (x(), torch.ones(3, dtype=torch.bool)))
    assert not found.couplings
    assert "sum in the model: what it sums over is not zero where a unit is" in str(found)


def test_masks_that_keep_zeros_zero_are_accepted():
    def run(m, x, mask):
        y = m.a(x).masked_fill(mask[:, None], 0.0)
        return m.b(torch.where(mask[:, None], 0.0, F.relu(y)) * mask[:, None])

    model = Net(run, a=nn.Linear(4, 8), b=nn.Linear(8, 3))
    assert len(discover(model, (x(), torch.ones(3, dtype=torch.bool))).couplings) == 1


class Centred(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(width) + 0.5), 1e-5

    def forward(self, x):
        return (x - x.mean(-1, keepdim=True)) * self.weight


class GatedNorm(Centred):
    def forward(self, x, gate):
        return x * torch.rsqrt(self.power(x).mean(-1, keepdim=True) + self.eps) * self.weight * F.silu(gate)

    def power(self, x):
        return x * x


def normed(norm):
    def run(m, x):
        return m.b(m.norm(m.a(x)) if norm is Centred else m.norm(m.a(x), m.z(x)))

    torch.manual_seed(0)
    return Net(run, a=nn.Linear(4, 8), z=nn.Linear(4, 8), norm=norm(8), b=nn.Linear(8, 3))


def test_a_mean_that_is_subtracted_is_no_root_mean_square():
    found = discover(normed(Centred), x())
    assert not found.couplings and "8 in a.weight[0] and 3 more: mean in norm" in str(found)


@pytest.mark.parametrize("power", [lambda x: x * x, torch.square, lambda x: x**2])
def test_a_gated_norm_is_folded(power, monkeypatch):
    monkeypatch.setattr(GatedNorm, "power", lambda _, x: power(x))
    coupling = discover(normed(GatedNorm), x()).couplings[0]
    model = pruned(normed(GatedNorm), [coupling])
    small, report = compact(model, coupling, x())
    assert report.difference <= 1e-5 and not report.notes and small.norm.eps == 2e-5


def test_a_mean_of_other_powers_is_no_root_mean_square(monkeypatch):
    monkeypatch.setattr(GatedNorm, "power", lambda _, x: x**4)
    assert not discover(normed(GatedNorm), x()).couplings


def test_a_norm_that_cannot_be_tested_is_reported():
    class Picky(GatedNorm):
        def forward(self, x, gate):
            if gate.shape[0] != 3:
                raise ValueError("a batch of 3")
            return super().forward(x, gate)

    coupling = discover(normed(GatedNorm), x()).couplings[0]
    message = refusal(SparsityError, pruned(normed(Picky), [coupling]), coupling, x())
    assert "not exact: norm.weight: a Picky could not be tested, so it was not folded (a batch of 3)" in message


def test_a_group_norm_whose_groups_get_narrower_is_reported_as_not_exact():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 1), nn.GroupNorm(4, 16), nn.Conv2d(16, 4, 1))
    names = {"0.weight": "(g u) i h w", "0.bias": "(g u)", "1.weight": "(g u)", "1.bias": "(g u)"}
    coupling = Coupling({**names, "2.weight": "o (g u) h w"}, scope="g", sizes={"g": 4})
    message = refusal(SparsityError, pruned(model, [coupling]), coupling, torch.randn(2, 3, 5, 5))
    assert "not exact: 1: a GroupNorm whose groups lose channels has statistics of fewer values" in message


def test_a_norm_without_weights_is_reported():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 1), nn.GroupNorm(8, 16, affine=False), nn.Conv2d(16, 4, 1))
    inputs = torch.randn(2, 3, 5, 5)
    coupling = discover(model, inputs).couplings[0]
    model = pruned(model, [coupling])
    message = refusal(SparsityError, model, coupling, inputs)
    assert "1.num_groups = 8, as '0.weight' had" in message and "1.num_channels = 16, as '0.weight' had" in message
    attrs = {"1.num_groups": "u", "1.num_channels": "u d"}
    assert compact(model, coupling, inputs, attrs=attrs)[1].difference <= 1e-5


def test_small_numbers_of_a_config_are_not_reported_as_sizes():
    model = dropping(pair(2), 1)
    model.config = SimpleNamespace(num_layers=2, eos_token_id=2)
    assert compact(model, PAIR, x())[1].unlisted == ()
    model = dropping(pair(6), 1)
    model.config = SimpleNamespace(hidden=6)
    assert compact(model, PAIR, x())[1].unlisted == ("config.hidden = 6, as 'hidden' had",)


ONE, SEVERAL = torch.ones(2, 1, dtype=torch.long), torch.tensor([[1, 2, 4]])


@pytest.mark.parametrize(
    ("model", "inputs", "place"),
    [
        (LinearAttention(), torch.randn(2, 1, 8), "example_inputs\\[0\\] has one entry in dimension 1"),
        (LinearAttention(), torch.ones(1, 1, 8), "example_inputs\\[0\\] has one entry in dimension 1"),
        (LinearAttention(0), torch.randn(1, 2, 8), "example_inputs\\[0\\] has one entry in dimension 0"),
        (LinearAttention(0), torch.randn(1, 8), "example_inputs\\[0\\] has one entry in dimension 0"),
        (Classifier(), {"ids": ONE, "mask": ONE > 0, "labels": ONE[:, 0]}, "example_inputs.ids has one entry in dim"),
        (LinearAttention(), torch.randn(1, 3, 8), ""),
        (Classifier(), {"ids": SEVERAL, "mask": SEVERAL > 0, "labels": ONE[0]}, ""),
    ],
)
def test_one_token_is_refused_where_the_model_combines_tokens_and_a_batch_of_one_is_not(model, inputs, place):
    q, k = Coupling({"**q.weight": "u i", "**q.bias": "u"}), Coupling({"**k.weight": "u i", "**k.bias": "u"})
    if place:
        for call in (lambda: shrink(model, inputs, EVERYTHING), lambda: compact(pruned(model, [q]), [q, k], inputs)):
            with pytest.raises(SparsityError, match=f"{place}.*Pass at least 2 entries there"):
                call()
        longer = {"ids": torch.tensor([[1, 2], [3, 1]]), "mask": torch.ones(2, 2), "labels": ONE[:, 0]}
        inputs = longer if "ids" in place else torch.randn(2, 2, 8)
    assert shrink(model, inputs, EVERYTHING)[1].left_out


@pytest.mark.parametrize("shape", [(1, 1, 6, 6), (2, 1, 6, 6)])
def test_one_channel_is_no_length(shape):
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 3))
    assert shrink(model, torch.randn(shape))[1].couplings[0].kept == 4


class Steps(nn.Module):
    """A recurrence, whose weights of hidden states one step does not show."""

    def __init__(self, kind):
        super().__init__()
        self.inner, self.head = kind(8, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.inner(x)[0])


LATENT = nn.ConvTranspose2d(16, 32, 4), nn.BatchNorm2d(32), nn.ReLU()
SHOWN = {
    "2D": (nn.Sequential(*LATENT, nn.ConvTranspose2d(32, 3, 4, 2, 1), nn.Tanh()), (8, 16, 1, 1)),
    "one latent": (nn.Sequential(*LATENT, nn.ConvTranspose2d(32, 3, 4, 2, 1)), (1, 16, 1, 1)),
    "1D": (nn.Sequential(nn.ConvTranspose1d(16, 32, 4), nn.ReLU(), nn.ConvTranspose1d(32, 3, 4, 2)), (8, 16, 1)),
    "padding": (nn.Sequential(nn.Conv1d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv1d(32, 3, 3, padding=1)), (1, 16, 1)),
    "pixels": (nn.Sequential(nn.Conv2d(16, 32, 1), nn.PixelShuffle(2), nn.Conv2d(8, 3, 3, padding=1)), (4, 16, 1, 1)),
    "resized": (
        nn.Sequential(nn.Upsample(scale_factor=4, mode="bilinear"), *LATENT, nn.Conv2d(32, 3, 3)),
        (2, 16, 1, 1),
    ),
}


@pytest.mark.parametrize("name", SHOWN)
def test_one_entry_is_taken_where_it_hides_no_weight(name):
    model, shape = SHOWN[name]
    report = shrink(model.eval(), torch.randn(shape))[1]
    assert report.after.parameters < 0.6 * report.before.parameters and report.difference <= 1e-5


def test_one_image_of_a_language_model_is_taken():
    def run(m, ids, pixels):
        x = torch.cat([m.patches(pixels).flatten(2).mT, m.embed(ids)], 1)
        return m.head(x + m.down(m.up(x).relu()))

    layers = {"patches": nn.Conv2d(3, 8, 4, 4), "embed": nn.Embedding(9, 8), "head": nn.Linear(8, 9)}
    model = Net(run, **layers, up=nn.Linear(8, 16), down=nn.Linear(16, 8))
    report = shrink(model, (torch.arange(5)[None], torch.randn(1, 3, 8, 8)), EVERYTHING)[1]
    assert len(report.couplings) == 2 and report.difference <= 1e-5


class WithoutGradients(nn.Module):
    """Attention that is never differentiated."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 3)

    @torch.no_grad()
    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out((q @ k.mT).softmax(-1) @ v)


ENCODER = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
GPT = {"input_ids": torch.tensor([[3], [7]])}


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (Steps(nn.GRU), torch.randn(2, 1, 8)),
        (Steps(nn.LSTM), torch.randn(1, 1, 8)),
        (nn.Sequential(nn.TransformerEncoder(ENCODER, 2), nn.Linear(8, 3)), torch.randn(2, 1, 8)),
        (WithoutGradients(), torch.randn(2, 1, 8)),
        (hf_models.make("GPT-2")[0], GPT),  # a packed weight, of which the values' part is shown
        (hf_models.make("Bloom")[0], GPT),  # here these parts alternate
    ],
)
def test_one_entry_is_refused_where_it_hides_a_weight_or_a_part_of_one(model, inputs):
    with pytest.raises(SparsityError, match="has one entry in dimension 1, but the model combines entries along it"):
        shrink(model.eval(), inputs)
