"""Random sequences of operations against the oracle in `strategies`, and what they have found.

SPARSEKIT_AO_FUZZ=20000 in the environment runs as many sequences.
"""

import copy
import math
import os
import warnings
from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stock import Holder, linear_model, prepared, reloaded, stepped
from strategies import (
    FLOATS,
    SMALL,
    accumulator,
    choose,
    examples,
    fill,
    mask_of,
    norm_of,
    params,
    scopes_of,
    tile_window,
    tiles,
    values_of,
    windows,
)

from sparsekit_ao import (
    BlockSpec,
    CouplingError,
    ScopeCoupling,
    ScopeSparsifier,
    ScopeSpec,
    SparsityError,
    WeightNormSparsifier,
)
from sparsekit_ao.selection import Request, fill_masks

COUNT = int(os.environ.get("SPARSEKIT_AO_FUZZ", "200"))
POOL = [*SMALL, math.nan, math.inf, -math.inf]
LEVELS = [0.0, 0.1, 0.25, 1 / 3, 0.5, 0.7, 0.9, 1.0]
SCALES = {  # powers of two whose squares are representable; sums of them are exact in any order
    torch.float16: [0, 12, -20],
    torch.bfloat16: [0, 52, -58],
    torch.float32: [0, 52, -58],
    torch.float64: [0, 480, -480],
}
COUPLED = {"apart": {}, "whole": {"scope_coupling": "all"}, "rows": {"scope_coupling": "all"}}
COUPLED["together"] = {"block_coupling": "pair"}

OPERATIONS = ["step", "step", "step", "level", "one", "weights", "save"]


def signed(weight, name):
    return weight.clone()


@st.composite
def stage_of(draw, param, block, scope):
    """(config keys, the window cut into blocks, its scopes), under a view of its own unless the block is given."""
    window, view = (tuple(param.shape), param.stride(), 0), {}
    if block is None:
        if param.is_contiguous() and draw(st.booleans()):
            window = draw(windows(param))
            view = {"view": window}
        block = draw(tiles(window[0], True))
    tiled = tile_window(param, window, block)
    scope = draw(tiles(tiled.grid, True)) if scope is None else scope
    return {"block_shape": block, "scope_shape": scope, "edge": "partial", **view}, tiled, scopes_of(tiled.grid, scope)


@st.composite
def budget_of(draw, width):
    return draw(
        st.one_of(
            st.tuples(st.just("level"), st.sampled_from(LEVELS)), st.tuples(st.just("nnz"), st.integers(0, width))
        )
    )


@st.composite
def cases(draw):
    """How tensors are coupled, the norm, and for each tensor its stages, their budgets, and that of the others."""
    kind, norm, dtype = (draw(st.sampled_from(own)) for own in (list(COUPLED), [1, 2, math.inf, None], FLOATS))
    rows, group = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    tensors = []
    for _ in range(draw(st.integers(1, 2) if kind == "apart" else st.integers(2, 3))):
        shape = None if kind == "apart" else (rows, *draw(st.lists(st.integers(1, 3), max_size=2)))
        param = draw(params(shape=shape, pool=POOL, dtypes=[dtype])).mul_(2.0 ** draw(st.sampled_from(SCALES[dtype])))
        count = draw(st.sampled_from([1, 2, 3])) if kind == "apart" else 1
        block, scope = {"apart": (None, None), "whole": (None, ())}.get(kind, (None, (1,)))
        if kind == "rows":
            block = (1, *draw(tiles(shape[1:], True)))
        if kind == "together":
            block, scope = (1, *(-1 for _ in shape[1:])), (group,)
        tensors.append([draw(stage_of(param, block, scope)) for _ in range(count)])
    widths = [[max(map(len, scopes.values())) for _, _, scopes in stages] for stages in tensors]
    if kind != "apart":
        width = min(group, rows) if kind == "together" else sum(own for (own,) in widths)
        return kind, norm, tensors, [[None]] * len(tensors), [draw(budget_of(width))] * len(tensors)
    fixed = [[draw(st.none() | budget_of(n)) if len(own) > 1 else None for n in own] for own in widths]
    return kind, norm, tensors, fixed, [draw(budget_of(min(own))) for own in widths]


