"""The words of SPEC section 2 on tensors small enough to check by eye."""

import inspect
import math
import re

import pytest
import torch
from strategies import shrunk

from sparsekit_ao import BlockCoupling, BlockSpec, CouplingError, ScopeCoupling, ScopeSpec, SparsityError, View

INF, NAN = math.inf, math.nan


def count(*shape, dtype=torch.float32):
    """0, 1, 2, ... in the shape given."""
    return torch.arange(math.prod(shape), dtype=dtype).reshape(shape)


def booleans(rows):
    return torch.tensor([[c == "x" for c in row] for row in rows.split()])


def refuses(text):
    return pytest.raises(ValueError, match=re.escape(text))


def only(masks):
    (mask,) = masks.values()
    return mask


# View: addresses


def test_an_address_is_offset_plus_index_times_stride():
    view = View(count(2, 8), (2, 2, 2), (8, 1, 4), 2)
    assert view.data.tolist() == [[[2, 6], [3, 7]], [[10, 14], [11, 15]]]
    assert view.linear_offset((1, 0, 1)) == 14
    assert (view.ndim, view.numel(), view.cosize) == (3, 8, 16)


def test_addresses_count_from_the_first_element_of_a_slice():
    p = count(4, 6)[1:, 2:]
    assert p.storage_offset() == 8
    assert View(p, (2, 2), (6, 2), 1).data.tolist() == [[9, 11], [15, 17]]


def test_a_channels_last_weight_is_addressed_as_it_is_stored():
    p = count(1, 2, 2, 2).contiguous(memory_format=torch.channels_last)
    view = View.from_existing(p)
    assert view.stride[1:] == (1, 4, 2)
    assert torch.equal(view.data, p)
    assert View(p, (4, 2), (2, 1)).data.tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]  # pixels by channels


def test_a_transposed_weight_is_addressed_as_it_is_stored():
    view = View.from_existing(count(2, 3).t())
    assert (view.shape, view.stride) == ((3, 2), (1, 3))
    assert view.data.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_a_view_passes_through_from_existing():
    view = View(count(4), (2,), (2,))
    assert View.from_existing(view) is view


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda w: w.unflatten(0, (2, 2)), ((2, 2, 6), (12, 6, 1), 0)),
        (lambda w: w[1:, ::2].t(), ((3, 3), (2, 6), 6)),
        (lambda w: w.view(-1), ((24,), (1,), 0)),
        (lambda w: w.detach(), ((4, 6), (6, 1), 0)),
        (lambda w: w, ((4, 6), (6, 1), 0)),
    ],
)
def test_any_chain_of_torch_views_makes_a_view(function, expected):
    view = View.from_function(count(4, 6), function)
    assert (view.shape, view.stride, view.offset) == expected


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_view_function_works_where_gradients_are_off(mode):
    with mode():
        assert View.from_function(count(4, 6), lambda w: w.t()).shape == (6, 4)


def test_a_view_function_that_copies_or_returns_another_tensor_is_an_error():
    with refuses("w: the view function returned a copy, not a view"):
        View.from_function(count(4, 6), lambda w: w.t().reshape(-1), name="w")
    with refuses("must return a tensor, got list"):
        View.from_function(count(4, 6), lambda w: w.tolist())
    with pytest.raises(SparsityError):
        View.from_function(count(4, 6), lambda w: count(4, 6).t())
    with pytest.raises(SparsityError):
        View.from_function(count(4, 6), lambda w: w.expand(3, 4, 6))


def test_a_view_function_may_not_change_the_dtype():
    with pytest.raises(SparsityError):
        View.from_function(count(4, 6, dtype=torch.float64), lambda w: w.view(torch.float32)[:2])


# View: what is refused

WRONG_VIEWS = [
    (((2, 4), (1,), 0), "w: a view needs one stride a dimension, got shape (2, 4) (2) and stride (1,) (1)"),
    (
        ((2, 4), (5, 1), 0),
        "w: view (2, 4):(5, 1) with offset 0 is out of bounds: it ends at element 8, the parameter (2, 4) at",
    ),
    (
        ((2, 4), (4, 1), 1),
        "w: view (2, 4):(4, 1) with offset 1 is out of bounds: it ends at element 8, the parameter (2, 4) at",
    ),
    (((2, 2), (1, 1), 0), "w: view (2, 2):(1, 1): strides overlap: indices (0, 1) and (1, 0) map to one element"),
    (((2, 2), (0, 1), 0), "w: view (2, 2):(0, 1): strides overlap: indices (0, 0) and (1, 0) map to one element"),
    (((3, 2), (1, 2), 0), "w: view (3, 2):(1, 2): strides overlap: indices (0, 1) and (2, 0) map to one element"),
    (
        ((2, 2, 2), (1, 2, 3), 0),
        "w: view (2, 2, 2):(1, 2, 3): strides overlap: indices (0, 0, 1) and (1, 1, 0) map to",
    ),
    (((2,), (-1,), 1), "w: view stride must be non-negative ints, got (-1,)"),
    (((2,), (1,), -1), "w: view offset must be non-negative ints, got (-1,)"),
    (((-2,), (1,), 0), "w: view shape must be non-negative ints, got (-2,)"),
]


@pytest.mark.parametrize(("window", "text"), WRONG_VIEWS)
def test_the_error_of_a_wrong_window_names_what_is_wrong(window, text):
    with refuses(text):
        View(torch.zeros(2, 4), *window, name="w")


@pytest.mark.parametrize(
    "window", [((2.0, 2), (2, 1), 0), ((2, 2), (2, True), 0), ((2, 2), (2, 1), 0.0), ((2, 2), (2, 1), False)]
)
def test_numbers_that_are_not_ints_are_refused_whatever_came_before(window):
    p = torch.zeros(2, 2)
    View(p, (2, 2), (2, 1), 0)
    with refuses("must be non-negative ints"):
        View(p, *window)


def test_a_window_stays_inside_the_parameter_not_merely_its_storage():
    base = count(4, 6)
    with refuses(
        "view (5,):(1,) with offset 0 is out of bounds: it ends at element 4, the parameter (4,) at element 3"
    ):
        View(base.view(-1)[:4], (5,), (1,))
    with refuses("contains elements that are not the parameter's: (4, 4):(6, 1) is a slice of a larger tensor"):
        View(base[:, :4], (2, 5), (6, 1))
    with refuses("contains elements that are not the parameter's"):
        View(base[:, ::2], (3,), (1,))
    assert View(base[:, ::2], (2, 2), (12, 4)).data.tolist() == [[0, 4], [12, 16]]


def test_windows_that_interleave_without_overlap_are_accepted():
    assert View(count(6), (2, 3), (3, 1)).data.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert View(count(6), (3, 2), (2, 1)).data.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert View(count(8), (2, 3), (3, 2)).data.tolist() == [[0, 2, 4], [3, 5, 7]]  # not nested, still injective


def test_the_stride_of_a_dimension_of_one_does_not_matter():
    assert View(count(4), (1, 4), (0, 1)).data.tolist() == [[0, 1, 2, 3]]
    assert View(count(4), (1, 4), (99, 1)).data.tolist() == [[0, 1, 2, 3]]


def test_a_parameter_that_is_itself_expanded_is_refused():
    with refuses("is expanded: several of its elements share memory. Make it contiguous first."):
        View.from_existing(torch.zeros(1, 3).expand(4, 3))


@pytest.mark.parametrize("shape", [(0,), (0, 4), (2, 0)])
def test_an_empty_window_is_a_window(shape):
    view = View.from_existing(torch.zeros(shape))
    assert view.numel() == 0 and view.cosize == 0 and view.data.shape == shape


# View: reading and writing


def test_data_is_live_and_assigning_writes_the_same_parameter():
    p = torch.nn.Parameter(count(2, 4))
    view, pointer = View(p, (2, 2), (4, 2)), p.data_ptr()
    alias = view.data
    view.data = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])
    assert p.tolist() == [[-1, 1, -2, 3], [-3, 5, -4, 7]] and alias[1, 1] == -4
    alias[0, 0] = 9
    assert p[0, 0] == 9 and p.data_ptr() == pointer and p.requires_grad and p.grad_fn is None


@pytest.mark.parametrize(
    "p",
    [count(3, 4), count(4, 3).t(), count(5, 6)[1:4, 2:], count(2, 3, 2), count(1, 3, 2, 2)],
    ids=["row-major", "transposed", "slice", "3-D", "4-D"],
)
def test_to_param_rc_gives_the_logical_row_and_column(p):
    view = View.from_existing(p)
    for row in range(p.shape[0]):
        for column, at in enumerate(
            torch.cartesian_prod(*(torch.arange(n) for n in p.shape[1:])).reshape(-1, p.ndim - 1)
        ):
            assert view.to_param_rc((row, *at.tolist())) == (row, column)


