"""Couplings found by one forward without values: factors of axes, a rule for each operation, suggested lines of code.

`trace` runs the forward and applies the rules of `arithmetic` and `shapes` to each operation (`call`); axes are made of
`factors`; `shared` writes what was found as patterns, and `discover` prints it.
"""

from .discover import Discovery, discover

__all__ = ["Discovery", "discover"]
