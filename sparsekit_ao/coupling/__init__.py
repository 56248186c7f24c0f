"""Couplings: which parts of several tensors are pruned together, written by hand, by architecture, or discovered."""

from .architectures import for_model
from .bound import BoundCoupling, Member
from .coupling import Coupling, joint_entries
from .discovery import Discovery, discover

__all__ = ["BoundCoupling", "Coupling", "Discovery", "Member", "discover", "for_model", "joint_entries"]
