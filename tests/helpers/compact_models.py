"""Small models of every structure that compaction must handle exactly, each with its couplings."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparsekit_ao import Coupling, ScopeSparsifier
from sparsekit_ao.removal import compact, cut_to


class GatedMLP(nn.Module):
    def __init__(self, width=6, hidden=12):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, hidden), nn.Linear(width, hidden)
        self.down_proj = nn.Linear(hidden, width)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Residual(nn.Module):
    """`x + layer(norm(x))`, layer after layer."""

    def __init__(self, *layers, norm=nn.Identity):
        super().__init__()
        self.layers, self.norms = nn.ModuleList(layers), nn.ModuleList(norm() for _ in layers)

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x))
        return x


class Attention(nn.Module):
    """Grouped queries: `queries` heads for each of `kv_heads` key and value heads."""

    def __init__(self, width=10, kv_heads=4, queries=3, size=4):
        super().__init__()
        self.num_kv_heads, self.num_queries, self.size, self.value_size = kv_heads, queries, size, size
        self.q, self.k = nn.Linear(width, kv_heads * queries * size), nn.Linear(width, kv_heads * size)
        self.v, self.o = nn.Linear(width, kv_heads * size), nn.Linear(kv_heads * queries * size, width)

    def forward(self, x):
        batch, tokens, _ = x.shape
        q = self.q(x).view(batch, tokens, self.num_kv_heads * self.num_queries, self.size).transpose(1, 2)
        k = self.k(x).view(batch, tokens, self.num_kv_heads, self.size).transpose(1, 2)
        v = self.v(x).view(batch, tokens, self.num_kv_heads, self.value_size).transpose(1, 2)
        k, v = (t.repeat_interleave(self.num_queries, dim=1) for t in (k, v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class PackedAttention(nn.Module):
    def __init__(self, width=8, heads=4, size=3):
        super().__init__()
        self.num_heads, self.size = heads, size
        self.qkv, self.proj = nn.Linear(width, 3 * heads * size), nn.Linear(heads * size, width)

    def forward(self, x):
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.num_heads, self.size).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class SkipNet(nn.Module):
    """A stem, two residual blocks, and a head on the flattened image."""

    def __init__(self, width=8, inner=6):
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, inner, 3, padding=1),
                nn.BatchNorm2d(inner),
                nn.ReLU(),
                nn.Conv2d(inner, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
            )
            for _ in range(2)
        )
        self.head = nn.Linear(width * 16, 5)

    def forward(self, x):
        x = self.stem_norm(self.stem(x))
        for block in self.blocks:
            x = F.relu(x + block(x))
        return self.head(x.flatten(1))


class PackedExperts(nn.Module):
    """Experts in tensors of three dimensions, whose gates add up."""

    def __init__(self, experts=6, width=5, hidden=8):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, hidden, width))
        self.down = nn.Parameter(torch.randn(experts, width, hidden))

    def forward(self, x):
        hidden = F.relu(torch.einsum("bi,ehi->beh", x, self.up))
        return torch.einsum("be,beh,eoh->bo", self.router(x).sigmoid(), hidden, self.down)


class RootMeanSquare(nn.Module):
    """As decoders write it; `shift` 1 keeps the weight as its difference from one."""

    def __init__(self, width, eps=1e-3, shift=0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width) / 4 + 1 - shift)
        self.variance_epsilon, self.shift = eps, shift

    def forward(self, x):
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight + self.shift) * (x * scale)


class Decoder(nn.Module):
    """An embedding, gated layers on a residual stream, a norm, and a head."""

    def __init__(self, norm, width=8, layers=2, tied=False):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, width), nn.Linear(width, 11, bias=False)
        self.layers, self.norms = nn.ModuleList(GatedMLP(width) for _ in range(layers)), nn.ModuleList()
        self.norms.extend(norm(width) for _ in range(layers))
        self.norm = norm(width)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x))
        return self.head(self.norm(x))


STREAM = {
    "embed.weight": "v u",
    "norm.weight": "u",
    "norms.**.weight": "u",
    "layers.**.gate_proj.weight": "o u",
    "layers.**.up_proj.weight": "o u",
    "layers.**.down_proj.weight": "u i",
    "layers.**.down_proj.bias": "u",
    "head.weight": "o u",
}
MLP = {
    "layers.*.gate_proj.weight": "u i",
    "layers.*.gate_proj.bias": "u",
    "layers.*.up_proj.weight": "u i",
    "layers.*.up_proj.bias": "u",
    "layers.*.down_proj.weight": "o u",
}


def bn(name, axes="u"):
    return {f"{name}.{t}": axes for t in ("weight", "bias", "running_mean", "running_var")}


def weights_and_biases(axes):
    """{"q": "(u d) i"} as members "q.weight" and "q.bias": the bias has what the first dimension has."""
    out = {}
    for name, text in axes.items():
        first = text.split(")")[0] + ")" if text.startswith("(") else text.split()[0]
        out |= {f"{name}.weight": text, f"{name}.bias": first}
    return out


def images():
    return torch.randn(2, 3, 4, 4)


def vectors(width):
    return lambda: torch.randn(2, 5, width)


def tokens():
    return torch.randint(11, (2, 5))


def decoder(norm):
    return lambda: Decoder(norm)


SKIP = {
    **{"stem.weight": "u i h w", "stem.bias": "u"},
    **bn("stem_norm"),
    **{"blocks.**.0.weight": "o u h w", "blocks.**.3.weight": "u i h w"},
    **bn("blocks.**.4"),
    "head.weight": "o (u hw)",
}
BLOCK = {"blocks.*.0.weight": "u i h w", "blocks.*.0.bias": "u", **bn("blocks.*.1"), "blocks.*.3.weight": "o u h w"}
KV_HEADS = Coupling(
    {**weights_and_biases({"q": "(u g d) i", "k": "(u d) i", "v": "(u d) i"}), "o.weight": "o (u g d)"},
    sizes={"g": 3, "d": 4},
    attrs={"num_kv_heads": "u"},
)
QUERIES = Coupling(
    {**weights_and_biases({"q": "(kv u d) i"}), "o.weight": "o (kv u d)"},
    scope="kv",
    sizes={"kv": 4, "d": 4},
    attrs={"num_queries": "u"},
)

# name: (make the model, its couplings, make its inputs)
CASES = {
    "gated MLP of every layer": (lambda: Residual(GatedMLP(), GatedMLP()), Coupling(MLP), vectors(6)),
    "kv heads with their query heads": (Attention, KV_HEADS, vectors(10)),
    "query heads inside every kv head": (Attention, QUERIES, vectors(10)),
    "kv heads, and query heads inside": (Attention, [KV_HEADS, QUERIES], vectors(10)),
    "value channels of every head": (
        Attention,
        Coupling(
            {**weights_and_biases({"v": "(kv u) i"}), "o.weight": "o (kv g u)"},
            sizes={"kv": 4, "g": 3},
            attrs={"value_size": "u"},
        ),
        vectors(10),
    ),
    "packed qkv": (
        PackedAttention,
        Coupling(
            {**weights_and_biases({"qkv": "(three u d) i"}), "proj.weight": "o (u d)"},
            sizes={"three": 3, "d": 3},
            attrs={"num_heads": "u"},
        ),
        vectors(8),
    ),
    "conv, BatchNorm, conv": (SkipNet, Coupling(BLOCK), images),
    "residual stream through skips, and flatten": (SkipNet, Coupling(SKIP, name="stream"), images),
    "both": (SkipNet, [Coupling(SKIP, name="stream"), Coupling(BLOCK)], images),
    "experts with their router row": (
        PackedExperts,
        Coupling({"router.weight": "u i", "up": "u h i", "down": "u o h"}),
        lambda: torch.randn(7, 5),
    ),
    "units inside every packed expert": (
        PackedExperts,
        Coupling({"up": "e u i", "down": "e o u"}, scope="e"),
        lambda: torch.randn(7, 5),
    ),
    "residual stream under torch.nn.RMSNorm": (decoder(nn.RMSNorm), Coupling(STREAM), tokens),
    "residual stream under a decoder's RMSNorm": (decoder(RootMeanSquare), Coupling(STREAM), tokens),
    "residual stream under an RMSNorm of 1 + weight": (
        decoder(lambda width: RootMeanSquare(width, shift=1.0)),
        Coupling(STREAM),
        tokens,
    ),
    "residual stream and every MLP": (decoder(RootMeanSquare), [Coupling(STREAM), Coupling(MLP)], tokens),
    "GroupNorm by whole groups": (
        lambda: nn.Sequential(nn.Conv2d(3, 12, 3), nn.GroupNorm(4, 12), nn.ReLU(), nn.Conv2d(12, 2, 1)),
        Coupling(
            {"0.weight": "(u c) i h w", "0.bias": "(u c)", "1.weight": "(u c)", "1.bias": "(u c)"}
            | {"3.weight": "o (u c) h w"},
            sizes={"c": 3},
        ),
        images,
    ),
    "grouped conv by whole groups": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 12, 3, groups=4), nn.Conv2d(12, 2, 1)),
        Coupling(
            {**weights_and_biases({"0": "(u c) i h w", "1": "(u m) c h w"}), "2.weight": "o (u m) h w"},
            sizes={"c": 2, "m": 3},
        ),
        images,
    ),
    "grouped conv, equally in each group": (
        lambda: nn.Sequential(nn.Conv2d(4, 12, 3, groups=2), nn.ReLU(), nn.Conv2d(12, 2, 1)),
        Coupling({**weights_and_biases({"0": "(g u) i h w"}), "2.weight": "o (g u) h w"}, scope="g", sizes={"g": 2}),
        lambda: torch.randn(2, 4, 5, 5),
    ),
    "depthwise with a multiplier": (
        lambda: nn.Sequential(nn.Conv1d(2, 6, 1), nn.Conv1d(6, 12, 3, groups=6), nn.Conv1d(12, 2, 1)),
        Coupling({**weights_and_biases({"0": "u i w", "1": "(u m) 1 w"}), "2.weight": "o (u m) w"}, sizes={"m": 2}),
        lambda: torch.randn(2, 2, 8),
    ),
    "transposed conv, InstanceNorm and PReLU": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=True), nn.PReLU(8), nn.ConvTranspose2d(8, 2, 3)
        ),
        Coupling(
            {"0.weight": "u i h w", "0.bias": "u", "1.weight": "u", "1.bias": "u", "2.weight": "u"}
            | {"3.weight": "u o h w"}
        ),
        images,
    ),
}


def shaken(model):
    """Norms' weights, biases and statistics that are not the ones and zeros that would hide a mistake."""
    with torch.no_grad():
        for name, t in model.state_dict().items():
            if t.is_floating_point() and t.ndim == 1:
                t.add_(torch.rand(t.shape) if "var" in name else torch.randn(t.shape) / 3)
    return model