def test_to_param_rc_of_channels_last_and_of_a_bias():
    p = torch.zeros(2, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    assert View.from_existing(p).to_param_rc((1, 2, 1, 0)) == (1, 2 * 4 + 2)
    assert View.from_existing(torch.zeros(5)).to_param_rc((3,)) == (3, 0)
    assert View(torch.zeros(4, 6), (2, 12), (12, 1)).to_param_rc((1, 7)) == (3, 1)


def test_to_param_rc_is_right_for_strides_that_are_not_nested():
    p = torch.zeros(8).as_strided((2, 3), (3, 2))
    view = View.from_existing(p)
    assert [view.to_param_rc((i, j)) for i in range(2) for j in range(3)] == [
        (i, j) for i in range(2) for j in range(3)
    ]


@pytest.mark.parametrize("index", [(2, 0), (0, -1), (0,), (0, 0, 0)])
def test_an_index_outside_the_view_is_refused(index):
    view = View.from_existing(count(2, 3))
    with refuses(f"index {index} is out of bounds for the view (2, 3)"):
        view.linear_offset(index)
    with refuses(f"index {index} is out of bounds for the view (2, 3)"):
        view.to_param_rc(index)


def test_block_view_of_reorders_interleaves_and_merges():
    w = count(2, 4)
    view = View.from_existing(w)
    assert view.block_view_of(w, (2, 2)).tolist() == [[[[0, 1], [4, 5]], [[2, 3], [6, 7]]]]
    assert view.block_view_of(w, (2, 2), reorder=False).tolist() == [[[[0, 1], [2, 3]], [[4, 5], [6, 7]]]]
    assert view.block_view_of(w, (2, 2), merge=True).tolist() == [[[0, 1, 4, 5], [2, 3, 6, 7]]]
    assert view.block_view_of(w, ()).shape == (2, 4, 1, 1) and view.block_view_of(w, (-1, 1)).shape == (1, 4, 2, 1)
    with refuses("merge=True needs reorder=True"):
        view.block_view_of(w, (2, 2), reorder=False, merge=True)


def test_block_view_of_is_a_view_and_takes_other_tensors_of_the_parameters_shape():
    w = count(2, 4)
    view = View.from_existing(w)
    view.block_view_of(w, (1, 2))[1, 1, 0, 0] = -1
    assert w[1, 2] == -1
    other = count(4, 2).t()
    assert view.block_view_of(other, (1, 2), merge=True).tolist() == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    with refuses("values must have the parameter's shape (2, 4), got (4, 2)"):
        view.block_view_of(count(4, 2), (1, 2))


def test_broadcast_block_to_element_spreads_one_value_a_block():
    view = View.from_existing(torch.zeros(2, 4))
    spread = view.broadcast_block_to_element(torch.tensor([[1.0, 2.0]]), (2, 2))
    assert spread.tolist() == [[1, 1, 2, 2], [1, 1, 2, 2]]
    fake = view.broadcast_block_to_element(torch.tensor([[1.0, 2.0]]), (2, 2), fake=True)
    assert fake.shape == (1, 2, 2, 2) and fake.stride()[1] == fake.stride()[3] == 0
    with refuses("block values must have the grid's shape (1, 2), got (2, 1)"):
        view.broadcast_block_to_element(torch.ones(2, 1), (2, 2))


def test_apply_multiplier_scales_blocks_in_place():
    w = count(2, 4)
    View.from_existing(w).apply_multiplier(torch.tensor([[10.0, 0.0]]), (2, 2))
    assert w.tolist() == [[0, 10, 0, 0], [40, 50, 0, 0]]


def test_apply_mask_zeroes_where_true():
    w = torch.ones(2, 4)
    View.from_existing(w).apply_mask(torch.tensor([[True, False]]), (2, 2))
    assert w.tolist() == [[0, 0, 1, 1], [0, 0, 1, 1]]
    BlockSpec(w, (1, 1)).apply_mask(booleans("...x ...."))
    assert w.tolist() == [[0, 0, 1, 0], [0, 0, 1, 1]]


def test_apply_mask_zeroes_nan_and_infinity_exactly():
    w = torch.tensor([[NAN, INF, 1.0]])
    View.from_existing(w).apply_mask(booleans("xx."), ())
    assert w.tolist() == [[0, 0, 1]]


def test_views_are_equal_by_parameter_shape_stride_and_offset():
    w, same = count(2, 4), count(2, 4)
    a, b = View(w, (2, 2), (4, 1), 1), View(w, (2, 2), (4, 1), 1)
    assert a == b and hash(a) == hash(b) and len({a, b}) == 1
    assert a != View(same, (2, 2), (4, 1), 1)
    assert all(a != View(w, *other) for other in [((2, 2), (4, 1), 0), ((2, 2), (4, 2), 1), ((2, 1), (4, 1), 1)])
    assert a != "view"


def test_a_spec_made_before_a_change_of_memory_format_tiles_the_same_or_refuses():
    conv = torch.nn.Conv2d(4, 2, 3, bias=False)
    s = ScopeSpec(BlockSpec(conv.weight), (1, 4, 1, 1))
    expected = only(s.get_masks(2))
    conv.to(memory_format=torch.channels_last)
    try:
        found = only(s.get_masks(2))
    except ValueError:
        return
    assert torch.equal(found, expected)


def test_a_spec_works_after_a_change_of_dtype():
    linear = torch.nn.Linear(8, 4)
    s = ScopeSpec(BlockSpec(linear.weight), (1, 4))
    linear.to(torch.bfloat16)
    assert only(s.get_masks(2)).unflatten(1, (2, 4)).sum(-1).eq(2).all()


# BlockSpec


@pytest.mark.parametrize(
    ("block", "grid", "per_block"),
    [
        ((), (4, 6), 1),
        ((1, 1), (4, 6), 1),
        ((2, 3), (2, 2), 6),
        ((-1, 2), (1, 3), 8),
        ((1, -1), (4, 1), 6),
        ((-1, -1), (1, 1), 24),
    ],
)
def test_the_grid_counts_blocks_along_each_dimension(block, grid, per_block):
    spec = BlockSpec(count(4, 6), block)
    assert (spec.grid_shape, spec.grid_ndim, spec.numel_per_block()) == (grid, 2, per_block)
    assert spec.numblk() == math.prod(grid) and spec.numel() == 24
    assert spec.blocks() == [spec] and len(spec.parameters()) == 1


WRONG_BLOCKS = [
    ((3, 2), 'w: block (3, 2) needs dimension 0 divisible by 3, got 4. Use edge="partial", or leave the tensor out.'),
    ((2, 4), 'w: block (2, 4) needs dimension 1 divisible by 4, got 6. Use edge="partial", or leave the tensor out.'),
    ((2, 12), "w: block (2, 12) needs dimension 1 divisible by 12, got 6."),
    ((0, 1), "w: block (0, 1) needs a positive size (or -1 for all) at dimension 0, got 0"),
    ((1, -2), "w: block (1, -2) needs a positive size (or -1 for all) at dimension 1, got -2"),
    ((1, 2.0), "w: block (1, 2.0) needs an int at dimension 1, got 2.0"),
    ((True, 1), "w: block (True, 1) needs an int at dimension 0, got True"),
    ((2,), "w: block (2,) has 1 entries, but the view has 2 dimensions (4, 6). Give one entry a dimension, or () for"),
    ((1, 1, 1), "w: block (1, 1, 1) has 3 entries, but the view has 2 dimensions (4, 6)"),
    (2, "w: block shape must be a tuple of ints, got 2"),
    ("12", "w: block shape must be a tuple of ints, got '12'"),
]


@pytest.mark.parametrize(("block", "text"), WRONG_BLOCKS)
def test_a_wrong_block_is_an_error_that_names_the_dimension_and_both_numbers(block, text):
    with refuses(text):
        BlockSpec(count(4, 6), block, name="w")


def test_an_error_is_named_by_the_view_if_the_block_has_no_name():
    with refuses("enc.w: block (3, 2) needs"):
        BlockSpec(View.from_existing(count(4, 6), name="enc.w"), (3, 2))


def test_edge_is_error_or_partial():
    with refuses("""edge must be "error" or "partial", got 'pad'"""):
        BlockSpec(count(4, 6), (2, 2), edge="pad")


def test_norms_of_a_block():
    b = BlockSpec(torch.tensor([[3.0, -4.0, 0.0, -2.0]]), (1, 2))
    assert b.norms().tolist() == [[5, 2]]
    assert b.norms(p=1).tolist() == [[7, 2]]
    assert b.norms(p=INF).tolist() == [[4, 2]]
    assert b.norms(torch.tensor([[0.0, 1.0, 6.0, 8.0]])).tolist() == [[1, 10]]
    assert b.norms({b.view.param: torch.ones(1, 4)}, 1).tolist() == [[2, 2]]


@pytest.mark.parametrize("p", [0, 3, -1, -INF, "fro"])
def test_a_norm_of_another_order_is_right_or_refused(p):
    b = BlockSpec(torch.tensor([[3.0, -4.0]]), (1, 2))
    try:
        found = b.norms(p=p)
    except ValueError:
        return
    torch.testing.assert_close(found[0, 0], torch.linalg.vector_norm(torch.tensor([3.0, -4.0]), p))


@pytest.mark.parametrize("p", [torch.square, True, None, "2", torch.tensor([2, 2])])
def test_a_norm_that_is_no_number_is_refused(p):
    with refuses(f"w: norms: p must be 1, 2 or inf, got {p!r}"):
        BlockSpec(count(1, 4), (1, 2), "w").norms(p=p)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_norms_are_float32_or_wider(dtype):
    found = BlockSpec(torch.full((1, 1024), 100.0, dtype=dtype), (1, -1)).norms()
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) and found.item() == 3200


