"""The JIT tier of the CPU path (numba, an optional extra); imported without numba, which only a call needs."""

from .launch import keep_mask, problem, refusal, scope_mask, scores_refusal

__all__ = ["keep_mask", "problem", "refusal", "scope_mask", "scores_refusal"]
