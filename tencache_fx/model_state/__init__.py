"""Model state in host memory and on disk: parameters, gradients, optimizers."""
