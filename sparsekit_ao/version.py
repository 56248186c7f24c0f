"""The version of the package, which pyproject.toml and model cards read."""

__version__ = "0.2.0"
