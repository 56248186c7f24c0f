"""Couplings: which parts of several tensors are pruned together, written by hand or discovered."""

from .bound import BoundCoupling, Member
from .coupling import Coupling, joint_entries
from .discovery import Discovery, discover
from .experts import expert_couplings, expert_scores

__all__ = ["BoundCoupling", "Coupling", "Discovery", "Member", "discover", "expert_couplings", "expert_scores"]
__all__ += ["joint_entries"]
