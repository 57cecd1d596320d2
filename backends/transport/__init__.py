"""Tensors and messages between two of our processes on one machine.

`link` is what others use; it joins `channel` (messages over a socket), `memory` (tensors in shared memory, at places
that `arena` allocates) and `parcel` (tensors to places and back). `blocking_link` is the same for ends that take turns
and block. Both ends run the same version of the code and trust each other.
"""
