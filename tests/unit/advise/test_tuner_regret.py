"""The script that measures the tuner's regret: its grid, its arithmetic, and where it goes on."""

import sys
from argparse import Namespace
from pathlib import Path

import msgspec
import pytest

from headway.advise.tune.confirm import Block, Confirmation

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

import tuner_regret
from tuner_regret import (
    CONFIRMED,
    GRID,
    Kept,
    Landscape,
    Simulated,
    confirmation,
    grid,
    mirrored,
    regret,
)


@pytest.fixture
def given(tmp_path) -> Namespace:
    return Namespace(
        folder="headway-tiny",
        flags="--threads 1 --max-num-seqs 64 --kv-memory 32MiB",
        calibration=str(tmp_path / "here.json"),
        conversations=8,
        block=1.0,
        rounds=2,
        trials=3,
        workload=["chats"],
        seed=5,
        file=tmp_path / "regret.json",
    )


LOAD = "--rate 4 --slo ttft=1s,tpot=100ms --seed 5 --input-len 20 --output-len 4"
FCFS = (("policy", "fcfs"),)


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

    monkeypatch.setattr(Confirmation, "block", run)
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


def test_the_tuner_goes_on_where_it_stopped(given, monkeypatch):
    """After a stop in its fifth run: the four before are in the file and not made again."""
    settings_of(given)
    ran: list[tuple] = []
    limit = [4]

    def run(self, changes, number):
        if len(ran) == limit[0]:
            raise KeyboardInterrupt
        ran.append((changes, number))
        return block(changes, number, 50 + 5 * len(changes))

    monkeypatch.setattr(Confirmation, "block", run)
    kept = {"chats": Landscape(name="chats", load=LOAD)}

    def tune() -> None:
        found = kept["chats"]
        tuner_regret.tune(given, found, confirmation(Kept, given, found, found=found, save=save))

    def save() -> None:
        given.file.write_bytes(msgspec.json.encode(kept))

    with pytest.raises(KeyboardInterrupt):
        tune()
    kept = tuner_regret.read(given.file)
    assert len(kept["chats"].blocks) == 4
    limit[0] = 99
    tune()
    assert len(ran) == len(set(ran)) == len(kept["chats"].blocks) <= 7
    assert {number for _, number in ran} == {CONFIRMED, CONFIRMED + 1}
    found = kept["chats"]
    assert found.finalists[0] == () and {changes for changes, _ in ran} == {*found.finalists}
    assert len(found.taken) == len(found.finalists) and all(found.taken[1:])


def test_a_replay_starts_no_server_and_changes_no_file(given, monkeypatch):
    """The tuner's runs are those of the grid, from its first round on and from its second."""
    blocks = [
        block(changes, number, 50 + 10 * (FCFS[0] in changes) + 5 * number)
        for number in range(2)
        for changes in settings_of(given)
    ]
    found = {"chats": Landscape(name="chats", load=LOAD, blocks=blocks)}
    given.file.write_bytes(before := msgspec.json.encode(found))
    monkeypatch.setattr(Confirmation, "block", None)
    rows = tuner_regret.replay(given)
    assert [row[0] for row in rows] == ["chats, from round 1 on", "chats, from round 2 on"]
    assert all(row[2] == "5.25" and row[3].startswith("6.25") for row in rows)
    assert given.file.read_bytes() == before


@pytest.mark.parametrize("name", list(GRID))
def test_a_machine_that_contradicts_serves_a_setting_as_its_opposite(given, name: str):
    """8 rows as 64, 16 as 32, `fcfs` as `slo`; each of the 16 as another one."""
    settings = settings_of(given)
    search = tuner_regret.search_of(given, LOAD, 5)
    turned = {changes: mirrored(search, changes, name) for changes in settings}
    assert set(turned.values()) == set(settings)
    assert all(turned[other] == changes != other for changes, other in turned.items())
    assert mirrored(search, (("max_num_seqs", 16),), "max_num_seqs") == (("max_num_seqs", 32),)
    found = Landscape(name="chats", load=LOAD)
    wrong, right = (
        confirmation(Simulated, given, found, search=search, contradict=each) for each in (name, "")
    )
    mine, its = wrong.block((), 0), right.block(turned[()], 0)
    assert mine.changes == () and its.changes == turned[()]
    assert (mine.met, mine.ttft_s) == (its.met, its.ttft_s) and len(mine.met) > 0


@pytest.mark.parametrize(
    ("chosen", "alone", "regrets"),
    [((), FCFS, ["20.0%", "0.0%"]), (FCFS, (), ["0.0%", "20.0%"])],
)
def test_the_simulated_table_has_the_choice_and_that_of_the_search_alone(chosen, alone, regrets):
    goodput = {(): 8.0, FCFS: 10.0, (("max_num_seqs", 8),): 5.0}
    row = tuner_regret.compared(goodput, chosen, alone)
    assert row[:3] == ["50%", "8.000", "10.000 (policy=fcfs)"] and row[4:] == regrets
