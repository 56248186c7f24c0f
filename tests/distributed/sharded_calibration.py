"""Cases for `test_sharded`: statistics of layers are summed over two ranks, and `one_shot` prunes alike on both."""

import copy
import functools
import os
import pathlib
import shutil
import unittest.mock

import pytest
import torch
from grids import turns
from pruned_models import Model
from stock import linear_model
from torch import distributed, nn
from torch.nn import functional as F
from torch.optim.swa_utils import update_bn

from sparsekit_ao import ScopeSparsifier, SparsityError, one_shot, prune, recover
from sparsekit_ao.coupling import expert_scores
from sparsekit_ao.oneshot import solving
from sparsekit_ao.removal import shrink_experts, shrink_layers


def prepared(model, **options):
    sparsifier = ScopeSparsifier(score="wanda", **options)
    sparsifier.prepare(model, None)
    return sparsifier


def rows(count):
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(1))


def sums():
    model, data = linear_model(8, 6, 4), rows(8)
    sparsifier = prepared(model, nnz=2, scope_shape=(1, 2))
    sparsifier.calibrate([data[:3] if distributed.get_rank() == 0 else data[3:]])
    found = sparsifier.statistics["2.weight"]
    hidden = model[1](model[0](data)).detach()
    torch.testing.assert_close(found.input_square[0], hidden.square().sum(0))
    assert found.tokens == 8


def unreached():
    rank = distributed.get_rank()
    sparsifier = prepared(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]))
    sparsifier.calibrate([torch.ones(1, 4)], lambda model, x: model[rank](x))
    assert all(s.tokens == 1 for s in sparsifier.statistics.values()) and len(sparsifier.statistics) == 2


