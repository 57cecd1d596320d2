"""Classifies flowers by four measurements. `train.py` creates the file that it loads."""

import numpy as np


class Model:
    inputs = {"measurements": ("FP32", [-1, 4])}
    outputs = {"species": ("BYTES", [-1]), "probabilities": ("FP32", [-1, 3])}

    def load(self, context):
        stored = np.load(context.folder / "classifier.npz")
        self.weights, self.bias, self.species = stored["weights"], stored["bias"], stored["species"]

    def execute(self, inputs):
        # All rows of all requests in the batch; outputs have the same number of rows, in the same order.
        scores = inputs["measurements"] @ self.weights + self.bias
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
        probabilities = scores / scores.sum(axis=1, keepdims=True)
        return {"species": self.species[probabilities.argmax(axis=1)], "probabilities": probabilities}

    def close(self):
        print("no more flowers")
