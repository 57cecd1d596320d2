"""ONNX Runtime in a process of its own.

`model` is what runs there, in the form of a Python model. `session` is what that is asked besides batches, and one such
process for a limited time, for inputs that nobody has vouched for; `served` is a model whose instances are such
processes.
"""
