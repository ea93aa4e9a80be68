"""The native kernels of the CPU: C++ on raw memory, compiled at install, chosen at load.

`available` reports without torch what would run here; `load` loads it, after each operation was
checked on small inputs; the other files are the operations.
"""
