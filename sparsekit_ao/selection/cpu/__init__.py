"""The CPU backend of a plain install: torch and numpy."""

from .masks import block_scores, keep_mask, scope_mask

__all__ = ["block_scores", "keep_mask", "scope_mask"]
