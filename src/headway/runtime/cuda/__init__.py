"""Steps on an accelerator: nothing is read back before the whole step is queued.

All of it except the kernels in `triton/` is plain torch on any device, so tests on a CPU cover it.
"""
