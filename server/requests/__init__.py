"""The steps of an inference request, whichever RPC brought it: decoding, queueing, answering, counting."""