def test_min_and_max_are_signed_and_reduce_is_any_fold():
    b = BlockSpec(torch.tensor([[3.0, -4.0, 0.0, -2.0]]), (1, 2))
    assert b.min().tolist() == [[-4, -2]] and b.max().tolist() == [[3, 0]]
    assert b.reduce(None, torch.sum).tolist() == [[-1, -2]]
    assert b.reduce(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.prod).tolist() == [[2, 12]]


def test_nnz_blocks_counts_blocks_with_an_element_above_eps():
    b = BlockSpec(torch.tensor([[0.0, 0.0, 1e-9, 0.0, 0.5, 0.0, NAN, 0.0]]), (1, 2))
    assert (b.nnz_blocks(), b.nnz_blocks(1e-10), b.nnz_blocks(eps=0.5)) == (2, 3, 1)


def test_partial_edges_average_over_the_elements_that_they_have():
    w = torch.tensor([[3.0, 3.0, 1.0], [3.0, 3.0, 1.0], [2.0, 4.0, 7.0]])
    b = BlockSpec(w, (2, 2), edge="partial")
    assert (b.grid_shape, b.numel(), b.numel_per_block()) == ((2, 2), 9, 4)
    assert b.norms(p=1).tolist() == [[3, 1], [3, 7]]
    assert b.norms(p=INF).tolist() == [[3, 1], [4, 7]]
    assert b.norms(p=2).tolist() == [[3, 1], [pytest.approx(10**0.5), 7]]
    assert b.min().tolist() == [[3, 1], [2, 7]] and (BlockSpec(-w, (2, 2), edge="partial").max() < 0).all()
    assert only(b.get_masks(booleans("x. .x"))).tolist() == booleans("xx. xx. ..x").tolist()


@pytest.mark.parametrize("call", ["block_view", "reduce", "apply_mask", "apply_multiplier"])
def test_what_needs_whole_blocks_raises_on_partial_ones(call):
    b = BlockSpec(count(3, 3), (2, 2), name="w", edge="partial")
    args = {"reduce": (None, torch.sum), "apply_mask": (booleans(".. .."),), "apply_multiplier": (torch.ones(2, 2),)}
    with refuses(f"w: {call} needs whole blocks; block (2, 2) leaves partial ones on (3, 3)"):
        getattr(b, call)(*args.get(call, ()))


def test_get_masks_keeps_elements_outside_the_view():
    w = count(3, 4)
    b = BlockSpec(View(w, (2, 2), (4, 1), 5), (1, 2))
    assert only(b.get_masks(torch.tensor([[True], [False]]))).tolist() == booleans("xxxx xxxx x..x").tolist()


def test_get_masks_and_data_on_a_channels_last_weight():
    w = count(2, 2, 1, 2).contiguous(memory_format=torch.channels_last)
    b = BlockSpec(w, (1, -1, -1, -1))
    keep = torch.tensor([False, True])[:, None, None, None]
    mask = only(b.get_masks(keep))
    assert mask.dtype == torch.bool and not mask[0].any() and mask[1].all()
    assert torch.equal(b.data, w) and torch.equal(b.block_view()[1, 0, 0, 0], w[1:])


@pytest.mark.parametrize("call", ["get_masks", "apply_mask", "apply_multiplier"])
def test_a_tensor_that_is_not_of_the_grids_shape_is_refused(call):
    b = BlockSpec(count(2, 4), (1, 2), name="w")
    with refuses("w: expected a tensor of the block grid's shape (2, 2), got (2, 4)"):
        getattr(b, call)(torch.ones(2, 4, dtype=torch.bool))


def test_values_of_another_shape_are_refused():
    with refuses("w: values must have the parameter's shape (2, 4), got (4, 2)"):
        BlockSpec(View.from_existing(count(2, 4), name="w"), (1, 2)).norms(count(4, 2))


def test_hard_threshold_zeroes_strictly_below_and_equal_stays():
    w = torch.tensor([[3.0, 4.0, 0.0, 4.9, 6.0, 8.0]])
    BlockSpec(w, (1, 2)).hard_threshold(5.0)
    assert w.tolist() == [[3, 4, 0, 0, 6, 8]]
    BlockSpec(w, (1, 2)).hard_threshold(torch.tensor([[0.0, 0.0, 11.0]]))
    assert w.tolist() == [[3, 4, 0, 0, 0, 0]]


def test_hard_threshold_may_compare_norms_of_other_values():
    w = torch.tensor([[1.0, 2.0]])
    BlockSpec(w).hard_threshold(1.0, torch.tensor([[5.0, 0.5]]))
    assert w.tolist() == [[1, 0]]


def test_hard_threshold_keeps_nan():
    w = torch.tensor([[NAN, 1.0]])
    BlockSpec(w).hard_threshold(5.0)
    assert w[0, 0].isnan() and w[0, 1] == 0


def test_a_threshold_of_a_wrong_shape_is_refused_before_anything_changes():
    w = torch.ones(4, 8)
    for spec in (BlockSpec(w), ScopeSpec(BlockSpec(w), (1, -1))):
        with pytest.raises(SparsityError):
            spec.hard_threshold(torch.full((3, 1), 9.0))
    assert torch.equal(w, torch.ones(4, 8))


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


def test_a_neuron_of_an_mlp_is_two_rows_and_a_column():
    mlp_, gate, up, down = mlp()
    assert (mlp_.grid_shape, mlp_.numblk(), mlp_.numel(), mlp_.numel_per_block()) == ((3, 1), 3, 18, 6)
    assert mlp_.norms().tolist() == [[3], [3], [3]]
    assert mlp_.norms(p=1).tolist() == [[5], [5], [5]] and mlp_.norms(p=INF).tolist() == [[2], [2], [2]]
    assert [p is q for p, q in zip(mlp_.parameters(), (gate, up, down), strict=True)] == [True] * 3
    assert mlp_.norms({gate: gate, up: up, down: torch.zeros(2, 3)}, 1).tolist() == [[3], [3], [3]]


def test_a_neurons_mask_covers_every_member():
    mlp_, *_ = mlp()
    gate, up, down = mlp_.get_masks(torch.tensor([[True], [False], [True]])).values()
    assert torch.equal(gate, booleans("xx .. xx")) and torch.equal(up, gate)
    assert torch.equal(down, booleans("x.x x.x"))


def test_multipliers_masks_and_thresholds_change_every_member():
    mlp_, gate, up, down = mlp()
    mlp_.apply_multiplier(torch.tensor([[1.0], [3.0], [1.0]]))
    assert gate[1].tolist() == [0, 6] and up[1].tolist() == [3, 0] and down[:, 1].tolist() == [6, 0]
    mlp_.apply_mask(torch.tensor([[True], [False], [False]]))
    assert not gate[0].any() and not up[0].any() and not down[:, 0].any() and mlp_.nnz_blocks() == 2
    mlp_.hard_threshold(9.0)  # neuron 1 has norm 9 and stays, neuron 2 has 3
    assert mlp_.norms().tolist() == [[0], [9], [0]]
    mlp_.soft_threshold(3.0)
    assert mlp_.norms().flatten().tolist() == pytest.approx([0, 6, 0], abs=1e-5)
    assert gate[1].tolist() == pytest.approx([0, 4], abs=1e-5)


def test_scopes_over_coupled_blocks_keep_whole_neurons():
    mlp_, gate, _, down = mlp()
    scores = torch.tensor([[1.0], [3.0], [2.0]])
    g, u, d = ScopeSpec(mlp_, ()).get_masks(2, block_scores=scores).values()
    assert torch.equal(g, booleans(".. xx xx")) and torch.equal(u, g) and torch.equal(d, booleans(".xx .xx"))
    ScopeSpec(mlp_).hard_threshold(nnz=1)  # all norms are 3: the first neuron stays
    assert gate.tolist() == [[1, 0], [0, 0], [0, 0]] and down.tolist() == [[2, 0, 0], [0, 0, 0]]


def test_a_bias_couples_with_the_rows_of_a_weight():
    weight, bias = torch.tensor([[3.0, 0.0], [0.0, 1.0]]), torch.tensor([4.0, 1.0])
    c = BlockCoupling([BlockSpec(weight, (1, -1)), BlockSpec(bias)])
    assert c.grid_shape == (2, 1) and c.numel_per_block() == 3
    assert c.norms().flatten().tolist() == pytest.approx([5, 2**0.5])
    w, b = c.get_masks(torch.tensor([[False], [True]])).values()
    assert torch.equal(w, booleans(".. xx")) and b.tolist() == [False, True]


