"""`save_sparse` and `load_sparse`: files with the kept values of every tensor, and bits or gaps that place them."""

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SparsityError
from ..removal.results import Conversion
from . import rules
from .encoding import CODES, bits_of, flat, kept_of, smaller_code
from .layers import Layer, refuse_masks
from .tensor_file import (
    DTYPES,
    Stored,
    StrPath,
    distinct,
    fields_of,
    file_bytes,
    has_form,
    open_file,
    read_json,
    refuse_same_names,
    write_file,
)

_KEY = "sparsekit_ao.sparse"
_SAMPLE = 2**16  # bytes of a tensor that are compressed to estimate what zlib would do
_ENTRY = 200  # bytes that a tensor in two parts adds to the header, about, and its name twice more


def reasons(layer: Layer) -> list[str]:
    """Why a weight would not be stored sparse; empty if it would."""
    weight = layer.weight
    found = rules.is_not_parametrized(layer)
    if found:
        return found
    if weight.dtype not in DTYPES:
        return [f"the file format has no {str(weight.dtype).removeprefix('torch.')}"]
    row = _encode(layer.fqn, weight)
    return [] if row.code else [_not_smaller(row)]


def save_sparse(model: nn.Module | Mapping[str, Tensor], path: StrPath) -> Conversion:
    """Save a squashed model without its zeros, as a safetensors file that `load_sparse` reads.

    Any pattern and any dtype: a tensor is stored as its kept values, in row-major order, and a bit for each element
    that marks which are kept, or, where that is smaller, a byte for each kept element (the zeros before it). Tensors
    for which this is not smaller are stored dense. Values are the same bits after loading; -0.0 and nan count as kept.
    Tied tensors are stored once. Tensors are encoded one at a time, when they are written.

    Args:
        model: squashed, or its state dict.
        path: of the file, which is replaced if it exists.

    Returns:
        What was stored sparse and what dense; bytes are those of this file and of a dense one.

    Raises:
        SparsityError: there are still masks; a value is not a plain tensor; no tensor is smaller. No file is written.

    >>> import os, tempfile
    >>> model = nn.Sequential(nn.Linear(64, 64, bias=False))
    >>> with torch.no_grad():
    ...     _ = model[0].weight[:, 16:].zero_()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "model.safetensors")
    ...     report = save_sparse(model, path)
    ...     model.load_state_dict(load_sparse(path))
    <All keys matched successfully>
    >>> report.converted, report.after < 0.3 * report.before
    (('0.weight',), True)
    """
    if isinstance(model, nn.Module):
        refuse_masks(model, "save_sparse")
    state = model.state_dict() if isinstance(model, nn.Module) else model
    dense, aliases = distinct(state)
    rows = [_encode(one.name, state[one.name]) for one in dense]
    sparse = [row for row in rows if row.code]
    if not sparse:
        fewest = max(rows, key=lambda row: row.zeros / max(row.n, 1), default=None)
        most = f" {_not_smaller(fewest)} in {fewest.name}, which has most zeros." if fewest else ""
        raise SparsityError(f"save_sparse: no tensor is smaller without its zeros.{most} Prune the model first.")
    stored = [part for one, row in zip(dense, rows, strict=True) for part in (_parts(row, state) or [one])]
    refuse_same_names([*(one.name for one in stored), *aliases], "save_sparse")
    about = {row.name: {"shape": row.shape, "code": row.code, "kept": row.n - row.zeros} for row in sparse}
    metadata = {_KEY: json.dumps({"tensors": about, "aliases": aliases})}
    return Conversion(
        target="save_sparse",
        converted=tuple(row.name for row in sparse),
        left={row.name: _not_smaller(row) for row in rows if not row.code},
        before=file_bytes(dense, {}),
        after=write_file(path, stored, metadata),
        notes=_notes(sparse),
    )


