"""Cases for `test_sharded`. FSDP2: prepare, then fully_shard; everything a sparsifier does, against one process."""

import functools

import pytest
import torch
from stock import refuses
from torch import distributed, nn
from torch.nn import functional as F

from sparsekit_ao import Coupling, NearlyDiagonalSparsifier, ScopeSparsifier, SparsityError, WeightNormSparsifier
from sparsekit_ao.distributed import copy_values, full_tensor, gathered, is_sharded, local, placed_like
from sparsekit_ao.removal import compact, removable, shrink

CONFIGS = {
    "global": [{"tensor_fqn": "*.weight", "scope_coupling": "all"}],
    "2:4": [{"tensor_fqn": "*.weight", "scope_shape": (1, 4), "edge": "partial"}],
    "mixed": [
        {"tensor_fqn": "0.weight", "block_coupling": "width", "block_shape": (1, -1)},
        {"tensor_fqn": "2.weight", "block_coupling": "width", "block_shape": (-1, 1), "coupling_order": (1, 0)},
        {"tensor_fqn": "4.weight", "stages": [{"nnz": 2, "scope_shape": (1, 4)}, {"scope_shape": ()}]},
    ],
}


def mlp(device="cpu", width=21):
    """Rows that ranks cannot share evenly: 21, 8, 5."""
    torch.manual_seed(0)
    with torch.device(device):
        return nn.Sequential(nn.Linear(12, width), nn.ReLU(), nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 5))


def batch(step, rows=8):
    g = torch.Generator().manual_seed(step)
    return torch.randn(rows, 12, generator=g), torch.randint(5, (rows,), generator=g)


def shard(model, **kwargs):
    from torch.distributed.fsdp import fully_shard

    for layer in (model[0], model[2]):
        fully_shard(layer, **kwargs)
    return fully_shard(model, **kwargs)


def sharded(model, sparsifier, config, **kwargs):
    sparsifier.prepare(model, config)
    shard(model, **kwargs)


def whole(model, sparsifier, config):
    sparsifier.prepare(model, config)


def pair(config=CONFIGS["global"], make=ScopeSparsifier, put=sharded, *, width=21, is_stepped=True):
    """Sparsifiers of two equal models: one process, and over the ranks."""
    one, many = make(), make()
    for sparsifier, prepare in ((one, whole), (many, put)):
        prepare(mlp(width=width), sparsifier, config)
        if is_stepped:
            sparsifier.step()
    return one, many


def assert_same_masks(one, many):
    for g in one.groups:
        name = g["tensor_fqn"]
        assert torch.equal(full_tensor(many.mask(name)), one.mask(name)), name


def train(model, optimizer, step, rows=slice(None)):
    x, y = batch(step)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x[rows]), y[rows])
    loss.backward()
    optimizer.step()
    return loss.detach()


def mine():
    """This rank's rows of a batch of eight."""
    each = 8 // distributed.get_world_size()
    return slice(each * distributed.get_rank(), each * (distributed.get_rank() + 1))


def offload():
    from torch.distributed.fsdp import CPUOffloadPolicy

    return CPUOffloadPolicy(pin_memory=False)


def set_level_and_step(sparsifier, level):
    for g in sparsifier.groups:
        g["sparsity_level"] = level
    sparsifier.step()


ADAM = functools.partial(torch.optim.AdamW, lr=0.01)