def of_fsdp():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    one, many, data = prepared(linear_model(8, 6, 4)), prepared(linear_model(8, 6, 4)), rows(8)
    for layer in (many.model[0], many.model[2], many.model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    one.calibrate([data])  # every rank sums it, which doubles all numbers
    many.calibrate([data[distributed.get_rank() :: 2]])
    for sparsifier in (one, many):
        sparsifier.step()
    for name in one.state:
        assert torch.equal(many.mask(name).full_tensor(), one.mask(name))
    with pytest.raises(SparsityError, match="0.weight: gradient statistics need whole weights"):
        many.calibrate([data], lambda model, batch: model(batch).square().sum(), needs=["gradient"])


def wrapped(model, blocks=True):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for block in model.blocks if blocks else ():
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def one_walk_over_ranks():
    """Masks are those of all data, every layer is solved by one rank, and FSDP2 gives the same bits."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)
    dense, batches = Model(width=32, blocks=2), list(torch.randn(4, 128, 32, dtype=torch.float64))
    dense.first = nn.Linear(32, 32)
    dense.double()
    own = batches[rank::world]
    whole, _ = prune(dense, "2:4", batches=batches, progress=False)  # all ranks sum it, which scales all sums
    solve, counts = solving.prune_layer, []
    with unittest.mock.patch.object(
        solving, "prune_layer", lambda layer, *args: counts.append(0) or solve(layer, *args)
    ):
        model, report = prune(dense, "2:4", batches=own, recover=True, progress=False)
    total = torch.tensor(len(counts))
    distributed.all_reduce(total)
    assert int(total) == len(report.rows) and len(counts) < len(report.rows)
    shared, _ = prune(dense, "2:4", batches=own, progress=False)
    same = [
        ((p != 0) == (q != 0)).double().mean() for p, q in zip(whole.parameters(), shared.parameters(), strict=True)
    ]
    # sums are float32, so that their rounding changes masks of ties, and each change the inputs of the layers after it
    assert min(same[:4]) >= 0.999
    sharded = wrapped(copy.deepcopy(dense))
    prune(sharded, "2:4", batches=own, recover=True, inplace=True, progress=False)
    masked = copy.deepcopy(dense)
    sparsifier = prepared_for_two_of_four(masked)
    one_shot(sparsifier, own, recover=True, progress=False)
    sparsifier.check()
    sparsifier.squash_mask()
    for name, p in model.named_parameters():
        assert torch.equal(sharded.get_parameter(name).full_tensor(), p), name
        assert torch.equal(masked.get_parameter(name).full_tensor(), p), name
    torch.testing.assert_close(sharded(own[0]), model(own[0]))
    recovered = wrapped(copy.deepcopy(shared))
    recover(recovered, wrapped(copy.deepcopy(dense)), own, progress=False)
    recover(shared, dense, own, progress=False)
    for name, p in shared.named_parameters():
        assert torch.equal(recovered.get_parameter(name).full_tensor(), p), name
    normed = nn.Sequential(nn.BatchNorm1d(32), nn.Linear(32, 8)).double()
    update_bn(batches, normed)
    other = copy.deepcopy(normed.eval())
    other[0].running_var *= 4
    recover(other, normed, own, passes=1, outputs="mse", progress=False)  # takes the statistics of all ranks
    torch.testing.assert_close(other[0].running_mean, normed[0].running_mean)
    torch.testing.assert_close(other[0].running_var, normed[0].running_var)
    with pytest.raises(SparsityError, match="every rank needs the same number of batches, got 1 and 2"):
        recover(shared, dense, own[: 1 + (rank > 0)])
    with pytest.raises(SparsityError, match="prune: the ranks have different models or arguments; load the same"):
        prune(Model(width=16 + rank), "2:4", batches=own)


def fitted_blocks():
    """All ranks remove the same blocks, and fit the others as one process with all batches does."""
    torch.manual_seed(0)
    dense, batches = Model(blocks=6).double(), list(torch.randn(8, 64, 8, dtype=torch.float64))
    whole, _ = shrink_layers(dense, batches, 1 / 3)  # all ranks have all batches, which scales all sums
    own, report = shrink_layers(dense, batches[distributed.get_rank() :: distributed.get_world_size()], 1 / 3)
    assert report.compensation and all(row.after < row.before for row in report.compensation)
    for (name, p), q in zip(own.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p, q, msg=name)


class Mixing(nn.Module):
    """A block that mixes the tokens of a sequence, or with `kind="shuffled"` those of all sequences."""

    def __init__(self, kind):
        super().__init__()
        self.up, self.down, self.mix, self.kind = nn.Linear(24, 48), nn.Linear(48, 24), nn.Linear(24, 24), kind

    def forward(self, x, scale):
        mean = x.mean(1, keepdim=True) if self.kind == "sequences" else x.flip(0)
        return x + scale * self.down(F.gelu(self.up(x) + self.up(mean))) + self.mix(mean)


def as_one_process(kind, folder):
    """Recovery takes the same steps on any number of ranks, whether or not the block can run on a part of a batch."""
    rank, world = (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)
    torch.manual_seed(0)
    dense = Model(width=24, blocks=0)
    dense.first, dense.blocks = nn.Linear(24, 24), nn.ModuleList(Mixing(kind) for _ in range(2))
    counts = [8, 5, 1, 9, 3, 12, 7, 4] if kind == "sequences" else [8] * 8  # too few for a part, or not even, too
    batches = [torch.randn(count, 10, 24) for count in counts]  # as many steps as batches
    own, steps, trained, step, forward = batches[rank::world], [], [], torch.optim.Adam.step, Mixing.forward

    def seen(block, x, scale):
        if torch.is_grad_enabled():
            trained.append(len(x))
        return forward(block, x, scale)

    with (
        unittest.mock.patch.object(torch.optim.Adam, "step", lambda self: steps.append(0) or step(self)),
        unittest.mock.patch.object(Mixing, "forward", seen),
    ):
        _, report = prune(dense, "2:4", batches=own, recover=True, progress=False)
    assert len(steps) == 2 * 4 * len(batches)  # blocks, passes, batches
    if kind == "sequences":
        assert sum(trained) == 2 * 4 * sum(len(x) if len(x) >= world else world * len(x) for x in own)
    path, found = pathlib.Path(folder, f"{kind}_{world}.pt"), [(row.before, row.after) for row in report.recovery]
    if world > 1:
        torch.save(found, path) if rank == 0 else None
    else:  # this one runs last
        torch.testing.assert_close(torch.load(path.with_stem(f"{kind}_2")), found, rtol=0.02, atol=0)


def cases_of_steps():
    for kind in ("sequences", "shuffled"):
        yield f"recovery: {kind}", functools.partial(as_one_process, kind, os.environ["SPARSEKIT_TEST_FOLDER"])


class Experts(nn.Module):
    """Four packed experts, called as in transformers, whose module has a router beside them."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj, self.down_proj = (nn.Parameter(torch.randn(size)) for size in ((4, 12, 8), (4, 8, 6)))

    def forward(self, tokens, chosen, gates):
        gate, up = torch.einsum("ti,tsoi->tso", tokens, self.gate_up_proj[chosen]).chunk(2, -1)
        return torch.einsum("tso,tsio,ts->ti", gate.relu() * up, self.down_proj[chosen], gates)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 4), Experts()

    def forward(self, x):
        gates, chosen = self.gate(x).softmax(-1).topk(2)
        return x + self.experts(x, chosen, gates)


def experts():
    """Scores of experts are those of the batches of all ranks."""
    torch.manual_seed(0)
    model, batches = nn.Sequential(Mixture(), Mixture()), [rows(12), rows(5).flip(1)]
    whole = expert_scores(model, batches)  # every rank sums all, which changes no mean
    own = batches[distributed.get_rank() :: 2]
    torch.testing.assert_close(expert_scores(model, own), whole)
    small, expected = shrink_experts(model, own, 0.5)[0], shrink_experts(model, batches, 0.5, scores=whole)[0]
    assert all(map(torch.equal, small.parameters(), expected.parameters()))


