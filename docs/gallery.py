"""The gallery of patterns: for each one a section of the page `patterns` and a picture of a mask.

Every notation of an entry is evaluated and prunes the same random weight; the masks must be equal, and the picture is
drawn from them. `python docs/gallery.py FOLDER` writes `gallery.md` and the pictures into a folder.
"""

import pathlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from pictures import DRAWINGS, PLOTS, draw_matrix
from torch import Tensor, nn

from sparsekit_ao import BlockSpec, ScopeSparsifier, ScopeSpec, View, patterns

DENSE = "Everywhere, once [`compact`](compact.md) has removed the dropped units: the layer is then smaller and dense."
BLOCKS = (
    "On CUDA with torch's BSR kernels, for square blocks with sides of 16 or more and a sparsity of about 80 % or "
    "more. See [Deploy](export.md)."
)
NOWHERE = (
    "No widely used kernel runs this pattern fast. It is useful for accuracy studies, or as a step towards another "
    "pattern."
)
EXPORT = "See [Deploy](export.md)."


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One pattern.

    Attributes:
        name: of the picture's file.
        title: of the section.
        text: what it is.
        shapes: config keys in shapes, as Python source.
        axes: the same in axes, or "" where axes cannot express it.
        pattern: the same as a value of `patterns`, or "".
        fast: what runs it fast, and where.
        module: the layer that the picture shows, as Python source.
    """

    name: str
    title: str
    text: str
    shapes: str
    axes: str = ""
    pattern: str = ""
    fast: str
    module: str = "nn.Linear(32, 16)"


ENTRIES = (
    Entry(
        name="unstructured",
        title="Single weights over the tensor",
        text="Every weight competes with every other one of its tensor.",
        pattern="patterns.unstructured(0.5)",
        shapes='{"block_shape": (), "scope_shape": (), "sparsity_level": 0.5}',
        axes='{"axes": "o i", "unit": "o i", "sparsity_level": 0.5}',
        fast="CPU engines with sparse kernels can skip single zeros, and files become smaller (zstd, Core ML). "
        f"Tensor cores do not become faster. {EXPORT}",
    ),
    Entry(
        name="per_row",
        title="Single weights in every row",
        text="Each output neuron keeps the same number of inputs, as in the Wanda paper. To give each column the "
        "same number instead, swap the axes.",
        shapes='{"scope_shape": (1, -1), "sparsity_level": 0.5}',
        axes='{"axes": "o i", "unit": "o i", "scope": "o", "sparsity_level": 0.5}',
        fast="The same as for single weights over the tensor. In addition, rows that keep equally many weights "
        "balance the work of the threads.",
    ),
    Entry(
        name="n_m",
        title="N of every M inputs (2:4, 1:4, ...)",
        text="NVIDIA's sparse tensor cores support 2:4.",
        pattern="patterns.n_m(2, 4)",
        shapes='{"block_shape": (1, 1), "scope_shape": (1, 4), "nnz": 2}',
        axes='{"axes": "o (s m)", "unit": "o s m", "scope": "o s", "sizes": {"m": 4}, "nnz": 2}',
        fast="2:4 on NVIDIA GPUs since Ampere, in fp16, bf16 and int8 (`export.to_2_4`). Other values of N and M "
        f"need other kernels. {EXPORT}",
    ),
    Entry(
        name="n_m_outputs",
        title="N of every M outputs",
        text="This is the transpose of a 2:4 weight. It is for layers that compute `x @ W`, or for the backward pass.",
        shapes='{"block_shape": (1, 1), "scope_shape": (4, 1), "nnz": 2}',
        axes='{"axes": "(s m) i", "unit": "s m i", "scope": "s i", "sizes": {"m": 4}, "nnz": 2}',
        fast="2:4 on sparse tensor cores, if the layer stores its weight transposed.",
    ),
    Entry(
        name="n_m_conv",
        title="N:M over the input channels of a convolution",
        text="The picture shows a `Conv2d(8, 8, 2)` as a matrix; the four inputs that compete are four columns "
        "apart, because each input channel has four columns, one for each kernel position.",
        pattern="patterns.n_m(2, 4)",
        shapes='{"block_shape": (1, 1, 1, 1), "scope_shape": (1, 4, 1, 1), "nnz": 2}',
        axes='{"axes": "o (s m) h w", "unit": "o s m h w", "scope": "o s h w", "sizes": {"m": 4}, "nnz": 2}',
        fast=f"TensorRT accepts this pattern, but was not noticeably faster when it was tried. {EXPORT}",
        module="nn.Conv2d(8, 8, 2)",
    ),
    Entry(
        name="vectors",
        title="Vectors of V rows, N of M",
        text="Four rows agree on the inputs that they keep, so a kernel loads an input once for all of them.",
        shapes='{"block_shape": (4, 1), "scope_shape": (1, 4), "nnz": 2}',
        axes='{"axes": "(r v) (s m)", "unit": "r s m", "scope": "r s", "sizes": {"v": 4, "m": 4}, "nnz": 2}',
        fast="Research kernels for vector-wise sparsity support it. If N:M is 2:4, it also runs on sparse tensor "
        "cores like any 2:4 weight.",
    ),
    Entry(
        name="blocks",
        title="Blocks over the tensor",
        text="The blocks are 4 x 4 here; usual sizes are 32 x 32 and 64 x 64.",
        pattern="patterns.blocks(4, 4, 0.5)",
        shapes='{"block_shape": (4, 4), "scope_shape": (), "sparsity_level": 0.5}',
        axes='{"axes": "(r a) (c b)", "unit": "r c", "sizes": {"a": 4, "b": 4}, "sparsity_level": 0.5}',
        fast=BLOCKS,
    ),
    Entry(
        name="blocks_per_row",
        title="Blocks in every block row",
        text="Each block row keeps the same number of blocks.",
        shapes='{"block_shape": (4, 4), "scope_shape": (1, -1), "sparsity_level": 0.5}',
        axes='{"axes": "(r a) (c b)", "unit": "r c", "scope": "r", "sizes": {"a": 4, "b": 4}, "sparsity_level": 0.5}',
        fast=BLOCKS,
    ),
    Entry(
        name="rows",
        title="Rows (output neurons)",
        text="A block is a whole row, which holds the weights of one output neuron. To remove neurons from the model, "
        "couple their rows with the bias and the inputs of the next layer.",
        pattern="patterns.rows(0.5)",
        shapes='{"block_shape": (1, -1), "scope_shape": (), "sparsity_level": 0.5}',
        axes='{"axes": "o i", "unit": "o", "sparsity_level": 0.5}',
        fast=DENSE,
    ),
    Entry(
        name="columns",
        title="Columns (inputs)",
        text="A block is a whole column, which holds all weights of one input.",
        pattern="patterns.columns(0.5)",
        shapes='{"block_shape": (-1, 1), "scope_shape": (), "sparsity_level": 0.5}',
        axes='{"axes": "o i", "unit": "i", "sparsity_level": 0.5}',
        fast=DENSE,
    ),
    Entry(
        name="filters",
        title="Filters of a convolution",
        text="A block is a whole output channel.",
        pattern="patterns.filters(0.5)",
        shapes='{"block_shape": (1, -1, -1, -1), "sparsity_level": 0.5}',
        axes='{"axes": "o i h w", "unit": "o", "sparsity_level": 0.5}',
        fast=DENSE,
        module="nn.Conv2d(8, 8, 2)",
    ),
    Entry(
        name="kernels",
        title="Kernels of a convolution",
        text="Each block is one h x w kernel, from one input channel to one output channel.",
        shapes='{"block_shape": (1, 1, -1, -1), "sparsity_level": 0.5}',
        axes='{"axes": "o i h w", "unit": "o i", "sparsity_level": 0.5}',
        fast=NOWHERE,
        module="nn.Conv2d(8, 8, 2)",
    ),
    Entry(
        name="heads",
        title="Attention heads of one projection",
        text="The rows of one head go together. Couple the four projections to remove heads from the model.",
        pattern="patterns.heads(4, 0.5)",
        shapes='{"view": lambda w: w.unflatten(0, (4, -1)), "block_shape": (1, -1, -1), "sparsity_level": 0.5}',
        axes='{"axes": "(h d) i", "unit": "h", "sizes": {"h": 4}, "sparsity_level": 0.5}',
        fast=DENSE,
    ),
    Entry(
        name="v_n_m",
        title="V:N:M, two stages",
        text="In the first stage, V rows together keep four of every M columns. In the second stage, each row keeps "
        "two of those four (2:4). M determines the sparsity, and sparse tensor cores can still run the result "
        "(arXiv 2310.02065). `stages` takes a dict for each stage, in shapes or in axes.",
        pattern="patterns.v_n_m(8, 2, 8)",
        shapes='{"stages": [{"block_shape": (8, 1), "scope_shape": (1, 8), "nnz": 4}, {"scope_shape": (1, 8), '
        '"nnz": 2}]}',
        axes='{"stages": [{"axes": "(r v) (s m)", "unit": "r s m", "scope": "r s", "sizes": {"v": 8, "m": 8}, "nnz": '
        '4}, {"axes": "o (s m)", "unit": "o s m", "scope": "o s", "sizes": {"m": 8}, "nnz": 2}]}',
        fast="NVIDIA GPUs since Ampere, with kernels made for it (VENOM).",
    ),
    Entry(
        name="pairs_apart",
        title="2:4 of pairs of columns that are 8 apart",
        text="Any strided view can be cut into blocks. Here a block consists of the two columns c and c + 8 of 16, "
        "because one thread of a matrix unit holds both.",
        shapes='{"view": ((16, 2, 8, 2), (32, 16, 1, 8)), "block_shape": (1, 1, 1, 2), "scope_shape": (1, 1, 4, 1), '
        '"nnz": 2}',
        axes='{"axes": "o (t p s m)", "unit": "o t s m", "scope": "o t s", "sizes": {"p": 2, "s": 2, "m": 4}, '
        '"nnz": 2}',
        fast=NOWHERE,
    ),
    Entry(
        name="diagonals",
        title="Diagonals",
        text="In the row-major layout of a weight with I inputs and I + 1 rows, a step of I + 1 elements goes one "
        "row down and one column to the right. So the columns of this view are diagonals that wrap around at the "
        "edge.",
        shapes='{"view": ((15, 16), (16, 1)), "block_shape": (-1, 1), "sparsity_level": 0.75}',
        fast=NOWHERE,
        module="nn.Linear(15, 16)",
    ),
    Entry(
        name="bands",
        title="Bands: neighbouring diagonals",
        text="A block consists of four neighbouring diagonals in the same view. For one fixed band around the main "
        "diagonal, use `NearlyDiagonalSparsifier`, which torch.ao has too.",
        shapes='{"view": ((15, 16), (16, 1)), "block_shape": (-1, 4), "sparsity_level": 0.5}',
        fast=NOWHERE,
        module="nn.Linear(15, 16)",
    ),
)


def evaluate(entry: Entry) -> tuple[Tensor, Tensor, Tensor]:
    """The mask of an entry, its first scope and its first block, all bool in the weight's shape.

    Raises:
        AssertionError: the notations of the entry give different masks.
    """
    torch.manual_seed(0)
    names: dict[str, Any] = {"nn": nn, "patterns": patterns}
    model = nn.Sequential(eval(entry.module, names))
    weight = model[0].weight.detach()
    notations = [eval(text, names) for text in (entry.shapes, entry.axes, entry.pattern) if text]
    masks = [_mask(model, notation) for notation in notations]
    assert all(torch.equal(masks[0], mask) for mask in masks), entry.name
    keys = notations[0].get("stages", [notations[0]])[0]
    scope, block = _first(weight, keys)
    return masks[0], scope, block


def _mask(model: nn.Sequential, keys: Any) -> Tensor:
    sparsifier = ScopeSparsifier()
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight", **keys}])
    sparsifier.step()
    sparsifier.check()
    mask = sparsifier.mask("0.weight").clone()
    parameter = model[0].parametrizations.weight.original.detach().clone()
    sparsifier.squash_mask()
    with torch.no_grad():
        model[0].weight.copy_(parameter)
    return mask


def _first(weight: Tensor, keys: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The elements of the first scope and of its first block."""
    view = keys.get("view")
    window = weight if view is None else View.from_function(weight, view) if callable(view) else View(weight, *view)
    block = BlockSpec(window, keys.get("block_shape", ()))
    scope = ScopeSpec(block, keys.get("scope_shape", ()))
    ids = torch.arange(block.numblk()).view(scope.numscp(), -1)
    numbers = torch.arange(scope.numscp())[:, None].expand_as(ids).reshape(*scope.grid_shape, -1)
    in_scope = block.get_masks(scope.scope_to_block(numbers) == 0)[block]
    first = torch.zeros(block.numblk(), dtype=torch.bool)
    first[0] = True
    return in_scope, block.get_masks(first.view(block.grid_shape))[block]


