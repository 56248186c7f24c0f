"""The Triton kernels on a GPU, at real sizes, bit for bit against the reference; nothing waits for the device."""

import pytest
import torch
from interpreted_kernels import agree
from kernel_cases import KINDS, as_request, blocks_of, generator, integers, scope_mask, scopes, scores_like
from torch import nn

from sparsekit_ao import ScopeSparsifier, patterns
from sparsekit_ao.selection import fill_masks, keep_mask
from sparsekit_ao.structure.windows import ScopeWindows, Window

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
    for ranked in (scores, scores.abs()):
        assert torch.equal(keep_mask(ranked, keep, impl="triton"), keep_mask(ranked, keep, impl="reference"))
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
    agree([ScopeWindows(windows=(member,), shape=scope)], keep)
    if keep < 10:
        member.mask.fill_(True)  # the first stage's choice, so that a later one has something to choose among
        scope_mask([ScopeWindows(windows=(member,), shape=scope)], keep, impl="reference")
        assert bool(member.mask.any())
        agree([ScopeWindows(windows=(member,), shape=scope)], keep - 1, within_mask=True)


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
        scope_mask([ScopeWindows(windows=(member,), shape=(2048, 2048))], 3_000_001, impl="triton")
        assert torch.equal(member.mask, mask), turn


def test_strides_and_couplings():
    conv = torch.randn(256, 128, 3, 3, generator=generator()).cuda().to(memory_format=torch.channels_last)
    mask = torch.zeros_like(conv, dtype=torch.bool)
    agree([ScopeWindows(windows=(Window(shape=(1, 1, 1, 1), values=conv, mask=mask),), shape=(1, 4, 1, 1))], 2)
    agree([ScopeWindows(windows=(Window(shape=(1, 1, 1, 1), values=conv, mask=mask),), shape=(256, 128, 3, 3))], 90000)
    gate, down = integers((1024, 512)).cuda(), integers((512, 1024), seed=1).cuda()
    members = (blocks_of(gate, (1, 512)), blocks_of(down, (512, 1), (1, 0)))
    agree([ScopeWindows(windows=members, shape=(1024, 1))], 300)
    agree([scopes(gate, (1, 1), (1024, 512)), scopes(down.t(), (1, 1), (1024, 512))], 400000)


@pytest.mark.slow
def test_more_than_2_31_elements():
    if torch.cuda.get_device_properties(0).total_memory < 60 << 30:
        pytest.skip("needs 60 GiB")
    rows, width = (1 << 16) + 8, 1 << 15
    values = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    mask = torch.zeros(rows, width, device="cuda", dtype=torch.bool)
    member = Window(shape=(1, 1), values=values, mask=mask)
    scope_mask([ScopeWindows(windows=(member,), shape=(1, 4))], 2, impl="triton")
    expected = torch.zeros(8, width, device="cuda", dtype=torch.bool)
    tail = Window(shape=(1, 1), values=values[-8:], mask=expected)
    scope_mask([ScopeWindows(windows=(tail,), shape=(1, 4))], 2, impl="reference")
    assert torch.equal(mask[-8:], expected)
    keep = rows * width // 2 + 11
    scope_mask([ScopeWindows(windows=(member,), shape=(rows, width))], keep, impl="triton")
    assert int(mask.sum(dtype=torch.int64)) == keep
    dropped = torch.stack([values[r].abs().masked_fill(mask[r], 0).max() for r in range(0, rows, 512)]).max()
    kept = torch.stack([values[r].abs().masked_fill(~mask[r], 9).min() for r in range(0, rows, 512)]).min()
    assert bool(kept >= dropped)


def test_a_captured_update_follows_the_weights_and_the_budget():
    values = torch.randn(1024, 1024, device="cuda").bfloat16()
    budgets = [torch.tensor(n, device="cuda") for n in (2, 500_000, 600)]
    patterns_of = (((1, 1), (1, 4)), ((1, 1), (1024, 1024)), ((32, 32), (32, 32)))
    requests = [as_request([scopes(values, *s)], keep) for s, keep in zip(patterns_of, budgets, strict=True)]
    fill_masks(requests, impl="triton")  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fill_masks(requests, impl="triton")
    for numbers in ((2, 500_000, 600), (1, 7, 1), (4, 1 << 20, 1024), (0, 0, 0)):
        values.copy_(torch.randint(-4, 5, values.shape, device="cuda"))
        for keep, number in zip(budgets, numbers, strict=True):
            keep.fill_(number)
        graph.replay()
        for request, shapes in zip(requests, patterns_of, strict=True):
            expected = scopes(values, *shapes)
            scope_mask([expected], int(request.keep), impl="reference")
            assert torch.equal(request.windows[0].mask, expected.windows[0].mask)


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
