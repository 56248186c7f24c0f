"""Small networks of many architectures: {name: (make the model, make its inputs)}.

Concatenations, branches, skips, gates, groups, shuffles, recurrent cells, attention in several forms.
"""

import functools
import operator

import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    """Modules and numbers by name, and a forward that is given."""

    def __init__(self, run, **parts):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs, **named):
        return self.run(self, *inputs, **named)


def joined(how, *branches):
    """Branches that read one input, and whose outputs are joined."""
    return Net(lambda m, x: how([branch(x) for branch in m.branches]), branches=nn.ModuleList(branches))


added = functools.partial(joined, lambda outputs: functools.reduce(operator.add, outputs))
multiplied = functools.partial(joined, lambda outputs: functools.reduce(operator.mul, outputs))
concatenated = functools.partial(joined, lambda outputs: torch.cat(outputs, 1))


def skip(*layers):
    return added(nn.Identity(), nn.Sequential(*layers))


def transposed(module):
    return Net(lambda m, x: m.inner(x.transpose(1, 2)).transpose(1, 2), inner=module)


def conv(i, o, size=3, stride=1, groups=1, act=nn.ReLU):
    layers = [nn.Conv2d(i, o, size, stride, size // 2, groups=groups, bias=False), nn.BatchNorm2d(o)]
    return nn.Sequential(*layers, *([act()] if act else []))


def head(i, o=5):
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(i, o))


def images(size=12, channels=3):
    return lambda: torch.randn(2, channels, size, size)


def vectors(*shape):
    return lambda: torch.randn(2, *shape)


def ids(*shape, of=20):
    return lambda: torch.randint(of, (2, *shape))


def vgg():
    return nn.Sequential(
        conv(3, 8), conv(8, 8), nn.MaxPool2d(2), conv(8, 12), nn.Flatten(), nn.Linear(432, 16), nn.Linear(16, 5)
    )


def resnet():
    def block(i, o, stride=1):
        short = nn.Identity() if i == o else conv(i, o, 1, stride, act=None)
        return nn.Sequential(added(nn.Sequential(conv(i, o, 3, stride), conv(o, o, act=None)), short), nn.ReLU())

    return nn.Sequential(conv(3, 8), block(8, 8), block(8, 12, 2), block(12, 12), head(12))


def resnext():
    def block():
        return nn.Sequential(skip(conv(8, 16, 1), conv(16, 16, groups=4), conv(16, 8, 1, act=None)), nn.ReLU())

    return nn.Sequential(conv(3, 8), block(), block(), head(8))


def preactivation():
    def layers():
        return nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)

    blocks = [skip(*layers(), *layers()) for _ in range(2)]
    return nn.Sequential(nn.Conv2d(3, 8, 3), *blocks, nn.BatchNorm2d(8), nn.ReLU(), head(8))


def densenet():
    def grown(width, count):
        return [concatenated(nn.Identity(), nn.Sequential(conv(width + 4 * k, 8, 1), conv(8, 4))) for k in range(count)]

    return nn.Sequential(conv(3, 8), *grown(8, 3), conv(20, 8, 1), nn.AvgPool2d(2), *grown(8, 2), head(16))


def inception():
    def block(i):
        pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), conv(i, 3, 1))
        return concatenated(conv(i, 4, 1), nn.Sequential(conv(i, 4, 1), conv(4, 6)), conv(i, 5, 5), pool)

    return nn.Sequential(conv(3, 8), block(8), block(18), head(18))


