"""Reports which patterns the zeros of a model's weights satisfy, and which functions of `export` take them."""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .. import patterns
from ..distributed import is_sharded
from ..errors import SparsityError, checked_model, folded
from ..masking import parametrized_names, used_weight
from ..models.names import is_of_transformers, matcher, parameter_of, plain_name
from ..tables import Table
from ..torch_ao import FakeSparsity

DENSE = 0.99  # a weight of a larger density is called dense
ZEROS = 0.1  # a weight without a mask counts as pruned if at least this fraction is zero
MULTIPLES = {torch.float16: (32, 64), torch.bfloat16: (32, 64), torch.int8: (16, 128)}  # (rows, columns), for CUTLASS
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

_N_M = ((1, 8), (1, 4), (2, 4), (4, 8), (8, 16))  # the first that fits implies those after it
_BLOCKS = ((32, 32), (16, 16), (8, 8), (4, 4), (1, 16), (16, 1), (1, 8), (8, 1), (1, 4), (4, 1))  # the largest first
_SAMPLE = 64  # parts of each dimension that are checked first, because most misfits show there
_SHOWN = 10  # lines of an error


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightToExport:
    """One weight of a model, which has `names` in the state dict after `squash_mask`, several if it is shared."""

    path: str
    module: nn.Module
    tensor_name: str
    masked: bool  # by a `WeightMask` or another `FakeSparsity`
    names: tuple[str, ...]
    computed: Tensor | None = field(default=None, repr=False)  # the values, where computed once for several uses

    @property
    def weight(self) -> Tensor:
        """The values that the forward pass uses: masked, without gradient; computed anew each time if parametrized."""
        return used_weight(self.module, self.tensor_name) if self.computed is None else self.computed

    def once(self) -> "WeightToExport":
        """Return the same weight with its values, for several uses of them; nothing else should hold it."""
        return replace(self, computed=self.weight)

    @property
    def fqn(self) -> str:
        """The weight's (first) name in the model."""
        return self.names[0]

    @property
    def kept(self) -> Tensor:
        """A bool tensor of the values that are not zero; nan counts as not zero, -0.0 as zero."""
        weight = self.weight
        has_no_comparison = weight.is_floating_point() and weight.itemsize == 1  # float8 on the CPU
        return (weight.float() if has_no_comparison else weight) != 0


@dataclass(frozen=True, kw_only=True)
class ExportRow:
    """A row of a `LayerReport`: the zeros of one weight and the functions that take it.

    Attributes:
        tensor: The name of the weight.
        kind: The name of its module's class.
        shape, dtype: Its shape, and its dtype as text without "torch.".
        masked: Whether its mask is still there.
        density: The fraction that is not zero; 1 for an empty weight.
        patterns: The structures that its zeros satisfy: "2:4", "1x4 blocks", "rows", "columns", "unstructured"; () if
            it is dense.
        targets: {function of `export`: reasons why it does not take the weight}, without reasons if it does.

    >>> row = sparsekit_ao.export.report(torch.nn.Sequential(torch.nn.Linear(8, 4)))[0]
    >>> row.tensor, row.kind, row.density, row.patterns
    ('0.weight', 'Linear', 1.0, ())
    """

    tensor: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    masked: bool
    density: float
    patterns: tuple[str, ...]
    targets: Mapping[str, tuple[str, ...]]

    @property
    def taken_by(self) -> tuple[str, ...]:
        """The functions of `export` that take the weight."""
        return tuple(name for name, why in self.targets.items() if not why)


@dataclass(frozen=True, kw_only=True)
class LayerReport(Table[ExportRow]):
    """The weights of a model, with a row for each; prints as a table, and `plot.plot_layers` draws it.

    >>> report = sparsekit_ao.export.report(torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2)))
    >>> [row.tensor for row in report]
    ['0.weight', '1.weight']
    """

    rows: tuple[ExportRow, ...]
    bars = ("density",)

    def cells(self, folds: bool = False) -> list[tuple[str, ...]]:
        """Return the head and the rows as text; with `folds`, equal rows share a line."""
        lines: list[tuple[str, ...]] = [("tensor", "module", "shape", "dtype", "", "density", "patterns", "taken by")]
        for r in self.rows:
            names = (", ".join(names) or "-" for names in (r.patterns, r.taken_by))
            state = "masked" if r.masked else ""
            lines.append((r.tensor, r.kind, "x".join(map(str, r.shape)), r.dtype, state, f"{r.density:.4f}", *names))
        return folded(lines) if folds else lines

    def below(self) -> list[str]:
        """Say how many weights each function takes, and why not the others."""
        pruned, texts = [row for row in self.rows if row.patterns], []
        for target in REFUSALS if pruned else ():
            refused = [row for row in pruned if row.targets[target]]
            first = f"; not {refused[0].tensor}: {refused[0].targets[target][0]}" if refused else ""
            texts.append(f"{target} takes {len(pruned) - len(refused)} of {len(pruned)} pruned weights{first}")
        return texts


