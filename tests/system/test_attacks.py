"""What an attack costs everybody else, by `benchmarks/attacks.py`, within bounds."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.hardening

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
HEALTH_P99_MS, MORE_MS, STORM_MEDIAN_MS, STORM_WORST_MS = 100, 200, 200, 1000


def rows(*words: str) -> dict[tuple[str, str], list[int]]:
    """(attack, when) → milliseconds: p50, p99, worst of /health, then of requests; failed ones."""
    command = [sys.executable, "attacks.py", *words]
    found = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stderr[-2000:]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in found.stdout.splitlines()]
    return {
        (name, when): [int(each) for each in numbers]
        for name, when, *numbers in (row for row in cells if len(row) == 9 and row[2].isdigit())
    }


@pytest.mark.parametrize("attack", ["upstream", "fallback"])
def test_an_endless_upstream_delays_nobody(attack: str) -> None:
    found = rows(attack)
    names = {name for name, _ in found}
    assert len(names) == 5
    for name in names:
        before, during = found[name, "before"], found[name, "attack"]
        assert during[1] <= HEALTH_P99_MS, (name, during)
        assert attack == "fallback" or during[6] == 0, "its own queue of one may be full there"
        assert during[3] - before[3] <= MORE_MS, (name, before, during)


def test_a_storm_of_connections_delays_no_other_key() -> None:
    found = rows("storm")
    ((name, _),) = [key for key in found if key[1] == "attack"]
    during = found[name, "attack"]
    assert during[3] <= STORM_MEDIAN_MS and during[5] <= STORM_WORST_MS and during[6] == 0
