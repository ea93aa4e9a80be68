"""The accelerator, as its driver describes it, and whether our own kernels run on it."""

import importlib.util

import torch

from headway.core.machine import Accelerator

MIN_CAPABILITY = (8, 0)
"""Triton also compiles for Volta and Turing; our tiles are tested from Ampere on."""


def check_own_kernels() -> tuple[bool, str]:
    """Return (whether our kernels run here, the versions or the reason why not)."""
    if not torch.cuda.is_available():
        return False, "torch sees no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability < MIN_CAPABILITY:
        return False, f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    if importlib.util.find_spec("triton") is None:
        return False, "Triton is not installed (pip install triton)"
    import triton

    return True, f"Triton {triton.__version__}, compute capability {capability[0]}.{capability[1]}"


def probe_accelerator(device: str) -> Accelerator | None:
    """Return the CUDA device where `device` allows one and torch sees it, else None."""
    if device == "cpu" or not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    has_kernels, why = check_own_kernels()
    return Accelerator(
        name=torch.cuda.get_device_name(),
        total_bytes=total,
        free_bytes=free,
        has_kernels=has_kernels,
        kernels_why=why,
        has_flashinfer=importlib.util.find_spec("flashinfer") is not None,
    )
