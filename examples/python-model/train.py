"""Train the classifier that models/flowers serves, a softmax regression, on made-up flowers.

python examples/python-model/train.py [examples/python-model/models/flowers/1]
"""

import sys
from pathlib import Path

import numpy as np

SPECIES = ["setosa", "versicolor", "virginica"]
MEANS = np.array([[5.0, 3.4, 1.5, 0.2], [5.9, 2.8, 4.3, 1.3], [6.6, 3.0, 5.6, 2.0]], np.float32)


def flowers(count, seed):
    """Measurements of `count` flowers, float32 [count, 4], and their species by number, [count]."""
    random = np.random.default_rng(seed)
    species = random.integers(0, len(SPECIES), count)
    return MEANS[species] + random.normal(0, 0.25, (count, 4)).astype(np.float32), species


def train(measurements, species, steps=2000, rate=0.1):
    weights, bias = np.zeros((4, len(SPECIES)), np.float32), np.zeros(len(SPECIES), np.float32)
    wanted = np.eye(len(SPECIES), dtype=np.float32)[species]
    for _ in range(steps):
        scores = np.exp(measurements @ weights + bias)
        error = (scores / scores.sum(axis=1, keepdims=True) - wanted) / len(measurements)
        weights -= rate * measurements.T @ error
        bias -= rate * error.sum(axis=0)
    return weights, bias


if __name__ == "__main__":
    here = Path(__file__).parent / "models" / "flowers" / "1"
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else here
    weights, bias = train(*flowers(600, seed=1))
    np.savez(folder / "classifier.npz", weights=weights, bias=bias, species=np.array(SPECIES))
