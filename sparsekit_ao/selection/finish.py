"""Writing masks to the end although Ctrl-C or an error comes in the middle."""

from collections.abc import Callable
from typing import ParamSpec

P = ParamSpec("P")


def finished(write: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    """Call a function whose result does not depend on where it stopped before; again if it is interrupted.

    What was raised first is raised again afterwards, so masks are then new as a whole. Only where the repetition fails
    too, for lack of memory say, may they be written in part.

    >>> def write(mask):
    ...     mask[0] = 1
    ...     if mask[1] == 0:
    ...         mask[1] = 1
    ...         raise KeyboardInterrupt
    >>> mask = [0, 0]
    >>> try:
    ...     finished(write, mask)
    ... except KeyboardInterrupt:
    ...     print(mask)
    [1, 1]
    """
    try:
        write(*args, **kwargs)
    except BaseException:
        while _is_interrupted(write, *args, **kwargs):
            pass
        raise


def _is_interrupted(write: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> bool:
    try:
        write(*args, **kwargs)
    except KeyboardInterrupt:
        return True
    except Exception:  # the first error is raised
        return False
    return False
