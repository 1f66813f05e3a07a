"""ONNX Runtime's device memory from the process's allocator::

    import onnxruntime
    import stratalloc.onnxruntime

    options = stratalloc.onnxruntime.provider_options(device=0, stream=stream)
    session = onnxruntime.InferenceSession(model, providers=[("CUDAExecutionProvider", options)])

ONNX Runtime's functions have no argument for the device or the stream. So all sessions of a process that use
these options are on one device and one stream.
"""

from . import _process
from ._library import number


def provider_options(device=0, stream=0, conf=None, library=None):
    """Returns options for the provider ``CUDAExecutionProvider``: the allocator's functions, and ``stream``
    (a ``cudaStream_t`` as a number) as the stream of the session. A later call must name the same device and
    stream. ``conf`` is a configuration string for the allocators of all devices."""
    loaded = _process.use(conf, library)
    device, stream = number(device, "device", 2**31 - 1), number(stream, "stream", 2**64 - 1)
    loaded.call("onnxruntime_use", device, stream)
    options = {"device_id": str(device)}
    for option in ("alloc", "free", "empty_cache"):
        options[f"gpu_external_{option}"] = str(loaded.address(f"stratalloc_onnxruntime_{option}"))
    if stream:
        options["user_compute_stream"] = str(stream)
    return options