def load_sparse(path: StrPath, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """The state dict in a file of `save_sparse`, with dense tensors, the same bits as before.

    The file may come from anywhere: names, dtypes, shapes and counts are checked before a tensor is allocated.

    Args:
        path: of the file.
        device: of the tensors.

    Raises:
        SparsityError: it is not a file of `save_sparse`, or contradicts itself.
        ImportError: safetensors is not installed.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     _ = save_sparse({"weight": torch.eye(64)}, file.name)
    ...     torch.equal(load_sparse(file.name)["weight"], torch.eye(64))
    True
    """
    with open_file(path) as file:
        about = read_json(path, file, _KEY, "save_sparse")
        tensors, aliases = _checked(file, about, str(path))
        parts = _parts_of(tensors)
        names = [name for name in file.keys() if name not in parts]  # noqa: SIM118 (an open file is no mapping)
        state = {name: _decode(file, name, t).to(device) for name, t in tensors.items()}
        state |= {name: file.get_tensor(name).clone().to(device) for name in names}
    return state | {name: state[first] for name, first in aliases.items()}


@dataclass(frozen=True, kw_only=True)
class _Row:
    """How a tensor is stored; `code` is "mask", "gaps", or None for dense, `zlib` what zlib leaves of a sample."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    zeros: int
    code: str | None
    code_bytes: int
    zlib: float

    @property
    def n(self) -> int:
        return math.prod(self.shape)


def _encode(name: str, tensor: Tensor) -> _Row:
    """Counts only: the code itself is made when it is written."""
    elements = flat(tensor)
    kept = kept_of(elements)
    count = int(kept.count_nonzero())
    code, size = smaller_code(kept)
    entry = _ENTRY + 2 * len(name)
    is_smaller = count * tensor.element_size() + size + entry < tensor.numel() * tensor.element_size()
    return _Row(
        name=name,
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        zeros=tensor.numel() - count,
        code=code if is_smaller else None,
        code_bytes=size,
        zlib=_zlib(elements),
    )


def _not_smaller(row: _Row) -> str:
    return f"values and bits are not smaller: {row.zeros:,} of {row.n:,} elements are zero"


def _parts(row: _Row, state: Mapping[str, Tensor]) -> list[Stored]:
    """The values and the code of a tensor that is stored sparse; nothing for a dense one."""
    if row.code is None:
        return []
    tensor, encode = state[row.name], CODES[row.code][0]

    def values() -> Tensor:
        elements = flat(tensor)
        return elements[kept_of(elements)]

    def code() -> Tensor:
        return encode(kept_of(flat(tensor)))

    kept = (row.n - row.zeros,)
    return [
        Stored(name=f"{row.name}.values", dtype=row.dtype, shape=kept, make=values),
        Stored(name=f"{row.name}.{row.code}", dtype=torch.uint8, shape=(row.code_bytes,), make=code),
    ]


def _zlib(elements: Tensor) -> float:
    """The size to which zlib compresses bytes from the middle of a tensor, relative to them."""
    data = elements.view(torch.uint8).numpy()
    start = max(0, (len(data) - _SAMPLE) // 2)
    sample = data[start : start + _SAMPLE].tobytes()
    return len(zlib.compress(sample)) / max(len(sample), 1)


def _notes(sparse: list[_Row]) -> tuple[str, ...]:
    """Where a dense file that is compressed would be smaller."""
    dense, own, other = (sum(column) for column in zip(*(_sizes(row) for row in sparse), strict=True))
    if other >= own:
        return ()
    return (
        f"zlib would leave about {other / dense:.2f} of a dense file of these tensors; here it is {own / dense:.2f}",
    )


def _sizes(row: _Row) -> tuple[int, int, float]:
    """Bytes of a tensor dense, without its zeros, and, estimated, with zlib."""
    dense = row.n * row.dtype.itemsize
    return dense, (row.n - row.zeros) * row.dtype.itemsize + row.code_bytes, row.zlib * dense


def _checked(file: Any, about: Any, path: str) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The entries of a file's metadata, all of which fit its tensors."""
    tensors, aliases = fields_of(about, "tensors", "aliases")
    if not isinstance(tensors, dict) or not isinstance(aliases, dict):
        raise SparsityError(f"{path}: {_KEY!r} in its metadata must hold 'tensors' and 'aliases', got {about!r:.80}")
    keys = set(file.keys())
    for name, t in tensors.items():
        _check_entry(file, keys, name, t, f"{path}: {name}: ")
    named = {*tensors, *keys} - _parts_of(tensors)
    for name, first in aliases.items():
        if not isinstance(first, str) or first not in named:
            raise SparsityError(f"{path}: {name} is to be the same tensor as {first!r}, which the file does not have")
        if name in tensors or name in keys:
            raise SparsityError(f"{path}: {name} is stored, and is to be the same tensor as {first!r}")
    return tensors, aliases


def _parts_of(tensors: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Names in the file that are parts of sparse tensors."""
    return {f"{name}.{part}" for name, t in tensors.items() for part in ("values", t["code"])}


def _check_entry(file: Any, keys: set[str], name: str, t: Any, where: str) -> None:
    shape, code, kept = fields_of(t, "shape", "code", "kept")
    is_form = isinstance(code, str) and code in CODES and isinstance(shape, list)
    is_form = is_form and all(type(n) is int and n >= 0 for n in (kept, *shape))
    if not is_form or math.prod(max(n, 1) for n in shape) >= 2**63:
        raise SparsityError(f"{where}needs a shape, a code of {list(CODES)} and a count of kept values, got {t!r:.80}")
    n, values, coded = math.prod(shape), f"{name}.values", f"{name}.{code}"
    missing = {values, coded} - keys
    if missing or name in keys:
        raise SparsityError(f"{where}{'the file has no ' + min(missing) if missing else 'is stored dense as well'}")
    dtype = next((d for d, text in DTYPES.items() if text == file.get_slice(values).get_dtype()), None)
    if dtype is None or kept > n or not has_form(file, values, dtype, (kept,)):
        found = file.get_slice(values).get_shape()
        raise SparsityError(f"{where}{kept} values of {n} elements are to be stored, got shape {found}")
    size = file.get_slice(coded).get_shape()
    if (
        len(size) != 1
        or not has_form(file, coded, torch.uint8, tuple(size))
        or not _is_possible(code, size[0], n, kept)
    ):
        raise SparsityError(f"{where}a {code} of shape {size} does not fit {kept} of {n} elements")


def _is_possible(code: str, size: int, n: int, kept: int) -> bool:
    """Whether a code of this size can place so many values among n elements."""
    if code == "mask":
        return size == -(-n // 8) and kept <= n
    return kept <= size and kept + 255 * (size - kept) <= n < 255 * (size + 1)


def _decode(file: Any, name: str, t: Mapping[str, Any]) -> Tensor:
    n, code = math.prod(t["shape"]), t["code"]
    at = CODES[code][1](file.get_tensor(f"{name}.{code}"), n)
    if at is None or len(at) != t["kept"]:
        found = "elements outside of the tensor" if at is None else f"{len(at)}"
        raise SparsityError(f"{name}: its {code} must place {t['kept']} values in {n} elements, got {found}")
    values = file.get_tensor(f"{name}.values")
    bits = torch.zeros(n, dtype=bits_of(values).dtype, device="cpu")
    bits[at] = bits_of(values)
    return bits.view(values.dtype).reshape(t["shape"])
