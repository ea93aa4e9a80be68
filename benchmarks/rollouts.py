"""How fast a rollout takes a bad version back, how often a good one, and what any test could do.

    python benchmarks/rollouts.py [--runs 300] [--steps 1,5,25,50]

Requests of both arms are drawn, and the gateway's own rollout judges them. The limit is that of the
most powerful test of all (Neyman and Pearson), which knows the control's rate and looks once, at
the 30th or 60th request of the canary: no test with the same `alpha` can find more by then.
"""

import argparse
import random
from collections.abc import Callable, Iterator

from common import heading, line
from headway.gateway.config import RolloutRow, converted
from headway.gateway.evidence import at_least
from headway.gateway.rollout import ALPHA_SHARES, Rollout, Sample

ROW = {"name": "r", "model": "m", "canary": ["new"]}
ERRORS = ((0.0, 0.2), (0.01, 0.2), (0.05, 0.2), (0.05, 0.25))
"""(the control's rate of errors, the canary's)."""
COLUMNS = ("control", "canary", "back by 30", "limit", "by 60", "limit", "last", "promoted")
MOST = 10_000
Draw = Callable[[random.Random, bool, int], Sample]


def errors(control: float, canary: float) -> Draw:
    return lambda dice, is_canary, number: Sample(
        error=dice.random() < (canary if is_canary else control)
    )


def outage(dice: random.Random, is_canary: bool, number: int) -> Sample:
    """Nine of ten requests fail for a while, whoever is asked."""
    return Sample(error=dice.random() < (0.9 if number % 3000 < 600 else 0.01))


def pace(times: float) -> Draw:
    """Seconds a token; the canary takes so many times the control's."""
    return lambda dice, is_canary, number: Sample(
        error=False, token_s=dice.lognormvariate(0.0, 0.2) * (times if is_canary else 1.0)
    )


def run(draw: Draw, steps: list[int], seed: int) -> tuple[str, int]:
    """(how a rollout ended, requests of the canary until then)."""
    row = converted("rollouts", {**ROW, "steps": steps, "needs": ["errors"]}, RolloutRow)
    rollout, dice, count, number = Rollout(row, None), random.Random(seed), 0, 0
    while rollout.state == "canary" and count < MOST:
        number += 1
        canary = rollout.takes(f"{seed} {number}")
        count += canary
        rollout.add(canary, draw(dice, canary, number))
    return rollout.state, count


def limit(control: float, canary: float, count: int, alpha: float) -> float:
    """The power of the best test that looks once, after `count` requests of the canary.

    Where a number of errors is as likely as to pass `alpha` by itself it is drawn by lot.
    """
    healthy, bad = at_least(count, max(control, 1e-9)), at_least(count, canary)
    need = next(k for k, chance in enumerate(healthy) if chance <= alpha)
    lot = (alpha - healthy[need]) / (healthy[need - 1] - healthy[need])
    return bad[need] + lot * (bad[need - 1] - bad[need])


def rows(runs: int, steps: list[int]) -> Iterator[str]:
    alpha = RolloutRow(**ROW).alpha * ALPHA_SHARES["errors"]
    named = [(f"{c:.0%} errors", f"{k:.0%}", errors(c, k), (c, k)) for c, k in ERRORS]
    named += [("a pace", "twice its time a token", pace(2.0), None)]
    for control, canary, draw, rates in named:
        found = [run(draw, steps, seed) for seed in range(runs)]
        counts = [count for state, count in found if state == "rolled back"]
        promoted = sum(state == "promoted" for state, _ in found)
        cells = []
        for most in (30, 60):
            best = f"{limit(*rates, most, alpha):.1%}" if rates else ""
            cells += [f"{sum(count <= most for count in counts) / runs:.1%}", best]
        yield line((control, canary, *cells, max(counts), promoted))
    alike = [(f"{rate:.0%} errors", errors(rate, rate)) for rate in (0.0, 0.01, 0.05)]
    for name, draw in [*alike, ("an outage", outage), ("a pace", pace(1.0))]:
        states = [run(draw, steps, 10_000 + seed)[0] for seed in range(runs)]
        back = f"{states.count('rolled back')} of {runs} at all"
        yield line((name, "the same", back, "", "", "", "", states.count("promoted")))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--steps", default="1,5,25,50", help="percent of the requests")
    given = parser.parse_args()
    print(heading(COLUMNS), flush=True)
    for row in rows(given.runs, [int(step) for step in given.steps.split(",")]):
        print(row, flush=True)


if __name__ == "__main__":
    main()
