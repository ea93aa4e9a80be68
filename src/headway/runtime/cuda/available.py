"""What accelerator there is, and whether our own kernels run on it: asked of the driver, not of an
import."""

import importlib.util

import torch

from headway.core.machine import Accelerator

MIN_CAPABILITY = (8, 0)
"""Triton compiles for Volta and Turing too; our tiles are checked from Ampere on."""


def check_own_kernels() -> tuple[bool, str]:
    """(whether they run here, the versions or why not); loads no Triton where there is no GPU."""
    if not torch.cuda.is_available():
        return False, "torch sees no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability < MIN_CAPABILITY:
        return False, f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    if importlib.util.find_spec("triton") is None:
        return False, "Triton is not installed (pip install headway[cuda])"
    import triton

    return True, f"Triton {triton.__version__}, compute capability {capability[0]}.{capability[1]}"


def probe_accelerator(device: str) -> Accelerator | None:
    """The CUDA device, when `device` allows one and torch sees it."""
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
