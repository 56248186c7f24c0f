"""`squash_mask` of a sparsifier: zeros are written and masks removed on all tensors, or nothing is removed."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from .. import distributed, masking
from .config import TensorGroup


def squash(
    model: nn.Module, groups: Sequence[TensorGroup], modules: Sequence[nn.Module], kept: Sequence[Mapping[str, Any]]
) -> None:
    """Write zeros into the parameters of a model and remove its masks.

    Whatever can be checked is checked before anything changes. If an operation fails after that, all masks are still
    registered, so that the model is the same and the call can be repeated; weights that are masked may be zero by then.

    Args:
        model: the prepared model, or a deep copy of it.
        groups: of all tensors.
        modules: for each group the module in the model.
        kept: for each group what its module's `sparse_params` will be; nothing is set where it is empty.

    Raises:
        SparsityError: values that cannot be written to, a mask that another parametrization cannot express, or a model
            that `fully_shard` wrapped only as a part of another one.
    """
    places = [(g["tensor_fqn"], g["module_fqn"], module) for module, g in zip(modules, groups, strict=True)]
    distributed.refuse_wrapped_outside(model, places)
    tensors = [(module, g["tensor_name"]) for module, g in zip(modules, groups, strict=True)]
    for (module, name), group in zip(tensors, groups, strict=True):
        masking.refuse_unwritable(module, name, group["tensor_fqn"])
    records = distributed.fsdp_records(model)
    masks = [masking.find_mask(*tensor) for tensor in tensors]
    parameters = [masking.parameters_under(*tensor) for tensor in tensors]
    rebuilt = [masking.rebuilt_originals(*tensor) for tensor in tensors]
    with masking.removed([*tensors, *masking.other_names(model, tensors)]):
        for own, mask, values in zip(parameters, masks, rebuilt, strict=True):
            assert mask is not None
            masking.write_zeros(own, mask.mask, values)
    for (module, name), params in zip(tensors, kept, strict=True):
        if id(module._parameters.get(name)) in records:
            distributed.move_record(records[id(module._parameters[name])], module, name)
        if params:
            module.sparse_params = params  # type: ignore[assignment]