def squeezenet():
    def fire(i):
        return nn.Sequential(conv(i, 4, 1), concatenated(conv(4, 8, 1), conv(4, 8)))

    return nn.Sequential(conv(3, 8), fire(8), fire(16), nn.Conv2d(16, 5, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def mobilenet():
    def squeeze_excite(m, x):
        return x * F.hardsigmoid(m.up(F.relu(m.down(x.mean((2, 3), keepdim=True)))))

    def block():
        gate = Net(squeeze_excite, down=nn.Conv2d(16, 4, 1), up=nn.Conv2d(4, 16, 1))
        return skip(conv(8, 16, 1, act=nn.Hardswish), conv(16, 16, groups=16), gate, conv(16, 8, 1, act=None))

    return nn.Sequential(conv(3, 8), block(), block(), head(8))


def shufflenet():
    def run(m, x):
        a, b = x.chunk(2, dim=1)
        x = torch.cat([a, m.branch(b)], 1)
        return x.unflatten(1, (2, x.shape[1] // 2)).transpose(1, 2).flatten(1, 2)

    def block():
        return Net(run, branch=nn.Sequential(conv(8, 8, 1), conv(8, 8, groups=8, act=None), conv(8, 8, 1)))

    return nn.Sequential(conv(3, 16), block(), block(), head(16))


def grouped_shuffle():
    return nn.Sequential(conv(3, 8), conv(8, 16, 1, groups=4), nn.ChannelShuffle(4), conv(16, 16, groups=4), head(16))


def repvgg():
    def block():
        return nn.Sequential(added(conv(8, 8, act=None), conv(8, 8, 1, act=None), nn.BatchNorm2d(8)), nn.ReLU())

    return nn.Sequential(conv(3, 8), block(), block(), head(8))


def res2net():
    def scales(m, x):
        parts = x.chunk(4, 1)
        out = [parts[0]]
        for part, layer in zip(parts[1:], m.layers, strict=True):
            out.append(layer(part + out[-1] if len(out) > 1 else part))
        return torch.cat(out, 1)

    inner = Net(scales, layers=nn.ModuleList(conv(4, 4) for _ in range(3)))
    return nn.Sequential(conv(3, 8), skip(conv(8, 16, 1), inner, conv(16, 8, 1)), nn.ReLU(), head(8))


def csp():
    def run(m, x):
        a, b = m.part(x).chunk(2, 1)
        return m.join(torch.cat([a, b + m.inner(b)], 1))

    return nn.Sequential(conv(3, 8), Net(run, part=conv(8, 16, 1), inner=conv(8, 8), join=conv(16, 8, 1)), head(8))


def unet():
    def run(m, x):
        a = m.a(x)
        b = m.b(F.max_pool2d(a, 2))
        c = m.c(F.max_pool2d(b, 2))
        b = m.d(torch.cat([m.up1(c), b], 1))
        return m.out(m.e(torch.cat([m.up2(b), a], 1)))

    up = {"up1": nn.ConvTranspose2d(16, 12, 2, 2), "up2": nn.ConvTranspose2d(12, 8, 2, 2), "out": nn.Conv2d(8, 2, 1)}
    return Net(run, a=conv(3, 8), b=conv(8, 12), c=conv(12, 16), d=conv(24, 12), e=conv(16, 8), **up)


def fpn():
    def run(m, x):
        a = m.a(x)
        b = m.b(a)
        top = m.lateral2(b)
        low = m.lateral1(a) + F.interpolate(top, scale_factor=2)
        return m.out(low), m.out(top)

    sides = {"lateral1": nn.Conv2d(8, 8, 1), "lateral2": nn.Conv2d(12, 8, 1), "out": nn.Conv2d(8, 6, 3, padding=1)}
    return Net(run, a=conv(3, 8), b=conv(8, 12, stride=2), **sides)


def aspp():
    def pooled(m, x):
        return F.interpolate(m.pool(F.adaptive_avg_pool2d(x, 1)), size=x.shape[2:])

    branches = [nn.Conv2d(8, 6, 3, padding=d, dilation=d) for d in (1, 2, 3)]
    branches += [Net(pooled, pool=nn.Conv2d(8, 6, 1))]
    return nn.Sequential(conv(3, 8), concatenated(*branches), nn.Conv2d(24, 2, 1))


def generator():
    ups = [nn.ConvTranspose2d(16, 12, 4, 2, 1), nn.BatchNorm2d(12), nn.ReLU(), nn.ConvTranspose2d(12, 3, 4, 2, 1)]
    first = [nn.Linear(8, 16 * 9), nn.Unflatten(1, (16, 3, 3)), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*first, *ups, nn.Tanh())


def discriminator():
    layers = [
        nn.Conv2d(3, 8, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(8, 16, 4, 2, 1),
        nn.InstanceNorm2d(16, affine=True),
    ]
    return nn.Sequential(*layers, nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(144, 1))


def super_resolution():
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.PReLU(8), nn.Conv2d(8, 12, 3, padding=1), nn.PixelShuffle(2))


def group_norms():
    layers = [nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 16, 3), nn.GroupNorm(8, 16), nn.SiLU()]
    return nn.Sequential(*layers, head(16))


def convnext():
    def block(m, x):
        y = m.norm(m.depthwise(x).permute(0, 2, 3, 1))
        return x + (m.scale * m.down(F.gelu(m.up(y)))).permute(0, 3, 1, 2)

    def make():
        layers = {"depthwise": nn.Conv2d(8, 8, 7, padding=3, groups=8), "norm": nn.LayerNorm(8)}
        return Net(block, **layers, up=nn.Linear(8, 32), down=nn.Linear(32, 8), scale=nn.Parameter(torch.ones(8)))

    return nn.Sequential(nn.Conv2d(3, 8, 4, 4), make(), make(), head(8))


def convnext2():
    def block(m, x):
        y = F.gelu(m.up(x.permute(0, 2, 3, 1)))
        size = y.norm(dim=(1, 2), keepdim=True)
        y = y * (1 + m.scale * size / (size.mean(-1, keepdim=True) + 1e-6))
        return x + m.down(y).permute(0, 3, 1, 2)

    layers = {"up": nn.Linear(8, 32), "down": nn.Linear(32, 8), "scale": nn.Parameter(torch.ones(32))}
    return nn.Sequential(nn.Conv2d(3, 8, 4, 4), Net(block, **layers), head(8))


def mixer():
    def mlp(i, o):
        return nn.Sequential(nn.Linear(i, o), nn.GELU(), nn.Linear(o, i))

    def block():
        return nn.Sequential(skip(nn.LayerNorm(8), transposed(mlp(9, 6))), skip(nn.LayerNorm(8), mlp(8, 16)))

    return Net(
        lambda m, x: m.head(m.blocks(m.patches(x).transpose(1, 2)).mean(1)),
        patches=nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.Flatten(2)),
        blocks=nn.Sequential(block(), block()),
        head=nn.Linear(8, 5),
    )


def gated_mlp():
    def gate(m, x):
        a, b = x.chunk(2, -1)
        return a * m.spatial(m.norm(b))

    inner = Net(gate, norm=nn.LayerNorm(8), spatial=transposed(nn.Linear(6, 6)))
    block = skip(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), inner, nn.Linear(8, 8))
    return nn.Sequential(block, nn.Linear(8, 5))


class Heads(nn.Module):
    """Attention with integers of three kinds: an attribute, an entry of a tuple, a size of all heads."""

    def __init__(self, width=16, heads=4, size=4):
        super().__init__()
        self.num_heads, self.inner, self.shapes = heads, heads * size, (3, heads, size)
        self.qkv, self.proj, self.scale = nn.Linear(width, 3 * heads * size), nn.Linear(heads * size, width), size**-0.5

    def forward(self, x):
        q, k, v = self.qkv(x).reshape(*x.shape[:2], *self.shapes).permute(2, 0, 3, 1, 4)
        y = (q @ k.transpose(-2, -1) * self.scale).softmax(-1) @ v
        return self.proj(y.transpose(1, 2).reshape(*x.shape[:2], self.inner))


def vit():
    def block(m, x):
        x = x + m.attention(m.norm1(x))
        return x + m.mlp(m.norm2(x))

    def make():
        mlp = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
        return Net(block, norm1=nn.LayerNorm(16), norm2=nn.LayerNorm(16), attention=Heads(), mlp=mlp)

    def run(m, x):
        x = m.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([m.token.expand(len(x), 1, -1), x], 1) + m.positions
        return m.head(m.norm(m.blocks(x))[:, 0])

    tokens = {"token": nn.Parameter(torch.randn(1, 1, 16)), "positions": nn.Parameter(torch.randn(1, 10, 16))}
    ends = {"patches": nn.Conv2d(3, 16, 4, 4), "norm": nn.LayerNorm(16), "head": nn.Linear(16, 5)}
    return Net(run, blocks=nn.Sequential(make(), make()), **tokens, **ends)


def levit():
    def block(m, x):
        q, k, v = m.qkv(x).unflatten(1, (m.heads, -1)).split([m.key, m.key, m.value], dim=2)
        y = v @ (q.transpose(-2, -1) @ k * m.scale).softmax(-1).transpose(-2, -1)
        return x + m.proj(F.hardswish(y.flatten(1, 2)))

    def norm(i, o):
        return nn.Sequential(nn.Conv1d(i, o, 1, bias=False), nn.BatchNorm1d(o))

    sizes = {"heads": 2, "key": 4, "value": 8, "scale": 0.5}
    return nn.Sequential(nn.Conv1d(3, 8, 1), Net(block, qkv=norm(8, 32), proj=norm(16, 8), **sizes), nn.Conv1d(8, 5, 1))


def encoder():
    layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 5))


