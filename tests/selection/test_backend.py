"""One fork: a new backend needs a name, reasons and run, and an entry in the table."""

import math
import re

import pytest
import torch
from grids import grid
from kernel_cases import generator
from sparsekit_ao.selection.nests import lower
from sparsekit_ao.selection.strides import addresses, cosize

from sparsekit_ao import (
    BlockCoupling,
    BlockSpec,
    ScopeCoupling,
    ScopeSparsifier,
    ScopeSpec,
    SparsityError,
    View,
    patterns,
)
from sparsekit_ao.selection import Blocks, Scopes, Threshold, Update, backend, block_scores, keep_mask, scope_masks


class Toy:
    """The selection rule in plain Python, over addresses in flat memory."""

    name = "toy"

    def reasons(self, work):
        if not isinstance(work, Update):
            return ["it only updates whole masks"]
        tiles = [(g, n) for s in work.scopes for g, n in zip(s.grid, s.shape, strict=True)]
        partial = any(m.is_partial for m in work.members) or any(g % n for g, n in tiles)
        return ["a block or scope is partial"] * partial + ["its norm is not 2"] * (work.norm != 2)

    def run(self, work):
        for update in work:
            budget = torch.as_tensor(update.keep).expand(update.scopes[0].scope_grid).reshape(-1).tolist()
            for scope, keep in enumerate(budget):
                blocks = [block for one in update.scopes for block in self.blocks_of(one, scope)]
                held = [[bool(mask[j]) or not update.among_kept for _, mask, _, j in block] for block in blocks]
                scores = [
                    sum(float(v[i]) ** 2 for (v, _, i, _), h in zip(*one, strict=True) if h)
                    for one in zip(blocks, held, strict=True)
                ]
                best = sorted(range(len(blocks)), key=lambda at: (-scores[at], at))
                kept = set([at for at in best if any(held[at])][:keep])
                for at, block in enumerate(blocks):
                    for (_, mask, _, j), h in zip(block, held[at], strict=True):
                        mask[j] = at in kept and h

    def blocks_of(self, scopes, scope):
        """For each block of a scope its elements: (flat values, flat mask, address in values, address in mask)."""
        nests = lower(scopes)
        walk = [[addresses(n.sizes, s).tolist() for s in n.strides] for n in (nests.scope, nests.block)]
        found = [[] for _ in range(nests.block.count)]
        for k, (member, element) in enumerate(zip(scopes.members, nests.elements, strict=True)):
            flat = [t.as_strided((cosize(t.shape, t.stride()),), (1,)) for t in (member.values, member.mask)]
            inside = [addresses(element.sizes, s).tolist() for s in element.strides]
            for b, block in enumerate(found):
                first = [walk[0][2 * k + t][scope] + walk[1][2 * k + t][b] for t in (0, 1)]
                block += [(*flat, first[0] + i, first[1] + j) for i, j in zip(*inside, strict=True)]
        return found


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setitem(backend.BACKENDS, "toy", Toy())
    monkeypatch.setitem(backend.ORDER, "cpu", ("toy", "reference"))


