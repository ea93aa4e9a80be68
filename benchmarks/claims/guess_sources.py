"""A draft, copies from the input, Medusa, lookahead: where each pays, and stops.

    python benchmarks/claims/guess_sources.py [FOLDER]

Every source in turns at 1, 4 and 16 at once; two minutes, ten on a widened model.
"""

from script import ask

if __name__ == "__main__":
    ask("guess-draft", "guess-copies", "guess-medusa", "guess-lookahead")
