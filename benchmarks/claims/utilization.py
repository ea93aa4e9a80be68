"""MBU of 70% for 7B at 100 tok/s on 2 TB/s, and $5.56 a million tokens.

    python benchmarks/claims/utilization.py

By the formulas of /stats; seconds.
"""

from script import ask

if __name__ == "__main__":
    ask("mbu", "dollars")