def test_a_bias_couples_with_the_columns_of_a_weight_by_an_order():
    weight, scale = torch.tensor([[3.0, 0.0], [0.0, 1.0]]), torch.tensor([4.0, 1.0])
    c = BlockCoupling([BlockSpec(weight, (-1, 1)), BlockSpec(scale)], [None, (1, 0)])
    assert c.grid_shape == (1, 2) and c.norms(p=1).tolist() == [[7, 2]]
    w, s = c.get_masks(booleans(".x")).values()
    assert torch.equal(w, booleans(".x .x")) and s.tolist() == [False, True]


def test_orders_permute_three_dimensions():
    a, b = count(2, 3, 4), torch.zeros(4, 2, 3)
    c = BlockCoupling([BlockSpec(a), BlockSpec(b)], [None, (1, 2, 0)])  # a[i, j, k] with b[k, i, j]
    keep = torch.zeros(2, 3, 4, dtype=torch.bool)
    keep[1, 2, 3] = keep[0, 1, 3] = True
    _, found = c.get_masks(keep).values()
    assert found.nonzero().tolist() == [[3, 0, 1], [3, 1, 2]]


def test_coupled_partial_blocks_average_over_the_union():
    c = BlockCoupling([BlockSpec(torch.ones(3), (2,), edge="partial"), BlockSpec(torch.tensor([3.0, 5.0]), (1,))])
    assert c.norms(p=1).tolist() == [pytest.approx(5 / 3), 3]


def test_grids_that_do_not_line_up_are_named():
    a, b = BlockSpec(count(4, 2), (1, -1), "up"), BlockSpec(count(2, 4), (-1, 1), "down")
    with pytest.raises(CouplingError) as caught:
        BlockCoupling([a, b], name="mlp")
    assert str(caught.value) == (
        "mlp: down has the aligned block grid (1, 4), but up has (4, 1). "
        "Give an order that permutes one onto the other, or other blocks and scopes."
    )
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("orders", "text"),
    [
        ([None], "mlp: 2 members but 1 orders; give one for each member, or None"),
        ([None, (0, 0)], "mlp: down: order (0, 0) is no permutation of the 2 aligned grid dimensions"),
        ([None, (2, 1)], "mlp: down: order (2, 1) is no permutation"),
        ([None, (1, 0, 2)], "mlp: down: order (1, 0, 2) is no permutation"),
    ],
)
def test_orders_that_are_no_permutations_are_refused(orders, text):
    specs = [BlockSpec(count(4, 2), (1, -1), "up"), BlockSpec(count(2, 4), (-1, 1), "down")]
    with pytest.raises(CouplingError, match=re.escape(text)):
        BlockCoupling(specs, orders, name="mlp")


def test_a_coupling_needs_members_and_values_by_parameter():
    with pytest.raises(CouplingError, match="a coupling needs at least one member"):
        BlockCoupling([])
    mlp_, gate, *_ = mlp()
    with refuses("mlp: coupled blocks take values as a mapping {parameter: tensor}"):
        mlp_.norms(torch.ones(3, 2))
    with refuses("up: values hold no tensor for this parameter"):
        mlp_.norms({gate: gate})


# ScopeSpec


@pytest.mark.parametrize(
    ("scope", "grid", "members", "elements"),
    [
        ((), (1, 1), 12, 24),
        ((-1, -1), (1, 1), 12, 24),
        ((1,), (4, 1), 3, 6),
        ((1, -1), (4, 1), 3, 6),
        ((-1, 1), (1, 3), 4, 8),
        ((2, 3), (2, 1), 6, 12),
    ],
)
def test_scopes_tile_the_block_grid(scope, grid, members, elements):
    s = ScopeSpec(BlockSpec(count(4, 6), (1, 2)), scope)
    assert (s.grid_shape, s.numscp(), s.numblk()) == (grid, math.prod(grid), 12)
    assert (s.numblk_per_scope(), s.numel_per_scope()) == (members, elements)


@pytest.mark.parametrize(
    ("scope", "text"),
    [
        ((1, 2), 'w: scope (1, 2) needs block-grid dimension 1 divisible by 2, got 3. Use edge="partial", or leave'),
        ((3,), "w: scope (3, -1) needs block-grid dimension 0 divisible by 3, got 4."),
        ((0, 1), "w: scope (0, 1) needs a positive size (or -1 for all) at block-grid dimension 0, got 0"),
        ((1.0, 1), "w: scope (1.0, 1) needs an int at block-grid dimension 0, got 1.0"),
        ((1, 1, 1), "w: scope (1, 1, 1) has 3 entries, but the block grid has 2 dimensions (4, 3)."),
        (4, "w: scope shape must be a tuple of ints, got 4"),
    ],
)
def test_a_wrong_scope_is_an_error_that_names_the_dimension_and_both_numbers(scope, text):
    with refuses(text):
        ScopeSpec(BlockSpec(count(4, 6), (1, 2), "w"), scope)


def test_a_scope_takes_a_parameter_or_a_view_as_single_elements():
    assert ScopeSpec(count(2, 4), (1, 4)).numel_per_scope() == 4
    assert ScopeSpec(View(count(8), (2, 2), (4, 1)), (1,)).numscp() == 2


def test_block_to_scope_and_back():
    s = ScopeSpec(BlockSpec(count(2, 6)), (1, 3))
    t = count(2, 6)
    assert s.block_to_scope(t).shape == (2, 2, 1, 3)
    assert s.block_to_scope(t, merge=True).tolist() == [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]]
    assert s.block_to_scope(t, reorder=False).shape == (2, 1, 2, 3)
    for kwargs in ({}, {"merge": True}, {"reorder": False}):
        assert torch.equal(s.scope_to_block(s.block_to_scope(t, **kwargs), kwargs.get("reorder", True)), t)


@pytest.mark.parametrize(("grid", "scope"), [((4, 8), (2, 4)), ((4, 4), (2, 2)), ((2, 6), (1, 2))])
@pytest.mark.parametrize("kwargs", [{}, {"merge": True}, {"reorder": False}])
def test_scope_to_block_inverts_block_to_scope_whatever_the_shapes(grid, scope, kwargs):
    s, t = ScopeSpec(BlockSpec(count(*grid)), scope), count(*grid)
    assert torch.equal(s.scope_to_block(s.block_to_scope(t, **kwargs), kwargs.get("reorder", True)), t)


def test_block_to_scope_takes_any_tensor_of_the_grids_shape():
    s = ScopeSpec(BlockSpec(count(2, 6)), (1, 3))
    assert s.block_to_scope(torch.ones(()).expand(2, 6), merge=True).tolist() == [[[1] * 3] * 2] * 2
    assert s.block_to_scope(count(6, 2).t(), merge=True)[1, 0].tolist() == [1, 3, 5]
    with refuses("block_to_scope takes the block grid's shape (2, 6), got (6, 2)"):
        s.block_to_scope(count(6, 2))
    with refuses("scope_to_block takes (2, 2, 1, 3) or (2, 2, 3), got (2, 6)"):
        s.scope_to_block(count(2, 6))


def test_scope_to_block_of_partial_scopes_undoes_block_norms_or_is_refused():
    s = ScopeSpec(BlockSpec(count(1, 5)), (1, 3), edge="partial")
    assert s.block_norms().tolist() == [[[0, 1, 2], [3, 4, 0]]]
    try:
        found = s.scope_to_block(s.block_norms())
    except ValueError:
        return
    assert found.tolist() == [[0, 1, 2, 3, 4]]


def test_kth_largest_and_kth_mid():
    s = ScopeSpec(torch.tensor([[1.0, -4.0, 3.0, 2.0], [0.0, 0.0, 5.0, -5.0]]), (1, 4))
    assert s.block_norms().tolist() == [[[1, 4, 3, 2]], [[0, 0, 5, 5]]]
    assert s.kth_largest(nnz=2).tolist() == [[3], [5]] and s.kth_largest(None, 4).tolist() == [[1], [0]]
    assert s.kth_largest(None, torch.tensor([[1], [3]])).tolist() == [[4], [0]]
    assert s.kth_mid(None, 2).tolist() == [[2.5], [2.5]]
    assert s.kth_mid(None, 2, 3.0).tolist() == [[2.25], [1.25]]
    assert s.kth_mid(None, 2, k_weight=0.0).tolist() == [[3], [5]]
    assert s.kth_largest(torch.tensor([[9.0, 8.0, 7.0, 6.0]] * 2), 3).tolist() == [[7], [7]]


