"""The JIT tier of the CPU path (numba, an optional extra); imported without numba, which only a call needs."""

from .launch import can_select, keep_mask, problem, refusal, scope_mask, scores_refusal, select

__all__ = ["can_select", "keep_mask", "problem", "refusal", "scope_mask", "scores_refusal", "select"]
