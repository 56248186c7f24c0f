"""Couplings found by one forward without values; README.md in this folder explains how."""

from .search import Discovery, FrozenAxis, discover

__all__ = ["Discovery", "FrozenAxis", "discover"]
