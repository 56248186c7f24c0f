"""The user's model: names of its tensors and modules, how it runs, and progress while it does."""
