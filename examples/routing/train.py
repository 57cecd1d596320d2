"""Train the pipeline that models/routing serves: words and pairs of words, weighted by rarity, and a linear classifier.

python examples/routing/train.py [examples/routing/models/routing/1/pipeline.joblib]

The messages are made up from a few patterns, so the pipeline knows little; put your own in their place. It needs
`pip install scikit-learn`.
"""

import sys
from itertools import product
from pathlib import Path

import joblib
import sklearn
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

BEGINNINGS = ["Hello, ", "Please help: ", "I wrote last week already. ", ""]
MESSAGES = {
    "billing": [
        "my invoice shows the wrong amount",
        "I was charged twice this month",
        "how can I pay with another card",
        "when do I get my money back",
        "the discount is missing on the bill",
        "please send the receipt for my payment",
    ],
    "shipping": [
        "my parcel has not arrived",
        "the tracking number doesn't work",
        "can you deliver to another address",
        "the box was damaged on its way",
        "how long does delivery abroad take",
        "the courier left the package with a neighbour",
    ],
    "technical": [
        "the app crashes when I open it",
        "I can't log in with my password",
        "the screen stays black after the update",
        "error 500 appears on the website",
        "synchronising my devices never ends",
        "the installation stops with an error message",
    ],
}


def messages():
    """Texts, and the departments that they are for."""
    return zip(
        *((start + text, name) for name, texts in MESSAGES.items() for start, text in product(BEGINNINGS, texts)),
        strict=True,
    )


def trained(texts, departments):
    words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    return make_pipeline(words, LogisticRegression(C=20)).fit(texts, departments)


if __name__ == "__main__":
    here = Path(__file__).parent / "models" / "routing" / "1" / "pipeline.joblib"
    stored = {"pipeline": trained(*messages()), "sklearn": sklearn.__version__}
    joblib.dump(stored, sys.argv[1] if len(sys.argv) > 1 else here)
