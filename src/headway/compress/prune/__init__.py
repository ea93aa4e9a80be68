"""A model with less in it: single weights, pairs of four, neurons, heads, layers."""
