"""The exceptions of the library; messages name where, what was required, what was found and what to do.

Both classes are `ValueError`s, so code that catches those keeps working.
"""

__all__ = ["CouplingError", "SparsityError"]


class SparsityError(ValueError):
    """An argument, a config entry or a call that does not fit; raised before anything is changed."""


class CouplingError(SparsityError):
    """Tensors that are to be kept or dropped together, or to share one budget, do not line up."""
