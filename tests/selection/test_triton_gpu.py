"""The Triton kernels on a GPU, at real sizes, bit for bit against the reference; nothing waits for the device."""

import math

import pytest
import torch
from interpreted_kernels import agree, blocks_of, integers, scopes
from kernel_cases import KINDS, generator, scores_like
from torch import nn

from sparsekit_ao import BlockSpec, ScopeSparsifier, ScopeSpec, SparsityError, patterns
from sparsekit_ao.selection import Blocks, Scopes, Update, block_scores, keep_mask, scope_mask, scope_masks
from sparsekit_ao.selection import triton as gpu_kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def _no_waiting():
    """Any wait for the device is an error, outside of what a test wraps in `look`."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def look(check):
    """The result of a check that may wait for the device."""
    torch.cuda.set_sync_debug_mode("default")
    found = check()
    torch.cuda.set_sync_debug_mode("error")
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [4, 16, 17, 1000, 11008, 20000, 40000, 1 << 20])
def test_rows_equal_the_reference(width, kind, dtype):
    rows = max(2, (1 << 21) // width)
    scores = scores_like(kind, rows, width, dtype).cuda()
    keep = torch.arange(rows, device="cuda") * 7919 % (width + 1)
    for magnitude in (False, True):
        found = keep_mask(scores, keep, magnitude=magnitude, impl="triton")
        assert torch.equal(found, keep_mask(scores, keep, magnitude=magnitude, impl="reference"))
    candidates = torch.rand(rows, width, device="cuda") < 0.7
    found = keep_mask(scores, keep, candidates=candidates, impl="triton")
    assert torch.equal(found, keep_mask(scores, keep, candidates=candidates, impl="reference"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("block", "scope", "keep"),
    [
        ((1, 1), (1, 4), 2),
        ((1, 1), (1, 16), 5),
        ((1, 2), (1, 4), 2),
        ((1, 1), (4, 1), 2),
        ((64, 1), (1, 8), 4),
        ((1, 1), (1, 4096), 1000),
        ((1, 1), (4096, 4096), 4096 * 2048),
        ((1, 1), (4096, 4096), 4096 * 410),
        ((1, 4), (4096, 1024), 4096 * 300),
        ((32, 32), (128, 128), 3277),
        ((1, 4096), (4096, 1), 1000),
        ((4096, 1), (1, 4096), 1000),
    ],
)
def test_patterns_at_real_sizes(block, scope, keep, dtype):
    single = block == (1, 1)
    values = torch.randn(4096, 4096, generator=generator()) if single else integers((4096, 4096))
    member = blocks_of(values.to(dtype).cuda(), block)
    agree([Scopes(members=(member,), shape=scope)], keep)
    if keep < 10:
        member.mask.fill_(True)  # the first stage's choice, so that a later one has something to choose among
        scope_mask([Scopes(members=(member,), shape=scope)], keep, impl="reference")
        assert bool(member.mask.any())
        agree([Scopes(members=(member,), shape=scope)], keep - 1, among_kept=True)


def test_ties_zeros_and_masked_weights_of_a_whole_tensor():
    weight = torch.randn(2048, 2048, generator=generator()).bfloat16().cuda()
    for values in (weight, weight * 0, torch.where(weight.abs() > 0.7, weight, 0), weight.sign()):
        for keep in (0, 1, 1 << 21, (1 << 22) - 5, 1 << 22):
            agree([scopes(values, (1, 1), (2048, 2048))], keep)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["random", "all equal", "half equal"])
def test_a_repeated_update_is_the_same_whatever_its_workspace_held_before(kind, dtype):
    """A difference would be a race, or a read of what was never written."""
    values = scores_like(kind, 1, 1 << 22, dtype).view(2048, 2048).cuda()
    (mask,) = agree([scopes(values, (1, 1), (2048, 2048))], 3_000_001)
    member = blocks_of(values, (1, 1))
    for turn in range(40):
        dirt = [torch.randint(0, 1 << 31, (1 << 19,), device="cuda") for _ in range(3)]
        del dirt  # the caching allocator hands out the same memory again
        scope_mask([Scopes(members=(member,), shape=(2048, 2048))], 3_000_001, impl="triton")
        assert torch.equal(member.mask, mask), turn


def test_strides_and_couplings():
    conv = torch.randn(256, 128, 3, 3, generator=generator()).cuda().to(memory_format=torch.channels_last)
    mask = torch.zeros_like(conv, dtype=torch.bool)
    agree([Scopes(members=(Blocks(shape=(1, 1, 1, 1), values=conv, mask=mask),), shape=(1, 4, 1, 1))], 2)
    agree([Scopes(members=(Blocks(shape=(1, 1, 1, 1), values=conv, mask=mask),), shape=(256, 128, 3, 3))], 90000)
    gate, down = integers((1024, 512)).cuda(), integers((512, 1024), seed=1).cuda()
    members = (blocks_of(gate, (1, 512)), blocks_of(down, (512, 1), (1, 0)))
    agree([Scopes(members=members, shape=(1024, 1))], 300)
    agree([scopes(gate, (1, 1), (1024, 512)), scopes(down.t(), (1, 1), (1024, 512))], 400000)


@pytest.mark.slow
def test_more_than_2_31_elements():
    if torch.cuda.get_device_properties(0).total_memory < 60 << 30:
        pytest.skip("needs 60 GiB")
    rows, width = (1 << 16) + 8, 1 << 15
    values = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    mask = torch.zeros(rows, width, device="cuda", dtype=torch.bool)
    member = Blocks(shape=(1, 1), values=values, mask=mask)
    scope_mask([Scopes(members=(member,), shape=(1, 4))], 2, impl="triton")
    expected = torch.zeros(8, width, device="cuda", dtype=torch.bool)
    tail = Blocks(shape=(1, 1), values=values[-8:], mask=expected)
    scope_mask([Scopes(members=(tail,), shape=(1, 4))], 2, impl="reference")
    assert torch.equal(mask[-8:], expected)
    keep = rows * width // 2 + 11
    scope_mask([Scopes(members=(member,), shape=(rows, width))], keep, impl="triton")
    assert int(mask.sum(dtype=torch.int64)) == keep
    dropped = torch.stack([values[r].abs().masked_fill(mask[r], 0).max() for r in range(0, rows, 512)]).max()
    kept = torch.stack([values[r].abs().masked_fill(~mask[r], 9).min() for r in range(0, rows, 512)]).min()
    assert bool(kept >= dropped)


def test_a_captured_update_follows_the_weights_and_the_budget():
    values = torch.randn(1024, 1024, device="cuda").bfloat16()
    masks = [torch.zeros(1024, 1024, dtype=torch.bool, device="cuda") for _ in range(3)]
    keep = torch.tensor(500_000, device="cuda")
    two = torch.tensor(2, device="cuda")
    blocks = torch.tensor(600, device="cuda")
    updates = [
        Update(scopes=(Scopes(members=(Blocks(shape=(1, 1), values=values, mask=masks[0]),), shape=(1, 4)),), keep=two),
        Update(
            scopes=(Scopes(members=(Blocks(shape=(1, 1), values=values, mask=masks[1]),), shape=(1024, 1024)),),
            keep=keep,
        ),
        Update(
            scopes=(Scopes(members=(Blocks(shape=(32, 32), values=values, mask=masks[2]),), shape=(32, 32)),),
            keep=blocks,
        ),
    ]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        scope_masks(updates, impl="triton")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scope_masks(updates, impl="triton")
    for n, k, b in ((2, 500_000, 600), (1, 7, 1), (4, 1 << 20, 1024), (0, 0, 0)):
        values.copy_(torch.randint(-4, 5, values.shape, device="cuda"))
        two.fill_(n), keep.fill_(k), blocks.fill_(b)
        graph.replay()
        for update in updates:
            (scoped,), (member,) = update.scopes, update.scopes[0].members
            expected = torch.zeros_like(member.mask)
            own = Blocks(shape=member.shape, values=values, mask=expected)
            scope_mask([Scopes(members=(own,), shape=scoped.shape)], int(update.keep), impl="reference")
            assert torch.equal(member.mask, expected)


def test_a_capture_of_tensors_never_updated_is_refused():
    values = torch.randn(64, 64, device="cuda")
    mask = torch.zeros(64, 64, dtype=torch.bool, device="cuda")
    graph = torch.cuda.CUDAGraph()

    def capture():
        with torch.cuda.graph(graph):
            values.mul_(2)  # the end of an empty capture warns, and that warning would replace the error
            scope_mask([Scopes(members=(Blocks(shape=(1, 1), values=values, mask=mask),), shape=(1, 4))], 2)

    with pytest.raises(SparsityError, match="Update the same tensors once before the capture"):
        capture()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("soft", [True, False])
@pytest.mark.parametrize(
    ("block", "scope"), [((1, 16), (1, 1)), ((1, 1), (1, 4096)), ((32, 32), (1, -1)), ((1, -1), (1, 1))]
)
def test_thresholds_at_real_sizes(block, scope, soft, dtype):
    whole = tuple(4096 if n == -1 else n for n in block)
    t = torch.rand(1, device="cuda") * (math.prod(whole) ** 0.5) * 2
    results = []
    for impl in ("triton", "reference"):
        weight = integers((4096, 4096)).to(dtype).cuda()
        spec = ScopeSpec(BlockSpec(weight, block), scope)
        (spec.soft_threshold if soft else spec.hard_threshold)(t, impl=impl)
        results.append(weight)
    ours, theirs = results
    assert torch.equal(ours == 0, theirs == 0)
    assert (
        torch.allclose(ours, theirs, rtol=1e-6 if dtype == torch.float32 else 2e-2) if soft else torch.equal(*results)
    )


def test_thresholds_counted_in_64_bits_equal_those_in_32():
    for block, diagonal in (((1, 1), None), ((32, 32), None), ((1, 16), torch.rand(1024, 1024, device="cuda") + 0.1)):
        found = []
        for big in (False, True):
            values = torch.randn(1024, 1024, generator=generator()).bfloat16().cuda()
            scoped = Scopes(members=(Blocks(shape=block, values=values, mask=diagonal),), shape=(1, 1))
            t = torch.linspace(0, 40, math.prod(scoped.scope_grid), device="cuda").view(scoped.scope_grid)
            if diagonal is None:
                gpu_kernels.threshold(scoped, t, soft=True, limits=gpu_kernels.Limits(big=big))
            else:
                settings = {"factor": 1.0, "eps": 0.0, "atol": 1e-6, "max_iter": 50}
                misses = gpu_kernels.condition(scoped, t, **settings, limits=gpu_kernels.Limits(big=big))
                assert not misses.any()
            found.append(values)
        assert torch.equal(*found) and bool((found[0] == 0).any()) and bool((found[0] != 0).any())


def test_conditioned_thresholds_equal_the_reference():
    diagonal = torch.rand(2048, 2048, generator=generator(1)).cuda() * 5 + 0.01
    found = []
    for impl in ("triton", "reference"):
        weight = torch.randn(2048, 2048, generator=generator()).bfloat16().cuda()
        BlockSpec(weight, (1, 16)).soft_threshold(2.0, diagonal, scale=True, eps=1e-8, impl=impl)
        found.append(weight)
    assert torch.equal(found[0] == 0, found[1] == 0) and torch.allclose(*found, rtol=2e-2)
    with pytest.raises(SparsityError, match="needs conditioners > 0, got 0.0"):
        BlockSpec(weight, (1, 16)).soft_threshold(2.0, diagonal * 0, impl="triton")


@pytest.mark.usefixtures("_no_waiting")
def test_a_threshold_that_is_a_number_never_waits_for_the_device():
    weight = look(lambda: torch.randn(512, 512, device="cuda"))
    for spec in (BlockSpec(weight, (1, 4)), ScopeSpec(BlockSpec(weight, (1, 4)), (1, -1))):
        spec.soft_threshold(0.1, impl="triton")
        spec.hard_threshold(0.5, impl="triton")


def test_sums_of_blocks_are_the_references_bits():
    for block in ((1, 4), (8, 1), (4, 8), (32, 32)):
        weight = torch.randn(2048, 2048, generator=generator()).cuda()
        for norm in (1, 2):
            for values in (weight, weight.t()):
                members = (blocks_of(values, block),)
                expected = block_scores(members, norm, impl="reference")
                assert torch.equal(block_scores(members, norm, impl="triton"), expected)
        agree([scopes(weight, block, (1, 8))], 3)


def test_streams_share_tables_and_numbers_follow_their_order():
    values = torch.randn(1024, 1024, device="cuda").bfloat16()
    mask = torch.zeros(1024, 1024, dtype=torch.bool, device="cuda")
    scoped = Scopes(members=(Blocks(shape=(1, 1), values=values, mask=mask),), shape=(1, 4))
    torch.cuda.synchronize()
    last = torch.cuda.current_stream()
    for turn in range(40):
        stream = torch.cuda.Stream()
        stream.wait_stream(last)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000)
            scope_masks([Update(scopes=(scoped,), keep=turn % 5)], impl="triton")
            counts = mask.view(-1, 4).sum(1)
        last = stream
        torch.cuda.current_stream().wait_stream(stream)
        assert bool((counts == turn % 5).all())


@pytest.mark.usefixtures("_no_waiting")
@pytest.mark.parametrize(
    "pattern",
    [
        patterns.n_m(2, 4),
        patterns.unstructured(0.5),
        patterns.blocks(32, 32, 0.8),
        patterns.rows(),
        patterns.v_n_m(64, 2, 8),
        {"scope_coupling": "all", "sparsity_level": 0.9},
    ],
)
def test_a_step_never_waits_for_the_device_and_equals_the_cpu(pattern):
    torch.manual_seed(0)
    layers = [nn.Linear(512, 256, bias=False), nn.Linear(256, 512, bias=False), nn.Linear(512, 256, bias=False)]
    cpu = nn.Sequential(*layers)
    for p in cpu.parameters():
        p.data = integers(p.shape, seed=p.shape[0])
    gpu = look(lambda: nn.Sequential(*(nn.Linear(m.in_features, m.out_features, bias=False) for m in layers)).cuda())
    look(lambda: gpu.load_state_dict(cpu.state_dict()))
    ours, theirs = ScopeSparsifier(**pattern), ScopeSparsifier(**pattern)
    look(lambda: ours.prepare(gpu, None))
    theirs.prepare(cpu, None)
    for _ in range(3):
        ours.step()
    theirs.step()
    for name in ("0.weight", "1.weight", "2.weight"):
        assert look(lambda name=name: torch.equal(ours.mask(name).cpu(), theirs.mask(name)))
