"""A book and many examples in the cache: -79% and -31% latency, -90% and -86% cost.

    python benchmarks/claims/cache_book.py [FOLDER | URL | --shape]

Fresh texts and a second question about each; half a minute, four with --shape.
"""

from script import ask

if __name__ == "__main__":
    ask("cache-book", "cache-many-shot")
