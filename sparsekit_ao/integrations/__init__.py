"""Callbacks for trainers: `integrations.transformers`, `integrations.lightning`; each imports its library."""
