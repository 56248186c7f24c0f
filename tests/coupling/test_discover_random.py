"""discover on networks that nobody wrote: whatever it finds goes without a change of the outputs.

A random program of layers, reshapes, gates, skips and norms, written so that no size but those of its layers is in it.
"""

import torch
from discovered import fill, pruned
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples
from torch import nn

from sparsekit_ao.coupling import discover
from sparsekit_ao.removal import compact

WIDTHS = (4, 6, 8, 12)
ACTIVATIONS = (torch.relu, torch.tanh, torch.sigmoid, torch.nn.functional.gelu, torch.abs, torch.cos)
ALONE = ("activation", "norm", "rms", "batch", "softmax", "swap", "gate", "halves", "total", "energy", "sum")
IN_PLACE = ("clone", "in place")
PAIRS = ("add", "multiply", "cat", "scores")


class Program(nn.Module):
    """Steps on a growing list of vectors: (what, first, second); the last one is read by a head."""

    def __init__(self, steps):
        super().__init__()
        self.layers, self.steps, widths = nn.ModuleDict(), [], [4]
        for k, (what, first, second, width) in enumerate(steps):
            a, b = first % len(widths), second % len(widths)
            if what in PAIRS and what != "cat" and widths[a] != widths[b]:
                what, width = "linear", widths[b]
            if what in ("gate", "halves") and widths[a] % 4:  # every width stays even
                what = "linear"
            self.steps.append((what, a, b))
            widths.append(self.widen(str(k), what, widths[a], widths[b], width))
        self.head = nn.Linear(widths[-1], 3)

    def widen(self, name, what, a, b, width):
        made = {
            "linear": lambda: nn.Linear(a, width),
            "norm": lambda: nn.LayerNorm(a),
            "rms": lambda: nn.RMSNorm(a, eps=1e-6),
            "batch": lambda: nn.BatchNorm1d(a),
            "convolve": lambda: nn.Conv1d(a, a, 1, groups=2),
        }
        if what in made:
            self.layers[name] = made[what]()
        return {"linear": width, "cat": a + b, "gate": a // 2, "halves": a // 2}.get(what, a)

    def forward(self, x):
        found = [x]
        for k, (what, a, b) in enumerate(self.steps):
            made = str(k) in self.layers
            found.append(self.step(what, found[a], found[b], self.layers[str(k)] if made else None, k))
        return self.head(found[-1])

    @staticmethod
    def step(what, x, y, layer, k):
        if what == "convolve":
            return layer(x.unsqueeze(-1)).squeeze(-1)
        if layer is not None:
            return layer(x)
        # A number for each of two heads, so that no head can go: the program itself has their number.
        heads = x.unflatten(-1, (2, -1)) * torch.tensor([[0.5], [1.5]], dtype=x.dtype)
        return {
            "activation": lambda: ACTIVATIONS[k % len(ACTIVATIONS)](x),
            "softmax": lambda: (heads.softmax(k % 2 - 2) * heads).flatten(1),
            "swap": lambda: heads.transpose(1, 2).flatten(1),
            "gate": lambda: torch.nn.functional.glu(x, -1),
            "halves": lambda: x.chunk(2, -1)[0] * x.chunk(2, -1)[1],
            "total": lambda: (heads * heads.cos().sum(2, keepdim=True)).flatten(1),
            "energy": lambda: (heads * heads.square().sum(2, keepdim=True)).flatten(1),
            "sum": lambda: (heads.sum(1, keepdim=True) + heads).flatten(1),
            "clone": lambda: x.clone().contiguous(),
            "in place": lambda: x.clone().view(x.shape).mul_(2).relu_(),
            "add": lambda: x + y,
            "multiply": lambda: x * y,
            "cat": lambda: torch.cat([x, y], -1),
            "scores": lambda: ((heads @ y.unflatten(-1, (2, -1)).transpose(1, 2)) @ heads).flatten(1),
        }[what]()


KINDS = ("linear",) * 6 + ALONE + IN_PLACE + ("convolve",) + PAIRS * 2
STEP = st.tuples(st.sampled_from(KINDS), *[st.integers(0, 20)] * 2, st.sampled_from(WIDTHS))


@examples(60)
@given(st.lists(STEP, min_size=1, max_size=8))
def test_what_is_found_in_a_random_network_is_removed_exactly(steps):
    model = fill(Program(steps)).double()
    inputs = torch.randn(5, 4, dtype=torch.float64)
    for coupling in discover(model, inputs).couplings:
        _, report = compact(pruned(model, [coupling]), coupling, inputs)
        assert report.difference <= 1e-5
