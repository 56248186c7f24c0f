"""Cases for `test_sharded`. FSDP2: prepare, then fully_shard; everything a sparsifier does, against one process."""

import functools
import warnings

import pytest
import torch
from grids import EXHAUSTIVE
from stock import refuses
from torch import distributed, nn
from torch.nn import functional as F

from sparsekit_ao import NearlyDiagonalSparsifier, ScopeSparsifier, SparsityError, WeightNormSparsifier
from sparsekit_ao.distributed import full_tensor, is_sharded, local, placed_like

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


def pair(config, make=ScopeSparsifier, mlp=mlp, **kwargs):
    """A sharded model and one that is not, each with its sparsifier."""
    plain, sharded = mlp(), mlp()
    one, many = make(), make()
    one.prepare(plain, config)
    many.prepare(sharded, config)
    shard(sharded, **kwargs)
    return plain, one, sharded, many


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


def every_method(config, **kwargs):
    plain, one, sharded, many = pair(CONFIGS[config], **kwargs)
    optimizers = [torch.optim.AdamW(m.parameters(), 0.01) for m in (plain, sharded)]
    x = batch(0)[0]
    assert torch.equal(sharded(x), plain(x))  # all is kept, and masks are not sharded yet
    for step in range(3):
        for sparsifier in (one, many):
            for g in sparsifier.groups:
                g["sparsity_level"] = 0.3 + 0.1 * step
            sparsifier.step()
        assert_same_masks(one, many)
        assert torch.equal(sharded(x), plain(x)) or step
        torch.testing.assert_close(sharded(x), plain(x), rtol=1e-4, atol=1e-5)
        loss = train(plain, optimizers[0], step)
        mean = train(sharded, optimizers[1], step, mine())
        distributed.all_reduce(mean)
        torch.testing.assert_close(mean / distributed.get_world_size(), loss, rtol=1e-4, atol=1e-5)
    assert many.check() == one.check()
    ranks = kwargs["mesh"].size(-1) if "mesh" in kwargs else distributed.get_world_size()
    for r, q in zip(one.report(), many.report(), strict=True):
        assert q.mask_bytes <= -(-q.shape[0] // ranks) * q.shape[1] and (r.tensor, r.kept) == (q.tensor, q.kept)
    many.squash_mask()
    one.squash_mask()
    assert many.check() == one.check()
    assert list(sharded.state_dict()) == list(plain.state_dict())
    for name, w in plain.state_dict().items():
        got = full_tensor(sharded.state_dict()[name])
        assert torch.equal(got != 0, w != 0), name
        torch.testing.assert_close(got, w, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sharded(x), plain(x), rtol=1e-4, atol=1e-5)
    train(sharded, optimizers[1], 9, mine())  # and it can be trained on
    train(plain, optimizers[0], 9)
    torch.testing.assert_close(sharded(x), plain(x), rtol=1e-3, atol=1e-4)


def one_byte_a_weight_over_the_ranks():
    _, _, sharded, many = pair(CONFIGS["global"])
    many.step()
    found = [b for n, b in sharded.named_buffers() if n.endswith("mask")]
    assert len(found) == 3 and all(is_sharded(b) and b.dtype == torch.bool for b in found)
    for b in found:
        assert local(b).untyped_storage().nbytes() <= -(-b.shape[0] // distributed.get_world_size()) * b.shape[1]
    assert [n for n, _ in sharded.named_parameters()] == [
        f"{k}.{n}" for k in "024" for n in ("bias", "parametrizations.weight.original")
    ]


def gradients_are_masked_and_hidden_nan_does_no_harm():
    plain, one, sharded, many = pair(CONFIGS["global"])
    for s in (one, many):
        s.step()
    for m, s in ((plain, one), (sharded, many)):
        weight = m[0].parametrizations.weight.original
        with torch.no_grad():
            hidden = ~local(s.mask("0.weight"))
            local(weight)[hidden] = float("nan")
    x, _ = batch(1)
    assert torch.equal(sharded(x), plain(x)) and bool(plain(x).isfinite().all())
    for m in (plain, sharded):
        m(x).square().mean().backward()
    for k in (0, 2, 4):
        got = full_tensor(sharded[k].parametrizations.weight.original.grad)
        torch.testing.assert_close(got, plain[k].parametrizations.weight.original.grad, rtol=1e-5, atol=1e-7)
        assert torch.equal(got != 0, plain[k].parametrizations.weight.original.grad != 0)


def mixed_precision():
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    _, one, sharded, many = pair(CONFIGS["global"], mp_policy=policy)
    for s in (one, many):
        s.step()
    assert_same_masks(one, many)  # chosen from the float32 weights
    out = sharded(batch(0)[0])
    assert out.dtype == torch.bfloat16
    out.float().square().mean().backward()
    weight = sharded[0].parametrizations.weight.original
    assert weight.grad.dtype == torch.float32
    assert not bool((full_tensor(weight.grad) * ~full_tensor(many.mask("0.weight"))).any())
    reference = mlp().bfloat16()
    for k in (0, 2, 4):
        with torch.no_grad():
            reference[k].weight.mul_(one.mask(f"{k}.weight"))
    assert torch.equal(out, reference(batch(0)[0].bfloat16()))
    many.step()
    assert_same_masks(one, many)


def meta_device(early):
    """Masks that were read before `to_empty` are sharded before there is memory."""
    model = mlp("meta")
    many = ScopeSparsifier()
    many.prepare(model, CONFIGS["global"])
    shard(model)
    if early:
        assert all(is_sharded(many.mask(g["tensor_fqn"])) for g in many.groups)
    model.to_empty(device="cpu")
    plain, one = mlp(), ScopeSparsifier()
    one.prepare(plain, CONFIGS["global"])
    names = dict(plain.named_parameters())
    with torch.no_grad():
        for name, p in model.named_parameters():
            from sparsekit_ao.distributed import copy_values

            copy_values(p, names[name].detach())
    x = batch(0)[0]
    assert torch.equal(model(x), plain(x))
    for s in (one, many):
        s.step()
    assert_same_masks(one, many)
    assert torch.equal(model(x), plain(x))


def checkpointed_activations():
    """Masks are gathered again where the forward pass is run again."""
    from torch.utils.checkpoint import checkpoint

    plain, one, sharded, many = pair(CONFIGS["global"])
    for s in (one, many):
        s.step()
    x = batch(1)[0].requires_grad_()
    plain(x).square().mean().backward()
    want = x.grad.clone()
    x.grad = None
    checkpoint(sharded, x, use_reentrant=False).square().mean().backward()
    torch.testing.assert_close(x.grad, want, rtol=1e-5, atol=1e-7)


def compiled():
    """Gathering a mask compiles, and a mask update is seen."""
    plain, one, sharded, many = pair(CONFIGS["global"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        fast = torch.compile(sharded, backend="inductor" if EXHAUSTIVE else "aot_eager")
        for level in (0.5, 0.7):
            for s in (one, many):
                for g in s.groups:
                    g["sparsity_level"] = level
                s.step()
            x = batch(0)[0]
            torch.testing.assert_close(fast(x), plain(x), rtol=1e-5, atol=1e-6)


def wrong_order():
    model = shard(mlp())
    with pytest.raises(SparsityError, match=r"0.weight: fully_shard was applied to '0' already.*Call prepare first"):
        ScopeSparsifier().prepare(model, None)
    with pytest.raises(SparsityError, match=r"4.weight: fully_shard was applied to the model already"):
        ScopeSparsifier().prepare(model, [{"tensor_fqn": "4.weight"}])
    assert not hasattr(model[0], "parametrizations")


def of_a_part():
    """A sparsifier of a model around which another module is sharded, after a step."""
    from torch.distributed.fsdp import fully_shard

    outer, many = nn.Sequential(mlp()), ScopeSparsifier()
    many.prepare(outer[0], CONFIGS["global"])
    fully_shard(outer)
    many.step()
    return outer, many


def squash_of_a_part():
    """FSDP2's records could not be updated: an error before anything is written."""
    outer, many = of_a_part()
    x = batch(0)[0]
    before = outer(x)
    outer.reshard()
    with pytest.raises(SparsityError, match=r"0.weight was sharded by .* around the prepared model.*that you wrap"):
        many.squash_mask()
    assert torch.equal(outer(x), before)
    back = ScopeSparsifier()
    plain = mlp()
    back.prepare(plain, CONFIGS["global"])
    outer.reshard()
    back.load_state_dict(many.state_dict())
    back.squash_mask()
    assert torch.equal(plain(x), before)


def gathered_by_a_parent():
    """An eval pass may leave the root's parameters gathered; so may a parent that the sparsifier does not know."""
    outer, many = of_a_part()
    with torch.no_grad():
        outer(batch(0)[0])
    with pytest.raises(SparsityError, match=r"0.weight: its parameter is gathered.*reshard"):
        many.step()
    outer.reshard()
    many.step()


def after_an_eval_pass():
    _, one, sharded, many = pair(CONFIGS["global"], reshard_after_forward=False)
    with torch.no_grad():
        sharded(batch(0)[0])
    for s in (one, many):
        s.step()
    assert_same_masks(one, many)
    assert all(is_sharded(m["mask"]) for m in many.state.values())
    for leave in (many.squash_mask, lambda: None):
        with torch.no_grad():
            sharded(batch(0)[0])
        assert many.check() == 1
        leave()


def stock_arguments():
    for make in (
        functools.partial(WeightNormSparsifier, 0.6, (1, 4)),
        functools.partial(WeightNormSparsifier, 0.5, (2, 3), 4),
        functools.partial(NearlyDiagonalSparsifier, 3),
    ):
        _, one, _, many = pair(None, make)
        for _ in range(2):
            one.step()
            many.step()
        assert_same_masks(one, many)
        assert [r.sparsity for r in one.report()] == [r.sparsity for r in many.report()]


def one_tensor_by_hand():
    _, one, _, many = pair(CONFIGS["mixed"])
    for s in (one, many):
        s.update_mask(**{**s.groups[2], "sparsity_level": 0.75})
    assert_same_masks(one, many)


def another_parametrization_below():
    model = mlp()
    nn.utils.parametrizations.weight_norm(model[0])
    many = ScopeSparsifier()
    many.prepare(model, CONFIGS["2:4"])
    shard(model)
    with pytest.raises(SparsityError, match=r"0.weight: _WeightNorm is below its mask"):
        many.step()


def what_torch_may_change():
    """Without FSDP2's records: an error before anything is written."""
    from torch.distributed.fsdp import FSDPModule

    _, _, sharded, many = pair(CONFIGS["global"])
    many.step()
    before = {name: local(t).clone() for name, t in sharded.state_dict().items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FSDPModule, "_get_fsdp_state", lambda self: None)
        patch.setattr(FSDPModule, "reshard", lambda self: None)
        with refuses("cannot find fully_shard's records of its parameters in this version of torch"):
            many.squash_mask()
    assert all(torch.equal(local(t), before[name]) for name, t in sharded.state_dict().items())
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


def state_dicts():
    _, one, sharded, many = pair(CONFIGS["global"])
    for s in (one, many):
        s.step()
    saved = one.state_dict()
    _, _, again, other = pair(CONFIGS["global"])
    other.load_state_dict(saved)  # whole masks into sharded ones
    assert_same_masks(one, other)
    _, _, again, other = pair(CONFIGS["global"])
    other.load_state_dict(many.state_dict())
    again.load_state_dict(sharded.state_dict())
    assert_same_masks(one, other)
    back = ScopeSparsifier()
    back.prepare(mlp(), CONFIGS["global"])
    back.load_state_dict(many.state_dict())  # and sharded ones into whole ones
    assert_same_masks(back, many)


def cases():
    for config in CONFIGS:
        yield f"every method {config}", functools.partial(every_method, config)
    yield "every method global, offloaded", functools.partial(every_method, "global", offload_policy=offload())
    for early in (False, True):
        yield f"meta {early}", functools.partial(meta_device, early)
    for case in (
        one_byte_a_weight_over_the_ranks,
        gradients_are_masked_and_hidden_nan_does_no_harm,
        mixed_precision,
        checkpointed_activations,
        compiled,
        wrong_order,
        squash_of_a_part,
        gathered_by_a_parent,
        after_an_eval_pass,
        other_strides,
        meshes_are_checked_first,
        stock_arguments,
        one_tensor_by_hand,
        another_parametrization_below,
        state_dicts,
        what_torch_may_change,
        masks_of_other_meshes,
    ):
        yield case.__name__, case
