"""One output token is worth about 100 input tokens, and costs two to four times one.

    python benchmarks/claims/token_prices.py [FOLDER | URL]

Slopes of one request alone, then of full batches; a minute.
"""

from script import ask

if __name__ == "__main__":
    ask("one-is-hundred", "output-price")
