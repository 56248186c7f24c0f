"""Layers that read removed units make up for them: the best weights for the others, by least squares."""

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from .. import masking
from ..calibration import Recorder
from ..models.names import owner_of
from ..oneshot.chain import CalibrationData
from ..oneshot.solving import LayerRow, Layers
from ..oneshot.walk import Walk
from .remove import Removal, kept_elements, plain_tensors


@torch.no_grad()
def compensated(
    model: nn.Module, removals: Sequence[Removal], data: CalibrationData
) -> tuple[nn.Module, list[LayerRow]]:
    """Return a copy whose weights that read removed units are the best ones without them, and their output errors.

    For the inputs X that a layer has with all units of the layers before it, ||X V^T - X W^T||^2 is minimized over the
    weights V that are zero where they multiply a removed unit. All other parameters are shared with the model, which
    must have no other parametrizations than masks.
    """
    names = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    kept = dict[str, Tensor]()  # {tensor: which of its elements belong to kept units}
    for removal, member in ((r, m) for r in removals if not r.is_empty for m in r.bound.members):
        tensor = plain_tensors(model, [member.fqn])[member.fqn]
        shape = tuple(tensor.shape)
        if (
            len(shape) > 1 and names[id(tensor)] == 1 and not tensor.is_complex()
        ):  # also weights that read and write one stream
            kept[member.fqn] = kept.get(member.fqn, True) & kept_elements(member, removal, shape)
    ids = {id(tensor) for tensor in plain_tensors(model, list(kept)).values()}
    copied = copy.deepcopy(model, {id(p): p for p in model.parameters() if id(p) not in ids})
    recorder = Recorder(copied, {name: owner_of(copied, name) for name in kept})
    masks = dict[str, Tensor]()
    for name, elements in kept.items():
        adapter = recorder.adapter(name)
        if adapter is None or not adapter.has_gram or not masking.is_parameter(*owner_of(copied, name)):
            continue
        matrix = adapter.matrix(elements)
        mask = adapter.weight(matrix.any(1, keepdim=True).expand_as(matrix), elements.shape)  # rows leave later
        if not bool(mask.all()):
            masks[name] = mask.to(recorder.target(name, ()).parameter.device)
    groups = [
        {"tensor_fqn": name, "module": module, "tensor_name": tensor_name}
        for name in masks
        for module, tensor_name in [owner_of(copied, name)]
    ]
    layers = Layers(groups, (), recorder, "least_squares", None, "shrink")
    layers.given_masks = masks
    # It visits blocks in the order of the forward pass, and records all layers of one before any of them changes.
    walk = Walk(replace(data, model=copied), [layers.target(name) for name in masks])
    return copied, walk.run("shrink", layers)[0] if walk.reached else []
