"""What a step needs on an accelerator: nothing is read back before all of it is queued.

All of it but the kernels in `triton/` is plain torch on any device, so a CPU proves it.
"""
