"""What one forward says about axes that go together: factors of axes, a rule for each operation, lines to keep."""

from .discover import Discovery, discover

__all__ = ["Discovery", "discover"]