class Blocks(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.first, self.blocks = nn.Linear(8, 8), nn.ModuleList(block() for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x * 2


SHARDED_BLOCKS = {
    "two": lambda: nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8), nn.GELU()),
    "model": lambda: nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8), nn.GELU()),
    "attention": lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True),
    "convolution": lambda: nn.Sequential(nn.Conv1d(5, 5, 3, padding=1), nn.Conv1d(5, 5, 1), nn.GELU()),
    "norm": lambda: nn.Sequential(nn.Linear(8, 8, bias=False), nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()),
}


def without_batches(block, is_run, folder):
    """A sharded model is pruned in place, before and after a forward pass, as the model that every process has."""
    torch.manual_seed(0)
    dense = Blocks(SHARDED_BLOCKS[block])
    data = {"batches": [torch.randn(4, 5, 8)], "compensate": "least_squares"}
    for number, keys in enumerate(({}, {"sparsity_level": 0.75, "score": "lamp"}, data)):
        expected, rows = prune(dense, progress=False, **keys)
        sharded, x = wrapped(copy.deepcopy(dense), blocks=block != "model"), torch.randn(4, 5, 8)
        if is_run:
            sharded(x)
        with pytest.raises(SparsityError, match="sharded over ranks, so a copy would not have them; give inplace=True"):
            prune(sharded, progress=False, **keys)
        checkpoint = f"{folder}/{block}_{number}" if is_run else None
        model, report = prune(sharded, inplace=True, progress=False, checkpoint=checkpoint, **keys)
        assert model is sharded and [r.tensor for r in report] == [r.tensor for r in rows] and not report.left_out
        for name, p in expected.named_parameters():
            assert torch.equal(sharded.get_parameter(name).full_tensor(), p), name
        torch.testing.assert_close(sharded(x), expected(x))


def another_call_on_a_rank(folder):
    """Ranks whose models, functions or checkpoints differ raise an error on all of them, and do not wait."""
    rank, eps = distributed.get_rank(), 1e-5 * (1 + distributed.get_rank())

    def call(first=F.relu, second=nn.ReLU, forward=None, **keys):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), second(), nn.LayerNorm(8, eps=keys.pop("eps", 1e-5)))
        model[0].weight.data[3, 5] += keys.pop("more", 0)
        forward = forward or (lambda m, b: m(first(b)))
        return prune(model, 0.5, batches=[rows(8 + rank)], forward=forward, compensate=None, **keys)[0].state_dict()

    place = torch.device("cpu") if rank else torch.device("cpu", 0)
    call(forward=lambda m, b: m(b.to("cpu" if rank < 2 else rank)))  # which names its rank, as for a GPU
    expected = call(checkpoint=folder, score=lambda w, n: w.to(place).abs())
    shutil.rmtree(folder) if rank == 0 else None
    distributed.barrier()
    for keys in (
        {"first": (F.relu, F.gelu)[rank]},
        {"second": (nn.ReLU, nn.GELU)[rank]},
        {"eps": eps},
        {"more": 1e-3 * rank},
        {"forward": (lambda m, b: m(b * 2), lambda m, b: m(b * 3))[rank]},
        {"score": lambda w, n: w.abs() + eps},
    ):
        with pytest.raises(SparsityError, match="the ranks have different models or arguments; load the same weights"):
            call(**keys)
    with pytest.raises(SparsityError, match="some ranks have a checkpoint= and others have none; give it on every"):
        call(checkpoint=folder if rank else None)
    call(checkpoint=folder, score=lambda w, n: w.to(place).abs())
    if rank == 0:
        pathlib.Path(folder, "00000.pt").write_bytes(b"")
    distributed.barrier()
    with pytest.raises(SparsityError, match=r"00000.pt' of the checkpoint cannot be read"):
        call(checkpoint=folder, score=lambda w, n: w.to(place).abs())
    assert all(map(torch.equal, expected.values(), call(score=lambda w, n: w.to(place).abs()).values()))


def prepared_for_two_of_four(model):
    sparsifier = ScopeSparsifier(nnz=2, scope_shape=(1, 4))
    sparsifier.prepare(model)
    wrapped(model)
    return sparsifier


def cases():
    for case in (sums, unreached, of_fsdp, one_walk_over_ranks, fitted_blocks):
        yield f"statistics: {case.__name__}", case
    folder = os.environ["SPARSEKIT_TEST_FOLDER"]
    for block, is_run in turns(SHARDED_BLOCKS, [(True,), (False,)]):
        yield f"{block} without batches, {is_run}", functools.partial(without_batches, block, is_run, folder)
    folder = f"{folder}/another_call"
    yield from cases_of_steps()
    yield "experts", experts
    yield "another call on a rank", functools.partial(another_call_on_a_rank, folder)
