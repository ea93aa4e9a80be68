"""Checkpoints that others have quantized: their bytes become levels, scales and offsets of ours."""
