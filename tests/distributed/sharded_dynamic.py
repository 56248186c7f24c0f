"""Cases for `test_sharded`. Masks that move, under FSDP2, HSDP and tensor parallel, against one process.

Every rank gets the same whole batch where results are compared bit for bit: the mean of equal gradients over two or
four ranks is exact. Where sums are split otherwise (tensor parallel), gradients are written by hand.
"""

import contextlib
import functools
import os
import warnings

import pytest
import sharded_fsdp
import torch
from grids import EXHAUSTIVE
from sharded_fsdp import ADAM, batch, initialize, mine, mlp, pair, shard, sharded, whole
from sharded_training import assert_ranks_agree, in_ddp, parallel, restore, state_of
from torch import distributed
from torch.nn import functional as F

from sparsekit_ao import GMP, SET, SNFS, SRSTE, STE, DynamicSparsifier, ScopeSparsifier, SparsityError, TopKAST
from sparsekit_ao.distributed import full_tensor, is_sharded, local, placed_like
from sparsekit_ao.dynamic import inits
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
MOMENTUM = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2)
RIGL = functools.partial(DynamicSparsifier, sparsity_level=0.6, update_every=2, until=8)
# name: (sparsifier, config, optimizer)
METHODS = {
    "RigL": (RIGL, None, ADAM),
    "SET": (functools.partial(SET, sparsity_level=0.6, update_every=2), None, MOMENTUM),
    "SNFS": (functools.partial(SNFS, sparsity_level=0.6, update_every=2, until=6), None, MOMENTUM),
    "global": (
        functools.partial(
            RIGL, sparsity_level=None, prune="global", redistribute="gradient", target=cubic(0.2, 0.7, 8)
        ),
        None,
        ADAM,
    ),
    "GMP": (functools.partial(GMP, sparsity_level=0.7, until=8, update_every=2), None, MOMENTUM),
    "coupled": (RIGL, COUPLED, ADAM),
    "one budget": (functools.partial(RIGL, scope_coupling="all", redistribute="nonzero"), None, MOMENTUM),
    "pieces": (functools.partial(RIGL, state_init="grad", new_values=noise), PIECES, ADAM),
    "a user's rule": (functools.partial(RIGL, grow=loudest, init="uniform", seed=3), None, ADAM),
}


def twins(method, put=sharded, width=21):
    """(model, optimizer, sparsifier) in one process, and the same over the ranks."""
    kind, config, optimizer = METHODS[method] if isinstance(method, str) else method
    runs = []
    for sparsifier in pair(config, kind, put, width=width, is_stepped=False):
        trainer = optimizer(sparsifier.model.parameters())
        sparsifier.attach(trainer)
        runs.append((sparsifier.model, trainer, sparsifier))
    return runs


def train(run, step, rows=slice(None)):
    model, optimizer, sparsifier = run
    loss = sharded_fsdp.train(model, optimizer, step, rows)
    sparsifier.step()
    return loss


def feed(run, step):
    """An iteration whose gradients are written by hand, as dense as masks are open.

    Those of open masks have other placements than their weights: partial sums over the mesh.
    """
    model, optimizer, sparsifier = run
    live = {f"{g['module_fqn']}.parametrizations.weight.original": g for g in sparsifier.groups}
    for k, (name, p) in enumerate(model.named_parameters()):
        grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + k))
        group = live.get(name)
        if group is not None and not getattr(group["module"].parametrizations.weight[0], "is_open", True):
            grad *= full_tensor(sparsifier.mask(group["tensor_fqn"])) != 0
            group = None
        p.grad = placed_like(grad, p) if group is None else unsummed(grad, p)
    optimizer.step()
    sparsifier.step()


def unsummed(t, p):
    from torch.distributed.tensor import DTensor, Partial

    if not is_sharded(p):
        return t
    at = [Partial()] * p.device_mesh.ndim
    return DTensor.from_local(t / p.device_mesh.size(), p.device_mesh, at, run_check=False)


