"""ONNX Runtime in a process of its own.

`model` is what runs there, in the form of a Python model, and `questions` what it is asked besides batches. `session`
is one such process for a while, for inputs that nobody has vouched for; `served` a model that is served from them.
"""
