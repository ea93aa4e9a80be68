"""Replicas for throughput, tensor parallelism for latency, on simulated H100.

    python benchmarks/claims/fleet_ranks.py

Four devices as four replicas or four ranks; two minutes.
"""

from script import ask

if __name__ == "__main__":
    ask("fleet-ranks")