def everything(run):
    """What an update may change, whole: parameters, masks, optimizer state; budgets and what moved."""
    model, optimizer, sparsifier = run
    found = {n: full_tensor(p.detach()) for n, p in model.named_parameters()}
    found |= {f"{g['tensor_fqn']} mask": full_tensor(sparsifier.mask(g["tensor_fqn"])) != 0 for g in sparsifier.groups}
    for name, p in model.named_parameters():
        for key, value in optimizer.state[p].items():
            found[f"{name} {key}"] = (
                full_tensor(value.detach()) if isinstance(value, torch.Tensor) else torch.tensor(-1.0)
            )
    budgets = [(g.get("nnz"), g["sparsity_level"]) for g in sparsifier.groups]
    return found, (budgets, getattr(sparsifier, "last_update", None))


def assert_same(one, many):
    (tensors, numbers), (others, other_numbers) = everything(one), everything(many)
    assert list(tensors) == list(others)
    different = [n for n in tensors if not torch.equal(tensors[n], others[n])]
    assert not different, different
    assert numbers == other_numbers


def train_alike(runs, steps, iteration=train):
    for step in steps:
        for run in runs:
            iteration(run, step)
        assert_same(*runs)


def as_one_process(method, put=sharded, iteration=train, **kwargs):
    one, many = twins(method, put, **kwargs)
    cut = [m["mask"] for m in many[2].state.values() if is_sharded(m["mask"])]
    assert cut and all(m.dtype == torch.bool for m in cut)
    moved = 0
    for step in range(1, 5):
        train_alike((one, many), [step], iteration)
        if one[2].last_update is not None and one[2].last_update.iteration == step:
            moved += sum(one[2].last_update.pruned.values())
    assert moved > 4
    assert one[2].check() == many[2].check()


def by_columns(model, sparsifier, config):
    from torch.distributed.tensor import Shard

    sharded(model, sparsifier, config, shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else Shard(0))


def in_micro_batches(run, step):
    """Two backward passes, of which FSDP2 reduces the last alone."""
    model, optimizer, sparsifier = run
    x, y = batch(step)
    optimizer.zero_grad()
    for part in (slice(0, 4), slice(4, 8)):
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(part.start > 0)
        F.cross_entropy(model(x[part]), y[part]).backward()
    optimizer.step()
    sparsifier.step()


def taken_first(run, step):
    """Gradients are taken before they would be clipped, kept in memory between steps, and gathered after backward."""
    model, optimizer, sparsifier = run
    x, y = batch(step)
    optimizer.zero_grad(set_to_none=False)
    if hasattr(model, "set_reshard_after_backward"):
        model.set_reshard_after_backward(False)
    F.cross_entropy(model(x), y).backward()
    sparsifier.take_gradients()
    optimizer.step()
    sparsifier.step()


def by_closure(run, step):
    model, optimizer, sparsifier = run
    x, y = batch(step)

    def loss():
        optimizer.zero_grad()
        found = F.cross_entropy(model(x), y)
        found.backward()
        return found

    optimizer.step(loss)
    sparsifier.step()


def gradients_of_one_rank_are_not_finite(is_scaled):
    """The update waits on every rank and happens in the next iteration; a scaler skips the optimizer's step too."""
    one, many = twins("SNFS" if is_scaled else "RigL")
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0, enabled=is_scaled) for _ in range(2)]
    for step in (1, 2, 3):
        for (model, optimizer, sparsifier), scaler in zip((one, many), scalers, strict=True):
            x, y = batch(step)
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            if step == 2:  # one hidden element, in the first row and so on the first rank
                hidden = (local(sparsifier.mask("0.weight")) == 0).nonzero()[0]
                weight = model[0].parametrizations.weight.original
                if not is_sharded(weight) or distributed.get_rank() == 0:
                    local(weight.grad)[tuple(hidden)] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            sparsifier.step()
        assert_same(one, many)
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert [bool(run[2].last_update) for run in (one, many)] == [step == 3] * 2


