"""Says which department a message is for. `train.py` creates the pipeline that it loads."""

import joblib
import numpy as np
import sklearn


class Model:
    inputs = {"text": ("BYTES", [-1, 1])}
    outputs = {"department": ("BYTES", [-1, 1]), "probability": ("FP32", [-1, 1])}

    def load(self, context):
        stored = joblib.load(context.folder / "pipeline.joblib")
        # A pipeline of another version may load, and answer differently.
        if stored["sklearn"] != sklearn.__version__:
            raise ValueError(f"trained with scikit-learn {stored['sklearn']}, and this is {sklearn.__version__}")
        self.pipeline = stored["pipeline"]

    def execute(self, inputs):
        # All texts of all requests in the batch, vectorized and classified at once.
        texts = [text.decode(errors="replace") for text in inputs["text"][:, 0]]
        probabilities = self.pipeline.predict_proba(texts)
        best = probabilities.argmax(axis=1)
        return {
            "department": self.pipeline.classes_[best][:, None].astype(object),
            "probability": np.take_along_axis(probabilities, best[:, None], 1).astype(np.float32),
        }
