"""Models that are Python code, each instance in a process of its own.

`backend` is what the server uses; `instance` is a model's instance, which ends with its process, `processes` are those
that will be an instance's, `process` is the server's side of one, `worker` is what runs in it, and `protocol` what the
two say to each other. `worker` and what it imports are all that a model's interpreter needs of this product:
`backends.base` and `backends.transport`, so nothing but numpy.
"""

EXECUTABLE = "paceline.python_executable"
"""The parameter that names another interpreter than the server's."""