def each_rank_its_data():
    one, many = twins("RigL")
    for step in range(1, 8):
        loss, mean = train(one, step), train(many, step, mine())
        distributed.all_reduce(mean)
        torch.testing.assert_close(mean / distributed.get_world_size(), loss, rtol=1e-4, atol=1e-5)
        updates = [None] * distributed.get_world_size()
        distributed.all_gather_object(updates, many[2].last_update)
        assert all(update == updates[0] for update in updates)
        if step % 2 == 0:
            assert updates[0].iteration == step and sum(updates[0].pruned.values()) > 0
            kept = {name: int(full_tensor(found["mask"]).sum()) for name, found in many[2].state.items()}
            assert updates[0].kept == kept == one[2].last_update.kept
    assert many[2].check() == one[2].check()


def under_ddp(method, syncs, broadcasts):
    """Half of every batch for each rank, in two micro-batches of which the first synchronizes only with `syncs`."""
    one, many = twins(method, whole)
    wrapped = in_ddp(many[0], broadcasts)
    for step in range(1, 7):
        train(one, step)
        x, y = batch(step)
        many[1].zero_grad()
        for part in range(2):
            rows = slice(mine().start + 2 * part, mine().start + 2 * part + 2)
            with contextlib.nullcontext() if syncs or part else wrapped.no_sync():
                (F.cross_entropy(wrapped(x[rows]), y[rows]) / 2).backward()
        many[1].step()
        many[2].step()
        assert many[2].last_update == one[2].last_update
    (tensors, _), (others, _) = everything(one), everything(many)
    torch.testing.assert_close(others, tensors, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(t, others[name]) for name, t in tensors.items() if name.endswith(" mask"))
    assert_ranks_agree(others.values())
    assert one[2].last_update.iteration == 6 and many[2].check() == one[2].check()


