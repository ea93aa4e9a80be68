"""The operations: a definition in plain torch, faster versions, and the table that selects."""

from headway.runtime.kernels.table import Kernels, choose_kernels

__all__ = ["Kernels", "choose_kernels"]
