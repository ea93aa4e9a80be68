"""18% retries against 2% at other token prices, by cost of a task that succeeds.

    python benchmarks/claims/cost_retries.py

Tasks drawn until they succeed; seconds.
"""

from script import ask

if __name__ == "__main__":
    ask("cost-retries")