def encoder_decoder():
    return nn.Transformer(16, 4, 1, 1, 24, batch_first=True)


def cross_attention():
    def run(m, x, y):
        return m.out(m.attention(m.query(x), y, y)[0])

    attention = nn.MultiheadAttention(16, 4, kdim=6, vdim=6, batch_first=True)
    return Net(run, query=nn.Linear(8, 16), attention=attention, out=nn.Linear(16, 3))


def lstm():
    def run(m, x):
        return m.out(m.cells(m.embed(x))[0][:, -1])

    return Net(run, embed=nn.Embedding(20, 12), cells=nn.LSTM(12, 8, 2, batch_first=True), out=nn.Linear(8, 3))


def gru():
    def run(m, x):
        return m.out(m.cells(m.into(x))[0])

    return Net(run, into=nn.Linear(6, 12), cells=nn.GRU(12, 8, batch_first=True), out=nn.Linear(8, 3))


def bidirectional():
    def run(m, x):
        return m.out(m.cells(x)[0])

    return Net(run, cells=nn.LSTM(6, 8, batch_first=True, bidirectional=True), out=nn.Linear(16, 3))


def temporal():
    def block():
        layers = nn.ConstantPad1d((4, 0), 0.0), nn.Conv1d(8, 12, 3, dilation=2), nn.ReLU(), nn.Conv1d(12, 8, 1)
        return nn.Sequential(skip(*layers), nn.ReLU())

    return nn.Sequential(nn.Conv1d(3, 8, 1), block(), block(), nn.Conv1d(8, 2, 1))


