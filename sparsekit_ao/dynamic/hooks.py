"""What a hook before an optimizer's step does about closures, which make the gradients that the hook wants.

Knows the arguments of `Optimizer.step` as hooks get them; nothing of what is done with gradients.
"""

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["after_closure"]


def after_closure(
    args: tuple, kwargs: dict[str, Any], then: Callable[[], None], first: Callable[[], None] | None = None
) -> tuple[tuple, dict[str, Any]] | None:
    """Call `then` when the gradients are there: at once, or after every call of the step's closure.

    Args:
        args, kwargs: of the step, with the optimizer first.
        then: what to do with the gradients.
        first: called before every call of the closure.

    Returns:
        What the hook is to return: the step's arguments with another closure, or None where there is none.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        then()
        return None

    def around() -> Any:
        if first is not None:
            first()
        with torch.enable_grad():
            loss = closure()
        then()
        return loss

    return ((args[0], around, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": around})