def every_method(config, put=sharded, optimizer=ADAM, rows=None, width=21, ranks=None):
    """Steps, training, squashing; `ranks` hold equal parts of every weight, unless it is 0 and sums are split too."""
    one, many = pair(CONFIGS[config], put=put, width=width, is_stepped=False)
    plain, model, x = one.model, many.model, batch(0)[0]
    rows = mine() if rows is None else rows
    ranks = distributed.get_world_size() if ranks is None else ranks
    optimizers = [optimizer(m.parameters()) for m in (plain, model)]
    assert not ranks or torch.equal(model(x), plain(x))  # all is kept, and masks are not sharded yet
    for step in range(3):
        for sparsifier in (one, many):
            set_level_and_step(sparsifier, 0.3 + 0.1 * step)
        assert_same_masks(one, many)
        assert not ranks or torch.equal(model(x), plain(x)) or step
        torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)
        loss = train(plain, optimizers[0], step)
        mean = train(model, optimizers[1], step, rows)
        distributed.all_reduce(mean)
        torch.testing.assert_close(mean / distributed.get_world_size(), loss, rtol=1e-4, atol=1e-5)
    assert many.check() == one.check()
    for r, q in zip(one.report(), many.report(), strict=True):
        assert (r.tensor, r.kept) == (q.tensor, q.kept)
        assert not ranks or q.mask_bytes <= -(-q.shape[0] // ranks) * q.shape[1]  # one byte for each weight
    many.squash_mask()
    one.squash_mask()
    assert many.check() == one.check()
    assert list(model.state_dict()) == list(plain.state_dict())
    for name, w in plain.state_dict().items():
        got = full_tensor(model.state_dict()[name])
        assert torch.equal(got != 0, w != 0), name
        torch.testing.assert_close(got, w, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)
    train(model, optimizers[1], 9, rows)  # and it can be trained on
    train(plain, optimizers[0], 9)
    torch.testing.assert_close(model(x), plain(x), rtol=1e-3, atol=1e-4)


def gradients_are_masked_and_hidden_nan_does_no_harm():
    one, many = pair()
    for s in (one, many):
        weight = s.model[0].parametrizations.weight.original
        with torch.no_grad():
            local(weight)[~local(s.mask("0.weight"))] = float("nan")
    x, _ = batch(1)
    assert torch.equal(many.model(x), one.model(x)) and bool(one.model(x).isfinite().all())
    for s in (one, many):
        s.model(x).square().mean().backward()
    for k in (0, 2, 4):
        got, want = (full_tensor(s.model[k].parametrizations.weight.original.grad) for s in (many, one))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)
        assert torch.equal(got != 0, want != 0)


def mixed_precision():
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    one, many = pair(put=functools.partial(sharded, mp_policy=policy))
    assert_same_masks(one, many)  # chosen from the float32 weights
    out = many.model(batch(0)[0])
    assert out.dtype == torch.bfloat16
    out.float().square().mean().backward()
    weight = many.model[0].parametrizations.weight.original
    assert weight.grad.dtype == torch.float32
    assert not bool((full_tensor(weight.grad) * ~full_tensor(many.mask("0.weight"))).any())
    reference = mlp().bfloat16()
    for k in (0, 2, 4):
        with torch.no_grad():
            reference[k].weight.mul_(one.mask(f"{k}.weight"))
    assert torch.equal(out, reference(batch(0)[0].bfloat16()))
    many.step()
    assert_same_masks(one, many)


def initialize(model):
    """Memory, and the values of `mlp()`, for a model on the meta device."""
    model.to_empty(device="cpu")
    fresh = dict(mlp().named_parameters())
    with torch.no_grad():
        for name, p in model.named_parameters():
            copy_values(p, fresh[name.replace("parametrizations.", "").replace(".original", "")].detach())


def meta_device(early):
    """Masks that were read before `to_empty` are sharded before there is memory."""
    one, many = ScopeSparsifier(), ScopeSparsifier()
    whole(mlp(), one, CONFIGS["global"])
    sharded(mlp("meta"), many, CONFIGS["global"])
    if early:
        assert all(is_sharded(many.mask(g["tensor_fqn"])) for g in many.groups)
    initialize(many.model)
    x = batch(0)[0]
    assert torch.equal(many.model(x), one.model(x))
    for s in (one, many):
        s.step()
    assert_same_masks(one, many)
    assert torch.equal(many.model(x), one.model(x))


def checkpointed_activations():
    """Masks are gathered again where the forward pass is run again."""
    from torch.utils.checkpoint import checkpoint

    one, many = pair()
    x = batch(1)[0].requires_grad_()
    one.model(x).square().mean().backward()
    want = x.grad.clone()
    x.grad = None
    checkpoint(many.model, x, use_reentrant=False).square().mean().backward()
    torch.testing.assert_close(x.grad, want, rtol=1e-5, atol=1e-7)


def wrong_order():
    model = shard(mlp())
    with pytest.raises(SparsityError, match=r"0.weight: fully_shard was applied to '0' already.*Call prepare first"):
        ScopeSparsifier().prepare(model, None)
    with pytest.raises(SparsityError, match=r"4.weight: fully_shard was applied to the model already"):
        ScopeSparsifier().prepare(model, [{"tensor_fqn": "4.weight"}])
    assert not hasattr(model[0], "parametrizations")


