"""Adapters tell how a layer is a matrix that multiplies its inputs, for every kind of layer that can be recorded.

An adapter reshapes a weight to [groups, outputs, inputs] and back. It turns what a product reads into rows
[groups, tokens, inputs], so that the layer's output is `rows @ matrix.T` for each group.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from ..errors import SparsityError
from ..masking import parametrized_names, shape_of
from ..models.names import is_of_transformers
from .products import Place, Product

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED_CONVOLUTIONS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
UNFOLDED = 1 << 24  # elements of unfolded inputs that are stored at once
SAMPLED = 1 << 26  # elements of unfolded inputs that `one_shot` takes from all batches of a convolution


@dataclass(frozen=True, kw_only=True, eq=False)
class Read:
    """Which groups of a weight a product multiplies."""

    groups: list[int]
    share: float = 1.0  # of their outputs that are computed
    is_first: bool = True  # whether the first output is among them, so that tokens are counted once
    is_whole: bool = True
    inputs: tuple[list[int], int] | None = None  # which inputs of how many, or None for all

    def filled(self, product: Product) -> Product:
        """The product with zeros for the inputs that it does not read."""
        if self.inputs is None:
            return product
        some, count = self.inputs

        def filled() -> Tensor:
            x = product.inputs()
            return x.new_zeros(*x.shape[:-1], count).index_copy(-1, torch.tensor(some, device=x.device), x)

        return replace(product, inputs=filled)


class LayerAdapter:
    """How a weight is a matrix, or one matrix for each of its groups (experts, groups of a convolution)."""

    kind = "matrix"
    has_gram = True  # whether X^T X can be recorded
    # positions that a convolution takes from the input of one call, drawn with a fixed seed; None for all
    sampled: int | None = None

    def __init__(
        self,
        module: nn.Module,  # whose forward call computes the product
        input_dims: tuple[int, ...] = (1,),  # the dimensions of the weight that are summed over
        group_dims: tuple[int, ...] = (),  # the dimensions that count matrices, such as that of the experts
        *,
        parts: int = 1,  # groups into which the outputs are divided, one after another
        is_known: bool = True,  # if not, these dimensions follow from the first product that is recorded
    ) -> None:
        self.module: Any = module
        self.input_dims, self.group_dims, self.parts, self.is_known = input_dims, group_dims, parts, is_known
        self._orders: set[bool] = set()  # see `token_rows`

    def _order(self, ndim: int) -> tuple[int, ...]:
        inner = (*self.group_dims, *self.input_dims)
        return (*self.group_dims, *(d for d in range(ndim) if d not in inner), *self.input_dims)

    def matrix(self, weight: Tensor) -> Tensor:
        """The weight (or anything of its shape) as [groups, outputs, inputs]; a view where that is possible."""
        groups, inputs = (math.prod(weight.shape[d] for d in dims) for dims in (self.group_dims, self.input_dims))
        ordered = weight.permute(self._order(weight.ndim))
        return ordered.reshape(groups * self.parts, weight.numel() // max(groups * self.parts * inputs, 1), inputs)

    def weight(self, matrix: Tensor, shape: Sequence[int]) -> Tensor:
        """The inverse of `matrix`, in the weight's shape."""
        order = self._order(len(shape))
        return matrix.reshape([shape[d] for d in order]).permute([order.index(d) for d in range(len(shape))])

    def reads(self, product: Product, place: Place, shape: Sequence[int]) -> Read | None:
        """Return what a product reads of a weight of this shape, or None if that is not a matrix of the adapter."""
        if product.kind != self.kind:
            return None
        if self.kind != "matrix":
            return Read(groups=[])
        dims = [place.dims[d] for d in product.contracted]
        batch = None if product.batch is None else place.dims[product.batch]
        inputs = tuple(own[0] for own in dims if own is not None)
        if not inputs and shape[self.input_dims[0]] == 1:
            inputs = self.input_dims
        if not self.is_known and list(inputs) == sorted(inputs):
            self.input_dims, self.is_known = inputs, True
            others = (*place.fixed, *(() if batch is None else (batch[0],))) if len(shape) > 2 else ()
            self.group_dims = tuple(sorted(d for d in others if shape[d] > 1 and d not in inputs))
        if inputs != self.input_dims or len(self.group_dims) > 1:
            return None
        read, some = None, dims[0]
        if some is not None and len(some[1]) < shape[some[0]]:
            read = list(map(int, some[1])), shape[some[0]]
        if self.group_dims:
            (d,) = self.group_dims
            every = next((own[1] for own in place.dims if own is not None and own[0] == d), range(shape[d]))
            groups = [place.fixed[d]] if d in place.fixed else list(map(int, every))
            return Read(groups=groups, is_whole=False, inputs=read)
        return self._reads_outputs(place, shape, read)

    def _reads_outputs(self, place: Place, shape: Sequence[int], read: tuple[list[int], int] | None) -> Read:
        """The parts that a product has outputs of, and its share in them."""
        outputs = [own for own in place.dims if own is not None and own[0] not in self.input_dims]
        share = math.prod(len(positions) / shape[d] for d, positions in outputs)
        share /= math.prod(shape[d] for d in place.fixed)
        first = int(outputs[0][1][0]) if outputs else min(place.fixed.values(), default=0)
        start, stop = 0, self.parts
        if outputs and self.parts > 1:
            d, positions = outputs[0]
            start, stop = (int(positions[k]) * self.parts // shape[d] for k in (0, -1))
            stop += 1
        return Read(
            groups=list(range(start, stop)),
            share=min(1.0, share * self.parts / (stop - start)),
            is_first=first == 0 and (read is None or read[0][0] == 0),
            is_whole=share == 1 and read is None,
            inputs=read,
        )

    def rows_of_groups(self, product: Product, read: Read, token_mask: Tensor | None) -> Iterator[tuple[int, Tensor]]:
        """The numbers of groups with their inputs [tokens, inputs]."""
        product = read.filled(product)
        x = product.inputs()
        if product.batch is None:
            rows = token_rows(x, token_mask, self._orders, product.counts)
            yield from ((group, rows) for group in read.groups)
            return
        if product.ends is None:
            counts = product.counts if product.counts is not None and len(product.counts) == len(x) else None
            sizes = [x.shape[1]] * len(x)
            kept = None if counts is None else counts.repeat_interleave(x.shape[1])
            if kept is None and token_mask is not None and token_mask.numel() == x.shape[1]:
                kept = token_mask.bool().reshape(-1).to(x.device).repeat(len(x))
            x = x.flatten(0, 1)
        else:
            ends = product.ends.tolist()
            sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
            kept, x = product.counts, x[: sum(sizes)]
        groups = torch.tensor(read.groups, device=x.device).repeat_interleave(torch.tensor(sizes, device=x.device))
        if kept is not None:
            x, groups = x[kept[: len(x)]], groups[kept[: len(x)]]
        groups, order = groups.sort(stable=True)
        found, counted = groups.unique_consecutive(return_counts=True)
        yield from zip(found.tolist(), x[order].split(counted.tolist()), strict=True)

    def rows(self, product: Product, token_mask: Tensor | None) -> Iterator[Tensor]:
        """The inputs as [groups, tokens, inputs], some at a time, without the tokens that the mask leaves out.

        There is one group where all groups read the same.
        """
        orders = {False} if product.is_batch_first else self._orders
        yield token_rows(product.inputs(), token_mask, orders, product.counts)[None]

    def squares(self, product: Product, token_mask: Tensor | None) -> tuple[Tensor, int]:
        """Sums of squares over tokens, float32 [groups, inputs], and the number of tokens."""
        sums = [(rows.float().square().sum(1), rows.shape[1]) for rows in self.rows(product, token_mask)]
        return sum((s for s, _ in sums[1:]), sums[0][0]), sum(n for _, n in sums)

    def gram(self, product: Product, token_mask: Tensor | None) -> tuple[Tensor, int]:
        """X^T X, float32 [groups, inputs, inputs], and the number of tokens."""
        chunks = (rows.float() for rows in self.rows(product, token_mask))
        rows = next(chunks)
        total, tokens = rows.mT @ rows, rows.shape[1]
        for rows in chunks:
            total, tokens = torch.baddbmm(total, rows.mT, rows), tokens + rows.shape[1]
        return total, tokens

    def few_rows(self, product: Product, token_mask: Tensor | None) -> Tensor | None:
        """Copy the rows, float32 [groups, tokens, inputs]; None where there are as many tokens as inputs or more."""
        chunks, tokens = [], 0
        for rows in self.rows(product, token_mask):
            tokens += rows.shape[1]
            if tokens >= rows.shape[2]:
                return None
            chunks.append(rows.float())
        return torch.cat(chunks, 1)


class _Embedding(LayerAdapter):
    """`nn.Embedding`: (tokens of the vocabulary, width); an input is a one-hot row, so squares are counts."""

    kind = "embedding"
    has_gram = False

    def squares(self, product: Product, token_mask: Tensor | None) -> tuple[Tensor, int]:
        x = product.inputs()
        tokens = token_rows(x[..., None], token_mask, self._orders)[:, 0]
        return torch.bincount(tokens, minlength=len(product.weight)).float()[None], tokens.numel()


class _Convolution(LayerAdapter):
    """Convolutions of any rank, with groups, strides, dilations and padding."""

    kind = "convolution"

    @property
    def groups(self) -> int:
        """The layer's groups; a module with filters of its own may have none."""
        return int(getattr(self.module, "groups", 1))

    def reads(self, product: Product, place: Place, shape: Sequence[int]) -> Read | None:
        is_whole = product.settings.get("groups", 1) == self.groups and product.weight.numel() == math.prod(shape)
        return super().reads(product, place, shape) if is_whole else None

    def matrix(self, weight: Tensor) -> Tensor:
        return weight.reshape(self.groups, weight.shape[0] // self.groups, -1)

    def weight(self, matrix: Tensor, shape: Sequence[int]) -> Tensor:
        return matrix.reshape(shape)

    def rows(self, product: Product, token_mask: Tensor | None) -> Iterator[Tensor]:
        x, kernel, of = product.inputs(), product.weight.shape[2:], product.settings
        x = x if x.ndim == len(kernel) + 2 else x[None]
        total = [d * (k - 1) for k, d in zip(kernel, of["dilation"], strict=True)]
        if isinstance(of["padding"], str):
            sides = [(n // 2, n - n // 2) if of["padding"] == "same" else (0, 0) for n in total]
        else:
            sides = [(n, n) for n in of["padding"]]
        padded = F.pad(x, [side for pair in reversed(sides) for side in pair])
        yield from unfolded(padded, kernel, of["stride"], of["dilation"], self.groups, self.sampled)


class _TransposedConvolution(_Convolution):
    """Transposed convolutions: a convolution with the flipped kernel over the input with zeros between its elements."""

    kind = "transposed convolution"

    def matrix(self, weight: Tensor) -> Tensor:
        g, n = self.groups, weight.ndim - 2
        split = weight.reshape(g, weight.shape[0] // g, *weight.shape[1:])
        return split.flip(tuple(range(3, 3 + n))).transpose(1, 2).reshape(g, weight.shape[1], -1)

    def weight(self, matrix: Tensor, shape: Sequence[int]) -> Tensor:
        g, n = self.groups, len(shape) - 2
        split = matrix.reshape(g, shape[1], shape[0] // g, *shape[2:]).transpose(1, 2)
        return split.flip(tuple(range(3, 3 + n))).reshape(shape)

    def rows(self, product: Product, token_mask: Tensor | None) -> Iterator[Tensor]:
        x, kernel, of = product.inputs(), product.weight.shape[2:], product.settings
        n = len(kernel)
        x = x if x.ndim == n + 2 else x[None]
        spread = x.new_zeros(*x.shape[:2], *((s - 1) * t + 1 for s, t in zip(x.shape[2:], of["stride"], strict=True)))
        spread[(slice(None), slice(None), *(slice(None, None, t) for t in of["stride"]))] = x
        settings = (of[name] for name in ("dilation", "padding", "output_padding"))
        sides = [(d * (k - 1) - p, d * (k - 1) - p + o) for k, d, p, o in zip(kernel, *settings, strict=True)]
        padded = F.pad(spread, [side for pair in reversed(sides) for side in pair])
        yield from unfolded(padded, kernel, (1,) * n, of["dilation"], self.groups, self.sampled)


def token_rows(x: Tensor, token_mask: Tensor | None, orders: set[bool], counts: Tensor | None = None) -> Tensor:
    """[..., inputs] as [tokens, inputs], without tokens for which the mask, of the leading shape, is False.

    Inputs may also be [tokens, batch, inputs] or flattened, [batch x tokens, inputs]. Where the model gathered tokens,
    `counts`, bool [tokens], says which of them are taken. Inputs of another leading shape (such as a pooled token)
    are taken whole. If there are as many sequences as tokens, the mask alone does not tell the first two dimensions
    apart. Their order is then that of earlier inputs of the layer: `orders` stores whether tokens were first in them.
    """
    if counts is not None and len(counts) == len(x):
        return x[counts].reshape(-1, x.shape[-1])
    if token_mask is not None:
        keep = token_mask.bool().to(x.device)
        masks = {False: keep, True: keep.mT} if keep.ndim == 2 else {False: keep}
        fitting = {order: mask for order, mask in masks.items() if mask.shape == x.shape[:-1]}
        if len(fitting) == 1:
            orders.update(fitting)
        elif fitting and not torch.equal(*fitting.values()):
            if len(orders) != 1:
                raise SparsityError(
                    f"a token mask of {len(keep)} sequences of as many tokens fits inputs {tuple(x.shape)} both as "
                    "[batch, tokens, inputs] and as [tokens, batch, inputs]; let the first batch have another number "
                    "of sequences than of tokens, or give token_mask=False to count all tokens"
                )
            fitting = {order: fitting[order] for order in orders}
        if fitting:
            return x[next(iter(fitting.values()))]
        if x.ndim == 2 and keep.ndim > 1 and keep.numel() == len(x):
            return x[keep.reshape(-1)]
    return x.reshape(-1, x.shape[-1])


def unfolded(
    padded: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    sampled: int | None = None,  # at most this number of positions, drawn with a fixed seed
) -> Iterator[Tensor]:
    """Yield what a kernel covers, some positions at a time: [groups, positions, channels of the group x kernel]."""
    n, x = len(kernel), padded
    for k in range(n):
        x = x.unfold(2 + k, dilation[k] * (kernel[k] - 1) + 1, stride[k])[..., :: dilation[k]]
    x = x.unflatten(1, (groups, -1))  # [batch, groups, channels, *positions, *kernel]
    order = (1, 0, *range(3, 3 + n), 2, *range(3 + n, 3 + 2 * n))
    windows = x.permute(order)  # [groups, batch, *positions, channels, *kernel], a view
    positions = windows.shape[1 : 2 + n]
    if sampled is not None and positions.numel() > sampled:
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randperm(positions.numel(), generator=generator, device="cpu")[:sampled].to(x.device)
        for some in drawn.split(max(1, UNFOLDED // max(windows[0, 0, ..., 0].numel(), 1))):
            yield windows[(slice(None), *torch.unravel_index(some, positions))].flatten(2)
        return
    at_once = max(1, UNFOLDED // max(x[0].numel(), 1)) if len(x) else 1
    for images in x.split(at_once):
        rows = images.permute(order)
        yield rows.reshape(groups, -1, rows.shape[2 + n :].numel())


def adapter_of(module: nn.Module, tensor_name: str, callers: Mapping[int, nn.Module]) -> LayerAdapter | None:
    """The adapter of a tensor, or None if inputs cannot be recorded; `callers` are modules around uncalled ones."""
    caller = callers.get(id(module), module)
    if isinstance(module, nn.MultiheadAttention):
        is_matrix = tensor_name.endswith("proj_weight")
        return LayerAdapter(module, parts=3 if tensor_name == "in_proj_weight" else 1) if is_matrix else None
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return LayerAdapter(module) if re.match("weight_(ih|hh)", tensor_name) else None
    if is_of_transformers(module, "Conv1D"):
        return LayerAdapter(module, (0,)) if tensor_name == "weight" else None
    kinds: tuple[tuple[Any, Callable[[], LayerAdapter]], ...] = (
        (nn.Linear, lambda: LayerAdapter(caller)),
        (nn.Embedding, lambda: _Embedding(module, (0,))),
        (TRANSPOSED_CONVOLUTIONS, lambda: _TransposedConvolution(module)),
        (CONVOLUTIONS, lambda: _Convolution(module)),
    )
    for kind, adapter in kinds:
        if isinstance(module, kind) and tensor_name == "weight":
            return adapter()
    ndim, own = len(shape_of(module, tensor_name)), type(module).__mro__[int(parametrize.is_parametrized(module))]
    if ndim < 2 or (own.__module__.startswith("torch.nn") and caller is module):
        return None
    if ndim > 3:
        return _Convolution(caller)
    inputs = 1 if ndim == 2 or is_transposed(module) else 2
    return LayerAdapter(caller, (inputs,), (0,) if ndim == 3 else (), is_known=False)


def is_transposed(module: nn.Module) -> bool:
    """Whether packed experts are (experts, inputs, outputs): gate and up have twice the outputs that down reads."""
    if hasattr(module, "is_transposed"):
        return bool(module.is_transposed)
    shapes = [shape_of(module, name) for name in packed_experts(module)]
    return any(up[1] == down[2] and up[2] == 2 * down[1] for up in shapes for down in shapes)


def packed_experts(module: nn.Module) -> list[str]:
    """The names of the weights of packed experts: two tensors (experts, ...) or more, in a module that is named so."""
    if "expert" not in type(module).__name__.lower() or isinstance(module, torch.jit.ScriptModule):
        return []  # before any weight is looked at, which parametrizations compute
    names = [*module._parameters, *parametrized_names(module)]
    shapes = {name: shape_of(module, name) for name in names if getattr(module, name) is not None}
    packed = [name for name, shape in shapes.items() if len(shape) == 3]
    is_packed = len(packed) > 1 and len({shapes[name][0] for name in packed}) == 1
    return packed if is_packed else []
