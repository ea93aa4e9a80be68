"""A system prompt of 1,000 tokens a million times a day.

    python benchmarks/claims/cache_million.py [FOLDER | URL | --shape]

What is found the second time, and the time that it takes; half a minute.
"""

from script import ask

if __name__ == "__main__":
    ask("cache-million")
