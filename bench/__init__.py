"""Measures the product against what bounds it: see README.md. It may import anything; nobody imports it."""
