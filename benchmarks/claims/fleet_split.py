"""Prefill and decode apart, and the ratio by workload, on simulated H100.

    python benchmarks/claims/fleet_split.py

Four engines on the real scheduler, by bisection; five minutes.
"""

from script import ask

if __name__ == "__main__":
    ask("fleet-apart", "fleet-ratio")
