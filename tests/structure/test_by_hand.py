"""Views, blocks, scopes and couplings on tensors small enough to check by eye; what they refuse."""

import contextlib
import inspect
import math
import re
from functools import partial

import pytest
import torch
from stock import refuses
from strategies import shrunk
from torch import nn

from sparsekit_ao import BlockCoupling, BlockSpec, CouplingError, ScopeCoupling, ScopeSpec, SparsityError, View
from sparsekit_ao.selection import Request, fill_masks

INF, NAN = math.inf, math.nan


def count(*shape, dtype=torch.float32):
    """0, 1, 2, ... in the shape given."""
    return torch.arange(math.prod(shape), dtype=dtype).reshape(shape)


def booleans(rows):
    return torch.tensor([[c == "x" for c in row] for row in rows.split()])


def only(masks):
    (mask,) = masks.values()
    return mask


def scope(*shape, block=(), scope=(), name=None):
    return ScopeSpec(BlockSpec(torch.ones(shape), block, name), scope, name)


# View


@pytest.mark.parametrize(
    ("view", "data"),
    [
        (View(count(2, 8), (2, 2, 2), (8, 1, 4), 2), [[[2, 6], [3, 7]], [[10, 14], [11, 15]]]),
        (View(count(4, 6)[1:, 2:], (2, 2), (6, 2), 1), [[9, 11], [15, 17]]),  # counted from a slice's first element
        (View(count(4, 6)[:, ::2], (2, 2), (12, 4)), [[0, 4], [12, 16]]),
        (View.from_existing(count(2, 3).t()), [[0, 3], [1, 4], [2, 5]]),
        (View(count(8), (2, 3), (3, 2)), [[0, 2, 4], [3, 5, 7]]),  # strides not nested, still injective
        (View(count(4), (1, 4), (99, 1)), [[0, 1, 2, 3]]),  # the stride of a dimension of one does not matter
        (View(count(1, 2, 2, 2).contiguous(memory_format=torch.channels_last), (2, 2), (2, 1)), [[0, 4], [1, 5]]),
    ],
)
def test_an_address_is_offset_plus_index_times_stride(view, data):
    assert view.data.tolist() == data
    assert view.linear_offset((0,) * view.ndim) == view.offset and View.from_existing(view) is view


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda w: w.unflatten(0, (2, 2)), ((2, 2, 6), (12, 6, 1), 0)),
        (lambda w: w[1:, ::2].t(), ((3, 3), (2, 6), 6)),
        (lambda w: w.detach(), ((4, 6), (6, 1), 0)),
        (lambda w: w, ((4, 6), (6, 1), 0)),
    ],
)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_any_chain_of_torch_views_makes_a_view(function, expected, mode):
    with mode():
        view = View.from_function(count(4, 6), function)
    assert (view.shape, view.stride, view.offset) == expected


