"""Cases for `test_sharded`: DDP, proximal steps, checkpoints that change the number of ranks, tensor parallel, HSDP."""

import functools
import itertools
import os
import pathlib
import warnings

import torch
from grids import EXHAUSTIVE, turns
from sharded_fsdp import (
    ADAM,
    CONFIGS,
    assert_same_masks,
    every_method,
    mine,
    mlp,
    pair,
    set_level_and_step,
    shard,
    sharded,
    train,
    whole,
)
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from sparsekit_ao import ProximalSparsifier, ScopeSparsifier, patterns
from sparsekit_ao.distributed import full_tensor


def in_ddp(model, broadcast):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renamed it, torch 2.11 has only this name
        return DistributedDataParallel(model, broadcast_buffers=broadcast)


def assert_ranks_agree(tensors):
    for t in tensors:
        everyone = [torch.empty_like(t) for _ in range(distributed.get_world_size())]
        distributed.all_gather(everyone, t.contiguous())
        assert all(torch.equal(other, t) for other in everyone)


def ddp(broadcast, config):
    """`step` sends no masks. With `broadcast_buffers` DDP sends them, at every forward."""
    one, many = pair(CONFIGS[config], put=whole, is_stepped=False)
    models = one.model, in_ddp(many.model, broadcast)
    optimizers = [ADAM(m.parameters()) for m in models]
    for step in range(4):
        for s in (one, many):
            set_level_and_step(s, 0.2 * step)
        assert_same_masks(one, many)
        train(models[0], optimizers[0], step)
        train(models[1], optimizers[1], step, mine())
    assert_ranks_agree(many.mask(g["tensor_fqn"]).clone() for g in many.groups)


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
    assert all(map(torch.equal, masks, own_masks))
    torch.testing.assert_close(own, weights, rtol=1e-4, atol=1e-6)
    assert_ranks_agree(own)


def build():
    model, sparsifier = mlp(), ScopeSparsifier()
    sparsifier.prepare(model, CONFIGS["global"])
    if distributed.is_initialized():
        shard(model)
    return model, sparsifier, ADAM(model.parameters())


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
    saved = getattr(checkpoint, how)(state_of(*run), checkpoint_id=f"{folder}/{how}")
    if how == "async_save":
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
    assert {g["sparsity_level"] for g in run[1].groups} == {0.1 * 3}
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
    yield "load save", functools.partial(load, folder, "save")
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    half = slice(4 * square["dp"].get_local_rank(), 4 * square["dp"].get_local_rank() + 4)
    momentum = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    split = functools.partial(every_method, optimizer=momentum, width=24, ranks=0)
    configs = CONFIGS if EXHAUSTIVE else ("global", "mixed")
    for config, mesh, rows in turns(configs, [(square, half), (line, slice(None))]):
        put = functools.partial(parallel, mesh)
        yield f"tensor parallel of {mesh.ndim} {config}", functools.partial(split, config, put, rows=rows)
    for config in CONFIGS if EXHAUSTIVE else ("mixed",):
        put = functools.partial(sharded, mesh=square)
        yield f"HSDP {config}", functools.partial(every_method, config, put, ranks=2)
    for config in CONFIGS if EXHAUSTIVE else ():  # five rows over four ranks: one has none
        yield f"every method {config}", functools.partial(every_method, config)
