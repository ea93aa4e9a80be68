"""Ranks: processes that compute one model together. `config.parallel` says how it is cut."""
