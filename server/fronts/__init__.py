"""gRPC in several processes, `--frontends N`: fronts share the port and hand requests to the engine, the one process
with the models.

`protocol` is what the two say to each other over `backends.transport`. The engine's side: `fleet` (processes),
`desk` (what one front asks for), `catalogue` (what fronts know of models). The front's side: `process`, `inference`,
`forwarding`. The rule: a front settles by itself only what is common and clear; all else goes to the engine as it came,
which does with it what a server of one process does.
"""
