"""Couplings found by one forward without values; README.md in this folder explains how."""

from .discover import Discovery, discover

__all__ = ["Discovery", "discover"]