def wavenet():
    def gate(function):
        return nn.Sequential(nn.Conv1d(8, 12, 3, padding=1), function)

    gated = multiplied(gate(nn.Tanh()), gate(nn.Sigmoid()))
    return nn.Sequential(nn.Conv1d(3, 8, 1), skip(gated, nn.Conv1d(12, 8, 1)), nn.Conv1d(8, 2, 1))


def volumes():
    layers = [nn.Conv3d(1, 8, 3), nn.BatchNorm3d(8), nn.ReLU(), nn.Conv3d(8, 4, 3)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 2))


def points():
    def run(m, x):
        x = m.local(x.transpose(1, 2))
        return m.out(torch.cat([x, x.amax(2, keepdim=True).expand_as(x)], 1))

    return Net(run, local=nn.Sequential(nn.Conv1d(3, 8, 1), nn.ReLU(), nn.Conv1d(8, 12, 1)), out=nn.Conv1d(24, 4, 1))


def graph():
    def run(m, x, edges):
        return m.b(edges @ F.relu(edges @ m.a(x)))

    return Net(run, a=nn.Linear(6, 12), b=nn.Linear(12, 3))


def autoencoder():
    def run(m, x):
        mean, spread = m.encode(x).chunk(2, -1)
        return m.decode(mean + spread.exp()), mean

    encode = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 8))
    return Net(run, encode=encode, decode=nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 10)))


def highway():
    def run(m, x):
        x = m.into(x)
        gate = torch.sigmoid(m.gate(x))
        return m.out(gate * F.relu(m.hidden(x)) + (1 - gate) * x)

    return Net(run, into=nn.Linear(6, 12), gate=nn.Linear(12, 12), hidden=nn.Linear(12, 12), out=nn.Linear(12, 3))


def recommender():
    def run(m, users, items, dense):
        a, b, c = m.users(users), m.items(items), m.dense(dense)
        products = torch.stack([(a * b).sum(-1), (a * c).sum(-1), (b * c).sum(-1)], -1)
        return m.top(torch.cat([c, products], -1))

    dense = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 8))
    top = nn.Sequential(nn.Linear(11, 12), nn.ReLU(), nn.Linear(12, 1))
    return Net(run, users=nn.Embedding(20, 8), items=nn.Embedding(20, 8), dense=dense, top=top)


def bag():
    return nn.Sequential(nn.EmbeddingBag(20, 12), nn.Linear(12, 16), nn.ReLU(), nn.Dropout(), nn.Linear(16, 3))


def siamese():
    def run(m, x, y):
        a, b = m.tower(x), m.tower(y)
        return m.out((a - b).abs())

    return Net(run, tower=nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8)), out=nn.Linear(8, 1))


def maxout():
    def run(m, x):
        return m.out(m.hidden(x).unflatten(-1, (8, 3)).amax(-1))

    return Net(run, hidden=nn.Linear(6, 24), out=nn.Linear(8, 3))


