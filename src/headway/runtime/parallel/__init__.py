"""Ranks: processes that compute one model together, cut as `config.parallel` says."""