def keys_of(budget):
    return {} if budget is None else {{"nnz": "nnz", "level": "sparsity_level"}[budget[0]]: budget[1]}


def kept_of(kind, norm, members, budget, before=None):
    """The blocks that windows keep, a set for each; in a later stage among those of which the mask leaves something."""
    mean, dtype = any(tiled.partial for tiled, _ in members), accumulator(members[0][0].param.dtype)
    units = defaultdict(lambda: ([], []))  # (scope, place in it): elements, and which blocks they are
    for j, (tiled, scopes) in enumerate(members):
        values = tiled.param if before is None else tiled.param.masked_fill(~before, 0)
        for at, found in scopes.items():
            for slot, block in found:
                scope = {"apart": at, "whole": ()}.get(kind, at[:1])
                elements, blocks = units[scope, slot if kind == "together" else (j, slot)]
                elements += tiled.read(block, values)
                blocks.append((j, block))
    ranked, sizes = defaultdict(list), defaultdict(int)
    for (scope, place), (elements, blocks) in units.items():
        sizes[scope] += 1
        if before is None or any(before[at] for j, block in blocks for at in members[j][0].blocks[block]):
            ranked[scope].append((norm_of(elements, norm, dtype, mean), place, tuple(blocks)))
    kept, (what, number) = [set() for _ in members], budget
    for scope, competitors in ranked.items():
        keep = number if what == "nnz" else sizes[scope] - math.floor(number * sizes[scope] + 1e-9)
        for j, block in [one for blocks in choose(competitors, keep) for one in blocks]:
            kept[j].add(block)
    return kept


def masks_of(kind, norm, tensors, budgets):
    """The masks after a step, by the budgets of the stages of each tensor."""
    if kind != "apart":
        members = [stages[0][1:] for stages in tensors]
        kept = kept_of(kind, norm, members, budgets[0][0])
        return [mask_of(tiled, own) for (tiled, _), own in zip(members, kept, strict=True)]
    masks = []
    for stages, own in zip(tensors, budgets, strict=True):
        mask = None
        for (_, tiled, scopes), budget in zip(stages, own, strict=True):
            found = mask_of(tiled, kept_of(kind, norm, [(tiled, scopes)], budget, mask)[0])
            mask = found if mask is None else mask & found
        masks.append(mask)
    return masks


