"""Ten turns with a long system prompt: -75% latency, -53% cost (Anthropic).

    python benchmarks/claims/cache_turns.py [FOLDER | URL | --shape]

The same turns known and begun anew; half a minute, four with --shape.
"""

from script import ask

if __name__ == "__main__":
    ask("cache-turns")