ZEROS, W = torch.zeros(2, 4), BlockSpec(View.from_existing(count(4, 6), name="w"))
FUNCTIONS = [  # a view function, the error
    (lambda w: w.t().reshape(-1), "w: the view function returned a copy, not a view"),
    (lambda w: w.tolist(), "must return a tensor, got list"),
    (lambda w: count(4, 6).t(), "w"),
    (lambda w: w.expand(3, 4, 6), "w"),
    (lambda w: w.view(torch.int32), "w"),
]
WINDOWS = [  # parameter, window, error
    (ZEROS, ((2, 4), (1,), 0), "w: a view needs one stride for each dimension, got shape (2, 4) (2) and stride (1,)"),
    (ZEROS, ((2, 4), (5, 1), 0), "w: view (2, 4):(5, 1) with offset 0 is out of bounds: it ends at element 8, the"),
    (ZEROS, ((2, 2), (1, 1)), "w: view (2, 2):(1, 1): strides overlap: indices (0, 1) and (1, 0) map to one element"),
    (ZEROS, ((2,), (-1,), 1), "w: view stride must be non-negative ints, got (-1,)"),
    (ZEROS, ((2,), (1,), -1), "w: view offset must be non-negative ints, got (-1,)"),
    (ZEROS, ((-2,), (1,), 0), "w: view shape must be non-negative ints, got (-2,)"),
    (ZEROS, ((2, 2), (2, True)), "must be non-negative ints"),
    (count(4, 6)[:, :4], ((2, 5), (6, 1)), "not the parameter's: (4, 4):(6, 1) is a slice of a larger tensor"),
    (count(4, 6)[:, ::2], ((3,), (1,)), "contains elements that are not the parameter's"),
    (torch.zeros(1, 3).expand(4, 3), ((4, 3), (0, 1)), "several of its elements share memory. Make it contiguous"),
]
BLOCKS = [  # block shape, error
    ((3, 2), 'block (3, 2) needs dimension 0 divisible by 3, got 4. Use edge="partial", or leave the tensor out.'),
    ((0, 1), "block (0, 1) needs a positive size (or -1 for all) at dimension 0, got 0"),
    ((1, 2.0), "block (1, 2.0) needs an int at dimension 1, got 2.0"),
    ((True, 1), "block (True, 1) needs an int at dimension 0, got True"),
    ((2,), "block (2,) has 1 entries, but the view has 2 dimensions (4, 6). Give one entry a dimension, or () for"),
    ("12", "block shape must be a tuple of ints, got '12'"),
]
SCOPES = [  # scope shape, error
    ((1, 2), 'scope (1, 2) needs block-grid dimension 1 divisible by 2, got 3. Use edge="partial", or leave'),
    ((0, 1), "scope (0, 1) needs a positive size (or -1 for all) at block-grid dimension 0, got 0"),
    ((1.0, 1), "scope (1.0, 1) needs an int at block-grid dimension 0, got 1.0"),
    ((1, 1, 1), "scope (1, 1, 1) has 3 entries, but the block grid has 2 dimensions (4, 3)."),
    (4, "scope shape must be a tuple of ints, got 4"),
]
ORDERS = [
    ([None], "mlp: 2 members but 1 orders; give one for each member, or None"),
    ([None, (0, 0)], "mlp: down: order (0, 0) is not a permutation of the 2 aligned grid dimensions"),
    (None, "mlp: down has the aligned block grid (1, 4), but up has (4, 1). Give an order that permutes one onto"),
]
PARTIAL = BlockSpec(count(3, 3), (2, 2), "w", edge="partial")
PAIR, ROWS = ScopeCoupling([scope(4), scope(4)]), scope(2, 4, scope=(1, 4), name="w")
MAPPING = "mapping {parameter: tensor}"
CALLS = [  # object, method, arguments, error
    (W.view, "linear_offset", ((4, 0),), "index (4, 0) is out of bounds for the view (4, 6)"),
    (W.view, "linear_offset", ((1.5, 1),), "an index must consist of ints, got (1.5, 1)"),
    (W.view, "to_param_rc", ((0, -1),), "index (0, -1) is out of bounds for the view (4, 6)"),
    (W.view, "block_view_of", (W.view.param, (2, 2), False, True), "merge=True needs reorder=True"),
    (W.view, "block_view_of", (count(6, 4), (1, 2)), "values must have the parameter's shape (4, 6), got (6, 4)"),
    (W.view, "broadcast_block_to_element", (ZEROS, (4, 3)), "must have the grid's shape (1, 2), got (2, 4)"),
    (W, "norms", (count(6, 4),), "w: values must have the parameter's shape (4, 6), got (6, 4)"),
    *((W, "norms", (None, p), f"w: norms: p must be 1, 2 or inf, got {p!r}") for p in [torch.square, True, None, "2"]),
    (W, "get_masks", (ZEROS > 0,), "w: expected a tensor of the block grid's shape (4, 6), got (2, 4)"),
    (W, "apply_multiplier", (ZEROS,), "w: expected a tensor of the block grid's shape (4, 6), got (2, 4)"),
    (PARTIAL, "block_view", (), "w: block_view needs whole blocks; block (2, 2) leaves partial ones on (3, 3)"),
    (PARTIAL, "reduce", (None, torch.sum), "w: reduce needs whole blocks; block (2, 2) leaves partial ones on (3, 3)"),
    (PARTIAL, "apply_multiplier", (torch.ones(2, 2),), "w: apply_multiplier needs whole blocks; block (2, 2) leaves"),
    (ROWS, "block_to_scope", (count(6, 2),), "block_to_scope takes the block grid's shape (2, 4), got (6, 2)"),
    (ROWS, "scope_to_block", (count(2, 6),), "scope_to_block takes (2, 1, 1, 4) or (2, 1, 4), got (2, 6)"),
    (ROWS, "kth_largest", (None, 0), "nnz must lie in 1 .. 4 (a scope has 4 blocks), got 0"),
    (ROWS, "kth_mid", (None, 4), "nnz must lie in 1 .. 3 (a scope has 4 blocks), got 4"),
    (ROWS, "hard_threshold", (), "w: hard_threshold needs either thresholds or nnz, not both"),
    (ROWS, "hard_threshold", (1.0, 1), "w: hard_threshold needs either thresholds or nnz, not both"),
    *(
        (ROWS, "sparsity_to_nnz", (x,), f"w: sparsity level must lie in [0, 1], got {x!r}")
        for x in [-0.1, 1.0000001, NAN, INF, True, "0.5", None]
    ),
    (ROWS, "get_masks", (1, None, torch.ones(2, 8)), "block_scores must have the block grid's shape (2, 4)"),
    (ROWS, "get_masks", (1, None, None, torch.ones(2, 8) > 0), "candidates must have the block grid's shape (2, 4)"),
    (ROWS, "get_masks", (1, None, count(2, 4).long()), "scores must be float16, bfloat16, float32 or float64"),
    (ROWS, "get_masks", (2, ZEROS, ZEROS), "get_masks: values and block_scores are mutually exclusive"),
    (PAIR, "scope_to_block", (torch.ones(1, 5),), "scope_to_block takes (1, 8), got (1, 5)"),
    (PAIR, "get_masks", (3, None, ZEROS[0]), "block_scores must be a mapping {block: tensor} for coupled scopes"),
    (PAIR, "block_norms", (ZEROS[0],), MAPPING),
    (PAIR, "get_masks", (1, ZEROS[0]), MAPPING),
    (PAIR, "kth_largest", (ZEROS[0], 1), MAPPING),
    (PAIR, "hard_threshold", (0.5, None, ZEROS[0]), MAPPING),
    (PAIR, "soft_threshold", (0.5, ZEROS[0]), MAPPING),
]
UP, DOWN = BlockSpec(count(4, 2), (1, -1), "up"), BlockSpec(count(2, 4), (-1, 1), "down")
REFUSED = [
    *((partial(View.from_function, count(4, 6), function, name="w"), text) for function, text in FUNCTIONS),
    *((partial(View, parameter, *window, name="w"), text) for parameter, window, text in WINDOWS),
    *((partial(BlockSpec, count(4, 6), block, name="w"), "w: " + text) for block, text in BLOCKS),
    (partial(BlockSpec, W.view, (3, 4)), "w: block (3, 4) needs"),  # named by the view
    (partial(BlockSpec, W.view, (2, 2), edge="pad"), """edge must be "error" or "partial", got 'pad'"""),
    *((partial(ScopeSpec, BlockSpec(count(4, 6), (1, 2), "w"), shape), "w: " + text) for shape, text in SCOPES),
    *((partial(BlockCoupling, [UP, DOWN], orders, name="mlp"), text) for orders, text in ORDERS),
    (partial(BlockCoupling, []), "a coupling needs at least one member"),
    (partial(BlockCoupling, [W, W]), "the blocks (1, 1) of w are given twice; members must be distinct"),
    (partial(BlockCoupling, [BlockSpec(UP.view, (1, -1)), UP]), "the blocks (1, 2) of up are given twice"),
    (partial(ScopeCoupling, [ScopeSpec(W), ScopeSpec(W)]), "the blocks (1, 1) of w are given twice"),
    (partial(BlockSpec, torch.zeros(2, dtype=torch.complex64), name="w"), "w: blocks need real numbers, but the param"),
    (
        partial(ScopeCoupling, [ScopeSpec(UP, name="a"), ScopeSpec(DOWN, (-1, 1), "b")], name="pair"),
        "pair: b has the aligned scope grid (1, 4), but a has (1, 1). Give an order",
    ),
    *((partial(getattr(owner, call), *arguments), text) for owner, call, arguments, text in CALLS),
]


