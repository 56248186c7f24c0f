"""Coupled groups: what of several tensors goes together, said in one line each, and found in a model."""

from .bound import BoundGroup, Member
from .discovery import Discovery, discover
from .group import Group
from .ready import for_model

__all__ = ["BoundGroup", "Discovery", "Group", "Member", "discover", "for_model"]