@pytest.mark.parametrize(
    ("call", "nnz", "text"),
    [
        ("kth_largest", 0, "nnz must lie in 1 .. 4 (a scope has 4 blocks), got 0"),
        ("kth_largest", 5, "nnz must lie in 1 .. 4 (a scope has 4 blocks), got 5"),
        ("kth_mid", 4, "nnz must lie in 1 .. 3 (a scope has 4 blocks), got 4"),
        ("kth_mid", 0, "nnz must lie in 1 .. 3 (a scope has 4 blocks), got 0"),
    ],
)
def test_a_rank_that_does_not_exist_is_refused(call, nnz, text):
    with refuses(text):
        getattr(ScopeSpec(count(2, 4), (1, 4)), call)(None, nnz)


def test_hard_threshold_by_threshold_or_by_count():
    w = torch.tensor([[1.0, 4.0, 3.0, 2.0], [5.0, 6.0, 7.0, 8.0]])
    s = ScopeSpec(w, (1, 4))
    s.hard_threshold(torch.tensor([[2.0], [6.5]]))
    assert w.tolist() == [[0, 4, 3, 2], [0, 0, 7, 8]]
    s.hard_threshold(nnz=1)
    assert w.tolist() == [[0, 4, 0, 0], [0, 0, 0, 8]]
    s.hard_threshold(None, 1, torch.tensor([[9.0, 1.0, 1.0, 1.0]] * 2))
    assert w.tolist() == [[0, 0, 0, 0], [0, 0, 0, 0]]


def test_hard_threshold_by_count_cuts_ties_that_a_threshold_would_keep():
    w = torch.ones(1, 4)
    s = ScopeSpec(w, (1, 4))
    s.hard_threshold(s.kth_largest(nnz=2))
    assert w.tolist() == [[1, 1, 1, 1]]
    s.hard_threshold(nnz=2)
    assert w.tolist() == [[1, 1, 0, 0]]


@pytest.mark.parametrize("kwargs", [{}, {"thresholds": 1.0, "nnz": 1}, {"values": torch.ones(1, 4)}])
def test_hard_threshold_takes_exactly_one_of_thresholds_and_nnz(kwargs):
    w = torch.ones(1, 4)
    with refuses("w: hard_threshold needs either thresholds or nnz, not both"):
        ScopeSpec(w, (1, 4), "w").hard_threshold(**kwargs)
    assert w.all()


def test_a_float64_weight_equal_to_the_threshold_stays():
    for spec in (BlockSpec, ScopeSpec):
        w = torch.tensor([[0.1, 0.2]], dtype=torch.float64)
        spec(w).hard_threshold(0.1)
        assert w.tolist() == [[0.1, 0.2]], spec


@pytest.mark.parametrize(
    ("level", "blocks", "nnz"),
    [
        (0.0, 4, 4),
        (1.0, 4, 0),
        (0.5, 4, 2),
        (0.5, 5, 3),
        (0.9, 10, 1),
        (0.7, 10, 3),
        (0.29, 100, 71),  # 0.29 * 100 = 28.999999999999996
        (0.57, 100, 43),
        (1 / 3, 3, 2),
        (1, 3, 0),
        (0, 3, 3),
        (0.999, 3, 1),
        (0.3333333333, 3, 2),  # one ulp short of a third still counts as a third
        (0.333333332, 3, 3),  # farther than 1e-9 from it does not
    ],
)
def test_a_level_drops_its_floor_with_a_1e_9_grace(level, blocks, nnz):
    assert ScopeSpec(torch.ones(2, blocks), (1, -1)).sparsity_to_nnz(level) == nnz


@pytest.mark.parametrize("level", [-0.1, 1.0000001, NAN, INF, True, "0.5", None])
def test_a_level_outside_zero_to_one_is_refused(level):
    with refuses(f"w: sparsity level must lie in [0, 1], got {level!r}"):
        ScopeSpec(torch.ones(2, 4), (1, -1), "w").sparsity_to_nnz(level)


@pytest.mark.parametrize(
    ("width", "scope", "nnz", "level"),
    [(8, 4, 1, 0.75), (8, 4, 0, 1.0), (8, 8, 8, 0.0), (10, 4, 2, 0.4), (10, 4, torch.tensor([[4, 0, 1]]), 0.5)],
)
def test_a_budget_amounts_to_a_level(width, scope, nnz, level):
    s = ScopeSpec(torch.ones(1, width), (1, scope), edge="partial")
    assert s.level_of(nnz) == pytest.approx(level)
    assert 1 - only(s.get_masks(nnz)).float().mean().item() == pytest.approx(level)


def test_partial_scopes_get_a_budget_each():
    s = ScopeSpec(torch.ones(1, 10), (1, 4), edge="partial")
    assert s.blocks_per_scope().tolist() == [[4, 4, 2]]
    assert s.sparsity_to_nnz(0.5).tolist() == [[2, 2, 1]]
    assert only(s.get_masks(s.sparsity_to_nnz(0.5))).tolist() == booleans("xx..xx..x.").tolist()
    assert only(s.get_masks(3)).tolist() == booleans("xxx.xxx.xx").tolist()


def test_get_masks_by_an_int_and_by_a_tensor_of_budgets():
    w = torch.tensor([[1.0, 4.0, 3.0, 2.0], [8.0, 7.0, 6.0, 5.0]])
    s = ScopeSpec(w, (1, 4))
    assert torch.equal(only(s.get_masks(2)), booleans(".xx. xx.."))
    assert torch.equal(only(s.get_masks(torch.tensor([[0], [3]]))), booleans(".... xxx."))
    assert torch.equal(only(s.get_masks(torch.tensor(1))), booleans(".x.. x..."))
    assert torch.equal(only(s.get_masks(1, -10 * (w == 2))), booleans("...x x..."))  # by magnitude of other values
    assert w[0].tolist() == [1, 4, 3, 2]


def test_get_masks_by_scores_and_among_allowed_blocks():
    s = ScopeSpec(BlockSpec(torch.ones(1, 8), (1, 2)), (1, 4))
    scores, allowed = torch.tensor([[1.0, 9.0, 2.0, -3.0]]), booleans("x.xx")
    assert torch.equal(only(s.get_masks(2, block_scores=scores)), booleans("..xxxx.."))
    assert torch.equal(only(s.get_masks(2, None, scores, allowed)), booleans("xx..xx.."))
    assert torch.equal(only(s.get_masks(4, block_scores=scores, candidates=allowed)), booleans("xx..xxxx"))
    assert torch.equal(only(s.get_masks(1, candidates=allowed)), booleans("xx......"))


def test_get_masks_breaks_ties_by_the_order_inside_the_scope():
    s = ScopeSpec(BlockSpec(torch.ones(2, 4)), (2, 2))
    assert torch.equal(only(s.get_masks(3)), booleans("xxxx x.x."))


def test_get_masks_keeps_nan_and_infinity():
    w = torch.tensor([[1.0, NAN, -INF, 2.0]])
    assert torch.equal(only(ScopeSpec(w).get_masks(1)), booleans(".x.."))
    assert torch.equal(only(ScopeSpec(w).get_masks(2)), booleans(".xx."))


WRONG_BUDGETS = [
    (5, "w: nnz must lie in 0 .. 4 (a scope has 4 blocks), got 5"),
    (-1, "w: nnz must lie in 0 .. 4 (a scope has 4 blocks), got -1"),
    (torch.tensor([[2], [9]]), "w: nnz must lie in 0 .. 4 (a scope has 4 blocks), got 2 .. 9"),
    (2.0, "w: nnz must be an int or an integer tensor, got 2.0"),
    (True, "w: nnz must be an int or an integer tensor, got True"),
    (torch.tensor([2.0]), "w: nnz must be an integer tensor of the scope grid's shape (2, 1), got torch.float32 (1,)"),
    (
        torch.tensor([[1, 2]]),
        "w: nnz must be an integer tensor of the scope grid's shape (2, 1), got torch.int64 (1, 2)",
    ),
    (torch.tensor(True), "w: nnz must be an integer tensor of the scope grid's shape (2, 1), got torch.bool ()"),
]


@pytest.mark.parametrize(("nnz", "text"), WRONG_BUDGETS)
def test_a_wrong_budget_is_refused_before_anything_changes(nnz, text):
    w = torch.ones(2, 4)
    s = ScopeSpec(w, (1, 4), "w")
    for call in (s.get_masks, lambda n: s.hard_threshold(nnz=n)):
        with refuses(text):
            call(nnz)
    assert w.all()


def test_scores_of_a_wrong_shape_or_dtype_are_refused():
    s = ScopeSpec(BlockSpec(torch.ones(2, 4), (1, 2), "w"), (1, 2))
    with refuses("w: block_scores must have the block grid's shape (2, 2)"):
        s.get_masks(1, block_scores=torch.ones(2, 4))
    with refuses("w: candidates must have the block grid's shape (2, 2)"):
        s.get_masks(1, candidates=torch.ones(2, 4, dtype=torch.bool))
    with refuses("scores must be float16, bfloat16, float32 or float64"):
        s.get_masks(1, block_scores=torch.ones(2, 2, dtype=torch.int64))


