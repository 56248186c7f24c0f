"""Whole runs on a GPU; without one they run on the CPU, so that they are known to be right but for the device."""

import math
import warnings

import pytest
import torch
from growing import batch, mlp
from stock import reloaded
from torch.nn import functional as F

from sparsekit_ao import GMP, SNFS, ProximalSparsifier, RigL, ScopeSparsifier, one_shot, patterns
from sparsekit_ao.distributed import full_tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HAS_GPU = DEVICE == "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
    *([] if HAS_GPU else [pytest.mark.nightly]),  # other tests see on the CPU what these would
]


def integer_mlp():
    """Weights whose sums of squares are exact in any order, so that masks are the same bits on every device."""
    model = mlp()
    with torch.no_grad():
        for k, p in enumerate(model.parameters()):
            p.copy_(torch.randint(-4, 5, p.shape, generator=torch.Generator().manual_seed(k)))
    return model


def loss_of(model, step):
    x, y = batch(step)
    return F.cross_entropy(model(x.to(DEVICE)), y.to(DEVICE))


def shard(model):
    from torch.distributed.fsdp import fully_shard

    for layer in (model[0], model[2]):
        fully_shard(layer)
    return fully_shard(model)


def masks_of(sparsifier):
    return {g["tensor_fqn"]: full_tensor(sparsifier.mask(g["tensor_fqn"])).cpu() != 0 for g in sparsifier.groups}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, mask in one.items():
        assert torch.equal(mask, other[name]), name


