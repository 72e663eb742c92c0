"""Will a model fit: planned from fake tensors."""