def test_masks_are_new_tensors_and_autograd_is_left_alone():
    w = torch.nn.Parameter(torch.ones(2, 4))
    s = ScopeSpec(w, (1, 4))
    first, second = only(s.get_masks(2)), only(s.get_masks(2))
    assert first.data_ptr() != second.data_ptr() and not first.requires_grad
    s.hard_threshold(nnz=2)
    s.soft_threshold(0.5)
    assert w.tolist() == [[0.5, 0.5, 0, 0]] * 2 and w.grad_fn is None and w.requires_grad


# ScopeCoupling


def test_members_of_different_counts_share_one_total():
    a, b = torch.tensor([[1.0, 6.0], [2.0, 3.0]]), torch.tensor([[5.0, 4.0, 0.0], [2.0, 2.0, 2.0]])
    c = ScopeCoupling([ScopeSpec(a, (1, -1), "a"), ScopeSpec(b, (1, -1), "b")], name="pair")
    assert (c.grid_shape, c.numscp(), c.numblk(), c.numblk_per_scope()) == ((2, 1), 2, 10, 5)
    assert c.numel_per_scope() == 5 and c.sparsity_to_nnz(0.4) == 3
    assert c.block_norms().tolist() == [[[1, 6, 5, 4, 0]], [[2, 3, 2, 2, 2]]]
    assert c.kth_largest(nnz=3).tolist() == [[4], [2]] and c.kth_mid(None, 1).tolist() == [[5.5], [2.5]]
    ma, mb = c.get_masks(3).values()
    assert torch.equal(ma, booleans(".x xx")) and torch.equal(mb, booleans("xx. x.."))
    assert sum(int(m.sum()) for m in (ma, mb)) == 6


def test_a_scope_coupling_thresholds_every_member():
    a, b = torch.tensor([1.0, 6.0]), torch.tensor([5.0, 4.0, 0.5])
    c = ScopeCoupling([ScopeSpec(a), ScopeSpec(b)])
    c.hard_threshold(2.0)
    assert (a.tolist(), b.tolist()) == ([0, 6], [5, 4, 0])
    c.soft_threshold(1.0)
    assert (a.tolist(), b.tolist()) == ([0, 5], [4, 3, 0])
    c.hard_threshold(nnz=1, values={a: torch.zeros(2), b: torch.tensor([0.0, 1.0, 0.0])})
    assert (a.tolist(), b.tolist()) == ([0, 0], [0, 3, 0])


def test_a_scope_coupling_lines_scopes_up_by_orders():
    rows, columns = torch.tensor([[1.0, 2.0], [8.0, 9.0]]), torch.tensor([[5.0, 6.0], [0.0, 7.0]])
    c = ScopeCoupling([ScopeSpec(rows, (1, -1)), ScopeSpec(columns, (-1, 1))], [None, (1, 0)])
    assert c.grid_shape == (2, 1) and c.block_norms().tolist() == [[[1, 2, 5, 0]], [[8, 9, 6, 7]]]
    r, q = c.get_masks(2).values()
    assert torch.equal(r, booleans(".x xx")) and torch.equal(q, booleans("x. .."))


def test_a_bias_shares_a_budget_with_the_rows_or_the_columns_of_a_weight():
    w, b = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([5.0, 0.0])
    by_row = ScopeCoupling([ScopeSpec(w, (1, -1)), ScopeSpec(b, (1,))])
    assert by_row.block_norms().tolist() == [[[1, 2, 5]], [[3, 4, 0]]]
    by_column = ScopeCoupling([ScopeSpec(w, (-1, 1)), ScopeSpec(b, (1,))], [None, (1, 0)])
    assert by_column.grid_shape == (1, 2) and by_column.blocks_per_scope().tolist() == [[3, 3]]
    assert by_column.block_norms().tolist() == [[[1, 3, 5], [2, 4, 0]]]
    first, second = by_column.get_masks(1).values()
    assert torch.equal(first, booleans(".. .x")) and second.tolist() == [True, False]


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
    ScopeCoupling([ScopeSpec(first), ScopeSpec(second)]).update_masks({first: mask, second: mask}, 4)
    assert torch.equal(mask, w >= 5)


def test_a_block_cannot_be_two_members():
    b = BlockSpec(count(4))
    for couple in (lambda: BlockCoupling([b, b]), lambda: ScopeCoupling([ScopeSpec(b), ScopeSpec(b)])):
        with pytest.raises(CouplingError):
            couple()


def test_thresholds_are_compared_with_block_norms_also_beside_partial_blocks():
    a, b = torch.ones(4), torch.ones(3)
    c = ScopeCoupling([ScopeSpec(BlockSpec(a, (2,))), ScopeSpec(BlockSpec(b, (2,), edge="partial"))])
    assert c.block_norms().tolist() == [[1, 1, 1, 1]] and c.kth_largest(nnz=1).tolist() == [1]
    c.hard_threshold(1.2)
    assert not a.any() and not b.any()


def test_scope_coupling_converts_by_blocks():
    a, b = BlockSpec(count(1, 2)), BlockSpec(count(1, 3))
    c = ScopeCoupling([ScopeSpec(a), ScopeSpec(b)])
    rows = c.block_to_scope({a: torch.tensor([[1.0, 2.0]]), b: torch.tensor([[3.0, 4.0, 5.0]])}, merge=True)
    assert rows.tolist() == [[[1, 2, 3, 4, 5]]]
    back = c.scope_to_block(rows)
    assert back[a].tolist() == [[1, 2]] and back[b].tolist() == [[3, 4, 5]]
    with refuses("scope_to_block takes (1, 1, 5), got (1, 5)"):
        c.scope_to_block(torch.ones(1, 5))


def test_scope_grids_that_do_not_line_up_are_named():
    a, b = ScopeSpec(count(2, 4), (1, -1), "a"), ScopeSpec(count(3, 4), (1, -1), "b")
    with pytest.raises(CouplingError) as caught:
        ScopeCoupling([a, b], name="pair")
    assert str(caught.value).startswith("pair: b has the aligned scope grid (3, 1), but a has (2, 1). Give an order")


def test_a_scope_coupling_takes_scores_by_block_and_values_by_parameter():
    a, b = torch.ones(4), torch.ones(4)
    blocks = [BlockSpec(a, (2,)), BlockSpec(b, (1,))]
    c = ScopeCoupling([ScopeSpec(s) for s in blocks], name="pair")
    scores = dict(zip(blocks, (torch.tensor([1.0, 9.0]), torch.tensor([5.0, 6.0, 0.0, 7.0])), strict=True))
    ma, mb = c.get_masks(3, block_scores=scores).values()
    assert ma.tolist() == [False, False, True, True] and mb.tolist() == [False, True, False, True]
    with refuses("pair: block_scores must be a mapping {block: tensor} for coupled scopes"):
        c.get_masks(3, block_scores=torch.ones(4))


@pytest.mark.parametrize(
    "call",
    [
        lambda c, t: c.block_norms(t),
        lambda c, t: c.get_masks(1, t),
        lambda c, t: c.kth_largest(t, 1),
        lambda c, t: c.hard_threshold(0.5, values=t),
        lambda c, t: c.hard_threshold(nnz=1, values=t),
        lambda c, t: c.soft_threshold(0.5, t),
    ],
)
def test_one_tensor_of_values_for_two_parameters_is_an_error(call):
    c = ScopeCoupling([ScopeSpec(torch.ones(4)), ScopeSpec(torch.ones(4))])
    with refuses("mapping {parameter: tensor}"):
        call(c, torch.ones(4))


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
    c = ScopeCoupling([ScopeSpec(a), ScopeSpec(b)])
    with pytest.raises(SparsityError):
        call(c, a, b)
    assert torch.equal(a, torch.ones(4)) and torch.equal(b, torch.ones(4))


def public_methods(cls):
    return {n: f for n, f in inspect.getmembers(cls, inspect.isfunction) if not n.startswith("_") and n != "members"}


def test_scope_coupling_has_the_methods_and_signatures_of_scope_spec():
    one, many = public_methods(ScopeSpec), public_methods(ScopeCoupling)
    assert set(one) <= set(many)
    for name in one:
        left, right = (
            [(p.name, p.kind, p.default) for p in inspect.signature(f[name]).parameters.values()] for f in (one, many)
        )
        assert left == right, name


# soft thresholding


def test_the_plain_prox_shrinks_norms_by_the_threshold():
    w = torch.tensor([[3.0, 4.0, 0.6, 0.8, 0.3, 0.4]])
    BlockSpec(w, (1, 2)).soft_threshold(1.0)
    assert w.flatten().tolist() == pytest.approx([2.4, 3.2, 0, 0, 0, 0], abs=1e-6)
    assert w.flatten()[2:].tolist() == [0, 0, 0, 0]


