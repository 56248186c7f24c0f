"""The canonical form: the addresses of three nests are those that views and tiles give."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsekit_ao.selection import Blocks, Scopes, to_scopes
from sparsekit_ao.selection.nests import Nest, lower


def walk(nest, tensor):
    """Every address of one tensor, by plain loops."""
    return [
        sum(i * d for i, d in zip(at, nest.strides[tensor], strict=True))
        for at in itertools.product(*map(range, nest.sizes))
    ]


loops = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 6), st.integers(0, 6)), max_size=4)


@given(loops)
def test_coalescing_keeps_every_address_and_their_order(dims):
    nest = Nest(sizes=tuple(d[0] for d in dims), strides=(tuple(d[1] for d in dims), tuple(d[2] for d in dims)))
    short = nest.coalesced()
    assert short.count == nest.count
    assert len(short.sizes) <= len(nest.sizes)
    for tensor in range(2):
        assert walk(short, tensor) == walk(nest, tensor)


@pytest.mark.parametrize(
    ("sizes", "strides", "loops"),
    [
        ((4, 8), ((8, 1),), 1),
        ((4, 8), ((1, 4),), 2),
        ((4, 1, 8), ((8, 5, 1),), 1),
        ((4, 8), ((8, 1), (1, 4)), 2),  # one tensor could be joined, the other not
        ((1, 1), ((3, 3),), 0),
        ((0, 4), ((4, 1),), 1),
    ],
)
def test_loops_are_joined_only_where_every_tensor_allows_it(sizes, strides, loops):
    assert len(Nest(sizes=sizes, strides=strides).coalesced().sizes) == loops


CASES = [  # window shape, block, scope, member order, scope order
    ((4, 8), (1, 1), (1, 4), (), ()),
    ((4, 8), (2, 2), (2, 4), (), ()),
    ((4, 8), (2, 1), (2, 2), (1, 0), ()),
    ((4, 8), (1, 4), (2, 2), (), (1, 0)),
    ((2, 4, 6), (1, 2, 3), (2, 1, 2), (2, 0, 1), (1, 2, 0)),
]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("sizes", "block", "scope", "order", "scope_order"), CASES)
def test_scope_block_and_element_add_up_to_the_address_of_the_view(sizes, block, scope, order, scope_order, transposed):
    values = torch.arange(torch.Size(sizes).numel()).view(sizes)
    if transposed:
        values = values.transpose(0, 1).contiguous().transpose(0, 1)
    mask = torch.zeros(sizes, dtype=torch.bool)
    member = Blocks(shape=block, values=values, mask=mask, order=order)
    scopes = Scopes(members=(member,), shape=scope, order=scope_order)
    nests = lower(scopes)
    flat = values.as_strided((values.numel(),), (1,))
    first = walk(nests.elements[0], 0)[0]
    corner = values[tuple(slice(None, None, b) for b in block)]  # the first element of every block
    aligned = corner.permute(order) if order else corner
    expected = to_scopes(aligned, scopes, 0)
    rows = [[int(flat[s + b + first]) for b in walk(nests.block, 0)] for s in walk(nests.scope, 0)]
    assert rows == expected.tolist()
    tile = values[tuple(slice(0, b) for b in block)]
    assert [int(flat[e]) for e in walk(nests.elements[0], 0)] == tile.reshape(-1).tolist()
    assert nests.scope.count * nests.block.count * nests.elements[0].count == values.numel()


def test_members_of_fewer_dimensions_stand_still_along_the_others():
    weight, bias = torch.zeros(4, 6), torch.zeros(4)
    members = (Blocks(shape=(1, 6), values=weight), Blocks(shape=(1,), values=bias))
    nests = lower(Scopes(members=members, shape=(4, 1)))
    assert nests.block == Nest(sizes=(4,), strides=((6,), (1,)))
    assert nests.elements == (Nest(sizes=(6,), strides=((1,),)), Nest(sizes=(), strides=((),)))
