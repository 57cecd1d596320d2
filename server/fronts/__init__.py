"""gRPC in several processes, `--frontends N`: fronts share the port and hand requests to the engine, the one process
with the models.

`protocol` is what the two say to each other over `backends.transport`, `catalogue` what fronts know of models. The
engine's side: `fleet` (processes), `desk` (what one front asks for), `calls`, `handles`. The front's side: `process`,
`remote` (inference), `forwarding` (other RPCs). The rule: a front settles by itself only what is common and clear; all
else goes to the engine as it came, which does with it what a server of one process does.
"""
