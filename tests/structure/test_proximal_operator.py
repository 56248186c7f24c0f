"""The conditioned proximal operator against an 80-digit solver, and its limits."""

import itertools
import math

import mpmath
import pytest
import torch
from grids import covering

from sparsekit_ao import BlockCoupling, BlockSpec, ScopeSpec, SparsityError
from sparsekit_ao.structure.thresholds import shrink_conditioned, shrunk_blocks

ELEMENTS = (1, 2, 3, 16, 100, 1025)
CONDITIONS = (1.0, 1e3, 1e6, 1e9, 1e12, 1e16)
FRACTIONS = (1e-6, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 1.01)  # of ||Dv||, from which on a block is zero
SPREADS = ("even", "growing", "opposed")
CASES = list(itertools.product(ELEMENTS, CONDITIONS, FRACTIONS, SPREADS))


def exact(v, h, t):
    """The solution by bisection in 80 digits; v and h as float64 values."""
    with mpmath.workdps(80):
        v, h, t = [mpmath.mpf(x) for x in v.tolist()], [mpmath.mpf(x) for x in h.tolist()], mpmath.mpf(t)
        if mpmath.sqrt(mpmath.fsum((a * b) ** 2 for a, b in zip(v, h, strict=True))) <= t:
            return [mpmath.mpf(0)] * len(v)
        s = mpmath.mpf(0)  # Newton's method on 1 / phi rises to the root from 0
        for _ in range(400):
            below = [b * s + t for b in h]
            phi2 = mpmath.fsum((a * b / d) ** 2 for a, b, d in zip(v, h, below, strict=True))
            slope = mpmath.fsum(b * (a * b / d) ** 2 / d for a, b, d in zip(v, h, below, strict=True))
            step = phi2 * (mpmath.sqrt(phi2) - 1) / slope
            s += step
            if step <= s * mpmath.mpf(10) ** -60:
                break
        else:
            raise AssertionError("no root")
        return [b * a * s / (b * s + t) for a, b in zip(v, h, strict=True)]


def case_of(elements, condition, fraction, spread, dtype):
    g = torch.Generator().manual_seed(elements)
    v = torch.randn(elements, generator=g, dtype=torch.float64)
    exponent = torch.linspace(-0.5, 0.5, elements, dtype=torch.float64) if elements > 1 else torch.zeros(1).double()
    h = condition**exponent
    if spread != "even":
        v = v * (h**0.5 if spread == "growing" else h**-1)
    v, h = v.to(dtype), h.to(dtype)
    return v, h, float((v.double() * h.double()).norm() * fraction)


def error_of(w, v, h, t):
    """|w - exact| / |exact|, times 1 - t / ||Dv||, by which a rounding of the data is amplified next to zero."""
    expected = exact(v.double(), h.double(), t)
    with mpmath.workdps(80):
        size = mpmath.sqrt(mpmath.fsum(x * x for x in expected))
        if size == 0:
            assert not w.any()
            return 0.0
        missed = mpmath.fsum((mpmath.mpf(a) - b) ** 2 for a, b in zip(w.double().tolist(), expected, strict=True))
        margin = 1 - mpmath.mpf(t) / mpmath.mpf(float((v.double() * h.double()).norm()))
        return float(mpmath.sqrt(missed) / size * margin)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 7.4e-7), (torch.float64, 2e-15)])
def test_the_conditioned_operator_equals_an_80_digit_solver(dtype, most):
    worst = 0.0
    for case in covering(CASES):
        v, h, t = case_of(*case, dtype)
        w = shrink_conditioned(v[None], h[None], torch.tensor(t, dtype=torch.float64))[0]
        error = error_of(w, v, h, t)
        assert error <= most, case
        worst = max(worst, error)
    print(f"{dtype}: worst error {worst:.1e}")