@examples(COUNT)
@given(cases(), st.data())
def test_masks_are_those_of_the_oracle(case, data):
    kind, norm, tensors, fixed, shared = case
    weights = [stages[0][1].param for stages in tensors]
    scoring = {"score": signed} if norm is None else {"norm": norm}
    config = []
    for k, (stages, own) in enumerate(zip(tensors, fixed, strict=True)):
        keys = [{**s[0], **keys_of(b), **COUPLED[kind], **scoring} for s, b in zip(stages, own, strict=True)]
        budget = {} if all(own) else keys_of(shared[k])
        config.append({"tensor_fqn": f"t{k}", **budget, **({"stages": keys} if len(keys) > 1 else keys[0])})
    model = Holder(**{f"t{k}": weight for k, weight in enumerate(weights)})
    sparsifier = prepared(model, config)
    first = [g["sparsity_level"] for g in sparsifier.groups]  # a level that is written has effect where it differs
    levels, masks = list(first), [torch.ones_like(w, dtype=torch.bool) for w in weights]

    def chosen():
        now = [g if level == f else ("level", level) for g, level, f in zip(shared, levels, first, strict=True)]
        return masks_of(kind, norm, tensors, [[b or n for b in own] for own, n in zip(fixed, now, strict=True)])

    def refill():
        for weight in weights:
            fill(weight, data.draw(values_of(weight.numel(), POOL)))
            weight.mul_(2.0 ** data.draw(st.sampled_from(SCALES[weight.dtype])))

    for _ in range(data.draw(st.integers(1, 4))):
        at, operation = data.draw(st.integers(0, len(weights) - 1)), data.draw(st.sampled_from(OPERATIONS))
        own = [at] if kind == "apart" else range(len(weights))
        if operation == "step":
            masks = chosen()
            sparsifier.step()
            sparsifier.check()
        elif operation == "level" and not all(fixed[at]):  # as a scheduler does
            level = data.draw(st.sampled_from([*LEVELS, first[at]]))
            for k in own:
                sparsifier.groups[k]["sparsity_level"] = levels[k] = level
        elif operation == "one":
            found = chosen()
            masks = [found[k] if k in own else mask for k, mask in enumerate(masks)]
            sparsifier.update_mask(model, f"t{at}")
        elif operation == "weights":
            refill()
        elif operation == "save":
            saved = reloaded(sparsifier.state_dict())
            refill()
            sparsifier.step()
            sparsifier.load_state_dict(saved)
        for k, (mask, row) in enumerate(zip(masks, sparsifier.report(), strict=True)):
            assert torch.equal(sparsifier.mask(f"t{k}"), mask), operation
            assert math.isclose(row.sparsity, 1 - float(mask.double().mean()), abs_tol=1e-9)
    expected = [torch.where(mask, weight, 0) for mask, weight in zip(masks, weights, strict=True)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a level changed since the last step
        sparsifier.squash_mask()
    for k, weight in enumerate(expected):
        assert torch.equal(getattr(model, f"t{k}").nan_to_num(7.0), weight.nan_to_num(7.0))


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_a_weight_without_elements(shape):
    for block in ((), (-1, 1), (1, -1)):
        sparsifier = stepped(Holder(w=torch.zeros(shape)), [{"tensor_fqn": "w", "block_shape": block}])
        assert sparsifier.mask("w").shape == shape and sparsifier.check() >= 0 and sparsifier.report()[0].kept == 0


@pytest.mark.parametrize("weight", [torch.ones(1, 4).expand(3, 4), torch.ones(6).as_strided((3, 4), (1, 1))])
@pytest.mark.parametrize(
    "sparsifier", [ScopeSparsifier(), ScopeSparsifier(view=((3, 4), (4, 1)), edge="partial"), WeightNormSparsifier()]
)
def test_an_expanded_parameter_is_refused(weight, sparsifier):
    model = Holder(w=weight)
    with pytest.raises(SparsityError, match=r"config\[0\]: 'w': the parameter \(3, 4\):.* is expanded"):
        copy.copy(sparsifier).prepare(model, [{"tensor_fqn": "w"}])
    assert not hasattr(model, "parametrizations")


def test_a_budget_for_each_scope_suits_members_of_any_rank():
    weights = [torch.arange(1.0, 5), torch.arange(1.0, 9).reshape(4, 2), torch.ones(4, 1, 1)]
    scopes = [ScopeSpec(BlockSpec(w), (1,), edge="partial") for w in weights]
    coupling = ScopeCoupling(scopes)
    masks = {s.block: torch.ones_like(w, dtype=torch.bool) for s, w in zip(scopes, weights, strict=True)}
    budget = torch.tensor([0, 1, 2, 4])
    fill_masks([Request(scope=coupling, masks=masks, keep=budget.reshape(coupling.grid_shape))])
    assert (sum(m.reshape(4, -1).sum(1) for m in masks.values()) == budget).all()


@pytest.mark.parametrize(
    "stages",
    [  # blocks of the last stage are cut by the first; views of one shape with other strides; a block at the edge
        [{"nnz": 5}, {"block_shape": (2, 2), "nnz": 3}],
        [{"scope_shape": (1, 4), "nnz": 1}, {"view": ((6, 4), (1, 6)), "scope_shape": (1, 4), "nnz": 3}],
        [{"block_shape": (4, 1), "scope_shape": (-1, 4), "nnz": 2}, {"scope_shape": (2, 4), "nnz": 4}],
    ],
)
def test_check_accepts_what_step_chooses_in_stages(stages):
    model = Holder(w=torch.randn(6, 4, generator=torch.Generator().manual_seed(1)))
    sparsifier = stepped(model, [{"tensor_fqn": "w", "stages": stages}], edge="partial")
    assert sparsifier.check() > 0


def test_a_level_that_is_written_to_one_of_two_tensors_with_a_shared_count_is_an_error():
    model, shared = linear_model(4, 4, 4), {"nnz": 8, "scope_coupling": "both"}
    sparsifier = prepared(model, [{"tensor_fqn": f"{k}.weight", **shared} for k in (0, 2)])
    sparsifier.groups[0]["sparsity_level"] = 0.9
    with pytest.raises(CouplingError, match="members share one budget"):
        sparsifier.step()
