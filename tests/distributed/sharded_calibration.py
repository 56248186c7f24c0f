"""Cases for `test_sharded`: statistics of layers are summed over two ranks, and `one_shot` prunes alike on both."""

import pytest
import torch
from torch import distributed, nn

from sparsekit_ao import ScopeSparsifier, SparsityError, one_shot, prune, recover


def prepared(model, **options):
    sparsifier = ScopeSparsifier(score="wanda", **options)
    sparsifier.prepare(model, None)
    return sparsifier


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))


def rows(count):
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(1))


def sums():
    model, data = mlp(), rows(8)
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

    one, many, data = prepared(mlp()), prepared(mlp()), rows(8)
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


def same_masks():
    data = rows(96)
    sparsifier = prepared(mlp(), nnz=1, scope_shape=(1, 2))  # other batches would give other masks
    one_shot(sparsifier, data.chunk(6)[distributed.get_rank() :: 2])
    sparsifier.check()
    for name in sparsifier.state:
        both = [torch.empty_like(sparsifier.mask(name).int()) for _ in range(2)]
        distributed.all_gather(both, sparsifier.mask(name).int())
        assert torch.equal(*both)


def same_recovery():
    torch.manual_seed(0)
    dense, data = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), rows(96)
    own = data.chunk(6)[distributed.get_rank() :: 2]
    model, _ = prune(dense, 0.75, batches=own)
    (row,) = recover(model, dense, own)
    assert row.after < row.before
    for p in model.parameters():
        both = [torch.empty_like(p) for _ in range(2)]
        distributed.all_gather(both, p.detach())
        assert torch.equal(*both)
    with pytest.raises(SparsityError, match="every rank needs the same number of batches, got 2 and 3"):
        recover(model, dense, own[: 2 + distributed.get_rank()])


def cases():
    for case in (sums, unreached, of_fsdp, same_masks, same_recovery):
        yield f"statistics: {case.__name__}", case