@pytest.mark.parametrize(("call", "text"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_wrong_is_refused_with_both_numbers(call, text):
    with pytest.raises(SparsityError, match=re.escape(text)):
        call()
    assert issubclass(SparsityError, ValueError) and issubclass(CouplingError, SparsityError)


@pytest.mark.parametrize("shape", [(0,), (0, 4), (2, 0)])
def test_an_empty_window_is_a_window(shape):
    view = View.from_existing(torch.zeros(shape))
    assert view.numel() == 0 and view.cosize == 0 and view.data.shape == shape


def test_data_is_live_and_assigning_writes_the_same_parameter():
    p = torch.nn.Parameter(count(2, 4))
    view, pointer = View(p, (2, 2), (4, 2)), p.data_ptr()
    alias = view.data
    view.data = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])
    assert p.tolist() == [[-1, 1, -2, 3], [-3, 5, -4, 7]] and alias[1, 1] == -4
    alias[0, 0] = 9
    assert p[0, 0] == 9 and p.data_ptr() == pointer and p.requires_grad and p.grad_fn is None


def test_block_view_of_reorders_interleaves_and_merges():
    w = count(2, 4)
    view = View.from_existing(w)
    assert view.block_view_of(w, (2, 2)).tolist() == [[[[0, 1], [4, 5]], [[2, 3], [6, 7]]]]
    assert view.block_view_of(w, (2, 2), reorder=False).tolist() == [[[[0, 1], [2, 3]], [[4, 5], [6, 7]]]]
    assert view.block_view_of(w, (2, 2), merge=True).tolist() == [[[0, 1, 4, 5], [2, 3, 6, 7]]]
    assert view.block_view_of(w, ()).shape == (2, 4, 1, 1) and view.block_view_of(w, (-1, 1)).shape == (1, 4, 2, 1)
    view.block_view_of(w, (1, 2))[1, 1, 0, 0] = -1
    assert w[1, 2] == -1
    assert view.block_view_of(count(4, 2).t(), (1, 2), merge=True).tolist() == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]


