"""TensorFlow and PyTorch in one process, whichever test module is imported first."""

import contextlib

# PyTorch's optimizers load Triton, and the process aborts where TensorFlow was loaded before it (see the README).
with contextlib.suppress(ModuleNotFoundError):
    import triton  # noqa: F401
