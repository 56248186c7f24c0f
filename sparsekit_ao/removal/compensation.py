"""With data, layers that read removed units make up for them, and blocks are trained to match the dense ones."""

import copy
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from .. import masking
from ..calibration import Recorder
from ..models.names import owner_of
from ..oneshot.chain import CalibrationData
from ..oneshot.dry import estimated_walk, seconds_of
from ..oneshot.solving import LayerRow, Layers, may_change
from ..oneshot.teacher import Teacher
from ..oneshot.walk import Walk, checkpoint_of
from .arguments import ShrinkCall
from .compaction import verify_removal
from .plan import Plan, active, removals_of
from .removal_report import ShrinkReport, text_of_zeros
from .remove import Removal, kept_elements, masked_copy, plain_tensor
from .verify import count_flops

_VERIFIED = 8  # forward passes on the example inputs by which results are compared, about


def compensate_weights(call: ShrinkCall, plans: Sequence[Plan]) -> tuple[nn.Module, ShrinkReport]:
    """Return the smaller model, whose weights make up for the removed units, and its report."""
    removals = removals_of(plans)
    better, rows = _best_weights(call.model, removals, call.data)
    reference = call.reference_of(masked_copy(better, removals), dense=better)
    small, report = verify_removal(reference, removals, call.fields, by_caller=True)
    return small, replace(report, compensation=tuple(rows))


@torch.no_grad()
def estimate_call(
    call: ShrinkCall, plans: Sequence[Plan], report: ShrinkReport, trials: float, scoring: float
) -> tuple[float, int]:
    """Return the seconds and bytes that the call takes, from what trials and scoring took in a dry run of it."""
    full = min(seconds_of(lambda: count_flops(call.model, call.example_inputs)) for _ in range(2))
    seconds = trials + scoring * call.all_data.one_batch()[1] + _VERIFIED * full
    memory = 2 * report.after.bytes  # masked and smaller copies, whose large weights are computed or shared
    if call.batches is not None and active(plans) and (call.compensate or call.recover):
        _, layers, walk = _walk_of_readers(call.model, removals_of(active(plans)), call.data)
        fitting, of_walk = estimated_walk(layers, walk, call.all_data, call.passes)
        seconds, memory = seconds + fitting, memory + of_walk
    return seconds, memory


@torch.no_grad()
def _best_weights(
    model: nn.Module, removals: Sequence[Removal], data: CalibrationData
) -> tuple[nn.Module, list[LayerRow]]:
    """Return a copy whose weights that read removed units are the best ones without them, and their output errors."""
    copied, layers, walk = _walk_of_readers(model, removals, data)
    return copied, walk.run("shrink", layers)[0] if walk.reached else []


def _walk_of_readers(
    model: nn.Module, removals: Sequence[Removal], data: CalibrationData
) -> tuple[nn.Module, Layers, Walk]:
    """Return a copy of a model, its layers that read removed units with their masks, and the walk over these.

    For the inputs X that a layer has with all units of the layers before it, ||X V^T - X W^T||^2 is minimized over the
    weights V that are zero where W is, and where they multiply a removed unit. All other parameters are shared with the
    model, which must have no other parametrizations than masks.
    """
    names = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    kept = dict[str, Tensor]()  # {tensor: which of its elements belong to kept units}
    for removal, member in ((r, m) for r in removals if not r.is_empty for m in r.bound.members):
        tensor = plain_tensor(model, member.fqn)
        if tensor.ndim > 1 and names[id(tensor)] == 1 and not tensor.is_complex():
            elements = kept_elements(member, removal, tuple(tensor.shape))
            kept[member.fqn] = kept.get(member.fqn, True) & elements  # a weight may read and write one stream
    ids = {id(plain_tensor(model, name)) for name in kept}
    copied = copy.deepcopy(model, {id(p): p for p in model.parameters() if id(p) not in ids})
    owners = {name: owner_of(copied, name) for name in kept}
    recorder, masks = Recorder(copied, owners), dict[str, Tensor]()
    for name, elements in kept.items():
        adapter = recorder.adapter(name)
        if adapter is None or not adapter.has_gram or not masking.is_parameter(*owners[name]):
            continue
        matrix = adapter.matrix(elements)
        mask = adapter.weight(matrix.any(1, keepdim=True).expand_as(matrix), elements.shape)  # rows leave later
        if not bool(mask.all()):
            weight = recorder.target(name, ()).parameter
            masks[name] = mask.to(weight.device) & may_change(weight)
    groups = [dict(zip(("tensor_fqn", "module", "tensor_name"), (n, *owners[n]), strict=True)) for n in masks]
    layers = Layers(groups, (), recorder, "least_squares", None, "shrink")
    layers.given_masks = masks
    # It visits blocks in the order of the forward pass, and records all layers of one before any of them changes.
    return copied, layers, Walk(replace(data, model=copied), [layers.target(name) for name in masks])


def recover_blocks(call: ShrinkCall, small: nn.Module, report: ShrinkReport, layers: Iterable[str]) -> ShrinkReport:
    """Train the blocks that have most of these layers in place, if asked for; return the report with output errors."""
    data = replace(call.data, model=small)
    if call.recover:
        checkpoint_of(data, None, "recover")  # checks that ranks have the same model
        teacher = Teacher(call.whole, data, passes=call.passes)
        walk = Walk(data, (), layers=[small.get_submodule(name) for name in layers])
        _, rows = walk.run("recover", None, teacher)
        report = replace(report, recovery=teacher.finish(rows))
    dense_output = replace(data, model=call.model).first_output()
    return replace(report, error_to_dense=data.error_to(dense_output), zeros=text_of_zeros(call.whole, small))