def test_multipliers_and_masks_of_blocks_change_elements_in_place():
    w = count(2, 4)
    view = View.from_existing(w)
    spread = view.broadcast_block_to_element(torch.tensor([[1.0, 2.0]]), (2, 2))
    assert spread.tolist() == [[1, 1, 2, 2], [1, 1, 2, 2]]
    fake = view.broadcast_block_to_element(torch.tensor([[1.0, 2.0]]), (2, 2), fake=True)
    assert fake.shape == (1, 2, 2, 2) and fake.stride()[1] == fake.stride()[3] == 0
    w = torch.tensor([[NAN, INF, 1.0]])
    View.from_existing(w).apply_mask(booleans("xx."), ())  # zero where True
    assert w.tolist() == [[0, 0, 1]]


def test_views_are_equal_by_parameter_shape_stride_and_offset():
    w, same = count(2, 4), count(2, 4)
    a, b = View(w, (2, 2), (4, 1), 1), View(w, (2, 2), (4, 1), 1)
    assert a == b and hash(a) == hash(b) and len({a, b}) == 1
    assert a != View(same, (2, 2), (4, 1), 1) and a != "view"
    assert all(a != View(w, *other) for other in [((2, 2), (4, 1), 0), ((2, 2), (4, 2), 1), ((2, 1), (4, 1), 1)])


def test_a_spec_made_before_a_change_of_memory_format_or_dtype_tiles_the_same_or_refuses():
    conv = torch.nn.Conv2d(4, 2, 3, bias=False)
    s = ScopeSpec(BlockSpec(conv.weight), (1, 4, 1, 1))
    expected = only(s.get_masks(2))
    conv.to(memory_format=torch.channels_last)
    with contextlib.suppress(SparsityError):
        assert torch.equal(only(s.get_masks(2)), expected)
    linear = torch.nn.Linear(8, 4)
    s = ScopeSpec(BlockSpec(linear.weight), (1, 4))
    linear.to(torch.bfloat16)
    assert only(s.get_masks(2)).unflatten(1, (2, 4)).sum(-1).eq(2).all()


# BlockSpec


def test_norms_of_other_values_folds_and_counts_of_blocks():
    b = BlockSpec(torch.tensor([[3.0, -4.0, 0.0, -2.0]]), (1, 2))
    assert b.norms(torch.tensor([[0.0, 1.0, 6.0, 8.0]])).tolist() == [[1, 10]]
    assert b.norms({b.view.param: torch.ones(1, 4)}, 1).tolist() == [[2, 2]]
    assert b.reduce(None, torch.sum).tolist() == [[-1, -2]]
    assert b.reduce(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.prod).tolist() == [[2, 12]]
    b = BlockSpec(torch.tensor([[0.0, 0.0, 1e-9, 0.0, 0.5, 0.0, NAN, 0.0]]), (1, 2))
    assert (b.nnz_blocks(), b.nnz_blocks(1e-10), b.nnz_blocks(eps=0.5)) == (2, 3, 1)


