"""File type detection with a neural network: the model in the PyPI package magika, served over gRPC."""
