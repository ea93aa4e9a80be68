"""Ranks: processes that compute one model together. `config.parallel` defines how the model is
cut."""
