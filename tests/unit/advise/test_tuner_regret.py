"""The script that measures the tuner's regret: its grid, its arithmetic, and where it goes on."""

import sys
from argparse import Namespace
from pathlib import Path

import msgspec
import pytest

from headway.advise.tune.confirm import Block

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

import tuner_regret
from tuner_regret import CONFIRMED, GRID, Landscape, grid, regret


@pytest.fixture
def given(tmp_path) -> Namespace:
    return Namespace(
        folder="headway-tiny",
        flags="--threads 1 --max-num-seqs 64 --kv-memory 32MiB",
        calibration=str(tmp_path / "here.json"),
        conversations=8,
        block=1.0,
        rounds=2,
        seed=5,
        file=tmp_path / "regret.json",
    )


LOAD = "--rate 4 --slo ttft=1s,tpot=100ms --seed 5 --input-len 20 --output-len 4"


def settings_of(given: Namespace):
    tuner_regret.by_formula(given, Path(given.calibration))
    return grid(tuner_regret.search_of(given, LOAD, 5).plan.machinery.settings)


def test_the_grid_is_every_setting_the_default_first(given):
    settings = settings_of(given)
    assert len(set(settings)) == len(settings) == 16
    assert settings[0] == ()
    assert {name for changes in settings for name, _ in changes} == set(GRID)


def block(changes, number: int, met: int) -> Block:
    return Block(
        changes=changes, round=number, span_s=10.0, met=[True] * met + [False] * (100 - met)
    )


def test_regret_is_what_the_choice_lacks_of_the_best(given):
    """The default meets 50 of 100, the choice 72 and the best 80: 1 - 72 / 80."""
    chosen, best = (("policy", "fcfs"),), (("max_num_seqs", 8),)
    found = Landscape(name="chats", load=LOAD, chosen=chosen)
    for number in range(2):
        found.blocks += [block((), number, 50), block(chosen, number, 72), block(best, number, 80)]
    found.blocks.append(block(chosen, CONFIRMED, 100))
    row = regret(given, found)
    assert row[1] == "38%"
    assert row[3:5] == ["8.00 (max_num_seqs=8)", "7.20 (policy=fcfs)"]
    assert row[5].startswith("10.0%"), "the tuner's own runs do not count"


def test_it_goes_on_where_it_stopped(given, monkeypatch):
    """After a stop in the middle of the grid no run is made twice; the file has each of them."""
    settings, ran = settings_of(given), []

    def run(self, changes, number):
        if len(ran) == 20:
            raise KeyboardInterrupt
        ran.append((changes, number))
        return block(changes, number, 50)

    monkeypatch.setattr(tuner_regret.Confirmation, "block", run)
    found = {"chats": Landscape(name="chats", load=LOAD, finalists=[(), settings[3]])}

    def save() -> None:
        given.file.write_bytes(msgspec.json.encode(found))

    with pytest.raises(KeyboardInterrupt):
        tuner_regret.exhaust(given, found["chats"], save)
    found = msgspec.json.decode(given.file.read_bytes(), type=dict[str, Landscape])
    assert len(found["chats"].blocks) == 20
    made, ran = ran, []
    tuner_regret.exhaust(given, found["chats"], save)
    assert sorted([*made, *ran]) == sorted((c, n) for c in settings for n in range(2))
    assert len(found["chats"].blocks) == 32
