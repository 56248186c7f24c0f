"""Convert 2:4 weights for torch's sparse kernels on CUDA, or pack them in a file and load them again."""

import os
import warnings
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor, nn, sparse
from torch.nn.utils import parametrize
from torch.sparse import _semi_structured_conversions as conversions

from .. import masking
from ..errors import SparsityError
from .weights import Conversion, WeightToExport, checked_layers, layers_of, memory_of, pack_refusals, same_bits

DEVICE = "cuda"  # on which torch has 2:4 kernels


def to_2_4(model: nn.Module, tensors: Sequence[str] | None = None) -> Conversion:
    """Replace 2:4 weights of Linear layers on CUDA by `torch.sparse.to_sparse_semi_structured`, in place.

    Weights that do not fit stay dense; `left` of the report has the reasons. Converted weights have no gradient, and
    masks are removed, so call this after training. `export.check(model, "pack_2_4")` checks the same on any machine.

    Args:
        model: A masked or squashed model in float16, bfloat16 or int8.
        tensors: The weights that must fit, as for `export.check`. None (default) converts all that fit.

    Raises:
        SparsityError: No weight is on CUDA, no weight fits, or one of `tensors` does not fit. The model is not changed.

    >>> report = to_2_4(model.cuda())  # doctest: +SKIP
    """
    layers = layers_of(model)
    if not any(layer.weight.device.type == DEVICE for layer in layers):
        call = "Call model.cuda() first, or export.pack_2_4, which writes a file on any machine"
        raise SparsityError(f"to_2_4: no weight of the model is on CUDA, where torch has 2:4 kernels. {call}.")
    if tensors is None:
        others = {layer.fqn: "; ".join(reasons) for layer in layers if (reasons := _cuda_refusals(layer))}
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


def pack_2_4(model: nn.Module, path: str | os.PathLike[str], tensors: Sequence[str] | None = None) -> Conversion:
    """Save a squashed 2:4 model with packed weights, in a safetensors file that `load_2_4` reads; no GPU is needed.

    The weight of a Linear (out, in) becomes `<name>.values` (out, in / 2), and `<name>.metadata` with two bits for each
    value. They take 56.25 % of the bytes of float16 and bfloat16, and 62.5 % of int8; -0.0 becomes 0. All other tensors
    of the state dict are stored as they are, tied ones once. The report has the bytes of dense tensors and file.

    Args:
        model: A squashed model in float16, bfloat16 or int8. float32 raises an error, since torch's packing does not
            restore it.
        path: The file to write; an existing file is replaced.
        tensors: The weights to pack, as for `export.check`.

    Raises:
        SparsityError: A weight cannot be packed (as `export.check` finds), or has a mask. No file is written.

    >>> import tempfile
    >>> model, again = (torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False)).half() for _ in range(2))
    >>> with torch.no_grad():
    ...     _ = model[0].weight.view(32, 16, 4)[:, :, 2:].zero_()
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     report = pack_2_4(model, file.name)
    ...     load_2_4(again, file.name)
    >>> report.converted, torch.equal(again[0].weight, model[0].weight)
    (('0.weight',), True)
    """
    from safetensors.torch import save_file

    for layer in layers_of(model):
        if layer.masked:
            raise SparsityError(f"pack_2_4: {layer.fqn} still has its mask; call sparsifier.squash_mask() first")
    chosen, others = checked_layers(model, "pack_2_4", pack_refusals, tensors)
    names = {memory_of(tensor) or name: name for name, tensor in reversed(model.state_dict().items())}  # of tied: first
    state = {name: model.state_dict()[name].detach().cpu() for name in names.values()}
    before, converted = sum(tensor.nbytes for tensor in state.values()), tuple(layer.fqn for layer in chosen)
    for name in converted:
        if name not in state:
            raise SparsityError(f"pack_2_4: {name} has another name in model.state_dict(); unwrap its module first")
        state[f"{name}.values"], state[f"{name}.metadata"] = _packed(state.pop(name))
    save_file({name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}, path)
    return Conversion(target="pack_2_4", converted=converted, left=others, before=before, after=os.path.getsize(path))


def load_2_4(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Load a file that `pack_2_4` wrote into a model of the same classes, shapes and dtypes, without masks.

    Packed weights have the same bits as before. On a GPU `to_2_4` then converts them, with a warning if torch's kernels
    refuse a weight, which stays dense.

    Raises:
        SparsityError: Names, dtypes or shapes do not fit the model, or `pack_2_4` did not write the metadata. The model
            stays unchanged.

    >>> load_2_4(model, "packed.safetensors")  # doctest: +SKIP
    """
    from safetensors.torch import load_file

    file, state = load_file(path), model.state_dict()
    dense, on_cuda, first_names = dict[str, Tensor](), list[str](), dict[Hashable, str]()
    for name, tensor in state.items():
        if tensor.is_meta:
            raise SparsityError("load_2_4: the model is on the meta device; model.to_empty(device=...) first")
        first = first_names.setdefault(memory_of(tensor) or name, name)
        if f"{name}.values" in file and f"{name}.metadata" in file:
            dense[name] = _unpacked(name, file.pop(f"{name}.values"), file.pop(f"{name}.metadata"))
            on_cuda += [name] if tensor.device.type == DEVICE else []
        elif name in file or first in dense:
            dense[name] = file.pop(name) if name in file else dense[first]
        else:
            raise SparsityError(f"{path} has no tensor {name!r}; load it into the model that was packed")
        wanted, stored = ((t.dtype, tuple(t.shape)) for t in (tensor, dense[name]))
        if wanted != stored:
            cast = "" if wanted[0] == stored[0] else f"; call model.to({stored[0]}) before"  # or .half()
            text = f"must be {wanted[0]} of shape {wanted[1]} for this model, got {stored}"
            raise SparsityError(f"{path}: {name} {text}{cast}")
        if not same_bits(dense[first], dense[name]):
            raise SparsityError(f"{path}: {first} and {name} differ, but the model ties them; untie them first")
    if file:
        raise SparsityError(f"{path} has an unknown tensor {min(file)!r}; load it into the model that was packed")
    model.load_state_dict(dense)
    left = to_2_4(model, on_cuda).left if on_cuda else {}
    for name in left.keys() & {*on_cuda}:
        warnings.warn(f"load_2_4: {name} stays dense: {left[name]}", stacklevel=2)


def _cuda_refusals(layer: WeightToExport) -> list[str]:
    device = layer.weight.device.type
    return pack_refusals(layer) if device == DEVICE else [f"needs a weight on CUDA, got one on {device}"]


def _packed(weight: Tensor) -> tuple[Tensor, Tensor]:
    return conversions.sparse_semi_structured_from_dense_cutlass(weight.masked_fill(weight == 0, 0).contiguous())


def _unpacked(name: str, values: Tensor, metadata: Tensor) -> Tensor:
    try:
        dense = conversions.sparse_semi_structured_to_dense_cutlass(values, metadata)
        if all(map(torch.equal, _packed(dense), (values, metadata))):
            return dense
    except RuntimeError:  # of other shapes or dtypes
        pass
    raise SparsityError(f"{name}: its metadata are not those of a 2:4 weight that pack_2_4 packed")
