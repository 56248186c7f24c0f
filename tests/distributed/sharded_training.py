"""Cases for `test_sharded`: training over ranks.

DDP, checkpoints that change the number of ranks, tensor parallel, HSDP.
"""

import functools
import itertools
import os
import pathlib
import warnings

import torch
from grids import EXHAUSTIVE
from sharded_fsdp import CONFIGS, assert_same_masks, batch, every_method, mine, mlp, shard, train
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from sparsekit_ao import ProximalSparsifier, ScopeSparsifier, patterns
from sparsekit_ao.distributed import full_tensor


def set_level_and_step(sparsifier, level):
    for g in sparsifier.groups:
        g["sparsity_level"] = level
    sparsifier.step()


def ddp(broadcast, config):
    """`step` sends no masks. With `broadcast_buffers` DDP sends them, at every forward."""
    plain, one = mlp(), ScopeSparsifier()
    one.prepare(plain, CONFIGS[config])
    model, many = mlp(), ScopeSparsifier()
    many.prepare(model, CONFIGS[config])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renamed it, torch 2.11 has only this name
        parallel = DistributedDataParallel(model, broadcast_buffers=broadcast)
    optimizers = [torch.optim.AdamW(m.parameters(), 0.01) for m in (plain, model)]
    for step in range(4):
        for s in (one, many):
            set_level_and_step(s, 0.2 * step)
        assert_same_masks(one, many)
        train(plain, optimizers[0], step)
        train(parallel, optimizers[1], step, mine())
    masks = [many.mask(g["tensor_fqn"]).clone() for g in many.groups]
    for mask in masks:
        everyone = [torch.empty_like(mask) for _ in range(distributed.get_world_size())]
        distributed.all_gather(everyone, mask)
        assert all(torch.equal(m, mask) for m in everyone)


def proximal(make, budget):
    """Proximal steps under DDP: the same weights on all ranks, those of one process that trains on the whole batch."""
    results = []
    for wrap, rows in ((lambda m: m, slice(None)), (DistributedDataParallel, mine())):
        model = mlp()
        optimizer = make(model.parameters())
        sparsifier = ProximalSparsifier(optimizer=optimizer, pattern=patterns.columns())
        sparsifier.prepare(model, [{"tensor_fqn": "*.weight", **budget}])
        parallel = wrap(model)
        for step in range(4):
            train(parallel, optimizer, step, rows)
            sparsifier.step()
        assert sparsifier.iteration == 4
        masks = [sparsifier.mask(g["tensor_fqn"]).clone() for g in sparsifier.groups]
        sparsifier.squash_mask()
        results.append((masks, [p.detach() for p in model.parameters()]))
    (masks, weights), (own_masks, own) = results
    assert not all(mask.all() for mask in masks)
    for mask, own_mask in zip(masks, own_masks, strict=True):
        assert torch.equal(mask, own_mask)
    for weight, mine_of_it in zip(weights, own, strict=True):
        torch.testing.assert_close(mine_of_it, weight, rtol=1e-4, atol=1e-6)
        everyone = [torch.empty_like(weight) for _ in range(distributed.get_world_size())]
        distributed.all_gather(everyone, mine_of_it.contiguous())
        assert all(torch.equal(w, mine_of_it) for w in everyone)


def build(config="global"):
    model, sparsifier = mlp(), ScopeSparsifier()
    sparsifier.prepare(model, CONFIGS[config])
    if distributed.is_initialized():
        shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    return model, sparsifier, optimizer


def state_of(model, sparsifier, optimizer, **kwargs):
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "sparsifier": sparsifier.state_dict(**kwargs)}


def restore(folder, model, sparsifier, optimizer, **kwargs):
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import set_state_dict

    state = state_of(model, sparsifier, optimizer, **kwargs)
    checkpoint.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    sparsifier.load_state_dict(state["sparsifier"])


def some_steps(model, sparsifier, optimizer, steps):
    for step in steps:
        set_level_and_step(sparsifier, min(0.1 * step, 0.7))
        train(model, optimizer, step, mine() if distributed.is_initialized() else slice(None))


