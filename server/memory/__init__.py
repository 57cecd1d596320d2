"""Shared memory of clients: its regions, the tensors in them, and large copies."""
