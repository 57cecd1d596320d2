"""Models that are Python code, each instance in a process of its own.

`backend` is what the server uses; `instance` is a model's instance, which ends with its process; `process` is the
server's side of one, and `worker` what runs in it. A model's interpreter needs nothing of this product but `worker` and
what it imports: `backends.spec` and `backends.transport`, so no package but numpy.
"""

EXECUTABLE = "paceline.python_executable"
"""The parameter that names another interpreter than the server's."""
ENVIRONMENT = "EXECUTION_ENV_PATH"
"""The parameter that names an environment with an interpreter, as in Triton."""
