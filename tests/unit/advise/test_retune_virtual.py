"""`--retune` on a virtual clock, smaller than `benchmarks/retune_simulated.py`: the engine, the
admission, the controller and its simulations are a server's own."""

import sys
from pathlib import Path

import pytest

from headway.advise.retune import trial
from headway.advise.retune.question import Answer

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

from retune_simulated import Kind, Steps, VirtualServer, fixed, served, shares, traffic

TALK, DRAFT = (Kind("talk", 4.5, 20, 24),), (Kind("draft", 2.4, 20, 60),)


@pytest.fixture(autouse=True)
def little(monkeypatch):
    """Less of the traffic is simulated than a server would."""
    monkeypatch.setattr(trial, "PROPOSE_CPU_S", 1.5)
    monkeypatch.setattr(trial, "JUDGE_CPU_S", 0.2)


def test_a_planted_bad_change_is_undone_within_three_minutes():
    """One row, of which the simulation is said to promise much."""
    server = VirtualServer(served(12), Steps(3), retunes=True)
    own = server.answered

    def planted(asked):
        if asked.kind == "judge" or asked.left_alone:
            return own(asked) if asked.kind == "judge" else Answer(why="nothing")
        part = trial.Trial.of(asked).shortened(0.1)
        now = part.see(part.begin({}), 1.0).share
        return Answer(changes={"max_num_seqs": 1}, gain=0.5, gain_interval=(0.2, 0.8), now=now)

    server.answered = planted
    server.run(traffic(((Kind("talk", 4.0, 20, 24),),), 330, 3))
    told = server.controller.told.changes
    assert [change.outcome for change in told] == ["rolled_back"]
    assert server.settings().max_num_seqs == server.replica.engine.settings.max_num_seqs == 12
    undone_s = server.controller._left_alone[0][0]
    assert undone_s - told[0].at_s <= 180


def test_rows_follow_the_traffic():
    """Answers that are read as they come want few rows, drafts many; one setting loses one."""
    seconds = 240.0
    talks, wanted = traffic((TALK, DRAFT), seconds, 5), served(24)
    server = VirtualServer(wanted, Steps(5), retunes=True)
    own = shares(server, server.run(talks), seconds, 2)
    grid = [fixed(wanted, {"max_num_seqs": rows}, talks, seconds, 2, 5) for rows in (6, 24)]
    best = [max(each[phase] for each in grid) for phase in (0, 1)]
    assert server.controller.told.changes, server.controller.told
    assert all(mine >= 0.9 * most for mine, most in zip(own, best, strict=True)), (own, grid)
