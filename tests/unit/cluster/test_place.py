"""Placing models on machines: whole, within what each has, and the cheapest there is."""

import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest

from headway.cli.main import main
from headway.cluster.place import (
    MAX_EXACT_REPLICAS,
    ModelReplica,
    Placement,
    PlacementMachine,
    cost,
    place,
    refusals,
)

GIB = 2**30
EMBEDDED = Path(__file__).resolve().parents[3] / "src/headway/embedded/headway-tiny"


def check(replicas: list[ModelReplica], machines: list[PlacementMachine], found: Placement) -> None:
    """Nothing is on two machines or beyond one; copies that are to be apart are."""
    assert len(found.hosts) == len(found.devices) == len(replicas)
    for at, machine in enumerate(machines):
        own = [r for r, host in zip(replicas, found.hosts, strict=True) if host == at]
        held = [0] * machine.devices
        for replica, host, devices in zip(replicas, found.hosts, found.devices, strict=True):
            assert host is None or len(set(devices)) == replica.ranks
            for device in devices if host == at else ():
                held[device] += -(-replica.num_bytes // replica.ranks)
        assert max(held) <= machine.num_bytes
        apart = [replica.model for replica in own if replica.apart]
        assert len(set(apart)) == len(apart)
    assert found.price == pytest.approx(cost(found.hosts, machines))


def draw(source: random.Random, most: int) -> tuple[list[ModelReplica], list[PlacementMachine]]:
    replicas = [
        ModelReplica(
            model=source.choice("abcd"),
            num_bytes=source.choice([1, 2, 3, 5, 8, 13]),
            apart=source.random() < 0.2,
        )
        for _ in range(source.randint(1, most))
    ]
    machines = [
        PlacementMachine(
            name=str(n), num_bytes=source.choice([8, 16, 21]), price=source.choice([0, 1, 1.5, 3])
        )
        for n in range(source.randint(1, 4))
    ]
    return replicas, machines


def cheapest(replicas: list[ModelReplica], machines: list[PlacementMachine]) -> float | None:
    """By trying everything; None where not all can be placed."""
    ways = [
        [
            (at, devices)
            for at, machine in enumerate(machines)
            for devices in itertools.combinations(range(machine.devices), replica.ranks)
        ]
        for replica in replicas
    ]
    best = None
    for chosen in itertools.product(*ways):
        left = [[machine.num_bytes] * machine.devices for machine in machines]
        for replica, (at, devices) in zip(replicas, chosen, strict=True):
            for device in devices:
                left[at][device] -= -(-replica.num_bytes // replica.ranks)
        on = [(r.model, at) for r, (at, _) in zip(replicas, chosen, strict=True)]
        alone = (on.count(one) == 1 for one, r in zip(on, replicas, strict=True) if r.apart)
        if min(map(min, left), default=0) >= 0 and all(alone):
            price = cost([at for at, _ in chosen], machines)
            best = price if best is None else min(best, price)
    return best


def alone(replicas: list[ModelReplica]) -> list[ModelReplica]:
    """Copies of a model agree whether they are to be apart, as rows of a file do."""
    apart = {replica.model: replica.apart for replica in replicas}
    return [
        ModelReplica(model=r.model, num_bytes=r.num_bytes, apart=apart[r.model]) for r in replicas
    ]


def test_two_hundred_small_instances_are_placed_at_the_least_price():
    source = random.Random(4)
    for _ in range(200):
        replicas, machines = draw(source, 6)
        replicas = alone(replicas)
        found, best = place(replicas, machines), cheapest(replicas, machines)
        check(replicas, machines, found)
        if best is None:
            assert None in found.hosts
            assert not found.is_cheapest
            assert refusals(replicas, machines, found)
        else:
            assert found.is_cheapest
            assert found.price == pytest.approx(best)


def cheapest_by_subsets(
    replicas: list[ModelReplica], machines: list[PlacementMachine]
) -> float | None:
    """The least price, of every set of replicas: a machine more either takes one of its fullest
    sets from it, or nothing. None where not all can be placed."""
    masks = np.arange(2 ** len(replicas))
    bits = masks[:, None] >> np.arange(len(replicas)) & 1
    sizes = bits @ [replica.num_bytes for replica in replicas]
    clashes = np.zeros(len(masks), bool)
    for model in {replica.model for replica in replicas if replica.apart}:
        clashes |= bits @ [replica.model == model for replica in replicas] > 1
    least = np.where(masks == 0, 0.0, np.inf)
    for machine in machines:
        fits = (sizes <= machine.num_bytes) & ~clashes
        larger = masks[:, None] | 1 << np.arange(len(replicas))
        fullest = masks[fits & ~(fits[larger] & (larger != masks[:, None])).any(axis=1)]
        taken = [least[masks & ~one] + machine.price for one in fullest]
        least = np.minimum.reduce([least, *taken])
    return None if least[-1] == np.inf else float(least[-1])


def test_two_hundred_instances_of_up_to_twelve_are_placed_at_the_least_price():
    """Nine replicas in the mean; about half of them have room for all."""
    source, placed = random.Random(7), 0
    for number in range(200):
        replicas, machines = draw(source, MAX_EXACT_REPLICAS)
        while len(replicas) < 6:
            replicas, machines = draw(source, MAX_EXACT_REPLICAS)
        replicas, machines = alone(replicas), machines * (1 + number % 3)
        found, best = place(replicas, machines), cheapest_by_subsets(replicas, machines)
        check(replicas, machines, found)
        assert found.is_cheapest == (best is not None)
        if best is not None:
            placed += 1
            assert found.price == pytest.approx(best)
    assert 60 < placed < 190


def test_the_two_oracles_agree():
    source = random.Random(8)
    for _ in range(60):
        replicas, machines = draw(source, 5)
        replicas = alone(replicas)
        assert cheapest_by_subsets(replicas, machines) == cheapest(replicas, machines)


def test_twelve_replicas_are_searched_to_the_end_and_never_dearer_than_first_fit():
    source = random.Random(5)
    for _ in range(40):
        replicas, machines = draw(source, MAX_EXACT_REPLICAS)
        machines = [
            PlacementMachine(name=f"{m.name}{n}", num_bytes=m.num_bytes, price=m.price)
            for m in machines
            for n in range(3)
        ]
        replicas = alone(replicas)
        found = place(replicas, machines)
        check(replicas, machines, found)
        assert found.is_cheapest == (None not in found.hosts)


def test_replicas_of_several_ranks_are_on_devices_of_one_machine():
    """Also where the cheapest choice is not the fullest devices; against all there are."""
    source, placed = random.Random(9), 0
    for _ in range(150):
        replicas = [
            ModelReplica(
                model=source.choice("ab"),
                num_bytes=source.choice([2, 3, 5, 8, 12]),
                ranks=source.choice([1, 1, 2, 3]),
            )
            for _ in range(source.randint(1, 4))
        ]
        machines = [
            PlacementMachine(
                name=str(n),
                num_bytes=source.choice([4, 6, 8]),
                price=source.choice([0, 1, 1.5, 3]),
                devices=source.choice([1, 2, 3]),
            )
            for n in range(source.randint(1, 2))
        ]
        found, best = place(replicas, machines), cheapest(replicas, machines)
        check(replicas, machines, found)
        if best is None:
            assert refusals(replicas, machines, found)
        else:
            placed += 1
            assert found.is_cheapest and found.price == pytest.approx(best)
    assert 20 < placed < 130


def test_devices_of_a_machine_are_filled_alike():
    """Five bytes are on each of four: two on their own, one cut in two."""
    replicas = [ModelReplica(model="a", num_bytes=5), ModelReplica(model="b", num_bytes=5)]
    replicas.append(ModelReplica(model="c", num_bytes=10, ranks=2))
    found = place(replicas, [PlacementMachine(name="node", num_bytes=16, price=1, devices=4)])
    check(replicas, [PlacementMachine(name="node", num_bytes=16, price=1, devices=4)], found)
    assert sorted(itertools.chain(*found.devices)) == [0, 1, 2, 3]


def test_a_thousand_models_on_a_hundred_machines():
    source = random.Random(6)
    replicas = [
        ModelReplica(model=str(n), num_bytes=source.randint(1, 20) * GIB) for n in range(1000)
    ]
    machines = [PlacementMachine(name=str(n), num_bytes=128 * GIB, price=1) for n in range(100)]
    found = place(replicas, machines)
    check(replicas, machines, found)
    assert None not in found.hosts
    used = len(set(found.hosts))
    least = -(-sum(replica.num_bytes for replica in replicas) // (128 * GIB))
    assert used <= 11 / 9 * least + 1, "what first fit in falling order promises"


def test_of_equal_prices_the_fullest_machine_is_as_empty_as_can_be():
    replicas = [ModelReplica(model=str(n), num_bytes=size) for n, size in enumerate([4, 4, 2, 2])]
    found = place(
        replicas,
        [PlacementMachine(name="a", num_bytes=16), PlacementMachine(name="b", num_bytes=16)],
    )
    check(
        replicas,
        [PlacementMachine(name="a", num_bytes=16), PlacementMachine(name="b", num_bytes=16)],
        found,
    )
    sizes = [sum(r.num_bytes for r, h in zip(replicas, found.hosts) if h == at) for at in (0, 1)]
    assert sizes == [6, 6]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "models.yaml").write_text(
        f"models:\n  chat: {{folder: {EMBEDDED}, quantization: int4, context: 1024, replicas: 2, "
        f"apart: true}}\n"
        "  big: {memory: 20GiB}\n"
    )
    (tmp_path / "machines.yaml").write_text(
        "machines:\n  small: {memory: 24GiB, price: 1, count: 2}\n"
        "  large: {memory: 64GiB, price: 1.5}\n"
    )
    return tmp_path


def run(files: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str, str]:
    arguments = [str(files / "models.yaml"), f"--machines={files / 'machines.yaml'}", *more]
    status = main(["plan", "--place", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_verb_says_what_is_where_and_why(files, capsys):
    status, said, _ = run(files, capsys, f"--json={files / 'out.json'}")
    assert status == 0
    assert "KV 24.0 MiB for 16 sequences of 1,024 tokens" in said
    assert "2 of 3 machines, 2 an hour; no placement is cheaper." in said
    told = json.loads((files / "out.json").read_text())
    assert {each["machine"] for each in told["replicas"]} == {"small-1", "small-2"}


def test_ranks_are_said_with_their_devices(files, capsys):
    """A model of three heads on two ranks, with a copy of the KV head that both read."""
    models, machines = files / "models.yaml", files / "machines.yaml"
    models.write_text(
        models.read_text().replace("replicas: 2, apart: true", "ranks: 2")
        + "  wide: {memory: 90GiB, ranks: 4}\n  eight: {memory: 8GiB, ranks: 8}\n"
    )
    machines.write_text("machines:\n  node: {memory: 32GiB, devices: 4, price: 9}\n")
    status, said, _ = run(files, capsys, f"--json={files / 'out.json'}")
    assert status == 5
    assert "devices 0, 1, 2, 3: as the file says" in said and "of 120 GiB" in said
    assert "eight has no machine: it takes 8.00 GiB; no machine has 8 devices" in said
    told = {
        each["model"]: each for each in json.loads((files / "out.json").read_text())["replicas"]
    }
    assert told["wide"]["devices"] == [0, 1, 2, 3] and len(told["chat"]["devices"]) == 2
    models.write_text("models:\n  wide: {memory: 200GiB, ranks: 4}\n")
    _, said, _ = run(files, capsys)
    assert "the largest machine, node, has 30.0 GiB for each rank" in said


def test_what_has_no_machine_is_said_in_bytes(files, capsys):
    models = files / "models.yaml"
    models.write_text(
        models.read_text().replace("20GiB", "80GiB")
        + "  odd: {memory: 1GiB, replicas: 4, apart: true}\n"
    )
    status, said, _ = run(files, capsys)
    assert status == 5
    assert (
        "big has no machine: it takes 80.0 GiB; the largest machine, large, has 62.0 GiB." in said
    )
    assert (
        "odd has no machine: it takes 1.00 GiB; every machine with room for it has another copy"
        in said
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("models: {a: {}}", "it needs either folder or memory"),
        ("models: {a: {memory: lots}}", "memory is 'lots'"),
        ("models: {a: {memory: 1GiB, replicas: 0}}", "positive numbers"),
        ("models: {a: {memory: 1GiB, ranks: 0}}", "ranks are 1 to 64"),
        (f"models: {{a: {{folder: {EMBEDDED}, ranks: 5}}}}", "--tensor-parallel-size 5"),
        ("models: {a: {memory: 1GiB, quantisation: int4}}", "quantisation"),
        ("models: {a: {folder: nowhere}}", "There is no folder"),
        ("hosts: {}", "has no mapping 'models'"),
    ],
)
def test_a_row_that_is_wrong_is_named(files, capsys, text, told):
    (files / "models.yaml").write_text(text)
    status, _, error = run(files, capsys)
    assert status == 2
    assert told in error
