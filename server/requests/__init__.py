"""The way of an inference request, whichever RPC brought it: decoded, queued, answered, counted."""
