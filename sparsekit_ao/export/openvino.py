"""`openvino`: pruned Linear layers as int8 layers of OpenVINO, which decompresses sparse weights on CPUs with AMX.

OpenVINO stores the nonzeros of such a weight and expands them on the way into the caches, so it reads less memory. It
does so from a fraction of zeros on (its property CPU_SPARSE_WEIGHTS_DECOMPRESSION_RATE), of any pattern, in layers of
which both dimensions are multiples of 64. On other CPUs the same int8 model runs dense.
"""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..calibration import call
from ..coupling.nested_tensors import arguments
from ..errors import SparsityError
from ..removal.results import Conversion
from ..removal.verify import Outputs, largest_difference
from . import rules
from .batches import calls_of, copied, listed, refuse_uncalled
from .layers import Layer, checked_layers
from .ranges import Range, Steps, int8_rows, record_ranges

RATE = "CPU_SPARSE_WEIGHTS_DECOMPRESSION_RATE"
_OFF = 1.0
MULTIPLE = 64
_AND = ", "
_LEAST_ZEROS = 1 / 8  # of int8 weights: each element takes a bit besides


def reasons(layer: Layer) -> list[str]:
    """Why OpenVINO cannot run a weight sparse; empty if it can on a CPU with AMX."""
    found = rules.is_a(layer, nn.Linear) or rules.has_dtype(layer, [torch.float32])
    return found or [
        *rules.is_not_parametrized(layer),
        *rules.is_not_shared(layer),
        *rules.computes_as(layer, nn.Linear),
        *rules.has_multiples(layer, MULTIPLE, MULTIPLE),
        *(rules.is_finite(layer) or rules.has_zeros(layer, _LEAST_ZEROS)),
    ]


@dataclass(frozen=True, kw_only=True)
class OpenVinoConversion(Conversion):
    """A `Conversion` to OpenVINO.

    Attributes:
        rate: the fraction of zeros from which a weight is run sparse.
        kernels: {tensor: OpenVINO's primitiveType, or several of them}; "sparse" in each where the weight runs sparse.
    """

    rate: float
    kernels: Mapping[str, str] = field(default_factory=dict)

    @property
    def ran_sparse(self) -> tuple[str, ...]:
        """Names of the tensors that run sparse on this CPU."""
        found = {name: kernels.split(_AND) for name, kernels in self.kernels.items()}
        return tuple(name for name, kernels in found.items() if all("sparse" in kernel for kernel in kernels))

    def __str__(self) -> str:
        lines = [f"{name} runs as {kernel}" for name, kernel in self.kernels.items()]
        return "\n".join(
            [super().__str__(), f"run sparse: {len(self.ran_sparse)}, from {self.rate:.0%} zeros on", *lines]
        )


class OpenVinoModel:
    """A compiled OpenVINO model that takes and returns torch tensors.

    Attributes:
        graph: the `openvino.Model`, which `openvino.save_model` writes.
        compiled: the `openvino.CompiledModel`.
    """

    def __init__(self, graph: Any, config: Mapping[str, Any]) -> None:
        import openvino

        self.graph = graph
        try:
            self.compiled = openvino.Core().compile_model(graph, "CPU", dict(config))
        except RuntimeError as e:
            raise SparsityError(f"openvino: it cannot compile the model with {dict(config)}: {e}") from e

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> tuple[Tensor, ...]:
        """The outputs in order; arguments as the torch model takes them."""
        given: dict[Any, Tensor] = {**dict(enumerate(args)), **kwargs}
        found = self.compiled({key: tensor.detach().contiguous().numpy() for key, tensor in given.items()})
        return tuple(torch.from_numpy(found[port].copy()) for port in self.compiled.outputs)

    def kernels(self, names: Iterable[str]) -> dict[str, str]:
        """{name of a Linear: primitiveType of its matrix products}; it is chosen when the model first runs."""
        found: dict[str, set[str]] = {}
        for op in self.compiled.get_runtime_model().get_ops():
            info = op.get_rt_info()
            if str(info["layerType"].astype(str)) in ("FullyConnected", "MatMul"):
                origin, kernel = (info[key].astype(str) for key in ("originalLayersNames", "primitiveType"))
                for name in names:
                    if (f"__module.{name}/" if name else "") + "aten::linear/" in origin:
                        found.setdefault(name, set()).add(kernel)
        return {name: _AND.join(sorted(kernels)) for name, kernels in found.items()}


