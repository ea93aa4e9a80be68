"""Two to three times the throughput for who gives up TTFT and TPOT (LinkedIn).

    python benchmarks/claims/batching_trade.py [FOLDER | URL]

1 to 64 requests at once; half a minute, five on a model of 0.5B.
"""

from script import ask

if __name__ == "__main__":
    ask("batching-trade")
