"""Files in the safetensors format: written one tensor at a time, and opened.

safetensors' own `save_file` needs all tensors in memory at once; reading, where it checks the header, is left to it.
"""

import json
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import SparsityError
from .encoding import memory_of

StrPath = str | os.PathLike[str]

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One tensor of a file.

    Attributes:
        name, dtype, shape: as in the header.
        make: returns the tensor, when it is written.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def bytes(self) -> int:
        """Without the header."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def as_stored(name: str, tensor: Tensor) -> Stored:
    """A tensor that is written as it is.

    Raises:
        SparsityError: it is no plain tensor with values, or the format does not have its dtype, or forbids its name.
    """
    if not isinstance(name, str) or name == "__metadata__":
        raise SparsityError(f"{name!r} cannot be the name of a tensor in a safetensors file; rename it")
    if not isinstance(tensor, Tensor) or tensor.is_meta:
        raise SparsityError(f"{name}: only tensors with values can be saved, got {type(tensor).__name__}")
    if tensor.dtype not in DTYPES or tensor.layout != torch.strided or type(tensor) not in (Tensor, torch.nn.Parameter):
        raise SparsityError(f"{name}: {type(tensor).__name__} of {tensor.dtype}, {tensor.layout} cannot be saved")
    return Stored(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), make=lambda: tensor)


def distinct(state: Mapping[str, Tensor]) -> tuple[list[Stored], dict[str, str]]:
    """Every tensor once, and {name: first name} of those that are the same memory."""
    first: dict[Hashable, str] = {}
    stored, aliases = [], {}
    for name, tensor in state.items():
        one = as_stored(name, tensor)
        key = memory_of(tensor) or name
        if first.setdefault(key, name) == name:
            stored.append(one)
        else:
            aliases[name] = first[key]
    return stored, aliases


def refuse_same_names(names: Sequence[str], target: str) -> None:
    """Raise a SparsityError if a part of a tensor has the name of another one."""
    if len(set(names)) < len(names):
        twice = next(name for at, name in enumerate(names) if name in names[:at])
        raise SparsityError(f"{target}: {twice!r} names a tensor and a part of another one; rename that")


def file_bytes(tensors: Sequence[Stored], metadata: Mapping[str, str]) -> int:
    """The size of the file that `write_file` would write."""
    return len(_header(tensors, metadata)) + sum(t.bytes for t in tensors)


def write_file(path: StrPath, tensors: Sequence[Stored], metadata: Mapping[str, str]) -> int:
    """Write tensors one by one, so that no more than one is made at a time; returns the bytes of the file.

    A file that exists is replaced when the new one is complete.
    """
    _refuse_folder(path)
    partial = Path(path).with_name(f"{Path(path).name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(_header(tensors, metadata))
            for one in _in_order(tensors):
                made = one.make().detach().cpu().resolve_conj().resolve_neg().contiguous()
                assert (made.dtype, tuple(made.shape)) == (one.dtype, one.shape), one.name
                file.write(made.reshape(-1).view(torch.uint8).numpy().data)
            size = file.tell()
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return size


def _refuse_folder(path: StrPath) -> None:
    if Path(path).is_dir():
        raise IsADirectoryError(f"{path} is a folder; pass the path of a file")


def open_file(path: StrPath) -> AbstractContextManager[Any]:
    """A safetensors file, whose header is read and checked.

    Raises:
        SparsityError: it is no such file.
        ImportError: safetensors is not installed.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as e:
        raise ImportError("reading the file needs safetensors: pip install 'sparsekit_ao[export]'") from e
    _refuse_folder(path)
    try:
        return safe_open(os.fspath(path), framework="pt")
    except SafetensorError as e:
        raise SparsityError(f"{os.fspath(path)} is not a complete safetensors file: {e}") from e


def read_json(path: StrPath, file: Any, key: str, writer: str) -> Any:
    """What an entry of a file's metadata holds.

    Raises:
        SparsityError: there is no such entry, or it is not JSON that can be read.
    """
    text = (file.metadata() or {}).get(key)
    if text is None:
        raise SparsityError(f"{os.fspath(path)} was not written by {writer}: its metadata has no {key!r}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:  # also of huge integers and deep nesting
        raise SparsityError(f"{os.fspath(path)}: {key!r} in its metadata is not JSON: {e}") from e


def fields_of(about: Any, *keys: str) -> list[Any]:
    """Values of an object that was read as JSON; None for what it does not have."""
    return [about.get(key) if isinstance(about, dict) else None for key in keys]


def has_form(file: Any, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    """Whether a file has a tensor of this dtype and shape; its values are not read."""
    if name not in file.keys():  # noqa: SIM118 (an open file is no mapping)
        return False
    found = file.get_slice(name)
    return found.get_dtype() == DTYPES.get(dtype) and tuple(found.get_shape()) == shape


def _in_order(tensors: Sequence[Stored]) -> list[Stored]:
    """The widest dtypes first, so that every tensor is aligned to its own."""
    return sorted(tensors, key=lambda one: -one.dtype.itemsize)


def _header(tensors: Sequence[Stored], metadata: Mapping[str, str]) -> bytes:
    fields: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for one in _in_order(tensors):
        start, end = end, end + one.bytes
        fields[one.name] = {"dtype": DTYPES[one.dtype], "shape": list(one.shape), "data_offsets": [start, end]}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
