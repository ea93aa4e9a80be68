"""A server that is 100% busy while most requests miss their objectives.

    python benchmarks/claims/busy.py [FOLDER | URL]

Random arrivals at 0.5 and 1.6 times what it can do; a minute.
"""

from script import ask

if __name__ == "__main__":
    ask("busy")
