"""The weights of a model, one `Layer` each with its values as the forward pass uses them, and the choice among them.

Works on masked and on squashed models; nothing is changed.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.ao.pruning import FakeSparsity
from torch.nn.utils import parametrize

from ..distributed import is_sharded
from ..errors import SparsityError, checked_model
from ..masking import parametrized_names, used_weight
from ..sparsifiers.names import matcher, parameter_of, plain_name
from .encoding import memory_of

DENSE = 0.99  # a weight of a larger density is called dense
ZEROS = 0.1  # a weight without a mask counts as pruned from this fraction of zeros on

_SHOWN = 10  # lines of an error

Reasons = Callable[["Layer"], list[str]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Layer:
    """One weight of a model.

    Attributes:
        name: of the module, as in `model.named_modules()`.
        module: that holds the weight.
        tensor_name: of the weight in the module.
        masked: whether it has a mask, this library's or torch.ao's, that is, was not squashed yet.
        names: every name of the weight in the model's state dict after `squash_mask`, the first one first; several if
            it is tied (one parameter, or several in the same memory), or its module is used in several places.
    """

    name: str
    module: nn.Module
    tensor_name: str
    masked: bool
    names: tuple[str, ...]

    @property
    def weight(self) -> Tensor:
        """The values that the forward pass uses: masked, without gradient; computed anew each time if parametrized."""
        return used_weight(self.module, self.tensor_name)

    @property
    def kind(self) -> str:
        """The class of the module."""
        return type(self.module).__name__.removeprefix("Parametrized")

    @property
    def fqn(self) -> str:
        """The weight's (first) name in the model."""
        return self.names[0]

    @property
    def kept(self) -> Tensor:
        """Bool, of the weight's shape: values that are not zero. nan is not zero, -0.0 is."""
        weight = self.weight
        is_float8 = weight.is_floating_point() and weight.itemsize == 1  # without comparisons on the CPU
        return (weight.float() if is_float8 else weight) != 0

    @property
    def density(self) -> float:
        """The fraction of values that are not zero; 1 for an empty weight."""
        kept = self.kept
        return int(kept.count_nonzero()) / kept.numel() if kept.numel() else 1.0

    def loaded(self) -> "Layer":
        """The same layer with a weight that is computed once, for several questions about unchanged values."""
        return _Loaded(**{field.name: getattr(self, field.name) for field in fields(self)})


class _Loaded(Layer):
    """A `Layer` that holds its weight, and which values are kept."""

    @cached_property
    def weight(self) -> Tensor:
        return super().weight

    @cached_property
    def kept(self) -> Tensor:
        return super().kept

    @cached_property
    def density(self) -> float:
        return super().density


def layers_of(model: nn.Module) -> list[Layer]:
    """Every parameter of two or more dimensions, and every masked one, in the order of the model's modules.

    A parameter that several modules share is listed once, with all its names.

    Raises:
        SparsityError: a weight has no values yet, as in lazy modules or on the meta device; or it is sharded,
            quantized, or sparse already.
    """
    found: dict[Hashable, Layer] = {}
    for path, module in checked_model(model, "export").named_modules(remove_duplicate=False):
        if isinstance(module, parametrize.ParametrizationList) or ".parametrizations." in f".{path}.":
            continue
        own = [n for n, p in module._parameters.items() if p is not None]
        for name in [*own, *parametrized_names(module)]:
            fqn, parameter = f"{plain_name(path)}.{name}".removeprefix("."), parameter_of(module, name)
            _refuse_special(fqn, parameter)
            masked = is_masked(module, name)
            if masked or used_weight(module, name).ndim > 1:
                layer = Layer(name=path, module=module, tensor_name=name, masked=masked, names=())
                key = memory_of(parameter) or id(parameter)
                first = found.setdefault(key, layer)
                found[key] = replace(first, names=(*first.names, fqn))
    return list(found.values())


def is_masked(module: nn.Module, tensor_name: str) -> bool:
    """Whether a tensor has a mask, of this library or of torch.ao's own sparsifiers."""
    if not parametrize.is_parametrized(module, tensor_name):
        return False
    return any(isinstance(p, FakeSparsity) for p in module.parametrizations[tensor_name])  # type: ignore[index]


