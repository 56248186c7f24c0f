"""2:4 weights packed as values and metadata, in the layout of torch's CUTLASS kernels, and loaded again.

Packing and unpacking run on the CPU; the packed form runs on CUDA, as `torch.sparse.SparseSemiStructuredTensor`.
"""

import json
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SparsityError
from ..removal.results import Conversion
from . import rules
from .encoding import bits_of, memory_of
from .layers import Layer, checked_layers
from .tensor_file import (
    StrPath,
    as_stored,
    distinct,
    fields_of,
    file_bytes,
    has_form,
    open_file,
    read_json,
    refuse_same_names,
    write_file,
)

_KEY = "sparsekit_ao.2_4"
_PARTS = ("values", "metadata")
MULTIPLES = {torch.float16: (32, 64), torch.bfloat16: (32, 64), torch.int8: (16, 128)}  # of torch's CUTLASS kernels


def reasons(layer: Layer) -> list[str]:
    """Why a weight cannot be packed; empty if it can."""
    found = rules.is_a(layer, nn.Linear) or rules.has_dtype(layer, MULTIPLES)
    return found or [
        *rules.is_not_parametrized(layer),
        *rules.is_not_shared(layer),
        *rules.has_multiples(layer, *MULTIPLES[layer.weight.dtype]),
        *rules.is_finite(layer),
        *rules.keeps_n_of_m(layer, 2, 4),
    ]


def pack_2_4(model: nn.Module, path: StrPath, tensors: Sequence[str] | None = None) -> Conversion:
    """Save a squashed 2:4 model with packed weights, as a safetensors file that `load_2_4` reads.

    The weight of a Linear (out, in) becomes `<name>.values` (out, in / 2), and `<name>.metadata` with two bits for each
    value, in the order of torch's CUTLASS kernels: 0.5625 of the bytes of float16 and bfloat16, 0.625 of int8. All
    other tensors of the state dict are stored as they are. What is packed is unpacked again and compared bit for bit;
    -0.0 counts as zero.

    Args:
        model: squashed; float16, bfloat16 or int8. float32 is refused, since torch's packing does not restore it.
        path: of the file, which is replaced if it exists.
        tensors: names, globs or `re:` expressions of the weights to pack; None is every weight of which at least a
            tenth is zero.

    Returns:
        What was packed and what was not; bytes are those of this file and of a dense one.

    Raises:
        SparsityError: a weight cannot be packed (`export.check(model, "pack_2_4")` finds the same), or has a mask. No
            file is written.

    >>> import tempfile
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False)).half()
    >>> with torch.no_grad():
    ...     _ = model[0].weight.view(32, 16, 4)[:, :, 2:].zero_()
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     pack_2_4(model, file.name).converted
    ('0.weight',)
    """
    chosen, left = checked_layers(model, "pack_2_4", reasons, tensors, squashed=True)
    dense, aliases = distinct(model.state_dict())
    packed = {layer.fqn: _pack(layer.fqn, layer.weight) for layer in chosen}
    unnamed = next((n for n in packed if all(n != one.name for one in dense)), None)
    if unnamed is not None:
        raise SparsityError(f"pack_2_4: {unnamed} has another name in model.state_dict(); unwrap its module first")
    stored = [as_stored(f"{n}.{part}", t) for n, p in packed.items() for part, t in zip(_PARTS, p, strict=True)]
    stored += [one for one in dense if one.name not in packed]
    refuse_same_names([one.name for one in stored] + list(aliases), "pack_2_4")
    return Conversion(
        target="pack_2_4",
        converted=tuple(packed),
        left=left,
        before=file_bytes(dense, {}),
        after=write_file(path, stored, {_KEY: json.dumps({"packed": list(packed), "aliases": aliases})}),
    )


def load_2_4(model: nn.Module, path: StrPath) -> None:
    """Load a file of `pack_2_4` into a model of the same classes and shapes.

    Where the model is on a GPU, packed weights become `SparseSemiStructuredTensor` parameters without gradient, which
    run in torch's sparse kernels: CUTLASS on compute capability 8.x, as packed; cuSPARSELt on later ones. Elsewhere
    they are unpacked to dense weights, the same bits as were packed.

    Args:
        model: not masked; of the dtypes that were saved.
        path: of the file.

    Raises:
        SparsityError: names, dtypes or shapes do not fit the model, metadata are none of `pack_2_4`, or torch has no
            sparse kernel for a weight on this GPU. The model is not changed.
        ImportError: safetensors is not installed.

    >>> import tempfile
    >>> model, again = (torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False)).half() for _ in range(2))
    >>> with torch.no_grad():
    ...     _ = model[0].weight.view(32, 16, 4)[:, :, 2:].zero_()
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     _ = pack_2_4(model, file.name)
    ...     load_2_4(again, file.name)
    >>> torch.equal(again[0].weight, model[0].weight)
    True
    """
    with open_file(path) as file:
        names, aliases = _names(read_json(path, file, _KEY, "pack_2_4"), str(path))
        state = model.state_dict()
        if any(tensor.is_meta for tensor in state.values()):
            raise SparsityError("load_2_4: the model is on the meta device; model.to_empty(device=...) first")
        _check_forms(file, names, aliases, state, str(path))
        packed = {n: (file.get_tensor(f"{n}.values"), file.get_tensor(f"{n}.metadata")) for n in names}
        dense = {name: _unpack(name, *parts) for name, parts in packed.items()}
        dense |= {n: file.get_tensor(n) for n in state if n not in dense and n not in aliases}
    dense |= {name: dense[first] for name, first in aliases.items()}
    _refuse_ties(state, dense, str(path))
    sparse = {n: _on_cuda(n, state[n], dense[n], *packed[n]) for n in names if state[n].is_cuda}
    model.load_state_dict(dense)
    for name, weight in sparse.items():
        owner, _, tensor_name = name.rpartition(".")
        setattr(model.get_submodule(owner), tensor_name, nn.Parameter(weight, requires_grad=False))


