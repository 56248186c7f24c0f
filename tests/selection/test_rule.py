"""The selection rule against numpy's sort: `keep_mask` of every backend, errors; backends are found by name."""

import re

import pytest
import torch
from grids import grid
from kernel_cases import (
    BITS,
    FLOATS,
    INF,
    KINDS,
    NAN,
    as_request,
    as_scopes,
    budgets,
    generator,
    scope_mask,
    scores_like,
    sorted_selection,
)
from stock import stepped

from sparsekit_ao import SparsityError
from sparsekit_ao.selection import BACKENDS, Request, api, cpu, fill_masks, keep_mask, reference

IMPLS = ["reference", "cpu"]


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Rows of 1024 are long, and of 256 too wide for a network."""
    for name, size in {"LONG": 1 << 10, "CHUNK": 1 << 9, "NETWORK": 1 << 7}.items():
        monkeypatch.setattr(cpu, name, size)


BY_HAND = [  # scores, budget, what is kept
    ([1.0, 3.0, 3.0, 2.0, 3.0], 2, [1, 2]),  # the lower index wins a tie
    ([0.0, 0.0, 0.0, 0.0], 2, [0, 1]),
    ([INF, -NAN, 5.0, NAN], 1, [1]),  # NaN of either sign ranks above infinity
    ([INF, -NAN, 5.0, NAN], 3, [0, 1, 3]),
    ([-0.0, 0.0, -INF, -1.0], 1, [0]),  # -0.0 equals 0.0
    ([-INF, 0.0, -0.0], 2, [1, 2]),
]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("scores", "keep", "kept"), BY_HAND)
def test_the_rule_by_hand(scores, keep, kept, impl):
    for dtype in FLOATS:
        assert keep_mask(torch.tensor([scores], dtype=dtype), keep, impl=impl)[0].nonzero()[:, 0].tolist() == kept
        tiny = torch.tensor([[0, 1, 0]], dtype=BITS[dtype]).view(dtype)
        assert keep_mask(tiny, 1, impl=impl).tolist() == [[False, True, False]]  # a subnormal outranks zero


@pytest.mark.parametrize(  # each width, kind and dtype with each value of every other
    ("width", "kind", "dtype", "impl"), grid([1, 2, 7, 8, 9, 128, 129, 1023, 1024, 2500], KINDS, FLOATS, IMPLS)
)
def test_rows_equal_numpys_sort(width, kind, dtype, impl):
    rows = 12 if width > 1000 else 60
    scores, keep = scores_like(kind, rows, width, dtype), budgets(rows, width)
    assert torch.equal(keep_mask(scores, keep, impl=impl), sorted_selection(scores, keep))
    for number in (0, width // 3, width):
        found = keep_mask(scores.abs(), number, impl=impl)
        assert torch.equal(found, sorted_selection(scores.abs(), [number] * rows))
    turned = scores.t().contiguous().t()
    assert torch.equal(keep_mask(turned, keep, impl=impl), sorted_selection(scores, keep))


@pytest.mark.parametrize(("width", "kind", "dtype", "impl"), grid([4, 8, 9, 129, 300, 1027], KINDS, FLOATS, IMPLS))
def test_only_candidates_are_kept_and_a_short_scope_keeps_them_all(width, kind, dtype, impl):
    rows = 12 if width > 1000 else 40
    scores, keep = scores_like(kind, rows, width, dtype), budgets(rows, width)
    share = torch.linspace(0, 1, rows)[:, None]  # the first row has no candidate, the last every one
    candidates = torch.rand(rows, width, generator=generator(1)) <= share
    candidates[0] = False
    found = keep_mask(scores, keep, candidates=candidates, impl=impl)
    assert torch.equal(found, sorted_selection(scores, keep, candidates))
    assert torch.equal(found.sum(1), torch.minimum(keep, candidates.sum(1)))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_pattern_of_16_bits_has_its_rank(dtype, impl):
    scores = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).expand(12, -1)
    keep = torch.arange(12) * 5461 + 1
    for ranked in (scores, scores.abs()):
        assert torch.equal(keep_mask(ranked, keep, impl=impl), sorted_selection(ranked, keep))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_real_length_equal_the_reference(kind, monkeypatch):
    monkeypatch.undo()
    width = cpu.LONG + 77
    for dtype in (torch.bfloat16, torch.float32):
        scores, keep = scores_like(kind, 2, width, dtype), torch.tensor([width // 2, width - 3])
        assert torch.equal(keep_mask(scores, keep, impl="cpu"), keep_mask(scores, keep, impl="reference"))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("width", [8, 100, 1200])
def test_scores_may_be_expanded_parameters_and_arguments_stay_as_they_were(width, impl):
    parameter = torch.nn.Parameter(scores_like("special", 1, width, torch.float32))
    scores, keep, before = parameter.expand(3, width), torch.tensor([3, 0, 2]), parameter.detach().clone()
    found = keep_mask(scores, keep, candidates=scores != 1, impl=impl)
    assert not found.requires_grad and torch.equal(found, sorted_selection(scores.detach(), keep, scores != 1))
    assert torch.equal(parameter.view(torch.int32), before.view(torch.int32)) and keep.tolist() == [3, 0, 2]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_a_budget_tensor_may_have_any_integer_dtype(dtype):
    scores, keep = scores_like("random", 3, 9, torch.float32), torch.tensor([0, 9, 4])
    assert torch.equal(keep_mask(scores, keep.to(dtype)), sorted_selection(scores, keep))
    assert torch.equal(keep_mask(scores, torch.tensor(4, dtype=dtype)), sorted_selection(scores, [4, 4, 4]))


S = torch.zeros(2, 4)
ERRORS = [
    (([1.0], 1), {}, r"scores must be a tensor \[scopes, slots\], got list"),
    ((torch.zeros(4), 1), {}, r"scores must be .* \[scopes, slots\], got torch.float32 \(4,\)"),
    ((torch.zeros(2, 4, dtype=torch.int32), 1), {}, r"scores must be .* got torch.int32 \(2, 4\)"),
    ((S, 5), {}, r"keep must be in 0 \.\. 4 \(the slots of a scope\), got 5 \.\. 5"),
    ((S, -1), {}, r"keep must be in 0 \.\. 4 .*, got -1 \.\. -1"),
    ((S, torch.tensor([-1, 2])), {}, r"keep must be in 0 \.\. 4 .*, got -1 \.\. 2"),
    ((S, True), {}, "keep must be an int or an integer tensor .*, got True"),
    ((S, 1.0), {}, "keep must be an int or an integer tensor .*, got 1.0"),
    ((S, torch.tensor([1.0, 1.0])), {}, r"keep must be .*, got torch.float32 \(2,\)"),
    ((S, torch.tensor([True, True])), {}, r"keep must be .*, got torch.bool \(2,\)"),
    ((S, torch.tensor([1, 1, 1])), {}, r"keep must be .* an integer tensor \[2\], got torch.int64 \(3,\)"),
    ((S, 1), {"candidates": torch.ones(2, 3, dtype=torch.bool)}, r"candidates must be bool \(2, 4\), got .*\(2, 3\)"),
    ((S, 1), {"candidates": torch.ones(2, 4)}, r"candidates must be bool \(2, 4\), got torch.float32"),
    ((S, 1), {"candidates": [[True] * 4] * 2}, r"candidates must be bool \(2, 4\), got list"),
    ((S, 1), {"impl": ["cpu"]}, r"impl must be one of \('auto', .*, got \['cpu'\]"),
    ((S, 1), {"impl": "gpu"}, r"impl must be one of \('auto', 'reference', 'cpu', 'triton'\), got 'gpu'"),
    ((S.to("meta"), 1), {"impl": "cpu"}, 'impl="cpu" cannot take this: it works on CPU tensors, got meta'),
]


@pytest.mark.parametrize(("args", "kwargs", "text"), ERRORS)
def test_wrong_arguments_say_what_was_required_and_found(args, kwargs, text):
    with pytest.raises(SparsityError, match="^(keep_mask: )?" + text):
        keep_mask(*args, **kwargs)


# backends


class Toy:
    """The reference, for whole scopes of 2-norms."""

    name, updated = "toy", 0

    def refusals(self, work):
        if not isinstance(work, Request):
            return ["it only updates whole masks"]
        partial = work.scope.is_partial or work.scope.as_mean
        return ["a block or scope is partial"] * partial + ["its norm is not 2"] * (work.norm != 2)

    def run(self, requests):
        self.updated += len(requests)
        reference.run(requests)


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setitem(BACKENDS, "toy", Toy())
    monkeypatch.setitem(api.ORDER, "cpu", ("toy", "reference"))
    return BACKENDS["toy"]


def test_a_registered_backend_is_used_unless_it_refuses(toy):
    stepped(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)))
    assert toy.updated == 2
    mask = torch.ones(4, 8, dtype=torch.bool)
    scope_mask([as_scopes(torch.ones(4, 8), mask, (1, 3), (1, 2))], 1)
    assert not mask.all() and toy.updated == 2
    with pytest.raises(SparsityError, match="it only updates whole masks"):
        keep_mask(torch.ones(1, 4), 2, impl="toy")


def test_a_backend_by_name_gives_every_reason_and_nothing_is_written(toy):
    masks = torch.ones(2, 4, 8, dtype=torch.bool)
    whole = as_request([as_scopes(torch.rand(4, 8), masks[0], (1, 1), (1, 4))], 1)
    partial = as_request([as_scopes(torch.rand(4, 8), masks[1], (1, 3), (1, 2))], 1, 1)
    text = 'impl="toy" cannot take this: a block or scope is partial; its norm is not 2. Use impl="auto".'
    with pytest.raises(SparsityError, match="^" + re.escape(text)):
        fill_masks([whole, partial], impl="toy")
    with pytest.raises(SparsityError, match=re.escape("('auto', 'reference', 'cpu', 'triton', 'toy'), got 'jit'")):
        fill_masks([whole], impl="jit")
    assert bool(masks.all())
