"""Solvers on matrices: every solver with every structure, and each against brute force."""

import itertools

import pytest
import torch
from pruned_models import STRUCTURES, correlated, layer_of, prepared
from torch import nn

from sparsekit_ao import SparsityError, prune
from sparsekit_ao.calibration import RowGram, damped_gram
from sparsekit_ao.oneshot.solvers import (
    SOLVERS,
    admm,
    column_chunks,
    least_squares,
    prune_chunks,
    relative_errors,
    sparsegpt,
)
from sparsekit_ao.oneshot.solving import matrix_scopes


def problem(outputs=6, inputs=8, tokens=40, seed=0):
    """(weight, X, G) of one layer with correlated inputs."""
    (x,) = correlated(1, tokens, inputs, seed, torch.float64)
    weight = torch.randn(1, outputs, inputs, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return weight, x, (x.T @ x)[None]


def scopes_of(weight, **options):
    """What competes in a matrix, as `one_shot` gives it to the solvers."""
    linear = nn.Linear(*weight[0].T.shape, bias=False, dtype=weight.dtype)
    sparsifier = prepared(nn.Sequential(linear), **options)
    layer = layer_of(sparsifier)
    return matrix_scopes(layer, {g["tensor_fqn"]: g for g in sparsifier.groups})


KNOWN = [(s, n) for s in SOLVERS for n in STRUCTURES if s != "sparsegpt" or n in ("2:4", "unstructured")]


@pytest.mark.parametrize(("solver", "structure"), KNOWN)
def test_masks_are_exact_and_weights_make_up_for_what_is_dropped(solver, structure):
    weight, _, gram = problem(8, 16)
    scopes = scopes_of(weight, **STRUCTURES[structure])
    mask, solution = SOLVERS[solver](weight, gram, scopes)
    assert torch.equal(scopes.project(mask.to(weight.dtype), 2), mask) and not solution[~mask].any()
    masked, best = weight * mask, least_squares(weight, gram, mask, steps=100)
    errors = relative_errors(weight, gram, best, solution, masked)
    assert errors[0] <= errors[1] * 1.0001 and errors[0] < errors[2] and not best[~mask].any()


@pytest.mark.parametrize("solver", ["obs", "admm"])
def test_fewer_tokens_than_inputs_give_the_same_by_their_rows(solver):
    weight, x, gram = problem(8, 16, tokens=12)
    scopes = scopes_of(weight, **STRUCTURES["2:4"])
    by_rows, by_gram = damped_gram(RowGram.of(x[None]), 0.01), damped_gram(gram, 0.01)
    (mask, solution), (expected_mask, expected) = (SOLVERS[solver](weight, g, scopes) for g in (by_rows, by_gram))
    assert torch.equal(mask, expected_mask)
    torch.testing.assert_close(solution, expected)
    errors = [relative_errors(weight, g, solution)[0] for g in (by_rows, by_gram)]
    assert errors[0] == pytest.approx(errors[1])


@pytest.mark.parametrize("is_singular", [False, True])
def test_whole_columns_are_dropped_with_the_best_weights_for_the_others(is_singular):
    weight, x, _ = problem(5, 8)
    x = torch.cat([x[:, :4], x[:, :4]], 1) if is_singular else x
    gram, kept = (x.T @ x)[None], torch.tensor([0, 2, 3, 5, 6])
    mask = torch.zeros_like(weight, dtype=torch.bool).index_fill_(2, kept, True)
    solution = least_squares(weight, gram, mask)
    best = torch.linalg.lstsq(x[:, kept], x @ weight[0].T, driver="gelsd").solution
    torch.testing.assert_close(x @ solution[0].T, x[:, kept] @ best)
    assert not solution[~mask].any()


def test_admm_is_never_worse_than_where_it_starts():
    torch.manual_seed(0)
    weight, x = torch.randn(1, 64, 64), torch.randn(4000, 64)  # independent inputs: magnitudes are the best masks
    gram, scopes = (x.T @ x)[None], scopes_of(weight, **STRUCTURES["2:4"])
    solution = admm(weight, gram, scopes)[1]
    best = least_squares(weight, gram, scopes.project(weight, 2))
    errors = relative_errors(weight, gram, solution, best)
    assert errors[0] < 1.01 * errors[1]


@pytest.mark.parametrize("structure", ["pairs", "columns", "V:N:M", "partial edge"])
def test_structures_that_sparsegpt_does_not_know(structure):
    weight, _, gram = problem(8, 16)
    with pytest.raises(SparsityError, match="0.weight: compensate='sparsegpt' knows only N:M along the inputs"):
        sparsegpt(weight, gram, scopes_of(weight, **STRUCTURES[structure]))


@pytest.mark.parametrize("seed", range(5))
def test_least_squares_is_lstsq_row_by_row(seed):
    weight, x, gram = problem(seed=seed)
    mask = torch.rand(weight.shape, generator=torch.Generator().manual_seed(seed)) < 0.6
    solution, expected = least_squares(weight, gram, mask, steps=100), torch.zeros_like(weight)
    for row in range(weight.shape[1]):
        kept = mask[0, row]
        expected[0, row, kept] = torch.linalg.lstsq(x[:, kept], x @ weight[0, row]).solution
    torch.testing.assert_close(solution, expected, rtol=1e-6, atol=1e-8)


def test_least_squares_of_a_singular_gram_matrix_keeps_what_the_data_does_not_determine():
    weight, x, _ = problem(tokens=3)
    x[:, 0] = 0  # a dead input
    gram = (x.T @ x)[None]
    mask = torch.rand(weight.shape, generator=torch.Generator().manual_seed(0)) < 0.7
    solution = least_squares(weight, gram, mask)
    assert solution.isfinite().all() and torch.equal(solution[..., 0], (weight * mask)[..., 0])
    errors = relative_errors(weight, gram, solution, weight * mask)
    assert errors[0] < errors[1]
    assert torch.equal(least_squares(weight, torch.zeros_like(gram), mask), weight * mask)


def test_the_relative_error_is_that_of_the_outputs():
    weight, x, gram = problem()
    other = weight * (torch.arange(8) % 2)
    expected = ((x @ (weight - other).mT).norm() / (x @ weight.mT).norm()).item()
    assert relative_errors(weight, gram, other, weight) == pytest.approx([expected, 0.0])
    assert relative_errors(weight * 0, gram, other * 0) == [0.0]


@pytest.mark.parametrize("seed", range(3))
def test_admm_finds_better_masks_than_magnitude_and_wanda(seed):
    weight, _, gram = problem(32, 64, 256, seed)
    scopes, scale = scopes_of(weight), gram.diagonal(dim1=1, dim2=2)[:, None].sqrt()
    masks = [scopes.project(weight, 2), scopes.project(weight * scale, 2), admm(weight, gram, scopes)[0]]
    errors = relative_errors(weight, gram, *(least_squares(weight, gram, m) for m in masks))
    assert errors[2] < 0.9 * min(errors[:2])


def test_columns_are_cut_where_no_scope_crosses():
    apart = torch.tensor([[0, 1, 0, 1, 2, 2], [3, 3, 3, 3, 4, 4]])
    assert column_chunks(apart) == [(0, 4), (4, 6)]
    assert column_chunks(torch.zeros(3, 5, dtype=torch.long)) == [(0, 5)]
    assert column_chunks(torch.arange(6).view(2, 3)) == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize("seed", range(4))
def test_the_obs_loss_and_compensation_are_those_of_the_best_remaining_weights(seed):
    """For the set whose loss w_P^T (C_PP)^-1 w_P / 2 is least: it equals the error after lstsq on what is left."""
    weight, x, gram = problem(1, 6, seed=seed)
    w, inverse = weight[0, 0], torch.linalg.inv(gram[0])

    def loss(p):
        return float(w[[*p]] @ torch.linalg.solve(inverse[[*p]][:, [*p]], w[[*p]]) / 2)

    pruned = min(itertools.combinations(range(6), 3), key=loss)
    kept = [j for j in range(6) if j not in pruned]
    solution = torch.linalg.lstsq(x[:, kept], x @ w).solution
    assert 2 * loss(pruned) == pytest.approx(float((x @ w - x[:, kept] @ solution).square().sum()))
    mask = torch.ones(1, 6, dtype=torch.bool).index_fill(1, torch.tensor(pruned), False)
    own, compensated = prune_chunks(weight[0], inverse, [(0, 6)], lambda *_: mask)
    assert torch.equal(own, mask)
    torch.testing.assert_close(compensated[0, kept], solution)


@pytest.mark.parametrize("widths", [(4, 4), (2, 4, 2), (1,) * 8])
def test_what_obs_prunes_on_the_left_is_compensated_on_the_right(widths):
    """Each chunk's compensation is the best for the columns that are not decided yet."""
    weight, x, gram = problem(3, 8)
    chunks = list(itertools.pairwise(itertools.accumulate((0, *widths))))
    mask = torch.rand(3, 8, generator=torch.Generator().manual_seed(1)) < 0.5
    _, compensated = prune_chunks(weight[0], torch.linalg.inv(gram[0]), chunks, lambda w, c, a, b: mask[:, a:b])
    for row in range(3):
        current = weight[0, row].clone()
        for a, b in chunks:
            free = mask[row].clone()
            free[b:], free[:a] = True, False  # decided columns stay
            fixed = torch.where(torch.arange(8) < a, current, 0)
            solution = torch.linalg.lstsq(x[:, free], x @ current - x @ fixed).solution
            current = fixed.index_put((free.nonzero().flatten(),), solution)
        torch.testing.assert_close(compensated[row], current)


def sparsegpt_by_loops(weight, inverse, n, m):
    """The algorithm as the paper writes it, one weight at a time: inverse Hessians shrink column by column."""
    w, c = weight.clone(), inverse.clone()
    mask = torch.ones_like(w, dtype=torch.bool)
    for j in range(w.shape[1]):
        if j % m == 0:
            diagonal = [1 / torch.linalg.cholesky(c[j:, j:], upper=True)[k, k] ** 2 for k in range(m)]
            for i in range(w.shape[0]):
                scores = [w[i, j + k] ** 2 * diagonal[k] for k in range(m)]
                for k in sorted(range(m), key=lambda k: float(scores[k]))[: m - n]:
                    mask[i, j + k] = False
        for i in range(w.shape[0]):
            if not mask[i, j]:
                w[i, j + 1 :] -= w[i, j] / c[j, j] * c[j, j + 1 :]
                w[i, j] = 0
        c[j + 1 :, j + 1 :] -= torch.outer(c[j, j + 1 :], c[j, j + 1 :]) / c[j, j]
    return mask, w


@pytest.mark.parametrize(("seed", "columns"), [(0, 16), (1, 16), (2, 16), (0, 132)])
def test_sparsegpt_is_a_double_loop(seed, columns):
    weight, _, gram = problem(5, columns, 400, seed=seed)
    weight = weight.mT.contiguous().mT if seed else weight  # as packed experts may be
    before = weight.clone()
    mask, solution = sparsegpt(weight, gram, scopes_of(weight))
    assert torch.equal(weight, before)
    expected_mask, expected = sparsegpt_by_loops(weight[0], torch.linalg.inv(gram[0]), 2, 4)
    assert torch.equal(mask[0], expected_mask)
    torch.testing.assert_close(solution[0], expected)


@pytest.mark.parametrize(("columns", "level"), [(16, 0.5), (300, 0.3), (130, 0.9)])
def test_sparsegpt_keeps_an_exact_number_of_single_elements(columns, level):
    weight, _, gram = problem(4, columns, 400)
    mask, solution = sparsegpt(weight, gram, scopes_of(weight, sparsity_level=level))
    assert int(mask.sum()) == round(4 * columns * (1 - level)) and not solution[~mask].any()


def pruned_with_dead_inputs(method, pattern, tokens=256, inputs=1.0, weights=1.0):
    """A layer of 32 inputs, of which every fourth is zero and has large weights, pruned to a half, and its row."""
    generator = torch.Generator().manual_seed(0)
    (x,) = correlated(1, tokens, 32)
    x[:, ::4] = 0
    model = nn.Sequential(nn.Linear(32, 16, bias=False))
    dense = torch.randn(16, 32, generator=generator)
    dense[:, ::4] *= 20
    model[0].weight.data = dense * weights
    pruned, report = prune(model, pattern, batches=[x * inputs], compensate=method, progress=False)
    return pruned[0].weight.detach(), report.rows[0]


@pytest.mark.parametrize("tokens", [256, 12])
@pytest.mark.parametrize("pattern", ["2:4", None])
@pytest.mark.parametrize("method", SOLVERS)
def test_weights_that_read_only_zeros_are_dropped_first_at_every_scale(method, pattern, tokens):
    expected, row = pruned_with_dead_inputs(method, pattern, tokens)
    assert not expected[:, ::4].any() and int((expected != 0).sum()) == 256 and row.after < row.before < 0.6
    for inputs in (2.0**-66, 2.0**-40, 2.0**20, 2.0**56, *([2.0**-100, 2.0**64] if tokens < 32 else [])):
        weight, scaled = pruned_with_dead_inputs(method, pattern, tokens, inputs)
        assert int((weight != 0).sum()) == 256 and not weight[:, ::4].any()
        assert scaled.after == pytest.approx(row.after, rel=0.02 if tokens < 32 or inputs > 1e-12 else 0.1)
    for weights in (2.0**-70, 2.0**70):
        weight, scaled = pruned_with_dead_inputs(method, pattern, tokens, weights=weights)
        torch.testing.assert_close(weight / weights, expected)
        assert scaled.after == pytest.approx(row.after)


@pytest.mark.parametrize("method", SOLVERS)
def test_groups_that_read_only_zeros_keep_their_budget(method):
    (x,) = correlated(1, 400, 8)
    x = x.mT.reshape(4, 8, 10, 10).clone()
    x[:, 2] = 0
    model = nn.Sequential(nn.Conv2d(8, 16, 3, groups=8, bias=False))
    (row,) = prune(model, 0.5, batches=[x], compensate=method, progress=False)[1]
    assert row.density == 0.5 and row.after <= row.before < 0.7


def test_inputs_whose_squares_overflow_when_they_are_summed_are_refused():
    batches = [torch.randn(8, 32) * 2.0**60 for _ in range(8)]
    with pytest.raises(SparsityError, match=r"weight: the inputs of this layer are not finite \(NaN, inf or overflow"):
        prune(nn.Linear(32, 8), 0.5, batches=[x * 16 for x in batches], progress=False)
    assert prune(nn.Linear(32, 8), 0.5, batches=batches[:2], progress=False)[1].rows[0].after < 1
