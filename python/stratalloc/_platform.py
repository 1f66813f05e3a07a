"""The platform that PyTorch is built for."""


def hip_of(torch):
    """Returns the version of HIP that PyTorch is built for, or ``None`` for other platforms. PyTorch for ROCm
    has its functions in ``torch.cuda``, as PyTorch for CUDA has."""
    hip = getattr(getattr(torch, "version", None), "hip", None)
    return hip if isinstance(hip, str) and hip else None


def name_of(torch):
    """Returns the name of the platform for messages."""
    return "CUDA" if hip_of(torch) is None else "HIP"


def build_of(torch):
    """Returns the version of PyTorch for the option ``--torch``, with ``+rocm`` in it for ROCm. Builds from
    source have no such part of their own."""
    version = str(getattr(torch, "__version__", ""))
    return version if hip_of(torch) is None or "+rocm" in version else version.partition("+")[0] + "+rocm"
