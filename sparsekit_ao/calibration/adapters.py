"""How a layer is a matrix that multiplies its inputs, for every kind of layer whose inputs are recorded.

An adapter reshapes a weight to [groups, outputs, inputs] and back. It turns the input of a forward call into rows
[groups, tokens, inputs], so that the layer's output is `rows @ matrix.T` for each group.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..distributed import full_tensor
from ..errors import SparsityError
from ..models.names import is_of_transformers

UNFOLDED = 1 << 24  # elements of unfolded inputs that are stored at once
SAMPLED = 1 << 26  # elements of unfolded inputs that `one_shot` takes from all batches of a convolution


class LayerAdapter:
    """How a layer is a matrix; this one is for `nn.Linear` and layers with a weight of its shape, (outputs, inputs).

    Args:
        module: The one whose forward calls are observed.
    """

    #: whether rows depend on the input alone, so that layers that read one tensor share its sums
    reads_rows = True
    #: whether X^T X can be recorded
    has_gram = True

    #: positions that a convolution takes from the input of one call, drawn with a fixed seed; None for all
    sampled: int | None = None

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module

    def matrix(self, weight: Tensor) -> Tensor:
        """The weight (or anything of its shape) as [groups, outputs, inputs]; a view where that is possible."""
        return weight[None]

    def weight(self, matrix: Tensor, shape: Sequence[int]) -> Tensor:
        """The inverse of `matrix`, in the weight's shape."""
        return matrix[0]

    def inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """The tensor that the layer reads, from the arguments of a forward call."""
        return full_tensor(args[0] if args else next(iter(kwargs.values())))

    def rows(self, x: Tensor, token_mask: Tensor | None) -> Iterator[Tensor]:
        """The inputs as [groups, tokens, inputs], some at a time, without the tokens that the mask leaves out."""
        yield token_rows(x, token_mask)[None]

    def squares(self, x: Tensor, token_mask: Tensor | None) -> tuple[Tensor, int]:
        """Sums of squares over tokens, float32 [groups, inputs], and the number of tokens."""
        sums = [(rows.float().square().sum(1), rows.shape[1]) for rows in self.rows(x, token_mask)]
        return sum((s for s, _ in sums[1:]), sums[0][0]), sum(n for _, n in sums)

    def gram(self, x: Tensor, token_mask: Tensor | None) -> tuple[Tensor, int]:
        """X^T X, float32 [groups, inputs, inputs], and the number of tokens."""
        chunks = (rows.float() for rows in self.rows(x, token_mask))
        rows = next(chunks)
        total, tokens = rows.mT @ rows, rows.shape[1]
        for rows in chunks:
            total, tokens = torch.baddbmm(total, rows.mT, rows), tokens + rows.shape[1]
        return total, tokens

    def few_rows(self, x: Tensor, token_mask: Tensor | None) -> Tensor | None:
        """Copy the rows, float32 [groups, tokens, inputs]; None where there are as many tokens as inputs or more."""
        chunks, tokens = [], 0
        for rows in self.rows(x, token_mask):
            tokens += rows.shape[1]
            if tokens >= rows.shape[2]:
                return None
            chunks.append(rows.float())
        return torch.cat(chunks, 1)


class _TransposedLinear(LayerAdapter):
    """transformers' Conv1D: (inputs, outputs)."""

    def matrix(self, weight: Tensor) -> Tensor:
        return weight.mT[None]

    def weight(self, matrix: Tensor, shape: Sequence[int]) -> Tensor:
        return matrix[0].mT


class _Embedding(_TransposedLinear):
    """`nn.Embedding`: (tokens of the vocabulary, width); an input is a one-hot row, so squares are counts."""

    reads_rows = False
    has_gram = False

    def squares(self, x: Tensor, token_mask: Tensor | None) -> tuple[Tensor, int]:
        tokens = x.reshape(-1) if token_mask is None or token_mask.shape != x.shape else x[token_mask.bool()]
        return torch.bincount(tokens, minlength=self.module.num_embeddings).float()[None], tokens.numel()


