"""The numba backend writes the reference's bits by every method, and says what it does not take."""

import itertools
import math
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from grids import covering, grid
from kernel_cases import (
    FLOATS,
    INF,
    KINDS,
    as_scopes,
    budgets,
    generator,
    plain_window,
    scores_like,
    sorted_selection,
)

from sparsekit_ao import ScopeSparsifier, SparsityError, View
from sparsekit_ao.selection import Blocks, Scopes, block_scores, keep_mask, numba, scope_mask, threads
from sparsekit_ao.selection.cpu import long
from sparsekit_ao.selection.numba import cache, lanes, launch, memory, scopes, wide
from sparsekit_ao.selection.work import Update

DTYPES = [d for d in FLOATS if d != torch.float64]
METHODS = {  # limits under which small inputs are chosen by each method
    "pairs": {},
    "network": {"PAIRS": 0, "NETWORK": 1 << 20, "SHORT": 1 << 20},
    "lanes": {"PAIRS": 0, "NETWORK": 0, "SHORT": 1 << 20},
    "rows": {"PAIRS": 0, "SHORT": 0, "COLUMNS": 0, "ROW": 1 << 20},
    "wide": {"PAIRS": 0, "SHORT": 0, "COLUMNS": 0, "ROW": 0},
    "misled": {"PAIRS": 0, "SHORT": 0, "COLUMNS": 0, "ROW": 0},
}
LONG = ("wide", "misled")  # which do not choose among what masks keep


@pytest.fixture
def any_layout(monkeypatch):
    """Also layouts for which the plain path is as fast."""
    monkeypatch.setattr(launch, "_layout_reasons", lambda *_: [])


@pytest.fixture(params=METHODS)
def method(request, monkeypatch, any_layout):
    for name, value in METHODS[request.param].items():
        monkeypatch.setattr(launch, name, value)
    monkeypatch.setattr(threads, "PIECE", 64)  # several pieces even of a small tensor
    if request.param == "misled":
        monkeypatch.setattr(long, "_bracket", lambda *_: (0, 0))
    return request.param


@pytest.mark.parametrize(  # each width, kind, dtype and method with each value of every other
    ("width", "kind", "dtype", "magnitude", "method"),
    grid([1, 2, 4, 31, 32, 33, 257, 3000], KINDS, DTYPES, [False, True], METHODS),
    indirect=["method"],
)
def test_rows_equal_numpys_sort(width, kind, dtype, magnitude, method):
    scores, keep = scores_like(kind, 20, width, dtype), budgets(20, width)
    expected = sorted_selection(scores.abs() if magnitude else scores, keep)
    assert torch.equal(keep_mask(scores, keep, magnitude=magnitude, impl="numba"), expected)


@pytest.mark.parametrize(("width", "kind", "method"), grid([4, 33, 700], KINDS, METHODS), indirect=["method"])
def test_only_candidates_are_kept(width, kind, method):
    if method in LONG:
        with pytest.raises(SparsityError, match="a long scope is chosen among"):
            keep_mask(torch.zeros(1, width), 1, candidates=torch.zeros(1, width) == 0, impl="numba")
        return
    for dtype, magnitude in itertools.product(DTYPES, (False, True)):
        scores, keep = scores_like(kind, 12, width, dtype), budgets(12, width)
        candidates = torch.rand(12, width, generator=generator(1)) <= torch.linspace(0, 1, 12)[:, None]
        candidates[0] = False
        before = candidates.clone()
        found = keep_mask(scores, keep, candidates=candidates, magnitude=magnitude, impl="numba")
        expected = sorted_selection(scores.abs() if magnitude else scores, keep, candidates)
        assert torch.equal(found, expected) and torch.equal(candidates, before)


@pytest.mark.parametrize("width", [4, 100])
def test_strided_expanded_and_empty_scores(width, method):
    base, keep = scores_like("few values", width, 6, torch.float32), budgets(6, width)
    assert torch.equal(keep_mask(base.t(), keep, impl="numba"), sorted_selection(base.t(), keep))
    one = base.t()[:1].expand(3, width)
    assert torch.equal(keep_mask(one, 3, impl="numba"), sorted_selection(one, [3, 3, 3]))
    assert keep_mask(torch.zeros(0, width), 0, impl="numba").shape == (0, width)
    assert keep_mask(torch.zeros(3, 0), 0, impl="numba").shape == (3, 0)