def _pack(name: str, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Values and metadata on the CPU, of which unpacking restores the weight."""
    from torch.sparse._semi_structured_conversions import sparse_semi_structured_from_dense_cutlass

    weight = weight.cpu().contiguous()
    weight = weight.masked_fill(weight == 0, 0)  # -0.0 too
    values, metadata = sparse_semi_structured_from_dense_cutlass(weight)
    if not _same_bits(_to_dense(values, metadata), weight):
        raise SparsityError(f"pack_2_4: {name} is not the same after unpacking; please report this")
    return values, metadata


def _unpack(name: str, values: Tensor, metadata: Tensor) -> Tensor:
    """The dense weight, if packing it gives the same values and metadata."""
    dense = _to_dense(values, metadata)
    try:
        again = _pack(name, dense)
    except SparsityError:
        again = None
    if again is None or not (_same_bits(again[0], values) and torch.equal(again[1], metadata)):
        raise SparsityError(f"{name}: its metadata are not those of a 2:4 weight that pack_2_4 packed")
    return dense


def _to_dense(values: Tensor, metadata: Tensor) -> Tensor:
    from torch.sparse._semi_structured_conversions import sparse_semi_structured_to_dense_cutlass

    return sparse_semi_structured_to_dense_cutlass(values, metadata)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits_of(a), bits_of(b))


def _names(about: Any, path: str) -> tuple[list[str], dict[str, str]]:
    """Names of packed tensors, and {name: first name} of tied ones, from a file's metadata."""
    names, aliases = fields_of(about, "packed", "aliases")
    is_form = isinstance(names, list) and isinstance(aliases, dict)
    if not is_form or not all(isinstance(text, str) for text in [*names, *aliases.values()]):
        raise SparsityError(f"{path}: {_KEY!r} in its metadata must hold 'packed' and 'aliases', got {about!r:.80}")
    both = aliases.keys() & {*aliases.values(), *names}
    if both:
        raise SparsityError(f"{path}: {min(both)!r} is stored, and is to be the same tensor as another one")
    return names, aliases


def _check_forms(file: Any, names: list[str], aliases: dict[str, str], state: Mapping[str, Tensor], path: str) -> None:
    """Names, dtypes and shapes of a file against a model's state dict; no values are read."""
    for name in names:
        if not _is_packable(state.get(name)):
            raise SparsityError(f"{path}: {name} is packed, but no weight of the model that pack_2_4 could pack")
    for name, first in aliases.items():
        one, other = state.get(name), state.get(first)
        if one is None or other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
            raise SparsityError(f"{path}: {name} is to be the same tensor as {first}, but they differ in the model")
    own = state.keys() - aliases.keys()
    expected = {part: form for name in own for part, form in _forms(name, state[name], name in names).items()}
    found = set(file.keys())
    for verb, some in (("has no", expected.keys() - found), ("has an unknown", found - expected.keys())):
        if some:
            raise SparsityError(f"{path} {verb} tensor {min(some)!r}; load it into the model that was packed")
    for part, (dtype, shape) in expected.items():
        if not has_form(file, part, dtype, shape):
            got = file.get_slice(part)
            raise SparsityError(
                f"{path}: {part} must be {dtype} of shape {shape} for this model, got {got.get_dtype()} of shape "
                f"{tuple(got.get_shape())}"
            )


def _refuse_ties(state: Mapping[str, Tensor], dense: Mapping[str, Tensor], path: str) -> None:
    """Tensors that are one in the model must be equal in the file, since the last one would replace the others."""
    firsts: dict[Hashable, str] = {}
    for name, tensor in state.items():
        first = firsts.setdefault(memory_of(tensor) or name, name)
        if first != name and not _same_bits(dense[first], dense[name]):
            raise SparsityError(f"{path}: {first} and {name} differ, but the model ties them; untie them first")


def _is_packable(tensor: Tensor | None) -> bool:
    if tensor is None or type(tensor) is not Tensor or tensor.dtype not in MULTIPLES or tensor.ndim != 2:
        return False
    return not any(n % size for n, size in zip(tensor.shape, MULTIPLES[tensor.dtype], strict=True))


def _forms(name: str, tensor: Tensor, is_packed: bool) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """{tensor in the file: its dtype and shape} of one tensor of a model."""
    if not is_packed:
        return {name: (tensor.dtype, tuple(tensor.shape))}
    rows, columns = tensor.shape
    wide = tensor.dtype == torch.int8
    metadata = (torch.int32, (rows, columns // 32)) if wide else (torch.int16, (rows, columns // 16))
    return {f"{name}.values": (tensor.dtype, (rows, columns // 2)), f"{name}.metadata": metadata}


def _on_cuda(name: str, like: Tensor, dense: Tensor, values: Tensor, metadata: Tensor) -> Tensor:
    """The sparse tensor for a GPU; torch's CUTLASS kernels are for compute capability 8.x only."""
    from torch import sparse

    if torch.cuda.get_device_capability(like.device)[0] != 8:
        try:
            return sparse.to_sparse_semi_structured(dense.to(like.device))
        except RuntimeError as e:
            raise SparsityError(f"load_2_4: torch cannot pack {name} for {like.device}: {e}") from e
    parts = (values.to(like.device), metadata.to(like.device))
    return sparse.SparseSemiStructuredTensorCUTLASS(dense.shape, *parts, None, None, None)