def test_blocks_of_a_million_elements():
    g = torch.Generator().manual_seed(0)
    v, h = torch.randn(2, 1 << 20, generator=g), 1e3 ** torch.rand(2, 1 << 20, generator=g)
    t = 0.4 * (v.double() * h.double()).norm(dim=1)
    wide = shrink_conditioned(v.double(), h.double(), t)
    gradient = h.double() * (wide - v.double()) + t[:, None] * wide / wide.norm(dim=1, keepdim=True)
    assert float((gradient.norm(dim=1) / t).max()) < 1e-12  # the float64 solution is where the gradient vanishes
    w = shrink_conditioned(v, h, t)
    assert float(((w.double() - wide).norm(dim=1) / wide.norm(dim=1)).max()) < 1e-6
    expected = v.double() * (1 - 300 / v.double().norm(dim=1, keepdim=True))
    plain = shrunk_blocks(v, torch.tensor(300.0))
    assert float(((plain.double() - expected).norm(dim=1) / expected.norm(dim=1)).max()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_finite_input_of_any_dtype_converges(dtype):
    limits = torch.finfo(dtype)
    sizes = [limits.max / 4, limits.tiny, 1.0, limits.max**0.5, limits.tiny**0.5]
    g = torch.Generator().manual_seed(1)
    for size, scale, fraction in itertools.product(sizes, sizes, (1e-3, 0.5, 0.999)):
        v = (torch.rand(4, 20, generator=g, dtype=torch.float64) * size).to(dtype)
        h = (torch.rand(4, 20, generator=g, dtype=torch.float64).clamp(min=1e-3) * scale).to(dtype).clamp(limits.tiny)
        force = torch.linalg.vector_norm(v.double() * h.double() / scale / size, dim=1) * size * scale
        t = (force * fraction).clamp(max=1e300)[:, None]
        w = v.clone()
        BlockSpec(w, (1, -1)).soft_threshold(t.to(dtype).double() if dtype == torch.float64 else t, h)
        assert w.isfinite().all() and (w.abs() <= v.abs()).all()


def test_blocks_whose_squares_overflow_on_the_path_to_the_root_have_a_solution():
    v = torch.tensor([[1e9, 1e-12, 0.0], [3.0, 4.0, 0.0], [0.0, 0.0, 0.0], [1e8, 1.0, 1e-15]])
    h, t = torch.tensor([0.1, 1e20, 1.0]).expand(4, -1), torch.tensor([1e-12, 2e20, 1.0, 1e-13])
    for own, *case in zip(shrink_conditioned(v, h.contiguous(), t), v, h, t.tolist(), strict=True):
        assert error_of(own, *case) <= 7.4e-7


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (2, -1)])
def test_eps_is_added_to_the_conditioners(shape):
    g = torch.Generator().manual_seed(0)
    v, h = torch.randn(4, 20, generator=g), torch.rand(4, 20, generator=g)
    one, other = v.clone(), v.clone()
    BlockSpec(one, shape).soft_threshold(0.5, h, eps=0.25)
    BlockSpec(other, shape).soft_threshold(0.5, h + 0.25)
    torch.testing.assert_close(one, other)


def test_the_steps_may_be_limited():
    w = torch.tensor([[1.0, 2.0, 3.0]])
    h = torch.tensor([[1e-3, 1.0, 1e3]])
    with pytest.raises(SparsityError, match=r"no convergence to atol=1e-06 in 1 steps \(missed by"):
        BlockSpec(w, (1, 3)).soft_threshold(2.0, h, max_iter=1)
    assert w.tolist() == [[1, 2, 3]]
    limited, free = w.clone(), w.clone()
    BlockSpec(limited, (1, 3)).soft_threshold(2.0, h, max_iter=30)
    BlockSpec(free, (1, 3)).soft_threshold(2.0, h)
    torch.testing.assert_close(limited, free)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e30), (torch.float32, 1e-30), (torch.float64, 1e200)])
