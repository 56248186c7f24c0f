"""Sparsifiers for `torch.ao.pruning`: config dicts in, masks out."""