def save(folder, how):
    from torch.distributed import checkpoint

    run = build()
    some_steps(*run, range(4))
    if how == "save":
        checkpoint.save(state_of(*run), checkpoint_id=f"{folder}/save")
    else:
        saved = checkpoint.async_save(state_of(*run), checkpoint_id=f"{folder}/async_save")
        saved.result()
    some_steps(*run, range(4, 6))
    after = {g["tensor_fqn"]: full_tensor(run[1].mask(g["tensor_fqn"])) for g in run[1].groups}
    if distributed.get_rank() == 0:
        torch.save(after, f"{folder}/{how}.pt")


def load(folder, how):
    """Continues as the run that saved: same masks after two more steps."""
    run = build()
    for group in run[1].groups:
        group["sparsity_level"] = 0.1 * 3  # as the loop would; else loading warns of another level
    restore(f"{folder}/{how}", *run)
    levels = {g["sparsity_level"] for g in run[1].groups}
    assert levels == {0.1 * 3}
    run[1].check()
    some_steps(*run, range(4, 6))
    for name, mask in torch.load(f"{folder}/{how}.pt").items():
        assert torch.equal(full_tensor(run[1].mask(name)), mask), name


def parallel(mesh, model, sparsifier, config):
    """parallelize_module, then prepare; on a second mesh dimension then fully_shard."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    sparsifier.prepare(model, config)
    if mesh.ndim > 1:
        fully_shard(model, mesh=mesh["dp"])


def tensor_parallel(config, mesh):
    plain, one = mlp(width=24), ScopeSparsifier()
    one.prepare(plain, CONFIGS[config])
    model, many = mlp(width=24), ScopeSparsifier()
    parallel(mesh, model, many, CONFIGS[config])
    rows = slice(None)
    if mesh.ndim > 1:
        rows = slice(4 * mesh["dp"].get_local_rank(), 4 * mesh["dp"].get_local_rank() + 4)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (plain, model)]
    for step in range(3):
        for s in (one, many):
            set_level_and_step(s, 0.3 + 0.1 * step)
        assert_same_masks(one, many)
        train(plain, optimizers[0], step)
        train(model, optimizers[1], step, rows)
    assert one.check() == many.check()
    torch.testing.assert_close(model(batch(0)[0]), plain(batch(0)[0]), rtol=1e-4, atol=1e-5)
    one.squash_mask()
    many.squash_mask()
    assert list(model.state_dict()) == list(plain.state_dict())
    for name, w in plain.state_dict().items():
        got = full_tensor(model.state_dict()[name])
        torch.testing.assert_close(got, w, rtol=1e-4, atol=1e-5)
        assert torch.equal(got == 0, w == 0)
    torch.testing.assert_close(model(batch(0)[0]), plain(batch(0)[0]), rtol=1e-4, atol=1e-5)


def cases_of_two():
    folder = pathlib.Path(os.environ["SPARSEKIT_TEST_FOLDER"])
    for broadcast, config in itertools.product((True, False), CONFIGS):
        yield f"ddp broadcast_buffers={broadcast} {config}", functools.partial(ddp, broadcast, config)
    makes = {
        "Adam": (lambda p: torch.optim.Adam(p, 0.01), 0.3),
        "SGD": (lambda p: torch.optim.SGD(p, 0.05, momentum=0.9), 2.0),
    }
    for name, (make, strength) in makes.items():
        yield f"proximal steps of a strength, {name}", functools.partial(proximal, make, {"strength": strength})
        yield f"proximal steps to a budget, {name}", functools.partial(proximal, make, {"sparsity_level": 0.4})
    for how in ("save", "async_save"):
        yield how, functools.partial(save, folder, how)


def cases_of_four():
    from torch.distributed.device_mesh import init_device_mesh

    folder = pathlib.Path(os.environ["SPARSEKIT_TEST_FOLDER"])
    for how in ("save", "async_save"):
        yield f"load {how}", functools.partial(load, folder, how)
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for config in CONFIGS:
        yield f"tensor parallel {config}", functools.partial(tensor_parallel, config, line)
        yield f"tensor parallel and FSDP2 {config}", functools.partial(tensor_parallel, config, square)
    for config in CONFIGS if EXHAUSTIVE else ("mixed",):  # five rows over four ranks: one has none
        yield f"HSDP {config}", functools.partial(every_method, config, mesh=square)
        yield f"every method {config}", functools.partial(every_method, config)