def test_the_plain_operator_of_blocks_whose_squares_leave_the_range(dtype, size):
    w = torch.tensor([[3.0, 4.0]], dtype=dtype) * size
    BlockSpec(w, (1, 2)).soft_threshold(torch.tensor(size, dtype=torch.float64))
    torch.testing.assert_close(w / size, torch.tensor([[2.4, 3.2]], dtype=dtype))


@pytest.mark.parametrize("shape", [(1, -1), (-1, 1), (2, 2), (1, 1), (3, 5)])
def test_the_order_in_which_blocks_are_read_does_not_matter(shape):
    g = torch.Generator().manual_seed(0)
    v, h = torch.randn(12, 20, generator=g), torch.rand(12, 20, generator=g) + 0.01
    results = []
    for order in (torch.clone, lambda t: t.t().contiguous().t()):
        w = order(v)
        BlockSpec(w, shape, edge="partial").soft_threshold(0.3, order(h))
        results.append(w)
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)


def test_thresholds_that_leave_a_budget_are_exact_with_ties_too():
    w = torch.tensor([[3.0, 4.0, 4.0, 3.0, 1.0, 0.0, 5.0, 0.0]])
    block = BlockSpec(w, (1, 2))
    scope = ScopeSpec(block, (1, 4))
    for nnz, kept in ((4, [1, 1, 1, 1]), (3, [1, 1, 0, 1]), (2, [1, 1, 0, 0]), (1, [1, 0, 0, 0]), (0, [0, 0, 0, 0])):
        thresholds = scope.keep_thresholds(nnz)[block]
        out = w.clone()
        BlockSpec(out, (1, 2)).soft_threshold(thresholds)
        assert out.view(4, 2).any(1).int().tolist() == kept, nnz
    assert scope.keep_thresholds(3)[block].tolist() == [[3.0, 3.0, math.inf, 3.0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("width", "edge"), [(1, "error"), (2, "error"), (6, "error"), (5, "partial")])
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-7, 0.0])
def test_a_kept_block_among_equal_ones_keeps_a_nonzero_element_of_its_dtype(dtype, width, edge, size):
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    w = torch.full((2, 12), size or least, dtype=dtype)
    block = BlockSpec(w, (1, width), edge=edge)
    scopes = ScopeSpec(block, (1, 2), edge="partial")
    block.soft_threshold(scopes.keep_thresholds(1)[block], scale=edge == "partial")
    assert block.nnz_blocks(eps=0) == scopes.numscp()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("members", "width"), [(4, 1), (9, 1), (4, 2)])
def test_a_kept_block_of_several_tensors_keeps_a_nonzero_element(dtype, members, width):
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    block = BlockCoupling([BlockSpec(torch.full((4, 8), least, dtype=dtype), (1, width)) for _ in range(members)])
    scopes = ScopeSpec(block, (1, 4))
    block.soft_threshold(next(iter(scopes.keep_thresholds(2).values())))
    assert block.nnz_blocks(eps=0) == 2 * scopes.numscp()


def test_coupled_blocks_in_parts_equal_one_part(monkeypatch):
    g = torch.Generator().manual_seed(0)
    results = []
    for part in (1, 1 << 20):
        monkeypatch.setattr("sparsekit_ao.structure.thresholds.PART", part)
        up, down = torch.randn(6, 4, generator=g.manual_seed(1)), torch.randn(5, 6, generator=g.manual_seed(2))
        both = BlockCoupling([BlockSpec(up, (1, -1)), BlockSpec(down, (-1, 1))], [None, (1, 0)])
        both.soft_threshold(1.0, {up: up.abs() + 0.1, down: down.abs() + 0.1})
        results.append((up, down))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_blocks_of_zeros_beside_kept_ones_stay_zero():
    v, t = torch.ones(8, 4), torch.tensor(0.03, dtype=torch.float64)
    v[2] = 0
    found = shrink_conditioned(v, torch.full_like(v, 0.1), t)
    assert found.isfinite().all() and found[2].eq(0).all() and found[[0, 1, 3]].ne(0).all()
