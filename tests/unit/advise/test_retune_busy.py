"""`--retune` on a server of 150 requests a second, a third more than it takes, on a virtual clock.

A step takes 2 ms and 0.3 ms a token: with all of its rows an answer is too slow as it is read, with
eight of them half of what comes is in time.
"""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from headway.advise.retune import trial
from headway.core.service import service_classes

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

from retune_simulated import Kind, Steps, VirtualServer, served, traffic

SLO, TALK = "talk:ttft=300ms,tpot=8ms", (Kind("talk", 150.0, 20, 12),)


class Quick(Steps):
    """A small model's steps."""

    def seconds(self, work):
        return super().seconds(work) / 10


@pytest.fixture(autouse=True)
def little(monkeypatch):
    """Less of the traffic is simulated than a server would."""
    monkeypatch.setattr(trial, "PROPOSE_CPU_S", 3.0)
    monkeypatch.setattr(trial, "JUDGE_CPU_S", 0.4)


def test_it_is_told_as_it_is_and_the_better_setting_is_found_at_once():
    wanted, seconds = replace(served(64), classes=service_classes([SLO])), 62.0
    server = VirtualServer(wanted, Quick(3), retunes=True)
    server.run(traffic((TALK,), seconds, 5))
    told = server.controller.told
    [asked] = told.asked
    assert asked.num_requests > 500 and 0.1 < asked.seen < 0.6
    assert asked.simulated == pytest.approx(asked.seen, abs=0.1)
    [change] = told.changes
    assert change.changes["max_num_seqs"] <= 12 and change.predicted_gain > 0.3
    assert server.settings().max_num_seqs == change.changes["max_num_seqs"]
