"""The radix select of long rows, launch by launch, and the memory that it works in."""

import torch
from torch import Tensor

from .forms import run
from .narrow import bracket_kernel, narrow_kernel, sample_kernel
from .passes import histogram_kernel, mark_kernel, tie_kernel
from .ready import Rows
from .wide import BINS, DIGIT, SPAN_FIELDS, STATE_FIELDS

__all__ = ["select_wide"]


def select_wide(rows: Rows, scores: Tensor, kept: Tensor) -> None:
    """Sample, bracket and narrow where rows are long; then radix passes, ties and marks.

    Args:
        rows: whose launches share the workspace, because an update may have parts in several.
        scores, kept: stored scores and decisions, for batches that work on those.
    """
    family, launches, device = rows.family, rows.launches, scores.device
    form, length = launches[0].form, launches[0].length
    passes = -(-form.bits // DIGIT.value)
    room = family.spans * length * (form.tile // 8) if form.narrow else 1
    kind = torch.int64 if family.deep else torch.int32
    state = torch.zeros(family.rows, STATE_FIELDS.value, dtype=torch.int64, device=device)
    counts = torch.zeros(family.rows, passes, BINS.value, dtype=kind, device=device)
    spans = torch.empty(family.spans, SPAN_FIELDS.value, dtype=torch.int32, device=device)
    inside = torch.empty(room, dtype=torch.uint32, device=device)
    memory = (scores, kept, state, spans, inside)
    if form.narrow:
        _bracket(rows, scores, kept, state)
        for launch in launches:
            launch.run(narrow_kernel, *memory, length)
    for at in range(passes):
        for launch in launches:
            launch.run(histogram_kernel, *memory, counts, length, PASS=at)
    for launch in launches:
        launch.run(tie_kernel, *memory, counts, length)
    for launch in launches:
        launch.run(mark_kernel, *memory[:4], length)


def _bracket(rows: Rows, scores: Tensor, kept: Tensor, state: Tensor) -> None:
    """Bracket each row's threshold from a sample."""
    family = rows.family
    samples = torch.empty(family.rows, family.samples, dtype=torch.uint32, device=scores.device)
    for x in rows.launches:
        arguments = (x.row_starts, x.parts, x.members, scores, kept, samples)
        run(sample_kernel, x.rows, *arguments, form=x.form, CAPACITY=family.samples, PARTS=x.count)
    for x in rows.launches:
        constants = {"CAPACITY": family.samples, "BITS": x.form.bits, "PARTS": x.count}
        run(bracket_kernel, x.rows, x.row_starts, x.parts, state, samples, form=x.form, **constants)
