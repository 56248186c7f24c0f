"""What a walk must not mistake: another call for the same, later batches for the first, half a block for a whole."""

import copy
import functools

import accelerate
import pytest
import torch
from networks import Net
from pruned_models import Model, correlated, prepared
from torch import nn

from sparsekit_ao import SparsityError, one_shot, prune, recover
from sparsekit_ao.oneshot import walk
from sparsekit_ao.oneshot.solving import UNSEEN


def small(blocks=3):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(blocks)))


def inputs(count=3, rows=64, seed=0):
    return list(torch.randn(count, rows, 16, generator=torch.Generator().manual_seed(seed)))


def test_other_files_in_the_folder_are_no_finished_blocks(tmp_path):
    (tmp_path / "model.pt").write_bytes(b"")
    prune(small(), "2:4", batches=inputs(), checkpoint=tmp_path)
    (tmp_path / "00001.pt").unlink()
    assert len(prune(small(), "2:4", batches=inputs(), checkpoint=tmp_path)[1].rows) == 3


def chain(*blocks):
    return Net(lambda m, x: functools.reduce(lambda x, block: block(x), m.blocks, x), blocks=nn.ModuleList(blocks))


def test_blocks_are_visited_in_their_order_whatever_the_first_batch_reaches():
    torch.manual_seed(0)
    first = Net(lambda m, x: m.a(x) if len(x) > 8 else m.d(x), a=nn.Linear(16, 16), d=nn.Linear(16, 16))
    model, batches = chain(first, nn.Linear(16, 16), nn.Linear(16, 16)), [torch.randn(8, 16), torch.randn(64, 16)]
    keys = {"sparsity_level": "2:4", "exclude": ["*.d"]}
    reports = [prune(model, batches=some, **keys)[1] for some in (batches, batches[::-1])]
    assert [row.tensor for row in reports[0]] == ["blocks.0.a.weight", "blocks.1.weight", "blocks.2.weight"]
    for row, other in zip(*reports, strict=True):
        assert row.after == pytest.approx(other.after, rel=1e-3)


@pytest.mark.parametrize("recovers", [False, True])
@pytest.mark.parametrize("fails", ["advance", "write"])
def test_an_error_after_a_block_was_pruned_leaves_it_as_it_was(fails, recovers, monkeypatch, tmp_path):
    target = walk.Stream if fails == "advance" else walk.Checkpoint
    original, calls = getattr(target, fails), []

    def broken(self, *args, **keys):
        calls.append(None)
        if len(calls) == (4 if recovers and fails == "advance" else 2):
            raise KeyboardInterrupt
        return original(self, *args, **keys)

    sparsifier = prepared(small())
    before = [sparsifier._dense(group).clone() for group in sparsifier.groups]
    monkeypatch.setattr(target, fails, broken)
    with pytest.raises(KeyboardInterrupt):
        one_shot(sparsifier, inputs(), recover=recovers, checkpoint=tmp_path)
    assert not sparsifier.mask("0.0.weight").all()
    for at in (1, 2):
        assert sparsifier.mask(f"{at}.0.weight").all() and torch.equal(
            sparsifier._dense(sparsifier.groups[at]), before[at]
        )


@pytest.mark.parametrize("recovers", [False, True])
def test_autocast_sees_weights_that_have_changed(recovers):
    results = []
    for caches in (True, False):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=caches):
            _, report = prune(small(), "2:4", batches=inputs(), recover=recovers)
            assert torch.is_autocast_cache_enabled() == caches
        results.append([row.after for row in report] + [row.after for row in report.recovery or ()])
        assert not recovers or any(row.after < row.before for row in report.recovery)
    assert results[0] == results[1]


def test_arguments_of_blocks_are_compared_in_every_batch():
    def windowed(m, x):  # as a language model whose layers have masks in turn, which are alike for short inputs
        for k, block in enumerate(m.blocks):
            x = block(x, 1.0 if len(x) < 10 or k % 2 else 0.5)
        return x

    blocks = [Net(lambda m, x, scale: m.layer(x) * scale, layer=nn.Linear(16, 16)) for _ in range(3)]
    model, short, long = Net(windowed, blocks=nn.ModuleList(blocks)), torch.randn(8, 16), torch.randn(32, 16)
    assert prune(model, batches=[short, short])[1].blocks == 3
    for batches in ([short, long], [long, short]):
        assert prune(model, batches=batches)[1].blocks == 0


