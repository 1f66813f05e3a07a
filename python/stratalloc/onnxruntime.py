"""ONNX Runtime's device memory from the process's allocator::

    import onnxruntime
    import stratalloc.onnxruntime

    options = stratalloc.onnxruntime.provider_options(device=0)
    session = onnxruntime.InferenceSession(model, providers=[("CUDAExecutionProvider", options)])

With an external allocator ONNX Runtime works on the legacy default stream, and refuses the option
``user_compute_stream``. Its functions have no argument for the device, so all sessions of a process that use
these options are on one device.
"""

from . import _process
from ._library import number


def provider_options(device=0, conf=None, library=None):
    """Returns options for the provider ``CUDAExecutionProvider``: the device and the allocator's functions. A
    later call must name the same device. ``conf`` is a configuration string for the allocators of all
    devices."""
    loaded = _process.use(conf, library)
    device = number(device, "device", 2**31 - 1)
    loaded.call("onnxruntime_use", device)
    options = {"device_id": str(device)}
    for option in ("alloc", "free", "empty_cache"):
        options[f"gpu_external_{option}"] = str(loaded.address(f"stratalloc_onnxruntime_{option}"))
    return options