def openvino(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    tensors: Sequence[str] | None = None,
    rate: float | None = None,
    need_sparse: bool = False,
    config: Mapping[str, Any] | None = None,
) -> tuple[OpenVinoModel, OpenVinoConversion]:
    """Convert a model to OpenVINO, with the pruned Linear layers in int8, which run sparse on CPUs with AMX.

    Weights become int8 with one scale for each output, activations of these layers 8-bit integers with one scale for
    each layer, whose range is the one seen on the batches. All other layers stay float32. On x86 CPUs without VNNI,
    OpenVINO's int8 sums may saturate. Needs the package `openvino`.

    Args:
        model: squashed, float32, on the CPU; it does not change.
        batches: typical inputs, from which ranges are taken and on which both models are compared: tensors, tuples of
            positional or dicts of keyword arguments. The first one is used for tracing.
        tensors: names, globs or `re:` expressions of the weights to convert. None is every weight of which at least a
            tenth is zero.
        rate: the fraction of zeros from which a weight is run sparse; None is the least of the converted weights.
        need_sparse: raise where some converted weight runs dense, as on every CPU without AMX.
        config: OpenVINO's properties; by default layers that are not int8 are computed in float32.

    Returns:
        A callable model, and an `OpenVinoConversion`, which lists what kernel runs each weight. Outputs are the same
        bits as with sparse weights switched off.

    Raises:
        SparsityError: a weight is not taken (see `export.check(model, "openvino")`), is still masked, or was not
            reached by the batches; OpenVINO cannot convert the model; it returns nan, or bits other than those of
            dense weights; `need_sparse`, and a weight runs dense.

    >>> converted, report = openvino(model, [torch.randn(8, 64)])  # doctest: +SKIP
    >>> report.ran_sparse  # doctest: +SKIP
    ('0.weight',)
    """
    layers, left = checked_layers(model, "openvino", reasons, tensors, squashed=True)
    if rate is not None and not 0 < rate <= 1:
        raise SparsityError(f"openvino: rate must be a fraction above 0 and at most 1, got {rate!r}")
    if RATE in (config or {}):
        raise SparsityError(f"openvino: {RATE} is set by rate=..., not in config")
    if need_sparse and not _has_amx():
        raise SparsityError("openvino: need_sparse, but sparse weights need amx_int8, which this CPU does not have")
    batches = _tensors_only(listed(batches, "openvino"))
    ranges, outputs = record_ranges(model, layers, batches, None, "openvino")
    if find_spec("openvino") is None:
        raise ImportError("openvino is not installed: pip install 'sparsekit_ao[openvino]'")
    new = {a.name: _Int8Linear(a.module, ranges[a.fqn]) for a in layers}
    zeros = {a.fqn: new[a.name].zeros for a in layers}
    rate = math.floor(min(zeros.values()) * 1000) / 1000 if rate is None else rate
    graph = _graph(copied(model, "openvino", new), batches[0], list(new))
    options = {"INFERENCE_PRECISION_HINT": "f32", **(config or {})}
    converted = OpenVinoModel(graph, {**options, RATE: rate})
    found = _outputs(converted, batches, outputs)
    modules = converted.kernels([a.name for a in layers])
    kernels = {a.fqn: modules.get(a.name, "not found in the compiled model") for a in layers}
    report = OpenVinoConversion(
        target="openvino",
        converted=tuple(a.fqn for a in layers),
        left=left,
        before=sum(a.weight.numel() * 4 for a in layers),
        after=sum(a.weight.numel() + 4 * len(a.weight) for a in layers),
        difference=largest_difference(outputs, found, "openvino"),
        notes=() if _has_amx() else ("this CPU has no amx_int8, so every weight runs dense",),
        rate=rate,
        kernels=kernels,
    )
    _check_sparse(report, zeros, need_sparse)
    if report.ran_sparse:
        _check_bits(found, _outputs(OpenVinoModel(graph, {**options, RATE: _OFF}), batches, outputs))
    return converted, report