def test_the_two_parts_of_a_complex_parameter_are_blocks():
    numbers = nn.Parameter(torch.tensor([3 + 4j, 0j, 9j]))
    assert BlockSpec(torch.view_as_real(numbers), (1, -1)).norms().tolist() == [[5], [0], [9]]


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.bool])
def test_integers_have_magnitudes_down_to_the_least_of_them(dtype):
    least = 0 if dtype == torch.bool else torch.iinfo(dtype).min
    w = torch.tensor([1, least, 0, 0, 1], dtype=dtype)
    assert BlockSpec(w).norms(p=1).tolist() == [1, abs(float(least)), 0, 0, 1]
    assert BlockSpec(w).nnz() == BlockSpec(w).nnz_blocks() == 2 + bool(least)
    assert ScopeSpec(BlockSpec(w)).get_masks(1).popitem()[1].tolist() == [not least, bool(least), False, False, False]
    pairs = BlockSpec(w, (2,), edge="partial")
    assert pairs.min().tolist() == [least, 0, 1] and pairs.max().tolist() == [1, 0, 1]


def test_hard_threshold_zeroes_strictly_below_and_keeps_nan():
    w = torch.tensor([[1.0, 2.0, NAN]])
    BlockSpec(w).hard_threshold(1.0, torch.tensor([[5.0, 0.5, NAN]]))  # norms of other values
    assert w[0, :2].tolist() == [1, 0] and w[0, 2].isnan()
    for spec in (BlockSpec, ScopeSpec):
        w = torch.tensor([[0.1, 0.2]], dtype=torch.float64)
        spec(w).hard_threshold(0.1)
        assert w.tolist() == [[0.1, 0.2]], spec


def test_a_scalar_parameter_is_one_block_in_one_scope():
    w = torch.tensor(3.0)
    b = BlockSpec(w)
    assert (b.grid_shape, b.numblk(), b.norms().item(), b.min().item()) == ((), 1, 3, 3)
    assert [only(ScopeSpec(b).get_masks(n)).item() for n in (0, 1)] == [False, True]
    b.soft_threshold(1.0)
    assert w == 2


def test_a_parameter_without_elements_has_no_blocks_and_raises_nothing():
    s = ScopeSpec(BlockSpec(torch.zeros(0, 4), (1, 2)), (1, 2))
    assert (s.numblk(), s.numscp(), s.grid_shape) == (0, 0, (0, 1))
    assert only(s.get_masks(1)).shape == (0, 4) and s.block_norms().shape == (0, 1, 2)
    s.hard_threshold(nnz=1)
    s.soft_threshold(1.0)


# BlockCoupling


def mlp():
    """Gate and up (3 neurons x 2 inputs), down (2 outputs x 3 neurons): one neuron is a row, a row and a column."""
    gate = torch.tensor([[1.0, 0.0], [0.0, 2.0], [2.0, 0.0]])
    up = torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    down = torch.tensor([[2.0, 2.0, 0.0], [0.0, 0.0, 2.0]])
    specs = [BlockSpec(gate, (1, -1), "gate"), BlockSpec(up, (1, -1), "up"), BlockSpec(down, (-1, 1), "down")]
    return BlockCoupling(specs, [None, None, (1, 0)], "mlp"), gate, up, down


def test_multipliers_masks_and_thresholds_change_every_member():
    neurons, gate, up, down = mlp()
    assert neurons.norms({gate: gate, up: up, down: torch.zeros(2, 3)}, 1).tolist() == [[3], [3], [3]]
    with refuses("up: values hold no tensor for this parameter"):
        neurons.norms({gate: gate})
    neurons.apply_multiplier(torch.tensor([[1.0], [3.0], [1.0]]))
    assert gate[1].tolist() == [0, 6] and up[1].tolist() == [3, 0] and down[:, 1].tolist() == [6, 0]
    neurons.apply_mask(torch.tensor([[True], [False], [False]]))
    assert not gate[0].any() and not up[0].any() and not down[:, 0].any() and neurons.nnz_blocks() == 2
    neurons.hard_threshold(9.0)  # neuron 1 has norm 9 and stays, neuron 2 has 3
    assert neurons.norms().tolist() == [[0], [9], [0]]
    neurons.soft_threshold(3.0)
    assert neurons.norms().flatten().tolist() == pytest.approx([0, 6, 0], abs=1e-5)
    assert gate[1].tolist() == pytest.approx([0, 4], abs=1e-5)


# ScopeSpec


