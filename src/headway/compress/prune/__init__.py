"""Pruning of single weights, two of four, neurons, heads, and layers."""
