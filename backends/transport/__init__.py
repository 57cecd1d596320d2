"""Tensors and messages between two of our processes on one machine.

`link` is what others use, on an event loop; `blocking_link` is the same for ends that take turns and block. Both have
`memory` (tensors in shared memory) and `parcel` (messages to bytes, tensors to places, and back). Both ends run the
same version of the code and trust each other.
"""
