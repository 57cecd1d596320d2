"""Tensors and messages between two processes of ours on one machine.

`link` is what others use; it joins `channel` (messages over a socket), `memory` (tensors in shared memory, places given
by `arena`) and `parcel` (tensors to places and back). `line` is the same for ends that take turns and block. Both ends
run the same code of the same version and trust each other.
"""