def test_block_to_scope_and_back():
    s, t = ScopeSpec(BlockSpec(count(2, 6)), (1, 3)), count(2, 6)
    assert s.block_to_scope(t, reorder=False).shape == (2, 1, 2, 3)
    assert s.block_to_scope(torch.ones(()).expand(2, 6), merge=True).tolist() == [[[1] * 3] * 2] * 2
    assert s.block_to_scope(count(6, 2).t(), merge=True)[1, 0].tolist() == [1, 3, 5]
    assert ScopeSpec(View(count(8), (2, 2), (4, 1)), (1,)).numscp() == 2  # a view or a parameter: single elements
    assert torch.equal(s.scope_to_block(s.block_to_scope(t, reorder=False), False), t)


@pytest.mark.parametrize(
    ("level", "blocks", "nnz"),
    [
        (0.0, 4, 4),
        (1, 3, 0),
        (0.5, 5, 3),
        (0.9, 10, 1),
        (0.29, 100, 71),  # 0.29 * 100 = 28.999999999999996
        (0.57, 100, 43),
        (1 / 3, 3, 2),
        (0.999, 3, 1),
        (0.3333333333, 3, 2),  # one ulp short of a third still counts as a third
        (0.333333332, 3, 3),  # farther than 1e-9 from it does not
    ],
)
def test_a_level_drops_its_floor_with_a_1e_9_grace(level, blocks, nnz):
    assert ScopeSpec(torch.ones(2, blocks), (1, -1)).sparsity_to_nnz(level) == nnz


@pytest.mark.parametrize(
    ("width", "scope", "nnz", "level"),
    [(8, 4, 1, 0.75), (8, 4, 0, 1.0), (8, 8, 8, 0.0), (10, 4, 2, 0.4), (10, 4, torch.tensor([[4, 0, 1]]), 0.5)],
)
def test_a_budget_amounts_to_a_level(width, scope, nnz, level):
    s = ScopeSpec(torch.ones(1, width), (1, scope), edge="partial")
    assert s.level_of(nnz) == pytest.approx(level)
    assert 1 - only(s.get_masks(nnz)).float().mean().item() == pytest.approx(level)


def test_masks_by_the_magnitude_of_other_values_leave_the_weight_as_it_is():
    w = torch.tensor([[1.0, 4.0, 3.0, 2.0], [8.0, 7.0, 6.0, 5.0]])
    assert torch.equal(only(ScopeSpec(w, (1, 4)).get_masks(1, -10 * (w == 2))), booleans("...x x..."))
    assert w[0].tolist() == [1, 4, 3, 2]


@pytest.mark.parametrize(
    ("nnz", "text"),
    [
        (-1, "nnz must lie in 0 .. 4 (a scope has 4 blocks), got -1"),
        (torch.tensor([[2], [9]]), "nnz must lie in 0 .. 4 (a scope has 4 blocks), got 2 .. 9"),
        (True, "nnz must be an int or an integer tensor, got True"),
        (torch.tensor([2.0]), "nnz must be an integer tensor of the scope grid's shape (2, 1), got torch.float32 (1,)"),
        (torch.tensor(True), "nnz must be an integer tensor of the scope grid's shape (2, 1), got torch.bool ()"),
    ],
)
def test_a_wrong_budget_is_refused_before_anything_changes(nnz, text):
    w = torch.ones(2, 4)
    s = ScopeSpec(w, (1, 4), "w")
    for call in (s.get_masks, lambda n: s.hard_threshold(nnz=n)):
        with refuses("w: " + text):
            call(nnz)
    assert w.all()


def test_masks_are_new_tensors_and_autograd_is_left_alone():
    w = torch.nn.Parameter(torch.ones(2, 4))
    s = ScopeSpec(w, (1, 4))
    first, second = only(s.get_masks(2)), only(s.get_masks(2))
    assert first.data_ptr() != second.data_ptr() and not first.requires_grad
    s.hard_threshold(nnz=2)
    s.soft_threshold(0.5)
    assert w.tolist() == [[0.5, 0.5, 0, 0]] * 2 and w.grad_fn is None and w.requires_grad


# ScopeCoupling


def test_a_scope_coupling_thresholds_every_member():
    a, b = torch.tensor([1.0, 6.0]), torch.tensor([5.0, 4.0, 0.5])
    c = ScopeCoupling([ScopeSpec(a), ScopeSpec(b)])
    c.hard_threshold(2.0)
    assert (a.tolist(), b.tolist()) == ([0, 6], [5, 4, 0])
    c.soft_threshold(1.0)
    assert (a.tolist(), b.tolist()) == ([0, 5], [4, 3, 0])
    c.hard_threshold(nnz=1, values={a: torch.zeros(2), b: torch.tensor([0.0, 1.0, 0.0])})
    assert (a.tolist(), b.tolist()) == ([0, 0], [0, 3, 0])


