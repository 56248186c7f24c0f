"""The rule of recurrent layers (LSTM, GRU, plain ones), which torch runs as one operation for all layers and steps."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from .arithmetic import combined, contract
from .call import AxisRule, Call, Label
from .factors import Axis, split_axis

_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def recurrent(call: Call) -> list[Label]:
    """Units are the same in all layers and directions: these have one size, and one tensor of initial states.

    A unit whose rows and biases are zero stays zero, if it begins with zero: tanh(0) = 0, and every gate multiplies.
    """
    x = call.label("data" if call["batch_sizes"] is not None else "input")
    states = [call["hx"]] if isinstance(call["hx"], Tensor) else call["hx"]
    first, *cells = [call.label_of(state)[-1] for state in states]
    ways = 2 if call["bidirectional"] else 1
    layers = list(_layers(call, ways * call["num_layers"]))
    rows = [axis for layer in layers for axis in layer.rows]
    unit = combined([(axis,) for axis in (*rows, *cells)], call.why)[0]
    projections = [layer.projection for layer in layers if layer.projection]
    for _, columns in projections:
        contract(call, unit, columns)
    own = [rows for rows, _ in projections] or [unit]
    hidden = combined([(axis,) for axis in (first, *own)], call.why)[0]
    for at, layer in enumerate(layers):
        contract(call, hidden, layer.recurrent)
        way, inputs = split_axis(layer.inputs, ways, call.why) if at >= ways else ((), layer.inputs)
        call.freeze(way)
        contract(call, hidden if at >= ways else x[-1], inputs)
    call.freeze(*x[:-1], *(axis for state in states for axis in call.label_of(state)[:-1]))
    last = [call.fixed(*out.shape[:-1]) for out in call.outs[1:]]
    ends = [(*axes, axis) for axes, axis in zip(last, (hidden, unit), strict=False)]
    return [(*x[:-1], call.fixed(ways)[0] + hidden), *ends]


class _Layer:
    """The axes of one layer in one direction: `rows` of single gates, inputs, recurrent inputs, (rows, columns)."""

    def __init__(self, call: Call, weights: Sequence[Tensor]) -> None:
        gates = _GATES[call.name]
        self.rows: list[Axis] = []
        biases = weights[2:4] if call["has_biases"] else ()
        for weight in (*weights[:2], *biases):
            gate, row = split_axis(call.label_of(weight)[0], gates, call.why)
            call.freeze(gate)
            self.rows.append(row)
        self.inputs, self.recurrent = (call.label_of(weight)[1] for weight in weights[:2])
        rest = weights[2 + len(biases) :]
        self.projection: tuple[Axis, ...] = tuple(call.label_of(rest[0])) if rest else ()


def _layers(call: Call, count: int) -> Iterator[_Layer]:
    each = len(call["params"]) // count
    for at in range(count):
        yield _Layer(call, call["params"][at * each : (at + 1) * each])


RULES: dict[AxisRule, str] = {recurrent: " ".join(_GATES)}
