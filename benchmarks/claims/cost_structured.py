"""What structured output saves of failed validations.

    python benchmarks/claims/cost_structured.py [FOLDER | URL]

Held-out extractions at temperature 1.5, free and by schema; half a minute.
"""

from script import ask

if __name__ == "__main__":
    ask("cost-structured")