STRUCTURES = [  # block, scope, share that is kept
    ((1, 1), (1, 4), 0.5),
    ((1, 1), (1, -1), 0.3),
    ((1, 1), (-1, 1), 0.3),
    ((1, 1), (-1, -1), 0.1),
    ((1, 1), (4, 4), 0.5),
    ((1, 2), (1, 4), 0.5),
    ((1, 4), (-1, -1), 0.5),
    ((4, 1), (1, 4), 0.5),
    ((4, 8), (-1, -1), 0.25),
    ((8, 4), (1, -1), 0.5),
    ((2, 16), (1, 1), 1.0),
    ((8, 1), (1, 4), 0.5),
    ((32, 1), (1, 8), 0.5),
    ((3, 2), (-1, 3), 0.5),
]


CASES = [  # only single elements are chosen among what masks keep, and not by every method
    (structure, layout, among_kept, method)
    for structure, layout, method in itertools.product(STRUCTURES, ["contiguous", "transposed", "padded"], METHODS)
    for among_kept in (False, True)
    if not among_kept or (structure[0] == (1, 1) and method not in LONG)
]


@pytest.mark.parametrize(  # each structure, layout and method with each value of every other
    ("structure", "layout", "among_kept", "method"), covering(CASES), indirect=["method"]
)
def test_masks_are_the_references(structure, layout, among_kept, method):
    block, scope, share = structure
    for dtype, norm in itertools.product(DTYPES, (1, 2, INF)):
        values, mask = plain_window((96, 48) if block[0] == 3 else (32, 48), dtype, layout)
        values.copy_((values * 4).round())  # ties
        values[0, :3] = torch.tensor([math.nan, -math.inf, -0.0])
        if among_kept:
            mask.copy_(torch.rand(mask.shape, generator=generator(2)) < 0.4)
        group = as_scopes(values, mask, block, scope)
        twin = as_scopes(values, mask.clone(), block, scope)
        keep = torch.full(group.scope_grid, int(share * math.prod(group.shape)))
        keep.view(-1)[::3] //= 2
        scope_mask([group], keep, norm, among_kept=among_kept, impl="numba")
        scope_mask([twin], keep, norm, among_kept=among_kept, impl="reference")
        assert torch.equal(mask, twin.members[0].mask)


