"""Callbacks for trainers, one module each: `integrations.transformers`, `integrations.lightning`.

Nothing is imported here: each needs its library.
"""
