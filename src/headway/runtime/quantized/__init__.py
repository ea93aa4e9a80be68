"""Checkpoints quantized by other tools: their bytes become our levels, scales and offsets."""
