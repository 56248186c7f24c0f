"""Convert 2:4 weights for torch's sparse kernels on CUDA."""

from collections.abc import Sequence

from torch import Tensor, nn, sparse
from torch.nn.utils import parametrize

from .. import masking
from ..checkpoints.conversion import Conversion
from ..errors import SparsityError
from .weights import WeightToExport, checked_layers, layers_of, semi_structured_refusals

DEVICE = "cuda"  # on which torch has 2:4 kernels


def to_2_4(model: nn.Module, tensors: Sequence[str] | None = None) -> Conversion:
    """Replace 2:4 weights of Linear layers on CUDA by `torch.sparse.to_sparse_semi_structured`, in place.

    Weights that do not fit stay dense; `left` of the report has the reasons. Converted weights have no gradient, and
    masks are removed, so call this after training. `export.check(model, "to_2_4")` checks the same on any machine.

    Args:
        model: A masked or squashed model in float16, bfloat16 or int8.
        tensors: The weights that must fit, as for `export.check`. None (default) converts all that fit.

    Raises:
        SparsityError: No weight is on CUDA, no weight fits, or one of `tensors` does not fit. The model is not changed.
            A weight that torch refuses all the same stays dense, and `left` says why.

    >>> report = to_2_4(model.cuda())  # doctest: +SKIP
    """
    layers = layers_of(model)
    if not any(layer.weight.device.type == DEVICE for layer in layers):
        raise SparsityError(
            "to_2_4: no weight of the model is on CUDA, where torch has 2:4 kernels. Call model.cuda() first; "
            "export.check(model, 'to_2_4') says on any machine which weights fit."
        )
    if tensors is None:
        others = {layer.fqn: "; ".join(reasons) for layer in layers if (reasons := _cuda_refusals(layer.once()))}
        chosen = [layer for layer in layers if layer.fqn not in others]
        if not chosen:
            first = "; ".join(f"{name}: {why}" for name, why in list(others.items())[:5])
            raise SparsityError(f"to_2_4: no weight fits. Call export.report(model) to see all of them. {first}")
    else:
        chosen, others = checked_layers(model, "to_2_4", _cuda_refusals, tensors)
    before, after, converted = 0, 0, list[str]()
    for layer in chosen:
        weight = layer.weight
        try:
            packed: Tensor = sparse.to_sparse_semi_structured(weight.contiguous())
        except RuntimeError as e:  # such as a shape that only cuSPARSELt refuses
            others[layer.fqn] = f"torch refuses it: {e}"
            continue
        if masking.find_mask(layer.module, "weight") is not None:
            masking.remove_mask(layer.module, "weight")
        elif layer.masked:  # by a FakeSparsity
            parametrize.remove_parametrizations(layer.module, "weight")
        layer.module.weight = nn.Parameter(packed, requires_grad=False)
        converted.append(layer.fqn)
        before += weight.nbytes
        after += sum(getattr(packed, name).nbytes for name in packed.__tensor_flatten__()[0])  # type: ignore[attr-defined]
    return Conversion(target="to_2_4", converted=tuple(converted), left=others, before=before, after=after)


def _cuda_refusals(layer: WeightToExport) -> list[str]:
    device = layer.weight.device.type
    return semi_structured_refusals(layer) if device == DEVICE else [f"needs a weight on CUDA, got one on {device}"]
