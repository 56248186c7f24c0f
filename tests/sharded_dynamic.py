"""Cases for `test_sharded`. Masks that move, under FSDP2, HSDP and tensor parallel, against one process.

Every rank gets the same whole batch where results are compared bit for bit: the mean of equal gradients over two or four
ranks is exact. Where sums are split otherwise (tensor parallel), gradients are written by hand.
"""

import functools

import torch
from sharded_fsdp import batch, mlp, shard
from torch.nn import functional as F

from sparsekit_ao import GMP, SET, SNFS, DynamicSparsifier
from sparsekit_ao.distributed import beside, is_sharded, local, whole
from sparsekit_ao.schedules import cubic


def loudest(slots):
    """A user's rule, which looks at everything that there is."""
    (gradient,) = slots.gradients.values()
    return (
        slots.scores({spec: gradient + w for spec, w in slots.weights.items()})
        - slots.active.float()
        + slots.random("u")
    )


loudest.needs = ("gradient",)


def noise(weight, generator):
    return torch.randn(weight.shape, generator=generator) + weight.mean()


COUPLED = [
    {"tensor_fqn": "0.weight", "block_coupling": "width", "block_shape": (1, -1)},
    {"tensor_fqn": "2.weight", "block_coupling": "width", "block_shape": (-1, 1), "coupling_order": (1, 0)},
    {"tensor_fqn": "4.weight", "scope_shape": (1, 4), "nnz": 2},
]
WHOLE = [{"tensor_fqn": "*.weight"}]
PIECES = [
    {"tensor_fqn": "0.weight", "scope_shape": (1, 4)},
    {"tensor_fqn": "2.weight", "block_shape": (4, 3)},
    {"tensor_fqn": "4.weight", "block_shape": (2, 3), "edge": "partial", "nnz": 3},
]
ADAM = functools.partial(torch.optim.AdamW, lr=0.01)
MOMENTUM = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2)
RIGL = functools.partial(DynamicSparsifier, sparsity_level=0.6, update_every=2, until=8)
# name: (sparsifier, config, optimizer)
METHODS = {
    "RigL": (RIGL, None, ADAM),
    "SET": (functools.partial(SET, sparsity_level=0.6, update_every=2), None, MOMENTUM),
    "SNFS": (functools.partial(SNFS, sparsity_level=0.6, update_every=2, until=6), None, MOMENTUM),
    "SNFS with Adam": (functools.partial(SNFS, sparsity_level=0.6, update_every=3, until=6), None, ADAM),
    "global": (functools.partial(RIGL, prune="global", redistribute="gradient"), None, ADAM),
    "global target": (
        functools.partial(RIGL, sparsity_level=None, prune="global", target=cubic(0.2, 0.7, 8)),
        None,
        ADAM,
    ),
    "GMP": (functools.partial(GMP, sparsity_level=0.7, until=8, update_every=2), None, MOMENTUM),
    "coupled": (RIGL, COUPLED, ADAM),
    "one budget": (functools.partial(RIGL, scope_coupling="all", redistribute="nonzero"), None, MOMENTUM),
    "pieces": (functools.partial(RIGL, state_init="grad", new_values=noise), PIECES, ADAM),
    "a user's rule": (functools.partial(RIGL, grow=loudest, init="uniform", seed=3), None, ADAM),
}


def twins(method, put, width=21):
    """(model, optimizer, sparsifier) in one process, and the same over the ranks."""
    kind, config, optimizer = METHODS[method] if isinstance(method, str) else method
    out = []
    for is_many in (False, True):
        model, sparsifier = mlp(width=width), kind()
        if is_many:
            put(model, sparsifier, config)
        else:
            sparsifier.prepare(model, config)
        trainer = optimizer(model.parameters())
        sparsifier.attach(trainer)
        out.append((model, trainer, sparsifier))
    return out


def sharded(model, sparsifier, config, **kwargs):
    sparsifier.prepare(model, config)
    shard(model, **kwargs)