class _Int8Linear(nn.Module):
    """An `nn.Linear` with int8 weights and fake-quantized inputs, in operations that OpenVINO turns into int8."""

    def __init__(self, linear: Any, seen: Range) -> None:
        super().__init__()
        values, scales = int8_rows(linear.weight.detach())
        self.zeros = float((values == 0).float().mean())
        self.register_buffer("values", values)
        self.register_buffer("scales", scales[:, None])
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())
        low, high = seen.inputs
        largest = max(-low, high)
        self.signed = low < 0  # symmetric, because OpenVINO's int8 products need a zero point of 0
        self.steps = Steps.of(0.0, largest, bits=7 if self.signed else 8)

    def forward(self, input: Tensor) -> Tensor:
        least = -128 if self.signed else 0
        x = torch.fake_quantize_per_tensor_affine(input, self.steps.scale, 0, least, self.steps.largest)
        return F.linear(x, self.values.float() * self.scales, self.bias)  # type: ignore[operator, arg-type]


def _tensors_only(batches: list[Any]) -> list[Any]:
    for batch in batches:
        args, kwargs = arguments(batch)
        for key, value in [*enumerate(args), *kwargs.items()]:
            if not isinstance(value, Tensor):
                kind = type(value).__name__
                raise SparsityError(f"openvino: batches must hold tensors only, got {kind} as argument {key!r}")
    return batches


def _graph(model: nn.Module, batch: Any, names: Sequence[str]) -> Any:
    """The model as an `openvino.Model` of any batch size and length; the modules of these names must be called."""
    import openvino

    args, kwargs = arguments(batch)
    example = kwargs or (args[0] if len(args) == 1 else args)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # of tracing
            with calls_of(model, {name: name for name in names}) as called:
                found = openvino.convert_model(model.eval(), example_input=example)
    except Exception as e:
        raise SparsityError(f"openvino: it cannot convert the model: {e}") from e
    refuse_uncalled(names, called, "openvino")
    return found


def _outputs(model: OpenVinoModel, batches: Sequence[Any], like: Sequence[Outputs]) -> list[Outputs]:
    """The outputs for every batch, named as the torch model's."""
    found = []
    for batch, want in zip(batches, like, strict=True):
        try:
            tensors = call(model, batch)  # type: ignore[arg-type]
        except Exception as e:
            raise SparsityError(f"openvino: the converted model does not run: {e}") from e
        if len(tensors) != len(want):
            raise SparsityError(f"openvino: the converted model returns {len(tensors)} tensors instead of {len(want)}")
        found.append([(place, tensor) for (place, _), tensor in zip(want, tensors, strict=True)])
    return found


def _check_sparse(report: OpenVinoConversion, zeros: Mapping[str, float], needed: bool) -> None:
    dense = [name for name in report.converted if name not in report.ran_sparse]
    if needed and dense:
        name = dense[0]
        raise SparsityError(
            f"openvino: need_sparse, but {name} runs as {report.kernels[name]}; {zeros[name]:.1%} of it is zero in "
            f"int8, and the rate is {report.rate:.1%}"
        )


def _check_bits(sparse: Sequence[Outputs], dense: Sequence[Outputs]) -> None:
    for a, b in zip(sparse, dense, strict=True):
        for (place, x), (_, y) in zip(a, b, strict=True):
            if not torch.equal(x, y):
                raise SparsityError(
                    f"openvino: {place} differs from that with sparse weights switched off; do not use it"
                )


def _has_amx() -> bool:
    if hasattr(torch.cpu, "get_capabilities"):
        return bool(torch.cpu.get_capabilities().get("amx_int8", False))
    return bool(torch.cpu._is_amx_tile_supported())  # of earlier versions of torch