def test_blocks_that_write_their_outputs_to_one_buffer():
    def reusing(m, x):
        return m.buffer.copy_(m.layer(x))

    reports = []
    for run in (reusing, lambda m, x: m.layer(x)):
        torch.manual_seed(0)
        model = nn.Sequential(*(Net(run, layer=nn.Linear(16, 16), buffer=torch.zeros(64, 16)) for _ in range(3)))
        reports.append([row.after for row in prune(model, batches=inputs(), inplace=True)[1]])
    assert reports[0] == reports[1]


def test_tensors_that_cannot_be_recorded_leave_a_block_before_it_is_matched():
    def run(m, x):
        return m.layer(x) + m.table.sum(0)  # no product

    torch.manual_seed(0)
    parts = [{"layer": nn.Linear(16, 16), "table": nn.Parameter(torch.randn(16, 16))} for _ in range(2)]
    model = chain(*(Net(run, **own) for own in parts))
    config = [{"tensor_fqn": ["*.layer.weight", "*.table"]}]
    sparsifier = prepared(copy.deepcopy(model), config=config)
    report = one_shot(sparsifier, inputs(), recover=True)
    assert {row.note for row in report if "table" in row.tensor} == {UNSEEN}
    assert [row.block for row in report.recovery] == ["blocks.0", "blocks.1"] and len(report.rows) == 4
    with torch.no_grad():
        x = torch.cat(inputs())
        expected = model.blocks[0](x)
        lost = sparsifier.model.blocks[0](x) - expected
    assert float(lost.norm() / expected.norm()) == pytest.approx(report.recovery[0].after, rel=1e-3)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        *(({"stream_memory": bad}, "stream_memory must be a number of bytes, or None") for bad in ("x", [1], -5, True)),
        *(({"device": bad}, "is not a device that blocks can run on") for bad in ("nonsense", "meta", 3.5, True)),
        ({"checkpoint": 3}, "checkpoint must be a folder, or None, got 3"),
        ({"checkpoint": __file__}, "is not a folder that can be written"),
    ],
)
def test_arguments_of_no_use_are_refused_and_change_nothing(keys, text):
    model, dense = small(), small()
    for call in (
        lambda: prune(model, 0.5, batches=inputs(), inplace=True, **keys),
        lambda: one_shot(prepared(small()), inputs(), **keys),
        lambda: recover(model, dense, inputs(), **keys),
    ):
        with pytest.raises(SparsityError, match=text):
            call()
    assert all(map(torch.equal, model.parameters(), dense.parameters()))


def test_hooks_of_accelerate_around_a_layer_or_around_all_blocks():
    model = Model()
    here, _ = prune(model, "2:4")
    there = accelerate.cpu_offload(copy.deepcopy(model), "cpu", preload_module_classes=["Block"])
    prune(there, "2:4", inplace=True)
    x = correlated()[0]
    torch.testing.assert_close(there(x), here(x))
    whole = accelerate.cpu_offload(copy.deepcopy(model), "cpu", preload_module_classes=["Model"])
    with pytest.raises(SparsityError, match="accelerate loads all of Model at once, with all of its blocks"):
        prune(whole, "2:4", inplace=True)


def test_tensors_that_were_one_before_they_were_offloaded_are_refused():
    tied = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 4))
    tied[2].weight = tied[0].weight
    assert [row.tensor for row in prune(copy.deepcopy(tied), exclude=["0.weight", "2.weight"])[1]] == ["3.weight"]
    model = accelerate.cpu_offload(tied, "cpu")
    with pytest.raises(SparsityError, match=r"0.weight and 2.weight were one tensor.*exclude=\['0.weight'"):
        prune(model, inplace=True)
    assert [row.tensor for row in prune(model, inplace=True, exclude=["0.weight", "2.weight"])[1]] == ["3.weight"]