def report(model: nn.Module) -> LayerReport:
    """Report which patterns the weights of a masked or squashed model satisfy, and which functions take them.

    All weights of two or more dimensions are listed, tied ones once. The report prints as a table, and
    `sparsekit_ao.plot.plot_layers(report)` draws density and patterns.

    >>> from sparsekit_ao import ScopeSparsifier, export, patterns
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 4)).half()
    >>> sparsifier = ScopeSparsifier(patterns.n_m(2, 4))
    >>> sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}])
    >>> sparsifier.step()
    >>> [(row.tensor, row.density, row.patterns, "to_2_4" in row.taken_by) for row in export.report(model)]
    [('0.weight', 0.5, ('2:4',), True), ('1.weight', 1.0, (), False)]
    """
    rows = [
        ExportRow(
            tensor=layer.fqn,
            kind=_kind(layer.module),
            shape=tuple(kept.shape),
            dtype=_short(layer.weight.dtype),
            masked=layer.masked,
            density=_density(kept),
            patterns=tuple(_patterns_of(layer, kept)),
            targets={target: tuple(refusals(layer)) for target, refusals in REFUSALS.items()},
        )
        for layer, kept in ((layer, layer.kept) for layer in map(WeightToExport.once, layers_of(model)))
    ]
    return LayerReport(rows=tuple(rows))


def check(model: nn.Module, target: str, tensors: Sequence[str] | None = None) -> list[WeightToExport]:
    """Check that a function of `export` takes all weights of a model, and return them.

    Args:
        model: A masked or squashed model, which is not changed.
        target: The name of the function: "quantize" or "to_2_4".
        tensors: Names, globs or `re:` expressions of weights. None (default) is every masked weight, or in a model
            without masks every weight with at least a tenth of zeros.

    Raises:
        SparsityError: A weight is not taken (the error names the tensor, the rule and the first place that breaks it),
            there is no such target or tensor, or there is nothing to check.

    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32)).half()
    >>> sparsifier = sparsekit_ao.ScopeSparsifier(sparsekit_ao.patterns.n_m(2, 4))
    >>> sparsifier.prepare(model)
    >>> sparsifier.step()
    >>> [layer.fqn for layer in sparsekit_ao.export.check(model, "to_2_4")]
    ['0.weight']
    """
    if target not in REFUSALS:
        raise SparsityError(f"unknown target {target!r}; known: {', '.join(REFUSALS)}")
    return checked_layers(model, target, REFUSALS[target], tensors)[0]


def layers_of(model: nn.Module) -> list[WeightToExport]:
    """Return every parameter of two or more dimensions, and every masked one, in order; a shared one once."""
    layers: dict[Hashable, WeightToExport] = {}
    for path, module in checked_model(model, "export").named_modules(remove_duplicate=False):
        if isinstance(module, parametrize.ParametrizationList) or ".parametrizations." in f".{path}.":
            continue
        plain = [name for name, p in module._parameters.items() if p is not None]
        for name in [*plain, *parametrized_names(module)]:
            fqn, parameter = f"{plain_name(path)}.{name}".removeprefix("."), parameter_of(module, name)
            if isinstance(parameter, nn.parameter.UninitializedParameter) or parameter.is_meta:
                raise SparsityError(f"{fqn} has no values yet: run a lazy module once, or load a checkpoint first")
            if is_sharded(parameter):
                raise SparsityError(f"{fqn} is sharded over ranks; export a model that holds whole weights")
            if type(parameter) not in (Tensor, nn.Parameter) or parameter.layout != torch.strided:
                kind = type(parameter).__name__ if parameter.layout == torch.strided else parameter.layout
                raise SparsityError(
                    f"{fqn} is a {kind}, and only plain weights can be exported; export before converting them"
                )
            masked = any(isinstance(p, FakeSparsity) for p in _parametrizations(module, name))
            if masked or used_weight(module, name).ndim > 1:
                layer = WeightToExport(path=path, module=module, tensor_name=name, masked=masked, names=())
                key = memory_of(parameter) or id(parameter)
                first = layers.setdefault(key, layer)
                layers[key] = replace(first, names=(*first.names, fqn))
    return list(layers.values())