N = 32
GRID = {  # arguments of a config entry
    "unstructured per tensor": {},
    "unstructured per row": {"scope_shape": (1, -1)},
    "unstructured per column": {"scope_shape": (-1, 1)},
    "2:4": patterns.n_m(2, 4),
    "8:16": patterns.n_m(8, 16),
    "2:4 of 1x2 pairs": {"block_shape": (1, 2), "scope_shape": (1, 4), "nnz": 2},
    "vector 2:4": {"block_shape": (8, 1), "scope_shape": (1, 4), "nnz": 2},
    "1x4 per tensor": patterns.blocks(1, 4),
    "8x8 per block row": {"block_shape": (8, 8), "scope_shape": (1, -1)},
    "2:4 of 4x4": {"block_shape": (4, 4), "scope_shape": (1, 4), "nnz": 2},
    "rows": patterns.rows(),
    "columns": patterns.columns(),
    "coupled 2:4, columns 8 apart": {
        "view": ((N, N // 16, 8, 2), (N, 16, 1, 8)),
        "block_shape": (1, 1, 1, 2),
        "scope_shape": (1, 1, 4, 1),
        "nnz": 2,
    },
    "16 columns, rows 8 apart, 1:2": {
        "view": ((N // 16, 8, 2, N), (16 * N, N, 8 * N, 1)),
        "block_shape": (1, 1, 1, 16),
        "scope_shape": (1, 1, 2, 1),
        "nnz": 1,
    },
    "MMA thread group": {
        "view": ((N // 32, 4, 8, N // 16, 16), (32 * N, 8 * N, N, 16, 1)),
        "block_shape": (1, 1, 1, 1, 16),
        "scope_shape": (1, 4, 1, 1, 1),
        "nnz": 2,
    },
    "heads": patterns.heads(4),
    "V:N:M": patterns.v_n_m(8, 2, 8),
    "1x5, partial edge": {"block_shape": (1, 5), "edge": "partial"},  # which the toy leaves to the reference
    "global": {"scope_coupling": "all"},
    "global, 1x4": {"scope_coupling": "all", "block_shape": (1, 4)},
    "coupled rows": {"block_coupling": "all", "block_shape": (1, -1)},
}


def stepped(entry):
    model = torch.nn.Sequential(*(torch.nn.Linear(N, N, bias=False) for _ in range(2)))
    for at, layer in enumerate(model):
        layer.weight.data = torch.randint(-4, 5, (N, N), generator=generator(at)).float()  # sums are exact, with ties
    sparsifier = ScopeSparsifier()
    sparsifier.prepare(model, [{"tensor_fqn": f"{at}.weight", **entry} for at in range(2)])
    sparsifier.step()
    return [sparsifier.mask(f"{at}.weight").clone() for at in range(2)]


@pytest.mark.parametrize("pattern", GRID)
def test_a_toy_backend_runs_the_pattern_grid(pattern, toy, monkeypatch):
    runs, real = [], Toy.run
    monkeypatch.setattr(Toy, "run", lambda self, work: runs.extend(work) or real(self, work))
    found = stepped(GRID[pattern])
    assert bool(runs) is ("partial" not in pattern)
    monkeypatch.setitem(backend.ORDER, "cpu", ("reference",))
    assert all(map(torch.equal, found, stepped(GRID[pattern])))


def row(values, **more):
    member = Blocks(shape=(1, 3), values=values, mask=torch.ones(values.shape, dtype=torch.bool))
    return Update(scopes=(Scopes(members=(member,), shape=(1, 2)),), keep=1, **more)


def test_a_backend_by_name_never_falls_back_and_says_every_reason(toy):
    update = row(torch.ones(4, 8), norm=1)
    with pytest.raises(SparsityError, match="^" + re.escape(
        'impl="toy" cannot take this: a block or scope is partial; its norm is not 2. Use impl="auto".'
    )):  # fmt: skip
        scope_masks([update], impl="toy")
    assert bool(update.members[0].mask.all())
    with pytest.raises(SparsityError, match="it only updates whole masks"):
        block_scores(update.members, impl="toy")
    scope_masks([update])
    assert not update.members[0].mask.all()


def test_nothing_is_written_if_one_of_several_updates_is_refused(toy):
    whole = Scopes(members=(Blocks(shape=(1, 1), values=torch.rand(4, 8), mask=torch.ones(4, 8) > 0),), shape=(1, 4))
    updates = [Update(scopes=(whole,), keep=1), row(torch.ones(4, 8))]
    with pytest.raises(SparsityError, match="partial"):
        scope_masks(updates, impl="toy")
    assert all(bool(u.members[0].mask.all()) for u in updates)


def test_an_unknown_name_lists_the_known_ones(toy):
    with pytest.raises(
        SparsityError, match=re.escape("impl must be one of ('auto', 'reference', 'cpu', 'triton', 'toy')")
    ):
        keep_mask(torch.ones(1, 4), 2, impl="jit")


def test_the_reference_and_the_cpu_backend_do_not_threshold_in_place():
    scopes = Scopes(members=(Blocks(shape=(1, 2), values=torch.ones(2, 4)),), shape=(1, 1))
    work = Threshold(scopes=scopes, thresholds=1.0, soft=True)
    for name in ("reference", "cpu"):
        assert backend.BACKENDS[name].reasons(work) == ["it does not threshold in place"]
    assert backend.find(work) is None


# saliencies


@pytest.mark.parametrize("impl", ["reference", "cpu", "auto"])
def test_saliencies_compete_by_their_signed_sum(impl):
    values = torch.tensor([[3.0, -9.0, 1.0, 1.0, -2.0, -2.0, 0.0, -1.0]])
    mask = torch.ones(1, 8, dtype=torch.bool)
    scope_masks(
        [
            Update(
                scopes=(Scopes(members=(Blocks(shape=(1, 2), values=values, mask=mask),), shape=(1, 4)),),
                keep=2,
                norm=None,
            )
        ],
        impl=impl,
    )
    assert mask.tolist() == [[False, False, True, True, False, False, True, True]]
    assert block_scores((Blocks(shape=(1, 2), values=values),), None, impl=impl).tolist() == [[-6, 2, -4, -1]]
    single = Scopes(members=(Blocks(shape=(1, 1), values=values, mask=mask),), shape=(1, 8))
    scope_masks([Update(scopes=(single,), keep=3, norm=None)], impl=impl)
    assert mask.tolist() == [[True, False, True, True, False, False, False, False]]


@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_saliencies_of_partial_blocks_are_means_and_coupled_ones_add_up(impl):
    values = torch.tensor([[1.0, 1.0, 4.0, -2.0, 1.5]])
    assert block_scores((Blocks(shape=(1, 2), values=values),), None, impl=impl).tolist() == [[1.0, 1.0, 1.5]]
    bias = torch.tensor([2.0, -1.0])
    members = (Blocks(shape=(1, 3), values=torch.tensor([[1.0, 2, 3], [-4, 5, 6]])), Blocks(shape=(1,), values=bias))
    assert block_scores(members, None, impl=impl).flatten().tolist() == [8.0, 6.0]


@pytest.mark.parametrize(
    ("scope", "among_kept", "dtype"),
    grid([(1, 4), (1, 16), (1, 1024), (256, 1), (256, 1024)], [False, True], [torch.float32, torch.bfloat16]),
)
def test_signed_saliencies_of_single_elements_are_the_references(scope, among_kept, dtype):
    values = torch.randn(256, 1024, generator=generator()).mul(20).round().to(dtype)
    held = torch.rand(values.shape, generator=generator(1)) < 0.7
    masks = [held.clone() for _ in range(2)]
    for mask, name in zip(masks, ("cpu", "reference"), strict=True):
        scopes = Scopes(members=(Blocks(shape=(1, 1), values=values, mask=mask),), shape=scope)
        update = Update(scopes=(scopes,), keep=math.prod(scope) // 2, norm=None, among_kept=among_kept)
        scope_masks([update], impl=name)
    assert torch.equal(*masks)


@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_a_default_dtype_of_bfloat16_changes_nothing(impl):
    values = torch.randn(64, 1024, generator=generator())
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            for block, scope in (((1, 1), (64, 1024)), ((1, 4), (1, 4)), ((1, 4), (64, 256)), ((1, 1), (1, 1024))):
                mask = torch.ones(64, 1024, dtype=torch.bool)
                scopes = Scopes(members=(Blocks(shape=block, values=values, mask=mask),), shape=scope)
                scope_masks([Update(scopes=(scopes,), keep=math.prod(scope) // 2)], impl=impl)
                found.append(mask)
        finally:
            torch.set_default_dtype(torch.float32)
    assert all(torch.equal(found[i], found[i + 4]) for i in range(4))


def test_couplings_go_through_the_same_fork(toy):
    gate, up = (torch.randint(-4, 5, (8, 8), generator=generator(s)).float() for s in (1, 2))
    coupled = BlockCoupling([BlockSpec(View.from_existing(t), (1, -1)) for t in (gate, up)])
    both = ScopeCoupling([ScopeSpec(coupled)])
    masks = {leaf: torch.ones(8, 8, dtype=torch.bool) for leaf in coupled.blocks()}
    both.update_masks(masks, 3, impl="toy")
    again = {leaf: torch.ones(8, 8, dtype=torch.bool) for leaf in coupled.blocks()}
    both.update_masks(again, 3, impl="reference")
    assert all(torch.equal(masks[leaf], again[leaf]) for leaf in masks)
