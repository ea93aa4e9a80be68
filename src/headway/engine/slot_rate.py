"""A name of `perf.rates` for the policies."""

from headway.perf.rates import SlotRate

__all__ = ["SlotRate"]