def test_whole_mlps_share_one_budget_of_neurons():
    first, second = mlp()[0], mlp()[0]
    first.apply_multiplier(torch.tensor([[3.0], [1.0], [2.0]]))  # norms 9, 3, 6 against 3, 3, 3
    c = ScopeCoupling([ScopeSpec(first), ScopeSpec(second)])
    assert c.numblk_per_scope() == 6 and c.numel_per_scope() == 36
    g, _, d, g2, _, d2 = c.get_masks(4).values()
    assert torch.equal(g, booleans("xx xx xx")) and torch.equal(d, booleans("xxx xxx"))
    assert torch.equal(g2, booleans("xx .. ..")) and torch.equal(d2, booleans("x.. x.."))


@pytest.mark.parametrize("alike", [True, False])
def test_two_views_of_one_parameter_may_fill_one_mask(alike):
    w = torch.tensor([8.0, 1.0, 7.0, 2.0, 6.0, 3.0, 5.0, 4.0]).reshape(1, 2, 2, 2)
    w = w.contiguous(memory_format=torch.channels_last)
    first, second = (BlockSpec(View.from_function(w, lambda t, k=k: t[:, k : k + 1])) for k in range(2))
    mask = torch.ones_like(w) > 0 if alike else torch.ones(w.shape, dtype=torch.bool)
    assert (mask.stride() == w.stride()) is alike
    fill_masks(
        [Request(scope=ScopeCoupling([ScopeSpec(first), ScopeSpec(second)]), masks={first: mask, second: mask}, keep=4)]
    )
    assert torch.equal(mask, w >= 5)


def test_a_scope_coupling_takes_scores_by_block():
    specs = [BlockSpec(torch.ones(4), (2,)), BlockSpec(torch.ones(4), (1,))]
    c = ScopeCoupling([ScopeSpec(s) for s in specs])
    scores = dict(zip(specs, (torch.tensor([1.0, 9.0]), torch.tensor([5.0, 6.0, 0.0, 7.0])), strict=True))
    ma, mb = c.get_masks(3, block_scores=scores).values()
    assert ma.tolist() == [False, False, True, True] and mb.tolist() == [False, True, False, True]
    assert c.block_to_scope(scores, merge=True).tolist() == [[1, 9, 5, 6, 0, 7]]


@pytest.mark.parametrize(
    "call",
    [
        lambda c, a, b: c.hard_threshold(5.0, values={a: torch.ones(4)}),
        lambda c, a, b: c.soft_threshold(0.5, {a: torch.ones(4)}),
        lambda c, a, b: c.soft_threshold(0.5, {a: torch.ones(4), b: torch.zeros(4)}),
        lambda c, a, b: c.soft_threshold(-1.0),
        lambda c, a, b: c.hard_threshold(nnz=9),
    ],
)
def test_an_error_in_a_later_member_leaves_the_earlier_ones_unchanged(call):
    a, b = torch.ones(4), torch.ones(4)
    with pytest.raises(SparsityError):
        call(ScopeCoupling([ScopeSpec(a), ScopeSpec(b)]), a, b)
    assert torch.equal(a, torch.ones(4)) and torch.equal(b, torch.ones(4))


def test_scope_coupling_has_the_methods_and_signatures_of_scope_spec():
    one, many = (dict(inspect.getmembers(c, inspect.isfunction)) for c in (ScopeSpec, ScopeCoupling))
    for name in (n for n in one if not n.startswith("_") and n != "members"):
        left, right = (
            [(p.name, p.kind, p.default) for p in inspect.signature(f[name]).parameters.values()] for f in (one, many)
        )
        assert left == right, name


def test_a_coupled_block_may_be_kept_while_any_member_has_something_left():
    a, b = BlockSpec(torch.tensor([1.0, 5.0, 2.0])), BlockSpec(torch.tensor([1.0, 4.0, 3.0]))
    masks = {a: torch.tensor([True, False, False]), b: torch.tensor([True, True, False])}
    fill_masks([Request(scope=ScopeSpec(BlockCoupling([a, b])), masks=masks, keep=1, within_mask=True)])
    assert masks[a].tolist() == [False, False, False] and masks[b].tolist() == [False, True, False]


# soft thresholding; see also test_proximal_operator.py