class _Convolution(LayerAdapter):
    """Convolutions of any rank, with groups, strides, dilations and padding modes."""

    reads_rows = False

    def matrix(self, weight: Tensor) -> Tensor:
        return weight.reshape(self.module.groups, weight.shape[0] // self.module.groups, -1)

    def weight(self, matrix: Tensor, shape: Sequence[int]) -> Tensor:
        return matrix.reshape(shape)

    def rows(self, x: Tensor, token_mask: Tensor | None) -> Iterator[Tensor]:
        conv = self.module
        x = x if x.ndim == len(conv.kernel_size) + 2 else x[None]
        mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        padded = F.pad(x, conv._reversed_padding_repeated_twice, mode=mode)
        yield from unfolded(padded, conv.kernel_size, conv.stride, conv.dilation, conv.groups, self.sampled)


class _TransposedConvolution(_Convolution):
    """Transposed convolutions: a convolution with the flipped kernel over the input with zeros between its elements."""

    def matrix(self, weight: Tensor) -> Tensor:
        g, n = self.module.groups, weight.ndim - 2
        split = weight.reshape(g, weight.shape[0] // g, *weight.shape[1:])
        return split.flip(tuple(range(3, 3 + n))).transpose(1, 2).reshape(g, weight.shape[1], -1)

    def weight(self, matrix: Tensor, shape: Sequence[int]) -> Tensor:
        g, n = self.module.groups, len(shape) - 2
        split = matrix.reshape(g, shape[1], shape[0] // g, *shape[2:]).transpose(1, 2)
        return split.flip(tuple(range(3, 3 + n))).reshape(shape)

    def rows(self, x: Tensor, token_mask: Tensor | None) -> Iterator[Tensor]:
        conv = self.module
        n = len(conv.kernel_size)
        x = x if x.ndim == n + 2 else x[None]
        spread = x.new_zeros(*x.shape[:2], *((s - 1) * t + 1 for s, t in zip(x.shape[2:], conv.stride, strict=True)))
        spread[(slice(None), slice(None), *(slice(None, None, t) for t in conv.stride))] = x
        sides = [
            (d * (k - 1) - p, d * (k - 1) - p + o)
            for k, d, p, o in zip(conv.kernel_size, conv.dilation, conv.padding, conv.output_padding, strict=True)
        ]
        padded = F.pad(spread, [side for pair in reversed(sides) for side in pair])
        yield from unfolded(padded, conv.kernel_size, (1,) * n, conv.dilation, conv.groups, self.sampled)


class _Attention(LayerAdapter):
    """A projection inside `nn.MultiheadAttention`, whose forward does not call it as a module.

    Args:
        module: The attention.
        name: "in_proj_weight" (query, key and value stacked: three groups), "q_proj_weight", "k_proj_weight",
            "v_proj_weight", or "out_proj", whose inputs are computed by a call with an identity in its place.
    """

    reads_rows = False

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(module)
        self._name = name

    def matrix(self, weight: Tensor) -> Tensor:
        return weight.reshape(3, -1, weight.shape[1]) if self._name == "in_proj_weight" else weight[None]

    def weight(self, matrix: Tensor, shape: Sequence[int]) -> Tensor:
        return matrix.reshape(tuple(shape))

    def inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        arguments = dict(zip(("query", "key", "value"), args, strict=False)) | dict(kwargs)
        tensors = [arguments[name] for name in ("query", "key", "value")]
        if self._name == "out_proj":
            return self._heads(tensors[0], args, kwargs)
        if self._name != "in_proj_weight":
            return tensors["qkv".index(self._name[0])]
        if len({x.shape for x in tensors}) > 1:
            raise SparsityError(
                "nn.MultiheadAttention whose query and key differ in shape has no common statistics for "
                "in_proj_weight; leave it out, or project the inputs by layers of your own"
            )
        return torch.stack(tensors)

    @torch.no_grad()
    def _heads(self, query: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """What the output projection reads: the output of the attention with an identity in its place."""
        twin = object.__new__(type(self.module))  # not a copy, which parametrized modules refuse
        width = self.module.embed_dim
        identity = nn.utils.skip_init(nn.Linear, width, width, device=query.device, dtype=query.dtype)
        nn.init.eye_(identity.weight)
        nn.init.zeros_(identity.bias)
        twin.__dict__ = {**self.module.__dict__, "_modules": {**self.module._modules, "out_proj": identity}}
        return type(self.module).forward(twin, *args, **kwargs)[0]

    def rows(self, x: Tensor, token_mask: Tensor | None) -> Iterator[Tensor]:
        if token_mask is not None and not self.module.batch_first:
            token_mask = token_mask.mT
        if self._name == "in_proj_weight":
            yield torch.stack([token_rows(read, token_mask) for read in x])
        else:
            yield token_rows(x, token_mask)[None]


def token_rows(x: Tensor, token_mask: Tensor | None) -> Tensor:
    """[..., inputs] as [tokens, inputs], without those for which the mask, of the leading shape, is False.

    Inputs may also be [tokens, batch, inputs] or flattened, [batch x tokens, inputs]. Those of another leading shape (a
    pooled token, say) are taken whole.
    """
    if token_mask is not None:
        keep = token_mask.bool().to(x.device)
        for mask in (keep, keep.mT) if keep.ndim == 2 else (keep,):
            if mask.shape == x.shape[:-1]:
                return x[mask]
        if x.ndim == 2 and keep.ndim > 1 and keep.numel() == len(x):
            return x[keep.reshape(-1)]
    return x.reshape(-1, x.shape[-1])


def unfolded(
    padded: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    sampled: int | None = None,
) -> Iterator[Tensor]:
    """What every position of a kernel covers: [groups, positions, channels of the group x kernel], some at a time.

    With `sampled`, at most so many positions, drawn with a fixed seed.
    """
    n, x = len(kernel), padded
    for k in range(n):
        x = x.unfold(2 + k, dilation[k] * (kernel[k] - 1) + 1, stride[k])[..., :: dilation[k]]
    x = x.unflatten(1, (groups, -1))  # [batch, groups, channels, *positions, *kernel]
    order = (1, 0, *range(3, 3 + n), 2, *range(3 + n, 3 + 2 * n))
    windows = x.permute(order)  # [groups, batch, *positions, channels, *kernel], a view
    positions = windows.shape[1 : 2 + n]
    if sampled is not None and positions.numel() > sampled:
        drawn = torch.randperm(positions.numel(), generator=torch.Generator().manual_seed(0))[:sampled].to(x.device)
        for some in drawn.split(max(1, UNFOLDED // max(windows[0, 0, ..., 0].numel(), 1))):
            yield windows[(slice(None), *torch.unravel_index(some, positions))].flatten(2)
        return
    at_once = max(1, UNFOLDED // max(x[0].numel(), 1)) if len(x) else 1
    for images in x.split(at_once):
        rows = images.permute(order)
        yield rows.reshape(groups, -1, rows.shape[2 + n :].numel())


def adapter_of(
    module: nn.Module, tensor_name: str, attentions: Mapping[int, nn.MultiheadAttention]
) -> LayerAdapter | None:
    """The adapter of a layer's tensor, or None where inputs cannot be recorded for it.

    Args:
        module, tensor_name: The tensor.
        attentions: {id of `out_proj`: its attention} of the model.
    """
    if isinstance(module, nn.MultiheadAttention):
        return _Attention(module, tensor_name) if tensor_name.endswith("proj_weight") else None
    if tensor_name != "weight":
        return None
    if id(module) in attentions:
        return _Attention(attentions[id(module)], "out_proj")
    if is_of_transformers(module, "Conv1D"):
        return _TransposedLinear(module)
    kinds: tuple[tuple[Any, type[LayerAdapter]], ...] = (
        (nn.Linear, LayerAdapter),
        (nn.Embedding, _Embedding),
        ((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _TransposedConvolution),
        ((nn.Conv1d, nn.Conv2d, nn.Conv3d), _Convolution),
    )
    return next((adapter(module) for kind, adapter in kinds if isinstance(module, kind)), None)
