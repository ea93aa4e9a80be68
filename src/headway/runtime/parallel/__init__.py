"""Ranks: processes that compute one model together. `core.parallel` says how it is cut."""
