"""What a date in the first line, or reordered tools, do to the hit rate.

    python benchmarks/claims/cache_first_line.py [FOLDER | URL]

Eight requests each of four ways to write a prompt; half a minute.
"""

from script import ask

if __name__ == "__main__":
    ask("cache-date")
