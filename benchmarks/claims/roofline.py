"""Prefill follows FLOP/s and decode follows bytes.

    python benchmarks/claims/roofline.py [FOLDER]

Threads, formats and lengths one at a time; two minutes.
"""

from script import ask

if __name__ == "__main__":
    ask("roofline")
