"""shrink with recover=True, and recover after shrink: what passes between blocks stays, and is known beforehand."""

import copy
import threading

import pytest
import torch
from discovered import fill
from grids import nightly_except
from networks import NETWORKS, Net, conv, head, images, skip
from stock import EVERYTHING
from torch import nn

from sparsekit_ao import SparsityError, prune, recover, shrink


def inverted(i, o, stride=1):
    """An expansion, a depthwise convolution and a projection, as in MobileNet."""
    return nn.Sequential(conv(i, 2 * i, 1), conv(2 * i, 2 * i, 3, stride, groups=2 * i), conv(2 * i, o, 1, act=None))


def ends(blocks, last, first=8):
    """Blocks between convolutions, of which the last one reads what the last block alone writes."""
    run = lambda m, x: m.top(m.last(m.blocks(m.first(x))))  # noqa: E731
    return Net(run, first=conv(3, first), blocks=nn.Sequential(*blocks), last=last, top=head(24))


def stages():
    """Stages of several blocks, each of another width."""
    wide = nn.Sequential(inverted(12, 16, 2), inverted(16, 16))
    return ends([nn.Sequential(inverted(8, 12)), wide, nn.Sequential(inverted(16, 20))], conv(20, 24, 1))


def pooled():
    """The last block has no parameters."""
    return ends([inverted(8, 12), inverted(12, 20), nn.Sequential(nn.AvgPool2d(2))], conv(20, 24, 1))


def tapped():
    """A branch of its own reads what the blocks read, and is added to what follows them."""

    def run(m, x):
        x = m.first(x)
        return m.top(m.last(m.blocks(x)) + m.side(x))

    blocks = nn.Sequential(inverted(8, 12), inverted(12, 20))
    return Net(run, first=conv(3, 8), blocks=blocks, last=conv(20, 24, 1), side=conv(8, 24, 1), top=head(24))


WITH_BLOCKS = ("DenseNet", "MobileNet v3", "ResNet v2", "Res2Net", "TCN", "WaveNet", "decoder with RMSNorm")
CASES = {make.__name__: (make, images()) for make in (stages, pooled, tapped)}
CASES |= {name: NETWORKS[name] for name in WITH_BLOCKS}


def case(name):
    make, inputs = CASES[name]
    torch.manual_seed(0)
    return fill(make()), [inputs() for _ in range(2)]


@pytest.mark.parametrize("name", nightly_except(CASES, "stages", "tapped", "TCN", "decoder with RMSNorm"))
def test_units_inside_of_blocks_leave_and_blocks_are_recovered(name):
    model, batches = case(name)
    small, report = shrink(model, ratio=EVERYTHING, score="obs", batches=batches, recover=True)
    assert report.after.parameters < report.before.parameters
    assert report.recovery and all(row.after <= row.before for row in report.recovery)
    assert any("it passes between blocks" in text for text in report.left_out)
    assert all(small(x).shape == model(x).shape for x in batches)


@pytest.mark.parametrize(
    "name", nightly_except(["stages", "tapped", "DenseNet", "WaveNet", "decoder with RMSNorm"], "tapped", "WaveNet")
)
def test_the_error_of_recover_comes_first_and_its_advice_helps(name):
    model, batches = case(name)
    small, _ = shrink(model, ratio=EVERYTHING, batches=batches, compensate=None)
    before = copy.deepcopy(small.state_dict())
    with pytest.raises(SparsityError, match=r"only outputs of the same shape .* exclude=\['width'\]"):
        recover(small, model, batches)
    assert all(torch.equal(value, before[key]) for key, value in small.state_dict().items())
    small, report = shrink(model, ratio=EVERYTHING, batches=batches, exclude=["width"])
    assert report.after.parameters <= report.before.parameters and recover(small, model, batches)


def test_what_the_first_block_reads_and_what_follows_the_last_one_is_still_removed():
    model, batches = case("stages")
    small, report = shrink(model, ratio=0.5, batches=batches, recover=True)
    assert small.first[0].out_channels == 4 and small.last[0].out_channels == 12
    assert [row.block for row in report.recovery] == ["blocks.0", "blocks.1", "blocks.2"]
    assert [stage[-1][2][0].out_channels for stage in small.blocks] == [12, 16, 20]


def test_a_kind_is_excluded_by_its_name():
    model, batches = case("decoder with RMSNorm")
    kinds = {row.kind for row in shrink(model, batches[0], EVERYTHING, dry_run=True)[1]}
    for kind in kinds:
        rows = shrink(model, batches[0], EVERYTHING, exclude=[kind], dry_run=True)[1]
        assert {row.kind for row in rows} == kinds - {kind}
    with pytest.raises(SparsityError, match=r"exclude\[0\] 'widths' matches no parameter or module"):
        shrink(model, batches[0], exclude=["widths"])


def test_gradients_choose_units_before_blocks_are_recovered():
    model, batches = case("TCN")
    loss = lambda m, x: m(x).square().mean()  # noqa: E731
    with pytest.raises(SparsityError, match=r"call shrink with exclude=\['width'\], and then recover\(small, model"):
        shrink(model, ratio=0.5, score="taylor", batches=batches, forward=loss, recover=True)
    small, _ = shrink(model, ratio=0.5, score="taylor", batches=batches, forward=loss, exclude=["width"])
    assert recover(small, model, batches)


class Labels(nn.Module):
    def __init__(self, repeats):
        super().__init__()
        self.fc, self.out = nn.Linear(6, 8), nn.Linear(8, 3)
        self.blocks = nn.Sequential(*(skip(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(repeats)))

    def forward(self, x):
        return self.out(self.blocks(self.fc(x).relu())).argmax(-1)


def test_outputs_that_cannot_be_matched_are_known_before_a_weight_changes():
    torch.manual_seed(0)
    model, batches, rated = Labels(0).eval(), [torch.randn(9, 6) for _ in range(2)], []
    logits = lambda m, x: m.out(m.fc(x).relu())  # noqa: E731
    assert shrink(model, ratio=0.5, batches=batches, forward=logits, recover=True, couplings=[])

    def score(weight, norms):
        rated.append(weight)
        return weight.abs()

    for call in (prune, shrink):
        with pytest.raises(SparsityError, match="the first output of the model is torch.int64 .* give forward"):
            call(model, batches=batches, score=score, compensate=None, recover=True)
    assert not rated
    model = Labels(2).eval()
    pruned, _ = prune(model, 0.5)
    before = copy.deepcopy(pruned.state_dict())
    with pytest.raises(SparsityError, match="the first output of the model is torch.int64 .* give forward"):
        recover(pruned, model, batches, outputs="mse")
    assert all(torch.equal(value, before[key]) for key, value in pruned.state_dict().items())


@pytest.mark.parametrize("call", [prune, shrink])
def test_what_is_no_model_or_cannot_be_copied_is_named(call):
    model, batches = Labels(1).eval(), [torch.randn(9, 6)]
    for wrong in (model.parameters(), "model.pt", model.state_dict(), Labels):
        with pytest.raises(SparsityError, match=f"{call.__name__}: model must be a torch.nn.Module, got"):
            call(wrong, batches=batches)
    features = {"of an earlier forward": model.fc(batches[0])}
    for value in (threading.Lock(), (x for x in "ab"), features):
        model.blocks[0].held = value
        with pytest.raises(
            SparsityError, match=rf"{call.__name__}: the model cannot be copied, because of blocks.0.held"
        ):
            call(model, batches=batches)
    prune(model, 0.5, inplace=True)  # as the error says
    del model.blocks[0].held
    assert call(model, batches=batches)
