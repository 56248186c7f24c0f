"""When compiled loops are used: at once where their machine code is on disk, else as soon as compiling them pays.

Compiling takes up to a minute for each `Kind` of update. The plain path chooses the same masks meanwhile. The
environment variable SPARSEKIT_AO_NUMBA has three values: "auto" (this rule), "always" (compile when first needed) and
"off".
"""

import logging
import os
from collections import Counter
from threading import Lock
from typing import NamedTuple

import numpy as np
import torch

from ...errors import SparsityError
from ..work import elements_of_step
from .window import INTS, Window

LARGE = (
    1 << 28
)  # elements of a step, for each thread, from which on it may wait for the compiler: about a second's work
PAYS = 1 << 34  # elements, for each thread, that the plain path has chosen in such steps before: about a minute's work
SWITCH, MODES = "SPARSEKIT_AO_NUMBA", ("auto", "always", "off")
log = logging.getLogger("sparsekit_ao")


class Kind(NamedTuple):
    """What machine code depends on: the method, and the bytes of elements of the weight and of the mask it is under."""

    method: str
    value_bytes: int
    under_bytes: int


_ready: set[Kind] = set()  # machine code is loaded
_absent: set[Kind] = set()  # there was none on disk
_chosen: Counter[Kind] = Counter()  # elements that the plain path has chosen in large steps
_compiling = Lock()


def mode() -> str:
    """The value of SPARSEKIT_AO_NUMBA."""
    found = os.environ.get(SWITCH, MODES[0])
    if found not in MODES:
        raise SparsityError(f"the environment variable {SWITCH} must be one of {', '.join(MODES)}, got {found!r}")
    return found


def pays(kind: Kind, elements: int) -> bool:
    """Whether the compiled loops should choose these elements: they are on disk, or compiling them pays by now."""
    if kind in _ready or mode() == "always" or _is_on_disk(kind):
        return True
    threads = torch.get_num_threads()
    if max(elements, elements_of_step.get()) < LARGE * threads:
        return False
    if _chosen[kind] >= PAYS * threads:
        return True
    _chosen[kind] += elements
    return False


def make_ready(kind: Kind) -> None:
    """Load the machine code of a kind, or compile it, which is logged."""
    if kind in _ready:
        return
    with _compiling:
        if kind not in _ready and not _is_on_disk(kind):
            log.warning(
                "compiling the selection of masks (%s, %d-byte weights) with numba: up to a minute, once if the "
                "machine code can be saved to disk. %s=off in the environment prevents it.",
                *kind[:2],
                SWITCH,
            )
            _call_without_work(kind)
        _ready.add(kind)


def _is_on_disk(kind: Kind) -> bool:
    """Whether the machine code of a kind is loaded, or was on disk when this process first looked; loads it."""
    from .cache import NotCompiled, only_loaded

    if kind in _absent:
        return False
    try:
        with only_loaded():
            _call_without_work(kind)
    except NotCompiled:
        _absent.add(kind)
        return False
    _ready.add(kind)
    return True


def _call_without_work(kind: Kind) -> None:
    """Call the functions of a method with arguments of the types that they will get, and nothing to do."""
    from .lanes import select_side_by_side
    from .scopes import choose, emit_mask, place, sample, select_by_one

    one, step = np.ones(1, np.int64), np.ones((3, 1), np.int64)
    keys, flags = np.zeros(1, np.int32), np.zeros(1, np.uint8)
    values, under = (np.zeros(1, INTS[n]) for n in (kind.value_bytes, kind.under_bytes))
    elements = np.zeros((2, 1), np.int64)
    window = Window(values, flags, under, step, step, elements, 1, one, 2, 0, False, False, False, flags)
    if kind.method == "lanes":
        select_side_by_side(window, one, 1, 1, 1, 0, 0)
    elif kind.method == "rows":
        select_by_one(window, one, 0, 0)
    else:
        sample(window, 0, one[:0], keys[:0])
        choose(keys, 1, flags)
        emit_mask(window, 0, 0, 0, 0, 0, keys, keys)
        place(window, 0, 0, keys[:0], flags)