def memory_of(tensor: Tensor) -> Hashable | None:
    """Return a key that is equal for tensors of the same values in the same memory; None for an empty tensor."""
    if not tensor.numel():
        return None
    kind = (tensor.device, tensor.dtype, tensor.is_conj(), tensor.is_neg())
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), *kind)


def checked_layers(
    model: nn.Module, target: str, refusals: Callable[[WeightToExport], list[str]], tensors: Sequence[str] | None
) -> tuple[list[WeightToExport], dict[str, str]]:
    """Return the layers to convert and {tensor: why} of others; raise if `refusals` returns why one is not taken."""
    layers = layers_of(model)
    if tensors is None:
        any_masked = any(layer.masked for layer in layers)
        chosen = [a for a in layers if (a.masked if any_masked else 1 - _density(a.kept) >= ZEROS)]
        why = "not masked" if any_masked else f"less than {ZEROS:.0%} of it is zero"
    else:
        why, chosen = "not in `tensors`", []
        for rule in [tensors] if isinstance(tensors, str) else tensors:
            if not isinstance(rule, str):
                kind = type(rule).__name__
                raise SparsityError(f"{target}: tensors takes names, globs or re: expressions, got {kind}")
            matches = matcher(rule, f"{target}: ")
            named = [a for a in layers if any(map(matches, (*a.names, f"{a.path}.{a.tensor_name}")))]
            if not named:
                names = [name for layer in layers for name in layer.names]
                known = f"{', '.join(names[:5]) or 'none'}{', ...' if len(names) > 5 else ''}"
                raise SparsityError(f"{target}: {rule!r} names no weight of the model. The weights are {known}.")
            chosen += named
        chosen = [layer for layer in layers if layer in chosen]
    if not chosen:
        empty = "tensors is empty; name weights, or leave it out to take the pruned ones"
        unpruned = "no weight is masked, and none has a tenth of zeros. Prune the model first, or pass tensors=[...]"
        if target == "quantize":
            unpruned += ". Smaller models have no zeros to keep: quantize them by torchao.quantize_"
        raise SparsityError(f"{target}: {unpruned if tensors is None else empty}")
    refused = [f"{layer.fqn}: {text}" for layer in chosen for text in refusals(layer.once())]
    if refused:
        lines = refused[:_SHOWN] + ([f"{len(refused) - _SHOWN} more"] if len(refused) > _SHOWN else [])
        hint = "" if tensors is not None else "\nPass tensors=[...] to convert only others."
        raise SparsityError(f"{target} does not take\n  " + "\n  ".join(lines) + hint)
    return chosen, {layer.fqn: why for layer in layers if layer not in chosen}


def _parametrizations(module: nn.Module, name: str) -> list[nn.Module]:
    return list(module.parametrizations[name]) if parametrize.is_parametrized(module, name) else []  # type: ignore


def linear_refusals(layer: WeightToExport, dtypes: Iterable[torch.dtype] = FLOATS) -> list[str]:
    """Return why a layer is not a Linear whose weight is finite and not shared, so that it can be replaced."""
    module, weight, kind = layer.module, layer.weight, _kind(layer.module)
    if not isinstance(module, nn.Linear) or layer.tensor_name != "weight":
        hint = "; Conv1D stores its weight transposed" if is_of_transformers(module, "Conv1D") else ""
        return [f"needs the weight of Linear, got {layer.tensor_name} of {kind}{hint}"]
    if weight.dtype not in dtypes:
        return [f"needs {' or '.join(map(_short, dtypes))}, got {_short(weight.dtype)}"]
    refusals = []
    others = [type(p).__name__ for p in _parametrizations(module, "weight") if not isinstance(p, FakeSparsity)]
    if others:
        call = "torch.nn.utils.parametrize.remove_parametrizations"
        refusals.append(f"is computed by {', '.join(others)}; call {call} first")
    if shared := ", ".join(layer.names[1:]):
        refusals.append(f"needs a weight of its own, but it is shared with {shared}; untie them first")
    if (at := _first_index(~weight.isfinite())) is not None:
        refusals.append(f"needs finite values, got {float(weight[at])} at {list(at)}")
    return refusals


