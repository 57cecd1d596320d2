"""gRPC in several processes, `--frontends N`: fronts share the port and hand requests to the engine, the one process
with the models.

`protocol` is what the two say to each other over `backends.transport`, and what fronts know about models. The engine's
side: `pool` (processes), `session` (what one front asks for). The front's side: `process` (also RPCs other than
inference), `inference`. The rule: a front handles by itself only what is common and clear; everything else goes
unchanged to the engine, which handles it as a server of one process does.
"""
