"""Observe the products of a running model: which tensor each product reads, and which weight multiplies this tensor.

A `TorchFunctionMode` sees each product. The weight is found by the storage of the tensor that multiplies, whatever
module computes the product. This tensor may be a parameter, a part of one (one of packed experts, a chunk, a transposed
view), or what functions and parametrizations make of one (a masked weight, another dtype, experts gathered for each
token).

The plain case is short: a masked Linear computes its weight, a hook ties the storage of the computed tensor to the
parameter (`Products.tie`), and `F.linear` multiplies by this tensor, so the product is one with the whole parameter.
`_Known.place_of`, `_follow` and `_reads_outputs` of `adapters.py` are for parts, copies and gathered weights.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from ..distributed import full_tensor, local
from ..models.names import named_tensors, owner_of, weights_by_name
from ..models.running import TokenMasks, eval_mode, tensors_in

_GATHERS = ("__getitem__", "index_select")  # functions that may gather rows by their numbers
# Functions that move elements to other places, so that their output is not the weight.
_MOVES = {*_GATHERS, *["flip", "fliplr", "flipud", "roll", "rot90", "gather", "take", "take_along_dim", "scatter"]}
_MOVES |= {"msort", "sort", "channel_shuffle", "index_put", "index_add", "index_copy", "scatter_add", "scatter_reduce"}
# Functions of which each output element depends on elements in other places.
_MOVES |= {"cumsum", "cumprod", "logcumsumexp", "linalg_inv", "inverse", "linalg_pinv", "pinverse", "matrix_exp"}
_MOVES |= {"linalg_matrix_exp", "linalg_cholesky", "cholesky", "linalg_matrix_power", "matrix_power", "fft_fft", "cov"}
Positions = range | Tensor


@dataclass(kw_only=True, eq=False)
class Product:
    """A product that the model computes: a tensor is multiplied by a weight, both as the model passes them."""

    read: Tensor
    weight: Tensor
    inputs: Callable[[], Tensor]  # returns `read` as [..., inputs], or with `batch` as [batch, tokens, inputs]
    kind: str = "matrix"  # or "convolution", "transposed convolution", "embedding"
    contracted: tuple[int, ...] = ()  # the dimensions of the weight that are summed over, in the order of the inputs
    batch: int | None = None  # the dimension of the weight with separate inputs for each index, such as experts
    ends: Tensor | None = None  # where the tokens of each index of `batch` end if `inputs` returns them sorted by it
    settings: Mapping[str, Any] = field(default_factory=dict)  # arguments of a convolution: stride, padding and so on
    is_computed: bool = False  # whether the inputs are computed from `read`, rather than a view of it
    counts: Tensor | None = None  # bool: which rows of `read` count; None if that is not known
    is_batch_first: bool = False  # whether it is known that inputs of three dimensions are [batch, tokens, inputs]
    token_mask: Tensor | None = None  # of the tokens in `read`


class Place(NamedTuple):
    """Where the elements of a tensor are in the weight of this name."""

    name: str
    fixed: dict[int, int]  # {dimension of the weight: index}, for those that the tensor does not have
    # For each dimension of the tensor: one of the weight and the indices in it; None if it has length 1 or is expanded.
    dims: tuple[tuple[int, Positions] | None, ...]


class _Known(NamedTuple):
    """A tensor whose place is known, and from which the places of its views follow."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    place: Place

    def place_of(self, view: Tensor) -> Place | None:
        """Return the place of a view, or None if its dimensions are not slices of different ones of the tensor."""
        shape, stride, offset = view.shape, view.stride(), int(view.storage_offset()) - self.offset
        if offset == 0 and shape == self.shape and stride == self.stride:
            return self.place
        # Dimensions from the longest stride to the shortest: the offset is split as a number into its digits.
        order = sorted((d for d, n in enumerate(self.shape) if n > 1 and self.stride[d]), key=lambda d: -self.stride[d])
        start = dict.fromkeys(range(len(self.shape)), 0)
        for d in order:
            start[d], offset = divmod(offset, self.stride[d])
        if offset or any(not 0 <= start[d] < self.shape[d] for d in order):
            return None
        fixed, dims, used = dict(self.place.fixed), list[tuple[int, Positions] | None](), set[int]()
        for n, step in zip(shape, stride, strict=True):
            if n == 1 or step == 0:
                dims.append(None)
                continue
            for d in order:
                end = start[d] + (n - 1) * (step // self.stride[d])
                if step % self.stride[d] == 0 and end < self.shape[d] and d not in used:
                    break
            else:
                return None
            in_weight = self.place.dims[d]
            used.add(d)
            dims.append(in_weight and (in_weight[0], in_weight[1][start[d] : end + 1 : step // self.stride[d]]))
        for d, in_weight in enumerate(self.place.dims):
            if d not in used and in_weight is not None:
                fixed[in_weight[0]] = int(in_weight[1][start[d]])
        return Place(self.place.name, fixed, tuple(dims))


class Products(TorchFunctionMode):
    """A context that calls `take(product, place)` before each product of the model that reads one of the weights.

    Products inside of compiled functions, `torch.func` transforms and kernels of other libraries are not seen.
    """

    def __init__(
        self,
        tensors: Mapping[str, tuple[nn.Module, str]],  # {name of a weight: (module, name of the tensor in it)}
        take: Callable[[Product, Place], None],
        token_mask: Callable[[], TokenMasks | Tensor | None],  # returns which tokens count, or None if all of them do
    ) -> None:
        super().__init__()
        self._tensors, self._take, self._token_mask = tensors, take, token_mask
        self._plain = [(name, *t) for name, t in tensors.items() if not parametrize.is_parametrized(*t)]
        # {storage: tensors in it whose places are known, the last one first}. Weights may share a storage.
        self._known: dict[StorageWeakRef, list[_Known]] = {}
        self._counts = WeakTensorKeyDictionary()  # {gathered tokens: bool tensor of the rows that count}

    def tie(self, name: str, tensor: Tensor) -> None:
        """Register a tensor as the whole weight of this name."""
        self._add(tensor, Place(name, {}, tuple((d, range(n)) for d, n in enumerate(tensor.shape))))

    def _add(self, tensor: Tensor, place: Place) -> None:
        """Store the place of a tensor. Forget storages that were freed, and places in a storage that are too old."""
        if len(self._known) > 2 * len(self._tensors) + 64:
            self._known = {key: known for key, known in self._known.items() if not key.expired()}
        key = _key(tensor)
        if key is None:
            return
        known = self._known.setdefault(key, [])
        known.insert(0, _Known(tensor.shape, tensor.stride(), int(tensor.storage_offset()), place))
        del known[len(self._tensors) + 1 :]

    def _place(self, tensor: Tensor, *, may_be_new: bool) -> Place | None:
        """Return the place of a view of a known tensor, or of a parameter that FSDP or accelerate may have replaced."""
        key = _key(tensor)
        if key is None:
            return None
        if key not in self._known and may_be_new:
            for name, module, tensor_name in self._plain:
                whole = getattr(module, tensor_name)
                if _key(whole) == key:
                    self.tie(name, whole)
        return next((p for known in self._known.get(key, ()) if (p := known.place_of(tensor)) is not None), None)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch._C._functorch.peek_interpreter_stack() is not None:  # inside vmap or grad, where values cannot be read
            return func(*args, **kwargs)
        name, masks = getattr(func, "__name__", "").partition(".")[0], self._token_mask()
        masks = masks if isinstance(masks, TokenMasks) else TokenMasks(masks, masks, masks)
        given = [a for a in (*args, *kwargs.values()) if not isinstance(a, Mapping)]  # a mapping is deepcopy's memo
        of_decoder = masks.of_decoder(given)
        if name in READERS:
            with torch.no_grad():
                for product in READERS[name](func, args, kwargs):
                    place = self._place(product.weight, may_be_new=True)
                    if place is not None:
                        product.counts = self._counts.get(product.read)
                        is_computed = all(product.read is not tensor for _, tensor in tensors_in("", given))
                        product.token_mask = masks.masks[masks.of_decoder(given if is_computed else product.read)]
                        self._take(product, place)
        output = func(*args, **kwargs)
        if of_decoder:
            masks.mark(args[0] if name == "__setitem__" else output)
        if name != "__get__":  # reading an attribute, such as `.shape` or `.T`, makes no new values
            self._follow(name, args, kwargs, output, masks.masks[of_decoder])
        return output

    def _follow(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any, mask: Any) -> None:
        """Store the place of an output that is computed from a weight, and which rows of gathered tokens count."""
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if isinstance(output, Tensor) and output.is_floating_point() and tensors and not output.is_nested:
            first, index = tensors[0], tensors[-1]
            if name in _GATHERS and _is_index(args, kwargs, index):
                place = self._place(first, may_be_new=_is_parameter(first))
                if place is not None and place.dims[0] is not None:
                    d, positions = place.dims[0]
                    chosen = torch.as_tensor(positions, device=index.device)[index]
                    self._add(output, place._replace(dims=((d, chosen), *place.dims[1:])))
            elif name not in READERS and name not in _MOVES:
                alike = [t for t in tensors if t.shape == output.shape and t.ndim > 1 and t is not output]
                places = (self._place(t, may_be_new=_is_parameter(t)) for t in alike)
                place = next(filter(None, places), None)
                if place is not None and _key(output) not in self._known:
                    self._add(output, place)
        if mask is not None and tensors:
            self._follow_rows(name, args, kwargs, tensors, output, mask)

    def _follow_rows(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        tensors: Sequence[Tensor],
        output: Any,
        mask: Tensor,
    ) -> None:
        """Store which rows of an output count: gathered tokens that `mask` counts, and what is computed of them."""
        counts = next((self._counts[t] for t in tensors if t in self._counts), None)
        first, is_repeated = tensors[0], name == "repeat_interleave" and (*args[2:], kwargs.get("dim"))[0] == 0
        if is_repeated or (name in _GATHERS and _is_index(args, kwargs, tensors[-1])):
            if counts is None and first.ndim == 2 and first.is_floating_point() and len(first) == mask.numel():
                counts = mask.bool().reshape(-1).to(first.device)
            if counts is not None and len(counts) == len(first):
                counts = counts.repeat_interleave(*args[1:], **kwargs) if is_repeated else counts[tensors[-1]]
        if counts is not None:
            for each in output if isinstance(output, (tuple, list)) else [output]:
                if isinstance(each, Tensor) and each.ndim and len(each) == len(counts):
                    self._counts[each] = counts


def other_matrices(model: nn.Module, known: Collection[str], run: Callable[[], object]) -> dict[str, bool]:
    """Return {name: whether its last dimensions are (inputs, outputs)} of parameters, not `known`, in products."""
    is_transposed: dict[str, bool] = {}
    parameters = {name for name, _ in named_tensors(model)}.difference(known)
    tensors = {name: owner_of(model, name) for name in weights_by_name(model) if name in parameters}

    def take(product: Product, place: Place) -> None:
        inputs = [place.dims[d] for d in product.contracted]
        parameter = getattr(*tensors[place.name])
        # A tensor that is computed from the parameter, such as a sum with position embeddings, is not a weight.
        is_itself = _key(product.weight) == _key(parameter)
        is_matrix = product.kind == "matrix" and parameter.ndim < 4
        if is_itself and is_matrix and len(inputs) == 1 and inputs[0] is not None:
            is_transposed.setdefault(place.name, inputs[0][0] == parameter.ndim - 2)
        elif is_itself and product.kind == "convolution" and parameter.ndim > 3:
            is_transposed.setdefault(place.name, False)

    if tensors:
        with Products(tensors, take, lambda: None), eval_mode(model), torch.no_grad():
            run()
    return {name: is_transposed[name] for name in tensors if name in is_transposed}


def _key(tensor: Tensor) -> StorageWeakRef | None:
    """Return a key of a tensor's storage, also unlike those of freed ones; None without storage (sparse, in vmap)."""
    try:
        return StorageWeakRef(local(tensor).untyped_storage())
    except (NotImplementedError, RuntimeError):
        return None


def _is_parameter(tensor: Tensor) -> bool:
    """Return whether a tensor is a parameter or a view of one, such as `weight.T`."""
    return isinstance(tensor._base if tensor._is_view() else tensor, nn.Parameter)


def _is_index(args: tuple[Any, ...], kwargs: Mapping[str, Any], index: Tensor) -> bool:
    """Return whether a call gathers rows along dimension 0, by the row numbers in `index`."""
    others = [a for a in (*args[1:], *kwargs.values()) if a is not index]
    is_of_numbers = index.ndim == 1 and index.dtype in (torch.int32, torch.int64)
    return is_of_numbers and others in ([], [0]) and index is not args[0]


# The functions below are called as `reader(func, args, kwargs)` for a function of torch and its arguments. Each yields
# the products that this call computes. `READERS` names the functions of torch that each of them reads.


def _linear(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Product]:
    x, weight = _tensors(args, kwargs)[:2]
    yield Product(read=x, weight=weight, inputs=partial(full_tensor, x), contracted=(-1,))


def _matmul(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Product]:
    """Yield a product for each of the two factors that may be the weight."""
    a, b = _tensors(args, kwargs)[-2:]  # addmm and baddbmm have another tensor before the factors
    if func is Tensor.__rmatmul__:
        a, b = b, a
    # If the first factor is the weight, the product is that of the transposed factors, in the other order.
    for x, weight, read in ((a, b, a), (b.mT if b.ndim > 1 else b[None], a.mT if a.ndim > 1 else a, b)):
        if weight.ndim == 2:
            yield Product(read=read, weight=weight, inputs=partial(full_tensor, x), contracted=(0,))
        elif weight.ndim == 3 and x.ndim > 1:
            inputs = partial(_batched, x, len(weight))
            yield Product(read=read, weight=weight, inputs=inputs, contracted=(1,), batch=0)


def _batched(x: Tensor, count: int) -> Tensor:
    """Return [..., tokens, inputs] as [batch, tokens, inputs], for a batch of `count` matrices."""
    x = x.expand(*torch.broadcast_shapes(x.shape[:-2], (count,)), *x.shape[-2:])
    return x.movedim(-3, 0).flatten(1, -2)


def _grouped(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Product]:
    """Yield the product of packed experts, of tokens that are sorted by expert or [experts, tokens, inputs]."""
    x, weight, *others = _tensors(args, kwargs)
    if weight.ndim == 3 and x.ndim == 3:
        yield from _matmul(func, (x, weight), {})
    elif weight.ndim == 3 and others:
        yield Product(read=x, weight=weight, inputs=lambda: x, contracted=(1,), batch=0, ends=others[0])


def _einsum(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Product]:
    """Yield a product for each of two factors whose letters are in the other one or the result, one at most in both."""
    equation, *factors = args
    factors = [*factors[0]] if factors and isinstance(factors[0], (tuple, list)) else factors
    if not isinstance(equation, str) or "->" not in equation or len(factors) != 2:
        return
    inside, out = equation.replace(" ", "").split("->")
    letters = inside.split(",")
    for at in (0, 1):
        (x, weight), (of_x, of_weight) = (factors[at], factors[1 - at]), (letters[at], letters[1 - at])
        if "..." in of_weight:
            continue
        # Letters that cannot be in an equation stand for the dimensions of "...".
        ellipsis = "".join(chr(0x100 + k) for k in range(x.ndim - len(of_x) + 3))
        of_x, of_out = of_x.replace("...", ellipsis), out.replace("...", ellipsis)
        both = [letter for letter in of_weight if letter in of_x]
        summed, batch = ([letter for letter in both if (letter in of_out) is kept] for kept in (False, True))
        rest = [letter for letter in of_x if letter not in both]
        if not summed or len(batch) > 1 or any(letter not in of_out for letter in rest):
            continue
        order = [of_x.index(letter) for letter in (*batch, *rest, *summed)]
        yield Product(
            read=x,
            weight=weight,
            inputs=partial(_permuted, x, order, len(summed), bool(batch)),
            contracted=tuple(of_weight.index(letter) for letter in summed),
            batch=of_weight.index(batch[0]) if batch else None,
        )


def _permuted(x: Tensor, order: Sequence[int], summed: int, has_batch: bool) -> Tensor:
    """Return a factor of an einsum as [..., inputs] or [batch, tokens, inputs]; `order` ends with `summed` inputs."""
    x = x.permute(*order).flatten(-summed)
    return x.reshape(len(x), -1, x.shape[-1]) if has_batch else x


def _convolution(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Product]:
    """Yield the product of a convolution, with settings that have a number for each dimension."""
    is_transposed = "transpose" in func.__name__
    last_names = "output_padding groups dilation" if is_transposed else "dilation groups"
    names = f"input weight bias stride padding {last_names}".split()
    named = dict(zip(names, args, strict=False)) | dict(kwargs)
    weight, n = named["weight"], named["weight"].ndim - 2
    settings = {"stride": 1, "padding": 0, "output_padding": 0, "dilation": 1} | named
    for name in ("stride", "padding", "output_padding", "dilation"):
        value = settings[name]
        if not isinstance(value, str):  # padding may be "same" or "valid"
            value = (value,) if isinstance(value, int) else tuple(value)
            settings[name] = value * n if len(value) == 1 else value
    kind = "transposed convolution" if is_transposed else "convolution"
    x = named["input"]
    yield Product(read=x, weight=weight, inputs=partial(full_tensor, x), kind=kind, settings=settings)


def _embedding(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Product]:
    indices, weight = _tensors(args, kwargs)[:2]
    if indices.is_floating_point():  # torch.embedding takes the weight first
        indices, weight = weight, indices
    yield Product(read=indices, weight=weight, inputs=partial(full_tensor, indices), kind="embedding")


def _attention(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Product]:
    """Yield the products of `nn.MultiheadAttention`; a call with the identity gives what the last projection reads."""
    named = inspect.signature(func).bind(*args, **kwargs).arguments
    reads = [named[name] for name in ("query", "key", "value")]
    is_separate = named.get("use_separate_proj_weight")
    weights = [named[f"{n}_proj_weight"] for n in "qkv"] if is_separate else [*named["in_proj_weight"].chunk(3)]
    for x, weight in zip(reads, weights, strict=True):
        yield Product(read=x, weight=weight, inputs=partial(_batch_first, x), contracted=(1,), is_batch_first=True)
    query, weight = reads[0], named["out_proj_weight"]

    def heads() -> Tensor:
        identity = torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)
        return _batch_first(func(**{**named, "out_proj_weight": identity, "out_proj_bias": None, "dropout_p": 0.0})[0])

    yield Product(read=query, weight=weight, inputs=heads, is_computed=True, contracted=(1,), is_batch_first=True)


def _batch_first(x: Tensor) -> Tensor:
    """Return [tokens, batch, inputs] as [batch, tokens, inputs], the order of token masks."""
    return x.transpose(0, 1) if x.ndim == 3 else x


def _recurrent(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Product]:
    """Yield the products of `nn.RNN`, `nn.LSTM` and `nn.GRU`, but not of `proj_size`, whose inputs are not returned."""
    x, *others = args  # then the sizes of steps if the sequences are packed
    sizes = others.pop(0) if isinstance(others[0], Tensor) and not others[0].is_floating_point() else None
    states, weights, has_biases, layers, _, _, is_bidirectional, *rest = others
    is_batch_first = bool(rest and rest[0])
    directions, is_lstm = 1 + is_bidirectional, isinstance(states, (tuple, list))
    count = len(weights) // (layers * directions)  # the number of weights of one layer and direction
    for layer in range(layers):
        rows = slice(layer * directions, (layer + 1) * directions)  # of this layer in the states
        of_layer = [*weights[rows.start * count : rows.stop * count]]
        first = tuple(state[rows] for state in states) if is_lstm else states[rows]
        settings = (has_biases, 1, 0.0, False, is_bidirectional)  # one layer, no dropout, eval mode
        if sizes is None:
            output = func(x, first, of_layer, *settings, is_batch_first)[0]
        else:
            output = func(x, sizes, first, of_layer, *settings)[0]
        time = 1 if is_batch_first else 0
        for k, hidden in enumerate(output.chunk(directions, -1)):
            start = (first[0] if is_lstm else first)[k]
            before = _before(hidden, start, sizes, time, is_reversed=k == 1)
            for read, weight in ((x, of_layer[k * count]), (before, of_layer[k * count + 1])):
                as_inputs = full_tensor if sizes is not None or is_batch_first else _batch_first
                inputs = partial(as_inputs, read)
                yield Product(read=read, weight=weight, inputs=inputs, contracted=(1,), is_batch_first=True)
        x = output


def _before(hidden: Tensor, start: Tensor, sizes: Tensor | None, time: int, is_reversed: bool) -> Tensor:
    """Return the hidden state that each step reads; packed sequences have `sizes`, and others the dimension `time`."""
    if sizes is None:
        length, initial = hidden.shape[time], start.unsqueeze(time)
        steps = hidden.narrow(time, int(is_reversed), length - 1)
        return torch.cat([steps, initial] if is_reversed else [initial, steps], time)
    counts = sizes.tolist()
    offsets = [sum(counts[:t]) for t in range(len(counts))]  # where each step begins in the packed rows
    # Row numbers in [hidden, start]. Sequences are sorted by length, so a step has the first rows of the one before.
    ranges = [range(len(hidden), len(hidden) + counts[0])]
    ranges += [range(offset, offset + n) for offset, n in zip(offsets, counts[1:], strict=False)]
    if is_reversed:  # sequences that end with a step read the initial state, others the state of the step after
        ranges = []
        for t, count in enumerate(counts):
            after = counts[t + 1] if t + 1 < len(counts) else 0
            ranges += [range(offsets[t] + count, offsets[t] + count + after)]
            ranges += [range(len(hidden) + after, len(hidden) + count)]
    at = torch.tensor([row for rows in ranges for row in rows], device=hidden.device)
    return torch.cat([hidden, start])[at]


def _cell(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Product]:
    """Yield the two products of a cell: of the input and of the hidden state."""
    x, state, *weights = args
    hidden = state[0] if isinstance(state, (tuple, list)) else state
    for read, weight in zip((x, hidden), weights, strict=False):
        yield Product(read=read, weight=weight, inputs=partial(full_tensor, read), contracted=(1,))


def _tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors among positional arguments and named ones, except an output and a bias that are named."""
    values = (*args, *(value for name, value in kwargs.items() if name not in ("out", "bias")))
    return [value for value in values if isinstance(value, Tensor)]


#: {name of a function of torch: the function above that yields the products of a call}
READERS: dict[str, Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Iterator[Product]]] = {
    "linear": _linear,
    **dict.fromkeys(("matmul", "__matmul__", "__rmatmul__", "mm", "mv", "addmm", "addmv", "bmm", "baddbmm"), _matmul),
    **dict.fromkeys(("_grouped_mm", "grouped_mm", "grouped_mm_fallback"), _grouped),
    "einsum": _einsum,
    **{f"conv{kind}{n}d": _convolution for kind in ("", "_transpose") for n in (1, 2, 3)},
    "embedding": _embedding,
    "multi_head_attention_forward": _attention,
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrent),
    **dict.fromkeys(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), _cell),
}
