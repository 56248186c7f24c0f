"""The classes of `torch.ao.pruning` that this package builds on; no other file imports torch.ao."""

from torch.ao.pruning import BaseScheduler, BaseSparsifier, CubicSL, FakeSparsity, LambdaSL

__all__ = ["BaseScheduler", "BaseSparsifier", "CubicSL", "FakeSparsity", "LambdaSL"]
