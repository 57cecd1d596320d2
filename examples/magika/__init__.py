"""File types by a neural network: the model that comes inside the PyPI package magika, served over gRPC."""
