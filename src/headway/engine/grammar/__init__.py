"""Structured output: grammars compiled while their requests wait, masks made while models run."""