def test_soft_threshold_takes_one_threshold_a_block_or_a_scope():
    w = torch.tensor([[3.0, -3.0], [3.0, -3.0]])
    BlockSpec(w).soft_threshold(torch.tensor([[1.0, 2.0], [0.0, 4.0]]))
    torch.testing.assert_close(w, torch.tensor([[2.0, -1.0], [3.0, 0.0]]))
    ScopeSpec(w, (1, -1)).soft_threshold(torch.tensor([[1.5], [2.0]]))
    torch.testing.assert_close(w, torch.tensor([[0.5, 0.0], [1.0, 0.0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("make", [lambda w: BlockSpec(w, (2, 2)), lambda w: ScopeSpec(BlockSpec(w, (2, 2)))])
def test_scale_multiplies_by_the_root_of_the_elements_of_a_block(make, dtype):
    w = torch.full((2, 2), 5.0, dtype=dtype)
    make(w).soft_threshold(0.5, scale=True)  # norm 10, threshold 0.5 * sqrt(4)
    torch.testing.assert_close(
        w, torch.full((2, 2), 4.5, dtype=dtype), rtol=1e-6 if dtype == torch.float32 else 1e-15, atol=0
    )


def test_scale_is_exact_in_float64_where_the_root_is_irrational():
    w = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    BlockSpec(w, (1, 2)).soft_threshold(1.0, scale=True)
    torch.testing.assert_close(w, torch.tensor([[3.0, 4.0]]).double() * (1 - 2**0.5 / 5), rtol=1e-14, atol=0)


def test_a_scopes_threshold_is_exact_in_float64():
    w = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    ScopeSpec(BlockSpec(w, (1, 2))).soft_threshold(0.1)
    torch.testing.assert_close(w, torch.tensor([[3.0, 4.0]]).double() * (1 - 0.1 / 5), rtol=1e-14, atol=0)


def test_scale_of_a_partial_block_counts_the_elements_that_it_has():
    w = torch.tensor([[3.0, 4.0, 3.0]])
    BlockSpec(w, (1, 2), edge="partial").soft_threshold(1.0, scale=True)
    assert w.flatten().tolist() == pytest.approx([3 * (1 - 2**0.5 / 5), 4 * (1 - 2**0.5 / 5), 2.0])


def test_a_threshold_of_zero_changes_nothing():
    w = torch.tensor([[1e-30, 2.0, 0.0, -3.0]])
    BlockSpec(w).soft_threshold(0.0)
    assert torch.equal(w, torch.tensor([[1e-30, 2.0, 0.0, -3.0]]))
    BlockSpec(w, (1, 2)).soft_threshold(0.0)
    torch.testing.assert_close(w, torch.tensor([[1e-30, 2.0, 0.0, -3.0]]), rtol=1e-6, atol=0)
    BlockSpec(w, (1, 2)).soft_threshold(0.0, torch.tensor([[1e-3, 1e3, 1.0, 1.0]]))
    torch.testing.assert_close(w, torch.tensor([[1e-30, 2.0, 0.0, -3.0]]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("conditioners", [None, torch.ones(1, 2)])
def test_a_threshold_of_zero_keeps_elements_whose_squares_underflow(conditioners):
    w = torch.tensor([[1e-30, 1e-30]])
    BlockSpec(w, (1, 2)).soft_threshold(0.0, conditioners)
    torch.testing.assert_close(w, torch.tensor([[1e-30, 1e-30]]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("conditioners", [None, torch.ones(1, 4)])
def test_soft_threshold_keeps_nan(conditioners):
    w = torch.tensor([[NAN, 1.0, 0.1, 0.1]])
    BlockSpec(w, (1, 2)).soft_threshold(0.5, conditioners)
    assert w[0, 0].isnan() and w[0, 2:].tolist() == [0, 0]


@pytest.mark.parametrize("t", [-1.0, torch.tensor([[1.0, -1e-9]]), NAN])
@pytest.mark.parametrize("make", [lambda w: BlockSpec(w, (), "w"), lambda w: ScopeSpec(w, (1, 1), "w")])
def test_a_negative_threshold_is_refused_before_anything_changes(make, t):
    w = torch.ones(1, 2)
    with refuses("soft_threshold needs thresholds >= 0"):
        make(w).soft_threshold(t)
    assert w.all()


@pytest.mark.parametrize("h", [[1.0, 0.0], [1.0, -1.0], [1.0, NAN]])
def test_a_conditioner_that_is_not_positive_is_refused(h):
    w = torch.ones(1, 2)
    with refuses("soft_threshold needs conditioners > 0"):
        BlockSpec(w, (1, 2)).soft_threshold(0.1, torch.tensor([h]))
    assert torch.equal(w, torch.ones(1, 2))


def test_eps_makes_a_zero_conditioner_positive():
    w = torch.ones(1, 2)
    BlockSpec(w).soft_threshold(0.5, torch.tensor([[0.0, 1.0]]), eps=1.0)  # single elements: |v| - t / h
    assert w.flatten().tolist() == pytest.approx([0.5, 0.75])


@pytest.mark.parametrize("max_iter", [0])
def test_too_few_newton_steps_are_an_error_not_a_wrong_answer(max_iter):
    w = torch.tensor([[1.0, 2.0]])
    with refuses("soft_threshold: no convergence to atol="):
        BlockSpec(w, (1, 2)).soft_threshold(0.1, torch.tensor([[1e-3, 1e3]]), max_iter=max_iter)
    assert w.tolist() == [[1, 2]]


def test_a_constant_conditioner_is_the_plain_prox_at_another_threshold():
    w, v = torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 4.0]])
    BlockSpec(w, (1, 2)).soft_threshold(2.0, torch.full((1, 2), 4.0))
    BlockSpec(v, (1, 2)).soft_threshold(0.5)
    torch.testing.assert_close(w, v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("condition", [1.0, 1e2, 1e6])
@pytest.mark.parametrize("elements", [1, 2, 16, 512])
def test_the_conditioned_prox_equals_a_slow_bisection(elements, condition, dtype):
    g = torch.Generator().manual_seed(elements)
    blocks = 24
    v = torch.randn(blocks, elements, generator=g, dtype=torch.float64).to(dtype)
    h = condition ** (torch.rand(blocks, elements, generator=g, dtype=torch.float64) - 0.5)
    h[:, 0], h[:, -1] = condition**0.5, condition**-0.5
    h = h.to(dtype)
    force = (h.double() * v.double()).norm(dim=1)
    t = (force * torch.linspace(0.0, 1.25, blocks, dtype=torch.float64)).to(dtype)
    t[1:4] = (force[1:4] * torch.tensor([1e-6, 0.999, 1.001], dtype=torch.float64)).to(dtype)
    w = v.clone()
    BlockSpec(w, (1, -1)).soft_threshold(t[:, None], h)
    expected = torch.stack([shrunk(*row) for row in zip(v.double(), t.double(), h.double(), strict=True)])
    assert torch.equal((w == 0).all(1), (h.double() * v.double()).norm(dim=1) <= t.double())
    error = (w.double() - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-30)
    # Near the border the answer is a small difference: a rounding of ||Dv|| there counts 1 / (1 - t / ||Dv||) times.
    margin = (1 - t.double() / force).abs().clamp(min=1e-3)
    assert float((error * margin)[expected.norm(dim=1) > 0].max()) < (2e-5 if dtype == torch.float32 else 1e-10)


def test_the_conditioned_prox_is_where_the_gradient_vanishes():
    g = torch.Generator().manual_seed(0)
    v, h = torch.randn(8, 6, generator=g).double(), torch.rand(8, 6, generator=g).double() * 1e3 + 1e-3
    t = 0.3 * (h * v).norm(dim=1, keepdim=True)
    w = v.clone()
    BlockSpec(w, (1, -1)).soft_threshold(t, h)
    gradient = h * (w - v) + t * w / w.norm(dim=1, keepdim=True)
    assert float((gradient.norm(dim=1) / t[:, 0]).max()) < 1e-9


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_keep_their_dtype(dtype):
    w = torch.tensor([[3.0, 4.0]], dtype=dtype)
    BlockSpec(w, (1, 2)).soft_threshold(2.5, torch.ones(1, 2))
    assert w.dtype == dtype and w.tolist() == [[1.5, 2.0]]


def test_coupled_blocks_are_shrunk_by_the_norm_of_the_union():
    a, b = torch.tensor([[3.0], [0.3]]), torch.tensor([4.0, 0.4])
    BlockCoupling([BlockSpec(a), BlockSpec(b)]).soft_threshold(1.0)
    assert a.flatten().tolist() == pytest.approx([2.4, 0]) and b.tolist() == pytest.approx([3.2, 0])
    a, b = torch.tensor([3.0]), torch.tensor([4.0])
    BlockCoupling([BlockSpec(a), BlockSpec(b)]).soft_threshold(2.0, {a: torch.tensor([1.0]), b: torch.tensor([9.0])})
    v, h = torch.tensor([3.0, 4.0]).double(), torch.tensor([1.0, 9.0]).double()
    assert [a.item(), b.item()] == pytest.approx(shrunk(v, 2.0, h).tolist(), rel=1e-5)


# the pattern table (SPEC section 4), rows whose view is given as it is or as (shape, stride)

ROWS, COLS = LINEAR = (32, 32)
CONV = (8, 4, 3, 3)
# (name, parameter, view, block, scope, kept, scopes, blocks of a scope, elements of a block)
PATTERNS = [
    ("unstructured per tensor", LINEAR, None, (1, 1), (-1, -1), 300, 1, 1024, 1),
    ("unstructured per row", LINEAR, None, (1, 1), (1, -1), 9, 32, 32, 1),
    ("unstructured per column", LINEAR, None, (1, 1), (-1, 1), 9, 32, 32, 1),
    ("2:4 along the input", LINEAR, None, (1, 1), (1, 4), 2, 256, 4, 1),
    ("1:8 along the input", LINEAR, None, (1, 1), (1, 8), 1, 128, 8, 1),
    ("2:4 of 1x2 pairs", LINEAR, None, (1, 2), (1, 4), 2, 128, 4, 2),
    ("vector 2:4", LINEAR, None, (8, 1), (1, 4), 2, 32, 4, 8),
    ("blocks per tensor", LINEAR, None, (8, 4), (-1, -1), 11, 1, 32, 32),
    ("blocks per block row", LINEAR, None, (8, 4), (1, -1), 3, 4, 8, 32),
    ("2:4 of blocks", LINEAR, None, (8, 4), (1, 4), 2, 8, 4, 32),
    ("rows", LINEAR, None, (1, -1), (-1, 1), 7, 1, 32, 32),
    ("columns", LINEAR, None, (-1, 1), (1, -1), 7, 1, 32, 32),
    ("coupled 2:4", LINEAR, ((ROWS, COLS // 16, 8, 2), (COLS, 16, 1, 8)), (1, 1, 1, 2), (1, 1, 4, 1), 2, 128, 4, 2),
    (
        "1:2, rows 8 apart",
        LINEAR,
        ((ROWS // 16, 8, 2, COLS), (16 * COLS, COLS, 8 * COLS, 1)),
        (1, 1, 1, 16),
        (1, 1, 2, 1),
        1,
        32,
        2,
        16,
    ),
    (
        "MMA thread group",
        LINEAR,
        ((ROWS // 32, 4, 8, COLS // 16, 16), (32 * COLS, 8 * COLS, COLS, 16, 1)),
        (1, 1, 1, 1, 16),
        (1, 4, 1, 1, 1),
        2,
        16,
        4,
        16,
    ),
    ("heads", LINEAR, ((4, 8, COLS), (8 * COLS, COLS, 1)), (1, -1, -1), (), 3, 1, 4, 256),
    ("filters", CONV, None, (1, -1, -1, -1), (), 5, 1, 8, 36),
    ("input channels", CONV, None, (-1, 1, -1, -1), (), 3, 1, 4, 72),
    ("kernels", CONV, None, (1, 1, -1, -1), (), 13, 1, 32, 9),
    ("conv 2:4 along input channels", CONV, None, (1, 1, 1, 1), (1, 4, 1, 1), 2, 72, 4, 1),
]


@pytest.mark.parametrize(
    ("row", "channels_last"),
    [pytest.param(row, last, id=row[0]) for row in PATTERNS for last in (False, True)[: 1 + (row[1] is CONV)]],
)
def test_every_pattern_of_the_table_keeps_its_exact_count(row, channels_last):
    _, shape, view, block, scope, nnz, scopes, members, elements = row
    w = torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(0)).float()  # full of ties
    if channels_last:
        w = w.contiguous(memory_format=torch.channels_last)
    s = ScopeSpec(BlockSpec(View(w, *view) if view else w, block), scope)
    assert (s.numscp(), s.numblk_per_scope(), s.block.numel_per_block()) == (scopes, members, elements)
    assert s.numel_per_scope() == members * elements and s.numblk() == scopes * members
    mask = only(s.get_masks(nnz))
    assert mask.shape == shape and int(mask.sum()) == scopes * nnz * elements
    blocks = s.block.block_view(mask.float(), merge=True)
    assert bool(((blocks == 0) | (blocks == 1)).all()) and torch.equal(blocks.amin(-1), blocks.amax(-1))
    per_scope = s.block_to_scope(blocks[..., 0].contiguous(), merge=True).sum(-1)
    assert torch.equal(per_scope, torch.full(s.grid_shape, float(nnz)))


def test_coupled_2_4_keeps_columns_8_apart_together():
    w = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    s = ScopeSpec(BlockSpec(View(w, (4, 1, 8, 2), (16, 16, 1, 8)), (1, 1, 1, 2)), (1, 1, 4, 1))
    mask = only(s.get_masks(2))
    assert torch.equal(mask[:, :8], mask[:, 8:])
    assert mask[:, :8].unflatten(1, (2, 4)).sum(-1).eq(2).all()
    pairs = (w[:, :8] ** 2 + w[:, 8:] ** 2).unflatten(1, (2, 4))
    best = torch.zeros(4, 2, 4, dtype=torch.bool).scatter_(2, pairs.topk(2).indices, True)
    assert torch.equal(mask[:, :8], best.flatten(1))


def test_one_of_two_blocks_whose_rows_are_8_apart():
    w = torch.ones(16, 32)
    w[8:, :16] = 2.0  # in the first 16 columns the lower row of each pair wins, in the others the upper one by index
    s = ScopeSpec(BlockSpec(View(w, (1, 8, 2, 32), (512, 32, 256, 1)), (1, 1, 1, 16)), (1, 1, 2, 1))
    mask = only(s.get_masks(1))
    assert mask[8:, :16].all() and not mask[:8, :16].any() and mask[:8, 16:].all() and not mask[8:, 16:].any()


def test_an_mma_thread_group_keeps_two_of_the_rows_8_apart():
    w = torch.arange(32.0)[:, None].repeat(1, 16)
    s = ScopeSpec(BlockSpec(View(w, (1, 4, 8, 1, 16), (512, 128, 16, 16, 1)), (1, 1, 1, 1, 16)), (1, 4, 1, 1, 1))
    mask = only(s.get_masks(2))
    assert mask[16:].all() and not mask[:16].any()


def test_v_n_m_in_two_stages():
    w = torch.randn(8, 16, generator=torch.Generator().manual_seed(2))
    mask = torch.ones(8, 16, dtype=torch.bool)
    first, second = BlockSpec(w, (4, 1)), BlockSpec(w, (1, 1))
    ScopeSpec(first, (1, 8)).update_masks({first: mask}, 4)
    assert mask.unflatten(0, (2, 4)).any(1).unflatten(1, (2, 8)).sum(-1).eq(4).all()
    columns = mask.clone()
    ScopeSpec(second, (1, 8)).update_masks({second: mask}, 2, among_kept=True)
    assert mask.unflatten(1, (2, 8)).sum(-1).eq(2).all() and bool((mask <= columns).all())
    left = torch.where(columns, w.abs(), -1.0).unflatten(1, (2, 8))
    best = torch.zeros(8, 2, 8, dtype=torch.bool).scatter_(2, left.topk(2).indices, True)
    assert torch.equal(mask, best.flatten(1))


def test_a_later_stage_keeps_no_partial_block_that_is_dropped_already():
    b = BlockSpec(torch.zeros(2, 3), (1, 2), edge="partial")
    mask = booleans("xx. xxx")
    ScopeSpec(b).update_masks({b: mask}, 2, among_kept=True)
    assert torch.equal(mask, booleans("xx. xx."))


def test_a_coupled_block_may_be_kept_while_any_member_has_something_left():
    a, b = BlockSpec(torch.tensor([1.0, 5.0, 2.0])), BlockSpec(torch.tensor([1.0, 4.0, 3.0]))
    masks = {a: torch.tensor([True, False, False]), b: torch.tensor([True, True, False])}
    ScopeSpec(BlockCoupling([a, b])).update_masks(masks, 1, among_kept=True)
    assert masks[a].tolist() == [False, False, False] and masks[b].tolist() == [False, True, False]


def test_global_is_one_budget_over_flat_views():
    tensors = [
        torch.tensor([[1.0, 8.0], [3.0, 4.0]]),
        torch.tensor([7.0, 2.0, 6.0]),
        torch.tensor(5.0).reshape(1, 1, 1),
    ]
    flat = [ScopeSpec(View(t, (t.numel(),), (1,))) for t in tensors]
    c = ScopeCoupling(flat)
    assert (c.numscp(), c.numblk_per_scope()) == (1, 8)
    a, b, d = c.get_masks(4).values()
    assert torch.equal(a, booleans(".x ..")) and b.tolist() == [True, False, True] and d.tolist() == [[[True]]]


def test_values_and_scores_are_mutually_exclusive():
    w = torch.ones(1, 4)
    s = ScopeSpec(BlockSpec(w), (1, 4))
    with refuses("get_masks: values and block_scores are mutually exclusive"):
        s.get_masks(2, values=w, block_scores=w)