def pruned(model, couplings, level=0.5):
    """One coupling after another, since a tensor may be in several."""
    for coupling in couplings:
        sparsifier = ScopeSparsifier(sparsity_level=level)
        sparsifier.prepare(model, coupling.entries(model))
        sparsifier.step()
        sparsifier.check()
        sparsifier.squash_mask()
    return model


def close(a, b):
    return float((a - b).abs().max()) <= 1e-5 * float(a.abs().max())


PAIR = Coupling({"0.weight": "u i", "0.bias": "u", "2.weight": "o u"}, name="hidden")
NET = Coupling({f"net.{name}": axes for name, axes in PAIR.members.items()}, name="hidden")  # of a module that has it


def pair(width=8):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))


def dropping(model, *units):
    """The pair with some hidden units zeroed by hand."""
    with torch.no_grad():
        model[0].weight[list(units)] = 0
        model[2].weight[:, list(units)] = 0
    return model


def rebuilt(model, small, report):
    """A model that is made smaller by the manifest of a report, with the weights of the smaller one."""
    again = cut_to(model, report.manifest)
    again.load_state_dict(small.state_dict())
    return again


def x(width=4):
    return torch.randn(3, width, generator=torch.Generator().manual_seed(1))


def refusal(kind, *args, **kwargs):
    with pytest.raises(kind) as e:
        compact(*args, **kwargs)
    return str(e.value)
