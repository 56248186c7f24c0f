"""FLOPs of a forward pass, also of operators for which torch's counter has no formula."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch

_PRODUCTS = {"mm", "mv", "dot", "vdot", "rnn", "trilinear", "cdist", "attention"}  # words in names of torch's operators


def flop_counter() -> Any:
    """Return torch's `FlopCounterMode` with more formulas; its `uncounted` are operators that may multiply without one.

    A module should run inside with `unfused_attention`, as fused attention has no formula.
    """
    from torch.utils.flop_counter import FlopCounterMode  # imports triton where there is one

    class Counter(FlopCounterMode):
        uncounted: dict[str, None]

        def _count_flops(self, func_packet: Any, out: Any, *arguments: Any) -> Any:
            namespace, _, name = str(func_packet).rpartition(".")
            may_multiply = namespace not in ("aten", "prim") or _PRODUCTS & {*name.split("_")}
            if may_multiply and func_packet not in self.flop_registry:
                self.uncounted[str(func_packet)] = None
            return super()._count_flops(func_packet, out, *arguments)

    counter = Counter(display=False, custom_mapping=_flop_formulas())
    counter.uncounted = {}
    # Torch's tracker of modules, which fails where one reads a view of a parameter (latents), is not needed here.
    tracker: Any = contextlib.nullcontext()
    counter.mod_tracker, tracker.parents = tracker, {"Global"}
    return counter


def _flop_formulas() -> dict[Any, Callable[..., int]]:
    """Return {operator: formula of its FLOPs, from shapes of arguments} where torch's counter has none."""

    def attention(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
        return 2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])

    def recurrence(x: Any, *arguments: Any, **_: Any) -> int:  # every step is multiplied by every matrix
        weights = arguments[0] if isinstance(arguments[0], list) else arguments[:2]
        return 2 * math.prod(x[:-1]) * sum(math.prod(shape) for shape in weights if len(shape) == 2)

    formulas: dict[str, Callable[..., int]] = {
        "_scaled_dot_product_flash_attention_for_cpu": attention,
        "mkldnn_rnn_layer": recurrence,
        "_cudnn_rnn": recurrence,
        "_grouped_mm": lambda x, weights, *_, **__: 2 * math.prod(x) * weights[-1],
        "mv": lambda matrix, *_, **__: 2 * math.prod(matrix),
        "addmv": lambda _, matrix, *__, **___: 2 * math.prod(matrix),
    }
    aten = torch.ops.aten
    return {getattr(aten, name): formula for name, formula in formulas.items() if hasattr(aten, name)}
