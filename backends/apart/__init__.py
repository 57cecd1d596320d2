"""ONNX Runtime in a process of its own.

Lives here: what starts it and asks it, and what runs in it. Must not: know what for, or batch.
"""