def _refuse_special(fqn: str, parameter: Tensor) -> None:
    if isinstance(parameter, nn.parameter.UninitializedParameter) or parameter.is_meta:
        raise SparsityError(f"{fqn} has no values yet: run a lazy module once, or load a checkpoint first")
    if is_sharded(parameter):
        raise SparsityError(f"{fqn} is sharded over ranks; export a model that holds whole weights")
    if type(parameter) not in (Tensor, nn.Parameter) or parameter.layout != torch.strided:
        kind = type(parameter).__name__ if parameter.layout == torch.strided else str(parameter.layout)
        raise SparsityError(f"{fqn} is a {kind}, and only plain weights can be exported; export before converting them")


def choose_layers(model: nn.Module, tensors: Sequence[str] | None, target: str) -> tuple[list[Layer], dict[str, str]]:
    """The layers that are to be converted, and {tensor: why} of all others.

    Args:
        model: masked or squashed.
        tensors: names, globs or `re:` expressions. None chooses every masked weight; in a model without masks, every
            weight of which at least a tenth (`ZEROS`) is zero.
        target: first word of error messages.

    Raises:
        SparsityError: an entry of `tensors` names no weight, or nothing is chosen.
    """
    layers = layers_of(model)
    if tensors is None:
        any_masked = any(layer.masked for layer in layers)
        chosen = [a for a in layers if (a.masked if any_masked else 1 - a.density >= ZEROS)]
        why = "not masked" if any_masked else f"less than {ZEROS:.0%} of it is zero"
    else:
        chosen, why = _named(layers, [tensors] if isinstance(tensors, str) else tensors, target), "not in `tensors`"
    if not chosen and tensors is not None:
        raise SparsityError(f"{target}: tensors is empty; name weights, or leave it out to take the pruned ones")
    if not chosen:
        raise SparsityError(
            f"{target}: no weight is masked, and in none a tenth is zero. Prune the model first, or pass tensors=[...]"
        )
    kept = {id(a) for a in chosen}
    return chosen, {a.fqn: why for a in layers if id(a) not in kept}


def _named(layers: Sequence[Layer], rules: Sequence[str], target: str) -> list[Layer]:
    every = [name for layer in layers for name in layer.names]
    chosen: set[int] = set()
    for rule in rules:
        if not isinstance(rule, str):
            raise SparsityError(f"{target}: tensors takes names, globs or re: expressions, got {type(rule).__name__}")
        matches = matcher(rule, f"{target}: ")
        found = {id(a) for a in layers if any(map(matches, (*a.names, f"{a.name}.{a.tensor_name}")))}
        if not found:
            hint = f" The weights are {', '.join(every[:5]) or 'none'}{', ...' if len(every) > 5 else ''}."
            raise SparsityError(f"{target}: {rule!r} names no weight of the model.{hint}")
        chosen |= found
    return [layer for layer in layers if id(layer) in chosen]


def checked_layers(
    model: nn.Module, target: str, reasons: Reasons, tensors: Sequence[str] | None = None, *, squashed: bool = False
) -> tuple[list[Layer], dict[str, str]]:
    """As `choose_layers`, where the target must take each chosen layer.

    Args:
        model, tensors: as in `choose_layers`.
        target: first word of error messages.
        reasons: why the target does not take a layer; empty if it does.
        squashed: masks that are still there are an error, as they must be when weights are converted.

    Raises:
        SparsityError: with the layers that are not taken, and the reasons.
    """
    if squashed:
        refuse_masks(model, target)
    chosen, left = choose_layers(model, tensors, target)
    wrong = [f"{layer.fqn}: {text}" for layer in chosen for text in reasons(layer.loaded())]
    if wrong:
        lines = wrong[:_SHOWN] + ([f"{len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else [])
        hint = "" if tensors is not None else "\nPass tensors=[...] to convert only others."
        raise SparsityError(f"{target} does not take\n  " + "\n  ".join(lines) + hint)
    return chosen, left


def refuse_masks(model: nn.Module, target: str) -> None:
    """Raise a SparsityError if any weight still has its mask."""
    masked = next((layer.fqn for layer in layers_of(model) if layer.masked), None)
    if masked is not None:
        raise SparsityError(f"{target}: {masked} still has its mask; call sparsifier.squash_mask() first")
