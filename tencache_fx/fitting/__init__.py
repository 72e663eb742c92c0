"""Will a model fit: planned from fake tensors."""

PREFIX = "hf:"
"""Before the name of a configuration of transformers."""