def squash_of_a_part():
    """FSDP2's records of a module around the model could not be updated: an error before anything is written."""
    from torch.distributed.fsdp import fully_shard

    outer, many = nn.Sequential(mlp()), ScopeSparsifier()
    whole(outer[0], many, CONFIGS["global"])
    fully_shard(outer)
    many.step()
    before = outer(x := batch(0)[0])
    outer.reshard()
    with pytest.raises(SparsityError, match=r"0.weight was sharded by .* around the prepared model.*that you wrap"):
        many.squash_mask()
    assert torch.equal(outer(x), before)
    plain, back = mlp(), ScopeSparsifier()
    whole(plain, back, CONFIGS["global"])
    outer.reshard()
    back.load_state_dict(many.state_dict())
    back.squash_mask()
    assert torch.equal(plain(x), before)


def after_an_eval_pass():
    one, many = pair(put=functools.partial(sharded, reshard_after_forward=False), is_stepped=False)
    with torch.no_grad():
        many.model(batch(0)[0])
    for s in (one, many):
        s.step()
    assert_same_masks(one, many)
    assert all(is_sharded(m["mask"]) for m in many.state.values())
    for leave in (many.squash_mask, lambda: None):
        with torch.no_grad():
            many.model(batch(0)[0])
        assert many.check() == 1
        leave()


def stock_arguments():
    for make in (
        functools.partial(WeightNormSparsifier, 0.6, (1, 4)),
        functools.partial(WeightNormSparsifier, 0.5, (2, 3), 4),
        functools.partial(NearlyDiagonalSparsifier, 3),
    ):
        one, many = pair(None, make)
        one.step()
        many.step()
        assert_same_masks(one, many)
        assert [r.sparsity for r in one.report()] == [r.sparsity for r in many.report()]


def one_tensor_by_hand():
    one, many = pair(CONFIGS["mixed"], is_stepped=False)
    for s in (one, many):
        s.update_mask(**{**s.groups[2], "sparsity_level": 0.75})
    assert_same_masks(one, many)


def another_parametrization_below():
    model = mlp()
    nn.utils.parametrizations.weight_norm(model[0])
    many = ScopeSparsifier()
    sharded(model, many, CONFIGS["2:4"])
    with pytest.raises(SparsityError, match=r"0.weight: _WeightNorm is below its mask"):
        many.step()


def what_torch_may_change():
    """Without FSDP2's records: an error before anything is written."""
    from torch.distributed.fsdp import FSDPModule

    _, many = pair()
    before = {name: local(t).clone() for name, t in many.model.state_dict().items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FSDPModule, "_get_fsdp_state", lambda self: None)
        patch.setattr(FSDPModule, "reshard", lambda self: None)
        with refuses("cannot find fully_shard's records of its parameters in this version of torch"):
            many.squash_mask()
    assert all(torch.equal(local(t), before[name]) for name, t in many.model.state_dict().items())
    many.squash_mask()


def masks_of_other_meshes():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    world = distributed.get_world_size()
    line, square = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (1, world))
    mask = distribute_tensor(torch.ones(6, 4, dtype=torch.bool), line, [Shard(0)])
    weight = distribute_tensor(torch.ones(6, 4), square, [Replicate(), Shard(1)])
    with pytest.raises(SparsityError, match=r"neither is part of the other. Name the dimensions"):
        placed_like(mask, weight)
    for to in ([Shard(1)], [Replicate()]):  # on its own mesh a mask takes any placement
        weight = distribute_tensor(torch.ones(6, 4), line, to)
        assert placed_like(mask, weight).placements == tuple(to)