def experts():
    def run(m, x):
        weight = m.router(x).sigmoid()
        return torch.einsum("be,beo->bo", weight, torch.stack([expert(x) for expert in m.experts], 1))

    layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 4)) for _ in range(3))
    return Net(run, router=nn.Linear(6, 3), experts=layers)


def rms_decoder():
    def gate(m, x):
        a, b = x.chunk(2, -1)
        return F.silu(a) * b

    def block():
        mlp = nn.Linear(16, 48), Net(gate), nn.Linear(24, 16)
        return nn.Sequential(skip(nn.RMSNorm(16), Heads()), skip(nn.RMSNorm(16), *mlp))

    return nn.Sequential(nn.Embedding(20, 16), block(), block(), nn.RMSNorm(16), nn.Linear(16, 20))


def windows():
    def run(m, x):
        x = m.patches(x).permute(0, 2, 3, 1)
        b, h, w, c = x.shape
        x = torch.roll(x, (-1, -1), (1, 2)).view(b, h // 2, 2, w // 2, 2, c).transpose(2, 3).reshape(-1, 4, c)
        x = x + m.attention(m.norm(x))
        x = x.view(b, h // 2, w // 2, 2, 2, c).transpose(2, 3).reshape(b, h, w, c)
        return m.head(m.merge(torch.cat([x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)], -1)).mean((1, 2)))

    ends = {"merge": nn.Linear(64, 24), "head": nn.Linear(24, 5)}
    return Net(run, patches=nn.Conv2d(3, 16, 3, 3), attention=Heads(), norm=nn.LayerNorm(16), **ends)


def adapters():
    low = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 12, bias=False))
    return nn.Sequential(added(nn.Linear(6, 12), low), nn.ReLU(), nn.Linear(12, 3))


NETWORKS = {
    "VGG": (vgg, images()),
    "ResNet": (resnet, images()),
    "ResNeXt": (resnext, images()),
    "ResNet v2": (preactivation, images()),
    "DenseNet": (densenet, images()),
    "Inception": (inception, images()),
    "SqueezeNet": (squeezenet, images()),
    "MobileNet v3": (mobilenet, images()),
    "ShuffleNet v2": (shufflenet, images()),
    "ShuffleNet": (grouped_shuffle, images()),
    "RepVGG": (repvgg, images()),
    "Res2Net": (res2net, images()),
    "CSP": (csp, images()),
    "U-Net": (unet, images()),
    "FPN": (fpn, images()),
    "DeepLab": (aspp, images()),
    "GAN generator": (generator, vectors(8)),
    "GAN discriminator": (discriminator, images()),
    "super-resolution": (super_resolution, images()),
    "GroupNorm": (group_norms, images()),
    "ConvNeXt": (convnext, images()),
    "ConvNeXt v2": (convnext2, images()),
    "MLP-Mixer": (mixer, images()),
    "gMLP": (gated_mlp, vectors(6, 8)),
    "ViT": (vit, images()),
    "LeViT": (levit, vectors(3, 7)),
    "Swin": (windows, images()),
    "nn.TransformerEncoder": (encoder, vectors(5, 16)),
    "nn.Transformer": (encoder_decoder, lambda: (torch.randn(2, 5, 16), torch.randn(2, 4, 16))),
    "cross-attention": (cross_attention, lambda: (torch.randn(2, 5, 8), torch.randn(2, 4, 6))),
    "LSTM": (lstm, ids(6)),
    "GRU": (gru, vectors(5, 6)),
    "bidirectional LSTM": (bidirectional, vectors(5, 6)),
    "TCN": (temporal, vectors(3, 9)),
    "WaveNet": (wavenet, vectors(3, 9)),
    "3-D convolutions": (volumes, vectors(1, 6, 6, 6)),
    "PointNet": (points, vectors(7, 3)),
    "graph convolutions": (graph, lambda: (torch.randn(7, 6), torch.rand(7, 7))),
    "autoencoder": (autoencoder, vectors(10)),
    "highway": (highway, vectors(6)),
    "DLRM": (recommender, lambda: (torch.randint(20, (3,)), torch.randint(20, (3,)), torch.randn(3, 5))),
    "bag of words": (bag, ids(6)),
    "siamese": (siamese, lambda: (torch.randn(3, 6), torch.randn(3, 6))),
    "maxout": (maxout, vectors(6)),
    "soft experts": (experts, vectors(6)),
    "decoder with RMSNorm": (rms_decoder, ids(6)),
    "LoRA": (adapters, vectors(6)),
}