def mixed_precision():
    """As FSDP2 over one rank has it; gradients are reduced in float32."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    alone = init_device_mesh("cpu", (distributed.get_world_size(), 1), mesh_dim_names=("all", "one"))["one"]
    runs = [twins("RigL", functools.partial(sharded, mp_policy=policy, **own))[1] for own in ({}, {"mesh": alone})]
    train_alike(runs, range(1, 6))
    assert runs[0][2].last_update.iteration == 4 and sum(runs[0][2].last_update.pruned.values()) > 10


def compiled():
    """One process, compiled and sharded, open and closed: the same masks, weights to the compiler's rounding."""
    one, many = twins("RigL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        fast = (torch.compile(many[0], backend="aot_eager"), *many[1:])
        for step in range(1, 5):
            losses = [train(run, step) for run in (one, fast)]
            torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
    tensors, others = everything(one)[0], everything(many)[0]
    assert one[2].last_update == many[2].last_update
    torch.testing.assert_close(others, tensors, rtol=1e-3, atol=1e-4)


def on_meta(init):
    """Masks are drawn once there is memory, as they would have been in prepare."""
    one, many = (RIGL(init=init, sparsity_level=0.6 if init == "erk" else None) for _ in range(2))
    whole(mlp(), one, None)
    sharded(mlp("meta"), many, None)
    with pytest.raises(SparsityError, match=r"0.weight: it is on the meta device. Call to_empty and initialize"):
        many.attach(ADAM(many.model.parameters()))
    initialize(many.model)
    runs = [(s.model, ADAM(s.model.parameters()), s) for s in (one, many)]
    for _, optimizer, sparsifier in runs:
        sparsifier.attach(optimizer)
    train_alike(runs, range(1, 5))


def too_early_on_meta():
    model = mlp("meta")
    sharded(model, RIGL(), None)
    model.to_empty(device="cpu")
    with pytest.raises(SparsityError, match=r"\(21, 12\) was prepared on the meta device.*call sparsifier.attach"):
        model(batch(0)[0])


def wrong_orders():
    order = r"call prepare, then fully_shard, then make the optimizer, then sparsifier.attach\(optimizer\)"
    none = r"0.weight: exactly one optimizer must train it, but 0 of the 1 given do.*"
    model = mlp()
    optimizer = ADAM(model.parameters())
    sparsifier = RIGL(optimizer=optimizer)
    sparsifier.prepare(model, None)
    shard(model)
    model(batch(0)[0]).sum().backward()
    optimizer.step()
    with pytest.raises(SparsityError, match=none + order):
        sparsifier.step()
    with pytest.raises(SparsityError, match=none + order):
        sparsifier.attach(optimizer)
    sparsifier.attach(ADAM(model.parameters()))
    sparsifier.step()
    assert sparsifier.iteration == 1
    model = mlp()
    optimizer = ADAM(model.parameters())
    sparsifier = SRSTE(sparsity_level=0.5)
    sparsifier.attach(optimizer)
    sparsifier.prepare(model, None)
    shard(model)
    for call in (sparsifier.step, functools.partial(sparsifier.attach, optimizer)):
        with pytest.raises(SparsityError, match=r"0.weight: none of the optimizers given trains it.*" + order):
            call()


def parameters_put_into_the_old_optimizer(kind, optimizer):
    """A trainer shards after `attach`, and the optimizer's very first step sees it."""
    runs = []
    for is_many in (False, True):
        model, sparsifier = mlp(), kind()
        sparsifier.prepare(model, None)
        trainer = optimizer(model.parameters())
        sparsifier.attach(trainer)
        if is_many:
            shard(model)
            trainer.param_groups[0]["params"] = list(model.parameters())
        runs.append((model, trainer, sparsifier))
    train_alike(runs, range(1, 4))


def state_on_one_rank_alone():
    """Under DDP each rank keeps, and zeroes, the state of some parameters; no rank could read all momenta."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer
    runs = []
    for is_many in (False, True):
        model, sparsifier = mlp(), RIGL()
        sparsifier.prepare(model, None)
        if is_many:
            trainer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
        else:
            trainer = ADAM(model.parameters())
        sparsifier.attach(trainer)
        runs.append((torch.nn.parallel.DistributedDataParallel(model) if is_many else model, trainer, sparsifier))
    for step in range(1, 8):
        for run in runs:
            train(run, step)
    (one, _, first), (many, _, second) = runs
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), many.parameters(), strict=True))
    assert first.last_update == second.last_update and first.last_update.iteration == 6
    for kind in (METHODS["SNFS"][0], functools.partial(RIGL, state_init="grad")):
        refusing, model = kind(), mlp()
        refusing.prepare(model, None)
        with pytest.raises(SparsityError, match=r"0.weight: .*ZeroRedundancyOptimizer\) keeps.*one rank alone.*Use"):
            refusing.attach(ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01))


def gathered_from_outside(kind):
    """What a module around the prepared model leaves gathered is not what optimizers hold: nothing is done with it."""
    from torch.distributed.fsdp import fully_shard

    inner, sparsifier = mlp(), kind()
    outer = torch.nn.Sequential(inner)
    sparsifier.prepare(inner, None)
    fully_shard(outer)
    sparsifier.attach(ADAM(outer.parameters()))
    sparsifier.step()
    with torch.no_grad():
        outer(batch(0)[0])
    calls = [sparsifier.step, lambda: sparsifier.attach(ADAM(outer.parameters()))]
    for call in calls[: 1 if kind is ScopeSparsifier else 2]:
        with pytest.raises(SparsityError, match=r"0.weight: its parameter is gathered.*reshard"):
            call()
    outer.reshard()
    sparsifier.step()


def squashed():
    """Zeros are written into shards; no optimizer state moves them afterwards."""
    one, many = twins("RigL")
    for step in range(1, 4):
        for run in (one, many):
            train(run, step)
    for model, _, sparsifier in (one, many):
        sparsifier.squash_mask()
        assert not any("parametrizations" in name for name in model.state_dict())
        model(batch(0)[0]).sum().backward()
    for (name, p), q in zip(one[0].named_parameters(), many[0].parameters(), strict=True):
        assert torch.equal(full_tensor(q.detach()), p), name
        for key, value in one[1].state[p].items():
            assert torch.equal(full_tensor(many[1].state[q][key]), value), (name, key)
    assert int((one[0][0].weight == 0).sum()) > 100


def from_one_kind_to_the_other():
    """One process has float masks on CPU, ranks have bool ones: each loads the other's, model and sparsifier."""
    one, many = twins("RigL")
    for run in (one, many):
        train(run, 1)
        train(run, 2)
    fresh, cut = twins("RigL")
    saved = [(run[0].state_dict(), run[2].state_dict()) for run in (one, many)]
    for target, (weights, state) in ((cut, saved[0]), (fresh, saved[1])):
        for key, value in weights.items():
            if not key.endswith("mask"):  # masks are placed when they are loaded
                weights[key] = placed_like(value, target[0].state_dict()[key])
        target[0].load_state_dict(weights)
        target[2].load_state_dict(state)
        for name, found in one[2].state.items():
            assert torch.equal(full_tensor(target[2].mask(name)) != 0, found["mask"] != 0)
        assert target[2].iteration == 2
    assert fresh[2].mask("0.weight").dtype == torch.float32 and cut[2].mask("0.weight").dtype == torch.bool


STRAIGHT = {
    "STE": (functools.partial(STE, scope_shape=(1, -1), sparsity_level=0.5), None, MOMENTUM),
    "SR-STE": (functools.partial(SRSTE, sparsity_level=0.5, decay=0.1), COUPLED, ADAM),
    "Top-KAST": (functools.partial(TopKAST, sparsity_level=0.8, backward_level=0.5), PIECES[:2], ADAM),
    "Top-KAST, one budget": (functools.partial(TopKAST, 0.8, 0.5, scope_coupling="all"), None, MOMENTUM),
}


def straight_through(method, put=sharded, iteration=train):
    one, many = twins(STRAIGHT[method], put)
    before = full_tensor(many[2].mask("0.weight")).clone()
    for step in range(1, 4):
        train_alike((one, many), [step], iteration)
        for g, h in zip(one[2].groups, many[2].groups, strict=True):
            a, b = (x["module"].parametrizations.weight[0].backward_mask for x in (g, h))
            assert torch.equal(full_tensor(b), a), g["tensor_fqn"]
            assert bool(a.all()) == (not method.startswith("Top"))
    assert not torch.equal(full_tensor(many[2].mask("0.weight")), before)


def resumable():
    model, sparsifier = mlp(), RIGL()
    sparsifier.prepare(model, None)
    if distributed.is_initialized():
        shard(model)
    optimizer = ADAM(model.parameters())
    sparsifier.attach(optimizer)
    return model, optimizer, sparsifier


def save(folder):
    """Saves when the gradients of the update in the fourth iteration are taken, but the update is not made yet."""
    from torch.distributed import checkpoint

    run = resumable()
    for step in (1, 2, 3):
        train(run, step)
    sharded_fsdp.train(run[0], run[1], 4)
    checkpoint.save(state_of(run[0], run[2], run[1]), checkpoint_id=f"{folder}/dynamic")
    run[2].step()
    for step in range(5, 8):
        train(run, step)
    found = everything(run)
    if distributed.get_rank() == 0:
        torch.save(found[0], f"{folder}/dynamic.pt")


def load(folder):
    """Makes the update that is due, and goes on as the run that saved did."""
    run = resumable()
    sharded_fsdp.train(run[0], run[1], 9)  # the optimizer has its state
    restore(f"{folder}/dynamic", run[0], run[2], run[1], with_gradients=True)
    assert run[2].iteration == 3
    run[2].step()
    assert run[2].last_update.iteration == 4
    for step in range(5, 8):
        train(run, step)
    want, found = torch.load(f"{folder}/dynamic.pt"), everything(run)[0]
    assert list(want) == list(found)
    assert not [n for n in want if not torch.equal(want[n], found[n])]


def parallel_forward(mesh):
    """Tensor parallel layers compute with the mask, open and closed; sums are split, so to a tolerance."""
    one, many = twins(
        (functools.partial(RIGL, update_every=2), WHOLE, ADAM), functools.partial(parallel, mesh), width=24
    )
    for step in range(1, 5):
        losses = [train(run, step) for run in (one, many)]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
        tensors, others = everything(one)[0], everything(many)[0]
        assert not [n for n in tensors if n.endswith("mask") and not torch.equal(tensors[n], others[n])]
        torch.testing.assert_close(others, tensors, rtol=1e-3, atol=1e-4)


def cases_of_two():
    iterations = {"SNFS": in_micro_batches, "global": taken_first, "a user's rule": by_closure}
    for method in METHODS if EXHAUSTIVE else [m for m in METHODS if m not in ("RigL", "pieces")]:  # below
        yield f"dynamic {method}", functools.partial(as_one_process, method, iteration=iterations.get(method, train))
    old = "parameters put into the old optimizer"
    yield f"dynamic {old}, SNFS", functools.partial(parameters_put_into_the_old_optimizer, METHODS["SNFS"][0], MOMENTUM)
    srste = functools.partial(SRSTE, sparsity_level=0.5, decay=0.1)
    yield f"dynamic {old}, SR-STE", functools.partial(parameters_put_into_the_old_optimizer, srste, ADAM)
    yield "dynamic by columns", functools.partial(as_one_process, "RigL", by_columns, width=22)
    for method in STRAIGHT:
        yield f"dynamic {method}", functools.partial(straight_through, method)
    for init in ("erk", lottery()):
        yield f"dynamic meta {init if isinstance(init, str) else init.name}", functools.partial(on_meta, init)
    for is_scaled in (False, True):
        name = f"dynamic gradients of one rank are not finite, scaled: {is_scaled}"
        yield name, functools.partial(gradients_of_one_rank_are_not_finite, is_scaled)
    for case in (
        each_rank_its_data,
        mixed_precision,
        compiled,
        too_early_on_meta,
        wrong_orders,
        state_on_one_rank_alone,
        squashed,
        from_one_kind_to_the_other,
    ):
        yield f"dynamic {case.__name__}", case
    for name, kind in (("RigL", RIGL), ("scopes", ScopeSparsifier)):
        yield f"gathered from outside, {name}", functools.partial(gathered_from_outside, kind)
    for case in (("RigL", True, False), ("RigL", False, True), ("SET", False, False), ("SNFS", False, False)):
        yield "DDP {}, syncs: {}, broadcasts: {}".format(*case), functools.partial(under_ddp, *case)
    yield "dynamic save", functools.partial(save, os.environ["SPARSEKIT_TEST_FOLDER"])


def lottery():
    source = torch.Generator().manual_seed(0)
    shapes = {f"{k}.weight": layer.weight.shape for k, layer in enumerate(mlp()) if hasattr(layer, "weight")}
    return inits.lottery_ticket({name: torch.rand(shape, generator=source) > 0.7 for name, shape in shapes.items()})


def cases_of_four():
    from torch.distributed.device_mesh import init_device_mesh

    line = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    over_line, over_square = (functools.partial(parallel, mesh) for mesh in (line, square))
    yield "dynamic pieces", functools.partial(as_one_process, "pieces")  # of five rows one rank has none
    yield "dynamic square coupled", functools.partial(as_one_process, "coupled", over_square, feed)
    yield "dynamic forward square", functools.partial(parallel_forward, square)
    yield "dynamic HSDP", functools.partial(as_one_process, "SNFS", functools.partial(sharded, mesh=square))
    yield "dynamic load", functools.partial(load, os.environ["SPARSEKIT_TEST_FOLDER"])
    if EXHAUSTIVE:
        yield "dynamic SNFS", functools.partial(as_one_process, "SNFS")
        yield "dynamic line pieces", functools.partial(as_one_process, "pieces", over_line, feed)
        yield "dynamic square SNFS", functools.partial(as_one_process, "SNFS", over_square, feed)
        yield "dynamic square Top-KAST", functools.partial(straight_through, "Top-KAST", over_square, feed)
        ticket = functools.partial(RIGL, sparsity_level=None, init=lottery()), None, ADAM
        yield "dynamic line lottery", functools.partial(as_one_process, ticket, over_line, feed)