def other_strides():
    """A shard made by hand need not be contiguous; neither is its mask."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    rank, world = distributed.get_rank(), distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    whole_weight = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    for place, part in ((Shard(0), whole_weight.chunk(world)[rank]), (Replicate(), whole_weight)):
        for settings in ({"sparsity_level": 0.5}, {"scope_shape": (1, 2), "nnz": 1}):
            plain, sharded = (nn.Linear(6, 8, bias=False) for _ in range(2))
            plain.weight = nn.Parameter(whole_weight.clone())
            columns = part.t().contiguous().t()
            columns = DTensor.from_local(columns, mesh, [place], shape=(8, 6), stride=(6, 1))
            sharded.weight = nn.Parameter(columns)
            one, many = ScopeSparsifier(**settings), ScopeSparsifier(**settings)
            for s, model in ((one, plain), (many, sharded)):
                s.prepare(model, None)
                s.step()
            assert_same_masks(one, many)


def meshes_are_checked_first():
    """No mask changes before the error, not even one of a plain tensor that has nothing to do with it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    world = distributed.get_world_size()
    line, square = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (1, world), mesh_dim_names=("a", "b"))
    model, many = mlp(), ScopeSparsifier()
    for at, mesh in ((2, line), (4, square["b"])):
        model[at].weight = nn.Parameter(distribute_tensor(model[at].weight.detach(), mesh, [Shard(0)]))
    apart = [{"tensor_fqn": "0.weight"}]
    many.prepare(model, apart + [{"tensor_fqn": f"{at}.weight", "scope_coupling": "both"} for at in (2, 4)])
    with pytest.raises(SparsityError, match=r"with which it shares a budget or its blocks, on"):
        many.step()
    assert all(bool(local(many.mask(g["tensor_fqn"])).all()) for g in many.groups)


def removal_is_refused():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh, x = init_device_mesh("cpu", (distributed.get_world_size(),)), batch(0)[0]
    rows = parallelize_module(mlp(width=24), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    hidden = Coupling({"0.weight": "u i", "0.bias": "u", "2.weight": "o u"})
    for model in (shard(mlp()), rows):
        for call in (lambda m: shrink(m, x), lambda m: removable(m, x), lambda m: compact(m, hidden, x)):
            with refuses("0.weight is sharded; remove units before parallelize_module"):
                call(model)
    model = fully_shard(mlp())
    model(x)
    assert not is_sharded(model[0].weight)
    for call in (lambda m: shrink(m, x), lambda m: removable(m, x)):
        with refuses("the model is sharded; remove units before parallelize_module"):
            call(model)
    wrapped = nn.parallel.DistributedDataParallel(mlp())
    with refuses("shrink: model is a DistributedDataParallel; give its .module"):
        shrink(wrapped, x)
    assert shrink(wrapped.module, x)[1].difference <= 1e-5


def hooks_that_change_while_gathered():
    model, seen = shard(mlp()), []

    def noting(name):
        return lambda *_: seen.append(name)

    layer = model[0]
    first = layer.register_forward_pre_hook(noting("first"), prepend=True)
    removed, kept = (layer.register_forward_hook(noting(name)) for name in ("removed", "kept"))
    before, after = list(layer._forward_pre_hooks), list(layer._forward_hooks)
    with gathered(model, [layer], False):
        removed.remove()
        assert set(layer._forward_pre_hooks) == {first.id} and set(layer._forward_hooks) == {kept.id}
        layer.register_forward_pre_hook(noting("added before"))
        layer.register_forward_hook(noting("added after"))
    after.remove(removed.id)
    assert list(layer._forward_pre_hooks)[:-1] == before and list(layer._forward_hooks)[:-1] == after
    model(batch(0)[0])
    assert seen == ["first", "added before", "kept", "added after"]


def state_dicts():
    one, many = pair()
    for state in (one.state_dict(), many.state_dict()):  # whole masks and sharded ones, into both
        for loaded in pair(is_stepped=False):
            loaded.load_state_dict(state)
            assert_same_masks(one, loaded)
    _, loaded = pair(is_stepped=False)
    loaded.load_state_dict(many.state_dict())
    loaded.model.load_state_dict(many.model.state_dict())
    assert_same_masks(one, loaded)


def cases():
    for config in ("2:4", "mixed"):
        yield f"every method {config}", functools.partial(every_method, config)
    offloaded = functools.partial(sharded, offload_policy=offload())
    yield "every method global, offloaded", functools.partial(every_method, "global", offloaded)
    for early in (False, True):
        yield f"meta {early}", functools.partial(meta_device, early)
    for case in (
        gradients_are_masked_and_hidden_nan_does_no_harm,
        mixed_precision,
        checkpointed_activations,
        wrong_order,
        squash_of_a_part,
        after_an_eval_pass,
        other_strides,
        meshes_are_checked_first,
        stock_arguments,
        one_tensor_by_hand,
        another_parametrization_below,
        state_dicts,
        removal_is_refused,
        hooks_that_change_while_gathered,
        what_torch_may_change,
        masks_of_other_meshes,
    ):
        yield case.__name__, case