def two_four_refusals(layer: WeightToExport) -> list[str]:
    """Return why a matrix is not 2:4 along its second dimension."""
    kept = layer.kept
    if kept.shape[1] % 4:
        return [f"needs dimension 1 in groups of 4, got shape {tuple(kept.shape)}"]
    counts = kept.unflatten(1, (-1, 4)).sum(2)
    if (at := _first_index(counts > 2)) is None:
        return []
    place = f"[{at[0]}, {4 * at[1]}:{4 * at[1] + 4}]"
    text = f"needs at most 2 nonzeros in every 4 along dimension 1, got {int(counts[at])} at {place}"
    if _density(kept) > DENSE:
        return [f"{text}: the weight is dense"]
    is_turned = kept.shape[0] % 4 == 0 and bool((kept.unflatten(0, (-1, 4)).sum(1) <= 2).all())
    return [f"{text}; it is 2:4 along dimension 0" if is_turned else text]


def semi_structured_refusals(layer: WeightToExport) -> list[str]:
    """Return why torch's 2:4 tensors cannot hold a weight, whatever its device is."""
    refusals = linear_refusals(layer, MULTIPLES)
    if not isinstance(layer.module, nn.Linear) or layer.weight.dtype not in MULTIPLES:
        return refusals
    for k, (n, size) in enumerate(zip(layer.weight.shape, MULTIPLES[layer.weight.dtype], strict=True)):
        refusals += [f"needs dimension {k} to be a multiple of {size}, got {n}"] if n == 0 or n % size else []
    return refusals + two_four_refusals(layer)


REFUSALS: Mapping[str, Callable[[WeightToExport], list[str]]] = {
    "to_2_4": semi_structured_refusals,
    "quantize": linear_refusals,
}


def _first_index(wrong: Tensor) -> tuple[int, ...] | None:
    """Return the index of the first True, or None."""
    return tuple(wrong.nonzero()[0].tolist()) if bool(wrong.any()) else None


def _density(kept: Tensor) -> float:
    return int(kept.count_nonzero()) / kept.numel() if kept.numel() else 1.0


def _kind(module: nn.Module) -> str:
    return type(module).__name__.removeprefix("Parametrized")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _patterns_of(layer: WeightToExport, kept: Tensor) -> list[str]:
    """Return rows, columns and the strictest n:m (along inputs) that a weight satisfies, else the largest blocks."""
    if _density(kept) >= DENSE:  # also an empty weight
        return []
    names = [p.kind for p in (patterns.rows(), patterns.columns()) if _satisfies(layer, kept, p)]
    names += [f"{n}:{m}" for n, m in _N_M if _satisfies(layer, kept, patterns.n_m(n, m), most=n)][:1]
    blocks = (f"{a}x{b} blocks" for a, b in _BLOCKS if _satisfies(layer, kept, patterns.blocks(a, b)))
    return names or [next(blocks, "unstructured")]


def _satisfies(layer: WeightToExport, kept: Tensor, pattern: patterns.Pattern, most: int | None = None) -> bool:
    """Return whether scopes keep at most `most` values, or without `most` whether blocks keep all values or none."""
    try:
        shapes = pattern.resolve(layer.module, layer.tensor_name, kept)
    except SparsityError:  # the pattern does not fit the weight
        return False
    shape = shapes.get("block_shape" if most is None else "scope_shape") or (1,) * kept.ndim
    sizes = [n if size == -1 else size for n, size in zip(kept.shape, shape, strict=True)]
    if math.prod(sizes) <= 1 or any(n % size for n, size in zip(kept.shape, sizes, strict=True)):
        return False
    split = kept.reshape([k for n, size in zip(kept.shape, sizes, strict=True) for k in (n // size, size)])
    for counts in (split[tuple(slice(None) if k % 2 else slice(_SAMPLE) for k in range(split.ndim))], split):
        for dim in range(split.ndim - 1, 0, -2):  # one after the other, which is faster than all at once
            counts = counts.sum(dim, dtype=torch.int32)
        if bool((counts > most).any() if most else ((counts > 0) & (counts < math.prod(sizes))).any()):
            return False
    return True
