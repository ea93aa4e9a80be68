"""Drift check: whether upstreams of one model still give the same answers to the same probes."""
