"""Axis patterns: the same masks as the views, blocks and scopes that they stand for; errors in patterns."""

import re

import pytest
import torch
from stock import Holder, stepped

from sparsekit_ao import CouplingError, ScopeSparsifier, SparsityError, patterns
from sparsekit_ao.structure import AxisPattern

ROWS, COLUMNS = 32, 64


def axes(text, unit, scope="", **sizes):
    return {"axes": text, "unit": unit, "scope": scope, "sizes": sizes}


LINEAR, CONV = (ROWS, COLUMNS), (8, 12, 3, 3)
PAIRS_8_APART = ((ROWS, COLUMNS // 16, 8, 2), (COLUMNS, 16, 1, 8))
THREADS = ((ROWS // 32, 4, 8, COLUMNS // 16, 16), (32 * COLUMNS, 8 * COLUMNS, COLUMNS, 16, 1))


def numbers(block=None, scope=None, view=None):
    keys = {"block_shape": block, "scope_shape": scope, "view": view}
    return {key: value for key, value in keys.items() if value}


TABLE = {  # (shape, axes, numbers), beside the gallery of the documentation, which test_docs.py evaluates
    "per column": (LINEAR, axes("o i", "o i", "i"), numbers(scope=(-1, 1))),
    "2:4 of pairs": (LINEAR, axes("o (s m p)", "o s m", "o s", m=4, p=2), numbers((1, 2), (1, 4))),
    "blocks": (LINEAR, axes("(r a) (c b)", "r c", a=8, b=4), patterns.blocks(8, 4)),
    "2:4 of blocks": (LINEAR, axes("(r a) (s m b)", "r s m", "r s", a=8, b=4, m=4), numbers((8, 4), (1, 4))),
    "coupled 2:4, columns 8 apart": (
        LINEAR,
        axes("o (g p e)", "o g e", "o g", p=2, e=8),
        numbers((1, 1, 1, 2), (1, 1, 8, 1), PAIRS_8_APART),
    ),
    "MMA thread group": (
        LINEAR,
        axes("(t g e) (c b)", "t g e c", "t e c", g=4, e=8, b=16),
        numbers((1, 1, 1, 1, 16), (1, 4, 1, 1, 1), THREADS),
    ),
    "filters": (CONV, axes("o i h w", "o"), patterns.filters()),
    "input channels": (CONV, axes("o i h w", "i"), numbers((-1, 1, -1, -1))),
    "conv 2:4": (CONV, axes("o (s m) h w", "o s h w m", "o s h w", m=4), patterns.n_m(2, 4)),
}


def prepared(weight, entry):
    sparsifier, model = ScopeSparsifier(), Holder(w=weight)
    budget = {} if entry.keys() & {"nnz", "sparsity_level", "stages", "pattern"} else {"sparsity_level": 0.5}
    sparsifier.prepare(model, [{"tensor_fqn": "w", **entry, **budget}])
    return sparsifier


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(("shape", "pattern", "numbers"), TABLE.values(), ids=TABLE)
def test_an_axis_pattern_and_its_numbers_choose_the_same_mask(shape, pattern, numbers, channels_last):
    weight = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 2).round()  # ties
    if channels_last and len(shape) == 4:
        weight = weight.contiguous(memory_format=torch.channels_last)
    if isinstance(numbers, patterns.Pattern):
        numbers = numbers.resolve(Holder(w=weight), "w")
    budget = {k: numbers[k] for k in ("nnz", "sparsity_level") if k in numbers}
    both = [prepared(weight.clone(), entry) for entry in ({**pattern, **budget}, numbers)]
    for sparsifier in both:
        sparsifier.step()
        sparsifier.check()
    assert torch.equal(both[0].mask("w"), both[1].mask("w"))


def test_defaults_and_entries_override_each_other():
    torch.manual_seed(0)
    sparsifier = ScopeSparsifier(axes="o (s m)", unit="o s m", scope="o s", sizes={"m": 4}, nnz=2)
    model = Holder(a=torch.randn(4, 8), b=torch.randn(4, 8), c=torch.randn(4, 8))
    sparsifier.prepare(
        model,
        [
            {"tensor_fqn": "a"},
            {"tensor_fqn": "b", "sizes": {"m": 8}, "nnz": 3},
            {"tensor_fqn": "c", "block_shape": (1, -1), "sparsity_level": 0.5},
        ],
    )
    sparsifier.step()
    assert (sparsifier.mask("a").view(-1, 4).sum(1) == 2).all()
    assert (sparsifier.mask("b").sum(1) == 3).all()
    assert sorted(sparsifier.mask("c").sum(1).tolist()) == [0, 0, 8, 8]
    assert "axes" in sparsifier.groups[0] and "block_shape" not in sparsifier.groups[0]
    assert "axes" not in sparsifier.groups[2]


W = "w: axes "
BAD = [
    (axes("o (s m)", "o s m", m=5), W + "'o (s m)': dimension 1 (s m) has size 8, which is not a multiple of m=5"),
    (
        axes("(r a) (c b d)", "r c", a=2, b=3, d=2),
        W + "'(r a) (c b d)': dimension 1 (c b d) has size 8, which is not a multiple of b=3 * d=2 = 6",
    ),
    (axes("(a b) i", "i", a=2, b=4), W + "'(a b) i': dimension 0 (a b) has size 4, not a=2 * b=4 = 8"),
    (axes("o i", "o", o=3), W + "'o i': dimension 0 (o) has size 4, not o=3"),
    (axes("o (s m)", "o s m"), W + "'o (s m)': dimension 1 (s m) has size 8; give the sizes of all but one of s, m"),
    (axes("o i h w", "o"), "it has 4 dimensions, but the tensor has 2: (4, 8)"),
    (axes("o i", "u"), "unknown axis 'u' in unit; the axes are o, i"),
    (axes("o i", "o", "x"), "unknown axis 'x' in scope; the axes are o, i"),
    (axes("o i", "o", "i"), "scope axis 'i' is not one of unit (o): a block cannot be in several scopes"),
    (axes("o i", "o", m=4), "unknown axis 'm' in sizes; the axes are o, i"),
    (axes("o i", "o", i=0), "sizes['i'] must be a positive int, got 0"),
    (axes("o i", "o", i=True), "sizes['i'] must be a positive int, got True"),
    (axes("o i", ""), "unit is empty"),
    (axes("o i", "o o"), "unit names an axis twice: o o"),
    (axes("o (i", "o"), W + "'o (i': Imbalanced parentheses"),
    (axes("o o", "o"), "duplicate dimension"),
    (axes("o ...", "o"), "give every axis a name"),
    (axes("o (i 4)", "o"), "give every axis a name"),
    (axes("o (5 + u + 3)", "u"), W + "'o (5 + u + 3)': dimension 1 has size 8, so nothing is left beside 5 + 3"),
    (axes("o (3 + u m)", "u", m=4), "dimension 1 (u m) has size 5, which is not a multiple of m=4"),
    (axes("o (i + u)", "u"), W + "'o (i + u)': (i + u) must be one part with names and lengths of the others"),
    (axes("o 5 + u", "u"), W + "'o 5 + u': + must be one part with names and lengths of the others, in brackets"),
    (axes("o 5+u", "u"), W + "'o 5+u': 5+u must be one part with names and lengths of the others, in brackets"),
    *(
        (axes(text, "u"), W + f"{text!r}: every bracket must be closed, and none is inside of another")
        for text in ("o (5 + u))", "o ((5 + u)", "o (5 + u", "o 5 + u)", "(o (5 + u))")
    ),
    (axes(7, "o"), "axes must be a str such as 'o (s m)', got 7"),
    ({"axes": "o i"}, "'axes' needs 'unit'"),
    ({"unit": "o"}, "'unit' is part of an axis pattern and needs 'axes'"),
    ({"axes": "o i", "unit": 3}, "unit must be names of axes, got 3"),
    ({"axes": "o i", "unit": "o", "sizes": 4}, "sizes must be a dict {axis: length}, got 4"),
    (axes("o i", "o") | {"block_shape": (1, -1)}, "'axes' and 'block_shape' are mutually exclusive"),
    ({"stages": [{"unit": "o"}]}, "w: stages[0]: 'unit' is part of an axis pattern and needs 'axes'"),
    ({"stages": [axes("o (s m)", "o s m", m=3)]}, "w: stages[0]: axes 'o (s m)': dimension 1 (s m) has size 8"),
]


@pytest.mark.parametrize(("entry", "text"), BAD, ids=[text[-40:] for _, text in BAD])
def test_a_pattern_that_does_not_fit_is_an_error_before_anything_is_changed(entry, text):
    model = Holder(w=torch.randn(4, 8))
    with pytest.raises(SparsityError, match=re.escape(text)):
        ScopeSparsifier().prepare(model, [{"tensor_fqn": "w", **entry}])
    assert not hasattr(model, "parametrizations")


def test_a_pattern_keeps_its_sizes():
    pattern = AxisPattern(axes="(a b) i", unit="a", sizes=(sizes := {"a": 2}))
    sizes["a"] = 99
    assert pattern(torch.zeros(4, 3)).shape == (2, 2, 3)


def test_coupled_units_of_different_length_are_refused():
    model = Holder(a=torch.randn(4, 8), b=torch.randn(6, 8))
    entries = [{"tensor_fqn": n, "axes": "u i", "unit": "u", "block_coupling": "c"} for n in ("a", "b")]
    with pytest.raises(CouplingError, match="block coupling 'c'"):
        ScopeSparsifier().prepare(model, entries)


def test_blocks_of_a_part_of_a_concatenation_compete_and_what_is_outside_is_kept():
    model = Holder(w=torch.tensor([[9.0, 1, 4, 2, 3, 9], [9, 1, 4, 2, 3, 9]]))
    sparsifier = stepped(model, [{"tensor_fqn": "w", **axes("o (1 + u + 1)", "u")}], sparsity_level=0.5)
    assert sparsifier.mask("w")[0].tolist() == [True, False, True, False, True, True]