def sections(folder: pathlib.Path | None = None) -> Iterator[str]:
    """The Markdown of every entry; pictures are written into the folder, if there is one."""
    for entry in ENTRIES:
        mask, scope, block = evaluate(entry)
        if folder is not None:
            (folder / f"{entry.name}.svg").write_text(
                draw_matrix(mask.flatten(1), outlines={"#d95f02": scope.flatten(1), "#1b7837": block.flatten(1)})
            )
        code = "\n".join(text for text in (entry.pattern, entry.shapes, entry.axes) if text)
        yield (
            f"## {entry.title}\n\n{entry.text}\n\n```{{image}} _generated/{entry.name}.svg\n:alt: a mask of "
            f"{entry.module}: {entry.title}\n```\n\n```python\n{code}\n```\n\n**Fast:** {entry.fast}\n"
        )


def write(folder: pathlib.Path) -> None:
    """Write `gallery.md` and the pictures, which lie beside those of `pictures.write_all`.

    Raises:
        ValueError: A name is that of another picture, which would be overwritten.
    """
    names = [*DRAWINGS, *PLOTS, *(entry.name for entry in ENTRIES)]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two pictures are called {min(twice)}.svg; rename one of them")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gallery.md").write_text("\n".join(sections(folder)))


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "out/gallery"))
