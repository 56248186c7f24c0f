"""Groups that need not be written: architectures that are known by the names of their tensors."""

from .for_model import for_model

__all__ = ["for_model"]
