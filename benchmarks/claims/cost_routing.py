"""Routing too bold and too timid, in cost of a right answer.

    python benchmarks/claims/cost_routing.py [FOLDER]

Held-out questions to headway-draft and the model; a minute.
"""

from script import ask

if __name__ == "__main__":
    ask("cost-routing")