@pytest.mark.parametrize(
    ("w", "block", "t", "kwargs", "expected"),
    [
        ([[3.0, 4.0, 0.6, 0.8, 0.3, 0.4]], (1, 2), 1.0, {}, [[2.4, 3.2, 0, 0, 0, 0]]),
        ([[3.0, -3.0], [3.0, -3.0]], (), torch.tensor([[1.0, 2.0], [0.0, 4.0]]), {}, [[2.0, -1.0], [3.0, 0.0]]),
        ([[5.0, 5.0], [5.0, 5.0]], (2, 2), 0.5, {"scale": True}, [[4.5, 4.5], [4.5, 4.5]]),  # times sqrt(4)
        ([[3.0, 4.0]], (1, 2), 1.0, {"scale": True}, [[3 * (1 - 2**0.5 / 5), 4 * (1 - 2**0.5 / 5)]]),
        ([[3.0, 4.0, 3.0]], (1, 2), 1.0, {"scale": True}, [[3 * (1 - 2**0.5 / 5), 4 * (1 - 2**0.5 / 5), 2.0]]),
        ([[3.0, 4.0]], (1, 2), 0.1, {}, [[3 * (1 - 0.1 / 5), 4 * (1 - 0.1 / 5)]]),
        ([[1e-30, 2.0, 0.0, -3.0]], (1, 2), 0.0, {}, [[1e-30, 2.0, 0.0, -3.0]]),
        ([[1e-30, 1e-30]], (1, 2), 0.0, {}, [[1e-30, 1e-30]]),  # whose squares vanish
        ([[1e-30, 1e-30]], (1, 2), 0.0, {"conditioners": torch.ones(1, 2)}, [[1e-30, 1e-30]]),
        ([[1e-30, 2.0]], (1, 2), 0.0, {"conditioners": torch.tensor([[1e-3, 1e3]])}, [[1e-30, 2.0]]),
        ([[NAN, 1.0, 0.1, 0.1]], (1, 2), 0.5, {}, [[NAN, NAN, 0.0, 0.0]]),
        ([[1.0, 1.0]], (), 0.5, {"conditioners": torch.tensor([[0.0, 1.0]]), "eps": 1.0}, [[0.5, 0.75]]),  # |v| - t / h
        ([[3.0, 4.0]], (1, 2), 2.0, {"conditioners": torch.full((1, 2), 4.0)}, [[2.7, 3.6]]),  # as plainly by 0.5
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_soft_threshold_shrinks_norms(w, block, t, kwargs, expected, dtype):
    w, expected = (torch.tensor(x, dtype=dtype) for x in (w, expected))
    BlockSpec(w, block, edge="partial").soft_threshold(t, **kwargs)
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-13}[dtype]
    torch.testing.assert_close(w, expected, rtol=tolerance, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_soft_threshold_of_halves(dtype):
    w = torch.tensor([[3.0, 4.0]], dtype=dtype)
    BlockSpec(w, (1, 2)).soft_threshold(2.5, torch.ones(1, 2))
    assert w.dtype == dtype and w.tolist() == [[1.5, 2.0]]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        *((lambda s, t=t: s.soft_threshold(t), "soft_threshold needs thresholds >= 0") for t in (-1.0, NAN)),
        (lambda s: s.soft_threshold(torch.tensor([[1.0, -1e-9]])), "soft_threshold needs thresholds >= 0"),
        *(
            (lambda s, h=h: s.soft_threshold(0.1, torch.tensor([[1.0, h]])), "soft_threshold needs conditioners > 0")
            for h in (0.0, -1.0, NAN)
        ),
        (lambda s: s.hard_threshold(torch.full((3, 1), 9.0)), "w: "),
    ],
)
@pytest.mark.parametrize("make", [lambda w: BlockSpec(w, (), "w"), lambda w: ScopeSpec(w, (1, 1), "w")])
def test_a_wrong_threshold_or_conditioner_is_refused_before_anything_changes(call, text, make):
    w = torch.ones(1, 2)
    with refuses(text):
        call(make(w))
    assert torch.equal(w, torch.ones(1, 2))


def test_coupled_blocks_are_shrunk_by_the_norm_of_the_union():
    a, b = torch.tensor([3.0]), torch.tensor([4.0])
    BlockCoupling([BlockSpec(a), BlockSpec(b)]).soft_threshold(2.0, {a: torch.tensor([1.0]), b: torch.tensor([9.0])})
    v, h = torch.tensor([3.0, 4.0]).double(), torch.tensor([1.0, 9.0]).double()
    assert [a.item(), b.item()] == pytest.approx(shrunk(v, 2.0, h).tolist(), rel=1e-5)
