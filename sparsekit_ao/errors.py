"""The exceptions of the library. Messages say where, what was required, what was found and what to do.

Both classes are `ValueError`s, so code that catches those keeps working.
"""

import difflib
import numbers
import re
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TypeGuard

import torch
from torch import nn

__all__ = ["CouplingError", "SparsityError"]

_NOT_THE_USERS = ("sparsekit_ao", "torch", "contextlib")  # packages whose lines a warning does not name
_MEANT = {  # what other libraries call an argument
    "sparsity_level": ("sparsity", "level", "amount", "ratio", "pruning_ratio"),
    "ratio": ("sparsity", "sparsity_level", "level", "amount", "pruning_ratio", "kinds"),
    "budget": ("cost", "scope"),
    "keep_config": ("uniform",),
    "multiple_of": ("tensor_parallel",),
    "exclude": ("ignore", "ignored_layers", "skip"),
    "layers": ("blocks",),
    "batches": ("data", "dataset", "dataloader", "calibration_data", "inputs", "example_inputs"),
    "example_inputs": ("inputs", "batch", "batches"),
    "block_shape": ("sparse_block_shape", "block", "block_size"),
    "sparse_block_shape": ("block_shape", "block", "block_size"),
    "tensor_fqn": ("fqn", "name", "tensor", "param", "parameter", "layer"),
}


class SparsityError(ValueError):
    """Raised when an argument, a config entry or a call does not fit, before anything is changed.

    >>> try:
    ...     sparsekit_ao.ScopeSparsifier(sparsity_level=0.5, nnz=2)
    ... except ValueError as e:
    ...     print(e)
    sparsity_level and nnz are mutually exclusive
    """


class CouplingError(SparsityError):
    """Raised when tensors that are kept or dropped together, or share one budget, do not line up.

    >>> rows = sparsekit_ao.BlockSpec(torch.ones(4, 2), (1, -1)), sparsekit_ao.BlockSpec(torch.ones(3, 2), (1, -1))
    >>> try:
    ...     sparsekit_ao.BlockCoupling(rows)
    ... except CouplingError as e:
    ...     print(type(e).__name__)
    CouplingError
    """


def warn(text: str) -> None:
    """Warn at the line of the user's code that called this library, also through torch or a context manager."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and (frame.f_globals.get("__name__") or "").partition(".")[0] in _NOT_THE_USERS:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a real number, and no bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def by_reason(reasons: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return (names, reason) for each reason of {name: reason}; names after the first five are only counted.

    >>> by_reason({**dict.fromkeys("abcdefg", "too wide"), "h": "tied"})
    [('a, b, c, d, e and 2 more', 'too wide'), ('h', 'tied')]
    """
    alike: dict[str, list[str]] = {}
    for name, why in folded([*reasons.items()], 1):
        alike.setdefault(why, []).append(name)
    more = {why: f" and {len(names) - 5} more" if len(names) > 5 else "" for why, names in alike.items()}
    return [(", ".join(names[:5]) + more[why], why) for why, names in alike.items()]


def folded(rows: Sequence[tuple[str, ...]], few: int = 3) -> list[tuple[str, ...]]:
    """Rows (name, *cells) in which more than a few that differ only in numbers of their names are one, with a count."""
    number = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\..*\.)")  # not that of a layer of a plain Sequential
    counts = Counter(keys := [(number.sub("*", name), *cells) for name, *cells in rows])
    pairs = zip(keys, rows, strict=True)
    return list(dict.fromkeys((f"{k[0]} ({counts[k]})", *k[1:]) if counts[k] > few else row for k, row in pairs))


def did_you_mean(name: str, names: Collection[str]) -> str:
    """Return a sentence with the one of `names` that an unknown name may stand for, or ""."""
    meant = next((known for known, others in _MEANT.items() if name in others and known in names), None)
    close = [meant] if meant else difflib.get_close_matches(name, names, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def checked_model(model: object, where: str) -> nn.Module:
    """Return the model, or raise an error unless it is a module that can be modified."""
    if isinstance(model, torch.jit.ScriptModule):
        raise SparsityError(f"{where}: model is scripted or traced; give the one that was passed to torch.jit")
    if isinstance(model, nn.Module):
        return model
    hint = "; pass its .model" if isinstance(getattr(model, "model", None), nn.Module) else ""
    raise SparsityError(f"{where}: model must be a torch.nn.Module, got {type(model).__name__}{hint}")


def check_writable(folder: str | PathLike[str], where: str, size: int = 0) -> None:
    """Raise an error unless so many bytes can be written to a folder, which need not exist; nothing is left there."""
    try:
        place = next(each for each in (Path(folder).resolve() / "file").parents if each.exists())
        tempfile.TemporaryFile(dir=place).close()  # permissions alone do not tell
        if (free := shutil.disk_usage(place).free) <= size:
            raise OSError(f"{free:,} bytes are free on its disk, and up to {size:,} are needed")
    except (OSError, ValueError, RuntimeError) as error:  # also of a name with a zero byte, and of links in a circle
        raise SparsityError(f"{where} is not a folder that can be written: {error}") from None
