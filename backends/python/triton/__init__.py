"""What `model.py` files written for Triton's Python backend find under `triton_python_backend_utils`.

`module` puts it together and into `sys.modules`, `model` calls the file's class. Everything here runs in the model's
process, with numpy alone, like `backends.python.worker`.
"""