STRUCTURES = {
    "2:4": patterns.n_m(2, 4),
    "single weights": patterns.unstructured(0.6),
    "blocks": patterns.blocks(4, 4, 0.5),
    "rows": patterns.rows(0.5),
    "V:N:M": patterns.v_n_m(4, 2, 4),
    "one budget over all": {"scope_coupling": "all", "sparsity_level": 0.7},
    "partial edges": {**patterns.blocks(5, 5, 0.5), "edge": "partial"},
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_masks_checkpoints_and_squashed_weights_are_those_of_the_cpu(name):
    runs = []
    for device in ("cpu", DEVICE):
        model, sparsifier = integer_mlp().to(device), ScopeSparsifier(**STRUCTURES[name])
        sparsifier.prepare(model, None)
        sparsifier.step()
        sparsifier.step()
        sparsifier.check()
        assert "0.weight" in str(sparsifier.report())
        runs.append((model, sparsifier))
    (plain, theirs), (model, ours) = runs
    masks = masks_of(theirs)
    assert_same(masks_of(ours), masks)
    state, masked = reloaded(ours.state_dict()), reloaded(model.state_dict())
    loss_of(model, 0).backward()  # gradients of kept weights alone
    kept = model[0].parametrizations.weight[0].mask != 0
    assert not model[0].parametrizations.weight.original.grad[~kept].any()
    again, loaded = integer_mlp().to(DEVICE), ScopeSparsifier(**STRUCTURES[name])
    loaded.prepare(again, None)
    again.load_state_dict(masked)
    loaded.load_state_dict(state)
    assert_same(masks_of(loaded), masks)
    for sparsifier in (theirs, ours, loaded):
        sparsifier.squash_mask()
        assert sparsifier.check() > 0
    for squashed in (model, again):
        for (key, weight), expected in zip(squashed.state_dict().items(), plain.state_dict().values(), strict=True):
            assert torch.equal(weight.cpu(), expected), key


def train(method, steps, state=None, broken=()):
    """(masks after every step, state before the last one, sparsifier) of training with scaled 16-bit gradients."""
    model = mlp().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, fused=True)
    sparsifier = method(optimizer)
    sparsifier.prepare(model, None)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=64.0)
    parts, found, held = (model, optimizer, sparsifier, scaler), {}, None
    for part, saved in zip(parts, state or (), strict=False):
        part.load_state_dict(saved)
    for step in steps:
        if step == steps[-1]:
            held = [reloaded(part.state_dict()) for part in parts]
        optimizer.zero_grad()
        with torch.autocast(DEVICE, dtype=torch.float16 if HAS_GPU else torch.bfloat16):
            loss = loss_of(model, step)
        scaler.scale(loss * (math.inf if step in broken else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        sparsifier.step()
        found[step] = masks_of(sparsifier)
    return found, held, sparsifier


METHODS = {
    "RigL": lambda o: RigL(0.75, o, until=100, update_every=2),
    "SNFS": lambda o: SNFS(0.75, o, until=100, update_every=2),
    "GMP": lambda o: GMP(0.75, o, until=8, update_every=2),
    "RigL of 2:4": lambda o: RigL(None, o, until=100, update_every=2, **patterns.n_m(2, 4)),
    "RigL of one budget": lambda o: RigL(0.75, o, until=100, update_every=2, prune="global"),
}


@pytest.mark.parametrize("name", METHODS)
def test_dynamic_masks_with_scaled_gradients_continue_from_a_checkpoint(name):
    found, held, sparsifier = train(METHODS[name], range(1, 9))
    moved = sparsifier.last_update
    assert moved.iteration == 8 and moved.kept == {n: int(m.sum()) for n, m in found[8].items()}
    assert sum(moved.pruned.values()) > 0 and sparsifier.check() >= 3
    resumed, _, other = train(METHODS[name], range(8, 9), held)
    assert_same(resumed[8], found[8])
    assert other.last_update == moved
    sparsifier.squash_mask()


def test_an_update_waits_for_a_step_that_gradient_scaling_did_not_skip():
    found, _, sparsifier = train(METHODS["RigL"], range(1, 4), broken=[2])
    assert sparsifier.last_update.iteration == 3
    assert_same(found[2], found[1])


@pytest.mark.skipif(not HAS_GPU, reason="only a GPU is waited for")
@pytest.mark.parametrize(("name", "most"), [("RigL", 1), ("SNFS", 2), ("GMP", 1), ("RigL of 2:4", 1)])
def test_an_update_on_a_gpu_waits_at_most_once_for_gradients_and_once_for_budgets(name, most):
    model = mlp().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    sparsifier = METHODS[name](optimizer)
    sparsifier.prepare(model, None)
    for step in range(1, 5):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            sparsifier.step()
        torch.cuda.set_sync_debug_mode("default")
        waits = [w for w in seen if "called a synchronizing CUDA operation" in str(w.message)]
        assert len(waits) <= (most if step % 2 == 0 else 0), [(w.filename, w.lineno) for w in waits]


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_proximal_steps_drop_the_blocks_that_they_drop_on_the_cpu(optimizer):
    results = []
    for device in ("cpu", DEVICE):
        model = mlp().to(device)
        steps = getattr(torch.optim, optimizer)(model.parameters(), lr=0.05)
        sparsifier = ProximalSparsifier(sparsity_level=0.5, optimizer=steps, pattern=patterns.blocks(1, 4))
        sparsifier.prepare(model, None)
        for step in range(3):
            steps.zero_grad()
            x, y = (t.to(device) for t in batch(step))
            F.cross_entropy(model(x), y).backward()
            steps.step()
            sparsifier.step()
        results.append([p.detach().cpu() for p in model.parameters()])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours == 0, theirs == 0) and torch.allclose(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("compensate", ["admm", "sparsegpt", "least_squares"])
def test_one_pass_leaves_the_error_that_it_leaves_on_the_cpu(compensate):
    errors = []
    for device in ("cpu", DEVICE):
        model = mlp().to(device)
        sparsifier = ScopeSparsifier(nnz=2, scope_shape=(1, 4))
        sparsifier.prepare(model, None)
        batches = [batch(step, rows=16)[0].to(device) for step in range(4)]
        with torch.no_grad():
            dense = [model(x) for x in batches]
        one_shot(sparsifier, batches, compensate=compensate, progress=False)
        assert sparsifier.check() == 144
        with torch.no_grad():
            errors.append([float(F.mse_loss(model(x), y)) for x, y in zip(batches, dense, strict=True)])
        sparsifier.squash_mask()
    assert errors[1] == pytest.approx(errors[0], rel=0.05)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # the compiler's own
def test_a_compiled_model_is_one_graph_and_follows_its_masks():
    model, sparsifier = integer_mlp().to(DEVICE), ScopeSparsifier(**patterns.n_m(2, 4))
    sparsifier.prepare(model, None)
    compiled = torch.compile(model, fullgraph=True, backend="inductor" if HAS_GPU else "aot_eager")
    x = batch(0)[0].to(DEVICE)
    compiled(x).sum().backward()
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(2):
            sparsifier.step()
            with torch.no_grad():
                model[0].parametrizations.weight.original.mul_(-1).roll(1, 1)
            assert torch.allclose(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    torch.compiler.reset()


@pytest.fixture
def _one_rank():
    """A process group of this process alone: NCCL on a GPU, gloo on the CPU."""
    backend, device = ("nccl", torch.device("cuda", 0)) if HAS_GPU else ("gloo", None)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1, device_id=device)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("name", ["2:4", "single weights", "one budget over all", "partial edges", "RigL"])
def test_sharded_by_fsdp2_on_one_rank(name):
    runs = []
    for is_sharded in (False, True):
        model = integer_mlp().to(DEVICE)
        sparsifier = RigL(0.75, until=100, update_every=2) if name == "RigL" else ScopeSparsifier(**STRUCTURES[name])
        sparsifier.prepare(model, None)
        model = shard(model) if is_sharded else model
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        sparsifier.attach(optimizer)
        for step in range(1, 5):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.grad.sign_()  # steps of whole numbers, so that sums of squares stay exact
            optimizer.step()
            sparsifier.step()
        runs.append((masks_of(sparsifier), sparsifier.check(), getattr(sparsifier, "last_update", None)))
        sparsifier.squash_mask()
        runs[-1] += ({n: full_tensor(p.detach()) for n, p in model.named_parameters()},)
    (masks, *numbers, weights), (other_masks, *other_numbers, other_weights) = runs
    assert_same(masks, other_masks)
    assert_same(weights, other_weights)
    assert numbers == other_numbers and (name != "RigL" or numbers[1].iteration == 4)
