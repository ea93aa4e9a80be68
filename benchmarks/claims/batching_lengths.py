"""Continuous against static batching where lengths vary, and a bus of one length.

    python benchmarks/claims/batching_lengths.py [FOLDER]

A full queue by both rules in turns, on CPU time; two minutes.
"""

from script import ask

if __name__ == "__main__":
    ask("batching-varied", "batching-bus")
