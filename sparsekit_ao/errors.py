"""The exceptions of the library: each message says where, what was required, what was found, what to do.

Knows nothing of tensors or models. Both classes are `ValueError`s, so code that catches those keeps working.
"""

__all__ = ["CouplingError", "SparsityError"]


class SparsityError(ValueError):
    """An argument, a config entry or a call that does not fit; raised before anything is changed."""


class CouplingError(SparsityError):
    """Tensors that were asked to share one fate or one budget do not line up."""
