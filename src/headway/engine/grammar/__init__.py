"""Structured output: grammars compiled in the background, masks computed while the model runs."""
