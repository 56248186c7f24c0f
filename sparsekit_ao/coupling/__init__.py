"""Coupled groups: what of several tensors goes together, said in one line each, and found in a model."""

from .bound import BoundCoupling, Member
from .coupling import Coupling
from .discovery import Discovery, discover
from .ready import for_model

__all__ = ["BoundCoupling", "Coupling", "Discovery", "Member", "discover", "for_model"]
