"""Paged KV holds 4.3 times the requests that contiguous reservations hold (vLLM, 2023).

    python benchmarks/claims/kv_paging.py [--runs 20]

The real scheduler and blocks over an executor that computes nothing; a minute.
"""

from script import ask

if __name__ == "__main__":
    ask("kv-paging")
