"""The native kernels of the CPU: C++ on raw memory, compiled at install, chosen at load.

`available` says without torch what would run here; `load` loads it, after it proved itself on a
small GEMM; the other files are its operations as the runtime's tables name them.
"""