@pytest.mark.parametrize("rows", [96, 97, 256])
@pytest.mark.parametrize("groups", [40, 64])
def test_scopes_with_few_neighbours_in_memory_are_taken_in_another_order(rows, groups):
    """2:4 over pairs of columns 8 apart: only two scopes follow each other with one step."""
    shape, masks = (rows, 16 * groups), []
    values = torch.randn(shape, generator=generator()).mul_(3).round_()
    for impl in ("numba", "reference"):
        masks.append(torch.ones(shape, dtype=torch.bool))
        view = [t.as_strided((rows, groups, 8, 2), (16 * groups, 16, 1, 8)) for t in (values, masks[-1])]
        pairs = Scopes(members=(Blocks(shape=(1, 1, 1, 2), values=view[0], mask=view[1]),), shape=(1, 1, 4, 1))
        scope_mask([pairs], 2, 2, impl=impl)
    assert torch.equal(*masks)
    unlike = torch.full(pairs.scope_grid, 2).index_fill_(0, torch.tensor(0), 1)
    assert "only 2 scopes follow each other" in launch.update_reasons(Update(scopes=(pairs,), keep=unlike))[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_16_bit_pattern_and_random_bits_are_summed_as_the_reference_sums_them(dtype, any_layout):
    if dtype == torch.float32:
        bits = torch.randint(-(1 << 31), 1 << 31, (1 << 16,), generator=generator(), dtype=torch.int64).int()
    else:
        bits = torch.arange(1 << 16).short()
    values = bits[torch.randperm(bits.numel(), generator=generator())].view(dtype).view(256, 256)
    for block, norm in itertools.product([(1, 1), (1, 2), (3, 1), (1, 7), (4, 4), (2, 16)], (1, 2, INF)):
        window = values[: 256 // block[0] * block[0], : 256 // block[1] * block[1]]
        masks = [torch.ones(window.shape, dtype=torch.bool) for _ in range(2)]
        for mask, impl in zip(masks, ("numba", "reference"), strict=True):
            group = as_scopes(window, mask, block, (-1, -1))
            scope_mask([group], math.prod(group.shape) // 3, norm, impl=impl)
        assert torch.equal(*masks), (block, norm)


def test_views_orders_and_channels_last(method):
    weight = torch.randn(32, 32, 3, 3, generator=generator()).contiguous(memory_format=torch.channels_last)
    cases = [  # block, scope, member order, scope order
        ((1, 1, 1, 1), (1, 4, 1, 1), (), ()),
        ((1, 1, 3, 3), (32, 32, 1, 1), (), ()),
        ((2, 1, 3, 1), (4, 32, 1, 3), (), ()),
        ((1, 2, 1, 1), (1, 3, 8, 4), (2, 3, 0, 1), ()),
        ((1, 1, 1, 1), (2, 4, 1, 3), (), (3, 1, 0, 2)),
    ]
    for block, scope, order, scope_order in cases:
        masks = [torch.ones_like(weight, dtype=torch.bool), torch.ones(weight.shape, dtype=torch.bool)]
        for mask, impl in zip(masks, ("numba", "reference"), strict=True):
            member = Blocks(shape=block, values=weight, mask=mask, order=order)
            group = Scopes(members=(member,), shape=scope, order=scope_order)
            keep = torch.randint(0, math.prod(scope) + 1, group.scope_grid, generator=generator(3))
            scope_mask([group], keep, impl=impl)
        assert torch.equal(*masks), (block, scope)


def test_a_window_leaves_the_rest_of_the_mask_alone(method):
    whole_mask, values = torch.zeros(70, 70, dtype=torch.bool), torch.randn(70, 70, generator=generator())
    view = View(values, (60, 60), (70, 1), 5 * 70 + 5)
    scope_mask([as_scopes(view.data, view.window(whole_mask), (1, 2), (60, 30))], 60 * 30, impl="numba")
    expected = torch.zeros(70, 70, dtype=torch.bool)
    expected[5:65, 5:65] = True
    assert torch.equal(whole_mask, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [(1, 1), (1, 4)])
def test_scopes_over_several_tensors(block, dtype, monkeypatch, any_layout):
    monkeypatch.setattr(launch, "SMALL", 1)
    monkeypatch.setattr(launch, "EACH", 1)
    monkeypatch.setattr(threads, "PIECE", 64)
    values = [scores_like("few values", 16, 12 * (i + 1), dtype, seed=i) for i in range(3)]
    for scope in ((-1, -1), (1, -1)):
        total = sum(math.prod(as_scopes(v, v, block, scope).shape) for v in values)
        for keep in (0, 1, total // 2, total):
            masks = [[torch.rand(v.shape, generator=generator(4)) < 0.6 for v in values] for _ in range(2)]
            for own, impl in zip(masks, ("numba", "reference"), strict=True):
                groups = [as_scopes(v, m, block, scope) for v, m in zip(values, own, strict=True)]
                scope_mask(groups, keep, impl=impl)
            assert all(map(torch.equal, *masks)), (scope, keep)


@pytest.mark.parametrize("found", [(0, 1), (1 << 30, 1 << 30), (0, 0x7F800001), (0x3F800000, 0x3F800001), (5, 4)])
@pytest.mark.parametrize("block", [(1, 1), (1, 4)])
def test_a_sample_that_misleads_costs_time_only(found, block, monkeypatch):
    monkeypatch.setattr(long, "_bracket", lambda *_: found)
    values, masks = torch.randn(300, 512, generator=generator()), [torch.ones(300, 512, dtype=torch.bool) for _ in "ab"]
    for keep in (1, 20_000, 300 * 512 // math.prod(block) - 1):
        for mask, impl in zip(masks, ("numba", "reference"), strict=True):
            scope_mask([as_scopes(values, mask, block, (-1, -1))], keep, impl=impl)
        assert torch.equal(*masks), keep


@pytest.mark.parametrize("order", ["random", "ascending", "few values", "one value", "periodic"])
def test_a_good_sample_is_used_and_a_useless_one_is_not(order, monkeypatch):
    values = {
        "random": lambda: torch.randn(1 << 18, generator=generator()),
        "ascending": lambda: torch.arange(1.0, (1 << 18) + 1),
        "few values": lambda: torch.randint(1, 3, (1 << 18,), generator=generator()).float(),
        "one value": lambda: torch.ones(1 << 18),
        "periodic": lambda: torch.arange(256.0).repeat(1 << 10),
    }[order]()
    for name, value in METHODS["wide"].items():
        monkeypatch.setattr(launch, name, value)
    monkeypatch.setattr(threads, "PIECE", 4096)
    used, original = [], wide.select_wide
    monkeypatch.setattr(wide, "select_wide", lambda *rest: used.append(original(*rest)) or used[-1])
    mask = torch.ones(512, 512, dtype=torch.bool)
    scope_mask([as_scopes(values.view(512, 512), mask, (1, 1), (-1, -1))], 100_000, impl="numba")
    assert torch.equal(mask.view(1, -1), keep_mask(values.view(1, -1), 100_000, magnitude=True, impl="reference"))
    assert used == [order in ("random", "periodic")]


def test_the_number_of_threads_does_not_show():
    values = (torch.randn(600, 512, generator=generator()) * 8).round()
    found = []
    before = torch.get_num_threads()
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        for block, scope in (((1, 1), (-1, -1)), ((1, 4), (-1, -1)), ((1, 1), (1, 4)), ((1, 1), (1, -1))):
            mask = torch.ones(values.shape, dtype=torch.bool)
            group = as_scopes(values, mask, block, scope)
            scope_mask([group], math.prod(group.shape) // 2, impl="numba")
            found.append(mask)
    torch.set_num_threads(before)
    assert all(torch.equal(found[i], found[i % 4]) for i in range(len(found)))


def test_steps_of_several_python_threads_do_not_disturb_each_other():
    values = [torch.randn(512, 512, generator=generator(i)) for i in range(4)]
    masks = [torch.ones(512, 512, dtype=torch.bool) for _ in values]

    def work(i):
        scope_mask([as_scopes(values[i], masks[i], (1, 1), (-1, -1))], 100_000, impl="numba")

    running = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for one in running:
        one.start()
    for one in running:
        one.join()
    for value, mask in zip(values, masks, strict=True):
        assert torch.equal(mask.view(1, -1), keep_mask(value.view(1, -1), 100_000, magnitude=True, impl="reference"))


def test_an_error_in_a_piece_of_work_is_raised():
    def fail():
        raise ZeroDivisionError("piece")

    with pytest.raises(ZeroDivisionError, match="piece"):
        threads.run_all([lambda: None, fail, lambda: None])


V = torch.ones(4, 8)
M = torch.ones(4, 8, dtype=torch.bool)
REFUSED = [
    (lambda: scope_mask([as_scopes(V, M, (1, 2), (1, 4))], 2, None, impl="numba"), "values are saliencies (norm=None)"),
    (
        lambda: scope_mask([as_scopes(torch.ones(200, 5), torch.ones(200, 5) > 0, (1, 2), (-1, -1))], 1, impl="numba"),
        "some block or scope at an edge is smaller than the others",
    ),
    (
        lambda: scope_mask([as_scopes(V, M, (1, 1), (1, 5))], 1, impl="numba"),
        "some block or scope at an edge is smaller than the others",
    ),
    (lambda: scope_mask([as_scopes(V.double(), M, (1, 1), (1, 4))], 2, impl="numba"), "the weight is torch.float64"),
    (
        lambda: scope_mask([as_scopes(torch.ones(8, 40), torch.ones(8, 40) > 0, (1, 40), (8, 1))], 1, impl="numba"),
        "blocks have 40 elements, more than 32",
    ),
    (
        lambda: scope_mask([as_scopes(torch.ones(8, 64), torch.ones(8, 64) > 0, (1, 16), (1, 4))], 1, impl="numba"),
        "blocks have 16 contiguous elements, more than 8",
    ),
    (
        lambda: scope_mask([as_scopes(torch.ones(8, 128), torch.ones(8, 128) > 0, (1, 1), (1, 128))], 9, impl="numba"),
        "scopes have 128 blocks; from 65 to 256 the plain path is as fast",
    ),
    (
        lambda: scope_mask(
            [as_scopes(torch.ones(8, 8, 3, 3), torch.ones(8, 8, 3, 3) > 0, (1,) * 4, (1, 4, 1, 1))], 2, impl="numba"
        ),
        "only 9 scopes follow each other in memory with one step, fewer than 64",
    ),
    (
        lambda: scope_mask([as_scopes(V, M, (1, 2), (1, 4))], 2, among_kept=True, impl="numba"),
        "blocks of several elements are chosen among those kept",
    ),
    (
        lambda: scope_mask(
            [as_scopes(torch.ones(8, 1 << 16), torch.ones(8, 1 << 16) > 0, (1, 1), (-1, -1))],
            2,
            among_kept=True,
            impl="numba",
        ),
        "a long scope is chosen among the blocks that masks keep",
    ),
    (
        lambda: scope_mask([as_scopes(V, M, (1, 1), (1, 4)), as_scopes(V, M, (1, 1), (1, 4))], 2, impl="numba"),
        "scopes of 2 tensors hold 8 blocks together, fewer than 65536 or 4096 each",
    ),
    (
        lambda: scope_mask([as_scopes(V, M, (1, 1), (1, 4)), as_scopes(V.half(), M, (1, 1), (1, 4))], 2, impl="numba"),
        "tensors of one scope differ in dtype or block shape",
    ),
    (
        lambda: scope_mask(
            [Scopes(members=(Blocks(shape=(1, 1), values=V, mask=M),) * 2, shape=(1, 4))], 2, impl="numba"
        ),
        "blocks of several tensors are coupled",
    ),
    (lambda: keep_mask(V.double(), 2, impl="numba"), "the weight is torch.float64 on cpu"),
    (lambda: block_scores((Blocks(shape=(1, 1), values=V),), impl="numba"), "it only updates whole masks"),
]


@pytest.mark.parametrize(("call", "text"), REFUSED, ids=[text[:30] for _, text in REFUSED])
def test_what_it_does_not_take_is_an_error_where_it_was_asked_for(call, text):
    with pytest.raises(SparsityError, match=re.escape(text)):
        call()
    assert bool(M.all())


def test_without_numba_only_a_call_by_name_is_an_error(monkeypatch):
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(launch, "problem", launch.problem.__wrapped__)
    for call in (
        lambda impl: scope_mask([as_scopes(V, M.clone(), (1, 1), (1, 4))], 2, impl=impl),
        lambda impl: keep_mask(V, 2, impl=impl),
    ):
        call("auto")
        with pytest.raises(SparsityError, match=re.escape("numba is not installed (pip install 'sparsekit_ao[jit]')")):
            call("numba")


def test_a_step_uses_the_backend_by_itself_where_numba_is_installed(monkeypatch):
    monkeypatch.setenv("SPARSEKIT_AO_NUMBA", "always")
    seen = []
    real = numba.run
    monkeypatch.setattr(numba, "run", lambda work: seen.append(1) or real(work))
    for size, taken in ((64, 0), (256, 1)):
        seen.clear()
        sparsifier = ScopeSparsifier(nnz=2, scope_shape=(1, 4))
        sparsifier.prepare(torch.nn.Sequential(torch.nn.Linear(size, size)), [{"tensor_fqn": "0.weight"}])
        sparsifier.step()
        assert len(seen) == taken


def test_a_change_of_one_source_file_gives_a_new_cache_folder(tmp_path):
    hash_of, folder = cache.sources_hash.__wrapped__, Path(launch.__file__).parent
    for source in folder.glob("*.py"):
        shutil.copy(source, tmp_path)
    before = hash_of(tmp_path)
    for source in sorted(tmp_path.glob("*.py")):
        text = source.read_text()
        source.write_text(text + "\n")
        assert hash_of(tmp_path) != before
        source.write_text(text)
    assert hash_of(tmp_path) == before


def test_the_cache_is_in_a_folder_named_by_the_hash_of_the_sources():
    for function in (lanes.select_side_by_side, memory.gather, scopes.emit_mask):
        assert Path(function._cache.cache_path).name == cache.sources_hash()
        assert isinstance(function._cache, cache._Cache)


def test_where_nothing_can_be_written_functions_are_compiled_without_a_cache(monkeypatch):
    def no_folder(*_):
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(cache._Cache, "_impl_class", no_folder)
    assert cache.compiled(lambda x: x + 1)(1) == 2


def test_a_read_only_folder_is_no_error(tmp_path):
    """A small function, compiled and used where neither the package's nor the user's cache folder may be written."""
    code = (
        "import tempfile, numpy as np\n"
        "def full(*args, **kwargs): raise OSError(30, 'Read-only file system')\n"
        "tempfile.TemporaryFile = full\n"
        "from sparsekit_ao.selection.numba.memory import straight\n"
        "assert straight(np.array([[7], [1]]), 1, 9) == 6"
    )
    environment = os.environ | {"NUMBA_OPT": "0"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment, check=True, timeout=300)


def test_numba_that_cannot_be_imported_is_warned_of_and_not_used(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(launch, "problem", launch.problem.__wrapped__)
    scores = torch.randn(256, 256)
    with pytest.warns(UserWarning, match="numba is installed but cannot be imported"):
        found = keep_mask(scores, 2)
    assert torch.equal(found, keep_mask(scores, 2, impl="reference"))
    with (
        pytest.warns(UserWarning, match="plain CPU path"),
        pytest.raises(SparsityError, match='impl="numba" cannot take this: numba is installed but cannot be imported'),
    ):
        keep_mask(scores, 2, impl="numba")


def test_numba_switched_off_is_not_used(monkeypatch):
    monkeypatch.setattr(cache.numba.config, "DISABLE_JIT", 1)
    monkeypatch.setattr(launch, "problem", launch.problem.__wrapped__)
    with pytest.raises(SparsityError, match="NUMBA_DISABLE_JIT is set"):
        keep_mask(torch.randn(4, 8), 2, impl="numba")


def test_a_cache_that_cannot_be_saved_is_no_error(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.caching.FunctionCache, "save_overload", full)
    assert cache.compiled(lambda x: x + 2)(1) == 3


@pytest.mark.parametrize("impl", ["numba", "cpu", "reference"])
def test_a_step_between_forward_and_backward_is_noticed_by_autograd(impl):
    weight, mask = torch.randn(256, 512, requires_grad=True), torch.ones(256, 512, dtype=torch.bool)
    out = torch.where(mask, weight, 0)
    scope_mask([as_scopes(weight.detach(), mask, (1, 1), (1, 4))], 2, impl=impl)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("impl", ["numba", "cpu", "reference"])
@pytest.mark.parametrize("shape", [(1, 300), (300, 1)])
def test_expanded_weights_are_read_and_expanded_masks_refused(shape, impl):
    values = torch.randn(shape, generator=generator()).expand(300, 300)
    mask = torch.ones(300, 300, dtype=torch.bool)
    scope_mask([as_scopes(values, mask, (1, 1), (1, -1))], 100, impl=impl)
    again = torch.ones_like(mask)
    scope_mask([as_scopes(values.contiguous(), again, (1, 1), (1, -1))], 100, impl="reference")
    assert torch.equal(mask, again)
    with pytest.raises(SparsityError, match=re.escape("scopes[0]: the mask is expanded")):
        scope_mask([as_scopes(values, mask[:1].expand(300, 300), (1, 1), (1, -1))], 100, impl=impl)


@pytest.mark.parametrize("impl", ["numba", "cpu", "reference"])
def test_windows_that_do_not_fit_each_other_are_refused(impl):
    values, mask = torch.randn(8, 8), torch.ones(8, 8, dtype=torch.bool)
    with pytest.raises(SparsityError, match=re.escape("scopes[0]: values are (8, 8), but their mask is (4, 8)")):
        scope_mask([as_scopes(values, mask[:4], (1, 1), (1, 4))], 2, impl=impl)
    both = [as_scopes(values, mask, (1, 1), (1, -1)), as_scopes(values[:4], mask[:4], (1, 1), (1, -1))]
    with pytest.raises(SparsityError, match=re.escape("scopes[1]: scopes form a grid [4, 1], but those of")):
        scope_mask(both, 2, impl=impl)
    with pytest.raises(SparsityError, match="needs values and masks"):
        scope_mask([Scopes(members=(Blocks(shape=(1, 1), values=values),), shape=(1, 4))], 2, impl=impl)


def test_a_weight_that_changes_while_it_is_read_does_no_harm(monkeypatch):
    """The undecided keys of a piece never exceed the capacity of their arrays."""
    real, values = wide.emit_mask, torch.randn(1, 1 << 19, generator=generator())
    monkeypatch.setattr(wide, "emit_mask", lambda *args: (values.fill_(float(values.abs().median())), real(*args))[1])
    mask = torch.ones(values.shape, dtype=torch.bool)
    scope_mask([as_scopes(values, mask, (1, 1), (1, -1))], 1 << 18, impl="numba")
    assert int(mask.sum()) <= 1 << 19


@pytest.mark.parametrize("width", [8191, 8192, 8193, 65_537, (1 << 18) - 1, (1 << 18) + 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_at_the_borders_of_chunks_and_methods_are_the_references(width, dtype):
    scores = (torch.randn(3, width, generator=generator(), dtype=torch.float64) * 50).round().to(dtype)
    for keep in (1, width // 2, width - 1):
        assert torch.equal(keep_mask(scores, keep, impl="numba"), keep_mask(scores, keep, impl="reference"))


@pytest.mark.parametrize(
    ("shape", "block", "scope", "keep"), [((60, 60), (4, 4), (16, 16), 30), ((5, 7), (1, 1), (5, 9), 9)]
)
def test_a_scope_larger_than_the_tensor_is_the_references(shape, block, scope, keep):
    weight = torch.randn(shape, generator=generator())
    masks = [torch.ones(shape, dtype=torch.bool) for _ in "ab"]
    for mask, impl in zip(masks, ("cpu", "reference"), strict=True):
        scope_mask([as_scopes(weight, mask, block, scope)], keep, impl=impl)
    assert torch.equal(*masks)


def test_a_default_device_changes_nothing():
    values, mask = torch.randn(64, 64, generator=generator()), torch.ones(64, 64, dtype=torch.bool)
    with torch.device("meta"):
        scope_mask([as_scopes(values, mask, (1, 4), (1, 4))], 2, impl="numba")
        rows = keep_mask(values, 3, impl="numba")
    assert int(mask.sum()) == 2048 and int(rows.sum()) == 192


def test_roots_are_rounded_alike_in_every_implementation():
    row = [float.fromhex(x) for x in ("0x1.000028p+0", "0x1.000048p+0", "0x1.000034p+0", "0x1.00003ep+0")]
    values = torch.tensor([row])
    masks = {impl: torch.ones(1, 4, dtype=torch.bool) for impl in ("numba", "cpu", "reference")}
    for impl, mask in masks.items():
        scope_mask([as_scopes(values, mask, (1, 2), (1, 2))], 1, impl=impl)
    assert len({tuple(m.flatten().tolist()) for m in masks.values()}) == 1
    near = 1 + torch.rand(512, 512, generator=generator()) * 1e-4
    both = [torch.ones(near.shape, dtype=torch.bool) for _ in range(2)]
    for mask, impl in zip(both, ("numba", "reference"), strict=True):
        scope_mask([as_scopes(near, mask, (1, 4), (-1, -1))], 16_384, impl=impl)
    assert torch.equal(*both)


@pytest.mark.parametrize(
    "block", [(8, 8), (32, 32), (1, 96), (96, 1), (7, 12), (3, 128), (12, 1536), (5, 9), (6, 3072)]
)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "padded"])
def test_large_blocks_are_summed_in_the_references_order(block, layout):
    """So near one another that a sum in another order would change the mask."""
    values, _ = plain_window((96, 3072), torch.float32, layout)
    values.mul_(1e-5).add_(1)
    masks = [torch.ones_like(values, dtype=torch.bool) for _ in range(2)]
    for scope in ((-1, -1), (1, -1)):
        for mask, impl in zip(masks, ("cpu", "reference"), strict=True):
            group = as_scopes(values, mask, block, scope)
            scope_mask([group], math.prod(group.shape) // 2, impl=impl)
        assert torch.equal(*masks), scope


def test_the_weights_storage_can_still_be_resized():
    """As FSDP2 does with gathered weights."""
    values, mask = torch.randn(64, 64, generator=generator()), torch.ones(64, 64, dtype=torch.bool)
    scope_mask([as_scopes(values, mask, (1, 1), (1, 4))], 2, impl="numba")
    for tensor in (values, mask):
        tensor.untyped_storage().resize_(0)