def train(run, step, rows=slice(None)):
    model, optimizer, sparsifier = run
    x, y = batch(step)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x[rows]), y[rows])
    loss.backward()
    optimizer.step()
    sparsifier.step()
    return loss.detach()


def feed(run, step):
    """An iteration whose gradients are written by hand, as dense as masks are open."""
    model, optimizer, sparsifier = run
    live = {f"{g['module_fqn']}.parametrizations.weight.original": g for g in sparsifier.groups}
    for k, (name, p) in enumerate(model.named_parameters()):
        grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + k))
        group = live.get(name)
        if group is not None and not group["module"].parametrizations.weight[0].is_open:
            grad *= whole(sparsifier.mask(group["tensor_fqn"])) != 0
        p.grad = beside(grad, p)
    optimizer.step()
    sparsifier.step()


def everything(run):
    """What an update may change, whole: parameters, masks, optimizer state; budgets and what moved."""
    model, optimizer, sparsifier = run
    found = {n: whole(p.detach()) for n, p in model.named_parameters()}
    found |= {f"{g['tensor_fqn']} mask": whole(sparsifier.mask(g["tensor_fqn"])) != 0 for g in sparsifier.groups}
    for name, p in model.named_parameters():
        for key, value in optimizer.state[p].items():
            found[f"{name} {key}"] = whole(value.detach()) if isinstance(value, torch.Tensor) else torch.tensor(-1.0)
    return found, ([(g.get("nnz"), g["sparsity_level"]) for g in sparsifier.groups], sparsifier.last_update)


def assert_same(one, many):
    (tensors, numbers), (others, other_numbers) = everything(one), everything(many)
    assert list(tensors) == list(others)
    different = [n for n in tensors if not torch.equal(tensors[n], others[n])]
    assert not different, different
    assert numbers == other_numbers


def as_one_process(method, put=sharded, iteration=train):
    one, many = twins(method, put)
    assert all(is_sharded(m["mask"]) and m["mask"].dtype == torch.bool for m in many[2].state.values())
    moved = 0
    for step in range(1, 8):
        for run in (one, many):
            iteration(run, step)
        assert_same(one, many)
        if one[2].last_update is not None and one[2].last_update.iteration == step:
            moved += sum(one[2].last_update.gone.values())
    assert moved > 10
    assert one[2].check() == many[2].check()


def parallel(mesh, model, sparsifier, config):
    """parallelize_module, then prepare; on a second mesh dimension then fully_shard."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    sparsifier.prepare(model, config)
    if mesh.ndim > 1:
        fully_shard(model, mesh=mesh["dp"])


def parallel_forward(mesh):
    """Tensor parallel layers compute with the mask, open and closed; sums are split, so to a tolerance."""
    one, many = twins(
        (functools.partial(RIGL, update_every=3), WHOLE, ADAM), functools.partial(parallel, mesh), width=24
    )
    for step in range(1, 8):
        losses = [train(run, step) for run in (one, many)]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
        tensors, others = everything(one)[0], everything(many)[0]
        assert not [n for n in tensors if n.endswith("mask") and not torch.equal(tensors[n], others[n])]
        torch.testing.assert_close(others, tensors, rtol=1e-3, atol=1e-4)


def cases_of_two():
    for method in METHODS:
        yield f"dynamic {method}", functools.partial(as_one_process, method)


def cases_of_four():
    from torch.distributed.device_mesh import init_device_mesh

    line = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for method in METHODS:
        yield f"dynamic {method}", functools.partial(as_one_process, method)  # of five rows one rank has none
    for method in ("pieces", "coupled", "global", "SNFS"):
        for name, mesh in (("line", line), ("square", square)):
            put = functools.partial(parallel, mesh)
            yield f"dynamic {name} {method}", functools.partial(as_one_process, method, put, feed)
    for name, mesh in (("line", line), ("square", square)):
        yield f"dynamic forward {name}", functools.partial(parallel_forward, mesh)
    yield "dynamic HSDP", functools.partial(as_one_process, "SNFS", functools.partial(sharded, mesh=square))
