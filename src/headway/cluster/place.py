"""Which model goes on which machine: bin packing by memory, the cheapest machines first.

Given what each replica takes and what each machine has, a placement at the least price, then with
the fullest machine as empty as that price allows, or why not everything can be placed. First fit in
falling order of size gives an answer at once; with few replicas branch and bound then finds the
cheapest there is. Worked example, two machines of 32 GiB at 1 and one of 64 GiB at 1.5:

    replicas of 30, 20 and 12 GiB   on the one of 64 (62 used): 1.5, where two small ones cost 2

A machine may have several devices. A replica of several ranks takes so many of one machine, and of
each a like share: one of 120 GiB on 2 ranks fits on two devices of 80, beside one of 20.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import inf

from headway.config.memory_plan import gib

EXACT_UP_TO = 12
"""Replicas for which the cheapest placement is searched to the end."""
MOST_NODES = 2_000_000
"""Of the search; beyond it the best one found is given, and called that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One copy of a model: the bytes it takes on all of its ranks, each of which wants a device,
    and whether no other copy may be on the same machine."""

    model: str
    num_bytes: int
    ranks: int = 1
    apart: bool = False
    why: str = ""
    """What the bytes are of."""

    @property
    def share(self) -> int:
        """The bytes of each rank."""
        return -(-self.num_bytes // self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine: the bytes that each of its devices has for models, and what it costs an hour."""

    name: str
    num_bytes: int
    price: float = 0.0
    devices: int = 1

    @property
    def total(self) -> int:
        """The bytes of all devices."""
        return self.num_bytes * self.devices


@dataclass(slots=True)
class Placement:
    """`hosts[i]` is the index of the machine of replica i, None where it has none; `devices[i]` are
    those of this machine that it is on."""

    hosts: list[int | None]
    devices: list[tuple[int, ...]]
    price: float = 0.0
    is_cheapest: bool = False
    """Whether no cheaper placement exists; else none was found."""


@dataclass(slots=True)
class Room:
    """What is left of the machines' devices while replicas are put on them."""

    machines: Sequence[Host]
    left: list[list[int]] = field(init=False)
    models: list[dict[str, int]] = field(init=False)
    """On each machine, how many copies of each model."""

    def __post_init__(self) -> None:
        self.left = [[machine.num_bytes] * machine.devices for machine in self.machines]
        self.models = [{} for _ in self.machines]

    def is_open(self, at: int) -> bool:
        """Whether something is on it."""
        return bool(self.models[at])

    def takes(self, replica: Replica, at: int) -> bool:
        beside = replica.apart and replica.model in self.models[at]
        return not beside and len(self.fitting(replica, at)) >= replica.ranks

    def fitting(self, replica: Replica, at: int) -> list[int]:
        """The devices of a machine that hold a rank of it, the fullest first."""
        left, share = self.left[at], replica.share
        found = [device for device in range(len(left)) if left[device] >= share]
        return sorted(found, key=lambda device: left[device])

    def choices(self, replica: Replica, at: int) -> Iterator[tuple[int, ...]]:
        """Every choice of devices there, the fullest first; of those that are as full one.

        Of devices with 5, 5 and 8 GiB left two: (5, 5), and (5, 8) once.
        """
        alike: dict[int, list[int]] = {}
        for device in self.fitting(replica, at):
            alike.setdefault(self.left[at][device], []).append(device)
        counts = [range(min(len(group), replica.ranks), -1, -1) for group in alike.values()]
        for numbers in product(*counts):
            if sum(numbers) == replica.ranks:
                pairs = zip(alike.values(), numbers, strict=True)
                yield tuple(device for group, count in pairs for device in group[:count])

    def put(self, replica: Replica, at: int, devices: Sequence[int]) -> None:
        for device in devices:
            self.left[at][device] -= replica.share
        counts = self.models[at]
        counts[replica.model] = counts.get(replica.model, 0) + 1

    def take(self, replica: Replica, at: int, devices: Sequence[int]) -> None:
        """The opposite of `put`."""
        for device in devices:
            self.left[at][device] += replica.share
        counts = self.models[at]
        counts[replica.model] -= 1
        if not counts[replica.model]:
            del counts[replica.model]


def place(replicas: Sequence[Replica], machines: Sequence[Host]) -> Placement:
    """Put every replica on a machine; those that fit nowhere have None."""
    order = sorted(range(len(replicas)), key=lambda i: by_size(replicas[i]))
    found = first_fit(replicas, machines, order)
    if len(replicas) <= EXACT_UP_TO:
        found = Search(replicas, machines, order, found).run()
    if None not in found.hosts:
        spread(replicas, machines, found)
    return found


def by_size(replica: Replica) -> tuple[int, int, str]:
    """The largest first, of those as large who wants most devices."""
    return -replica.num_bytes, -replica.ranks, replica.model


def cost(hosts: Sequence[int | None], machines: Sequence[Host]) -> float:
    """What the machines cost that something is on."""
    return sum(machines[at].price for at in {at for at in hosts if at is not None})


def first_fit(
    replicas: Sequence[Replica], machines: Sequence[Host], order: Sequence[int]
) -> Placement:
    """The largest first, each on the open machine that it fills best, else on a new one; there on
    the fullest devices that hold it.

    A new one is the one with the least price for a byte of those that hold it.
    """
    room, found = Room(machines), nothing(replicas)
    rest = sum(replica.num_bytes for replica in replicas)
    for i in order:
        fitting = [at for at in range(len(machines)) if room.takes(replicas[i], at)]
        opened = [at for at in fitting if room.is_open(at)]
        chosen = None
        if opened:
            chosen = min(opened, key=lambda at: least_left(room, replicas[i], at))
        elif fitting:
            chosen = min(fitting, key=lambda at: by_price(machines[at], rest))
        if chosen is not None:
            devices = tuple(room.fitting(replicas[i], chosen)[: replicas[i].ranks])
            room.put(replicas[i], chosen, devices)
            found.hosts[i], found.devices[i] = chosen, devices
        rest -= replicas[i].num_bytes
    found.price = cost(found.hosts, machines)
    return found


def nothing(replicas: Sequence[Replica]) -> Placement:
    """No replica has a machine."""
    return Placement([None] * len(replicas), [()] * len(replicas))


def least_left(room: Room, replica: Replica, at: int) -> int:
    """The bytes that are left on the fullest device of a machine that holds a rank of it."""
    return room.left[at][room.fitting(replica, at)[0]]


def by_price(machine: Host, wanted: int) -> tuple[float, int]:
    """The price of a byte that can be used of it; of equals the smaller."""
    return machine.price / max(1, min(machine.total, wanted)), machine.total


class Search:
    """Branch and bound over the replicas in falling order of size.

    A branch ends where its machines, and the cheapest bytes for what is left, cost as much as the
    best placement known. Machines that are alike are tried once; equal replicas keep their order.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        machines: Sequence[Host],
        order: Sequence[int],
        best: Placement,
    ) -> None:
        self.replicas, self.machines, self.order, self.best = replicas, machines, order, best
        self.room = Room(machines)
        self.now = nothing(replicas)
        self.nodes = 0
        sizes = [replicas[i].num_bytes for i in order]
        self.rest = [sum(sizes[at:]) for at in range(len(sizes) + 1)]
        self.by_byte = sorted(
            range(len(machines)), key=lambda at: machines[at].price / max(1, machines[at].total)
        )

    def run(self) -> Placement:
        """The cheapest placement of all replicas; the one it began with where there is none."""
        if None in self.best.hosts:
            self.best.price = inf
        self._go(0, 0.0)
        self.best.is_cheapest = self.nodes <= MOST_NODES and None not in self.best.hosts
        if None in self.best.hosts:
            self.best.price = cost(self.best.hosts, self.machines)
        return self.best

    def _go(self, depth: int, price: float) -> None:
        self.nodes += 1
        if self.nodes > MOST_NODES or price + self._least_more(depth) >= self.best.price:
            return
        if depth == len(self.order):
            self.best = Placement(list(self.now.hosts), list(self.now.devices), price)
            return
        i, tried = self.order[depth], set[tuple[float, int, int]]()
        replica = self.replicas[i]
        for at in self._candidates(depth, replica):
            machine, is_open = self.machines[at], self.room.is_open(at)
            if not is_open:
                kind = machine.price, machine.num_bytes, machine.devices
                if kind in tried:
                    continue
                tried.add(kind)
            for devices in list(self.room.choices(replica, at)):
                self.room.put(replica, at, devices)
                self.now.hosts[i], self.now.devices[i] = at, devices
                self._go(depth + 1, price + (0.0 if is_open else machine.price))
                self.now.hosts[i], self.now.devices[i] = None, ()
                self.room.take(replica, at, devices)

    def _candidates(self, depth: int, replica: Replica) -> list[int]:
        """Machines that take it, open ones first; not before the one of an equal replica."""
        before = self.replicas[self.order[depth - 1]] if depth else None
        least = -1
        if before is not None and before == replica:
            least = self.now.hosts[self.order[depth - 1]] or 0
        ranks = [at for at in self.by_byte if self.room.takes(replica, at)]
        if least >= 0:
            rank = {at: number for number, at in enumerate(self.by_byte)}
            ranks = [at for at in ranks if rank[at] >= rank[least]]
        return sorted(ranks, key=lambda at: not self.room.is_open(at))

    def _least_more(self, depth: int) -> float:
        """The least that what is left can cost beyond the machines that are open."""
        free = sum(sum(left) for at, left in enumerate(self.room.left) if self.room.is_open(at))
        wanted, least = self.rest[depth] - free, 0.0
        for at in self.by_byte:
            if wanted <= 0:
                break
            if not self.room.is_open(at):
                machine = self.machines[at]
                least += machine.price * min(1.0, wanted / max(1, machine.total))
                wanted -= machine.total
        return least if wanted <= 0 else inf


def spread(replicas: Sequence[Replica], machines: Sequence[Host], found: Placement) -> None:
    """Move replicas from the fullest device to others of open machines while that empties it.

    The price stays; with machines that cost nothing all are open.
    """
    room = room_of(replicas, machines, found)
    usable = [at for at in range(len(machines)) if room.is_open(at) or not machines[at].price]
    for _ in range(10 * len(replicas)):
        full = [
            (1 - left / max(1, machines[at].num_bytes), at, device)
            for at in usable
            for device, left in enumerate(room.left[at])
        ]
        if not full or not move_one(replicas, machines, found, room, usable, max(full)):
            return


def move_one(
    replicas: Sequence[Replica],
    machines: Sequence[Host],
    found: Placement,
    room: Room,
    usable: Sequence[int],
    fullest: tuple[float, int, int],
) -> bool:
    """Whether a replica of the fullest device, (how full, machine, device), could go where it makes
    less of a peak: on the emptiest devices of its machine or of another.

    Of 4, 4, 2 and 2 on one machine a 4 goes first, then a 2: 6 and 6.
    """
    share, own_at, device = fullest
    there = [i for i, at in enumerate(found.hosts) if at == own_at]
    moves = []
    for i in (i for i in there if device in found.devices[i]):
        room.take(replicas[i], own_at, found.devices[i])
        for at in usable:
            if at != own_at and len(there) == 1 and machines[own_at].price:
                continue  # it would be empty, and another one open
            if room.takes(replicas[i], at):
                devices = tuple(room.fitting(replicas[i], at)[-replicas[i].ranks :])
                room.put(replicas[i], at, devices)
                touched = [(own_at, device), *((at, each) for each in devices)]
                moves.append((peak(room, machines, touched), i, at, devices))
                room.take(replicas[i], at, devices)
        room.put(replicas[i], own_at, found.devices[i])
    after, i, at, devices = min(moves, default=(inf, 0, 0, ()))
    if after >= share:
        return False
    room.take(replicas[i], own_at, found.devices[i])
    room.put(replicas[i], at, devices)
    found.hosts[i], found.devices[i] = at, devices
    return True


def peak(room: Room, machines: Sequence[Host], some: Sequence[tuple[int, int]]) -> float:
    """How full the fullest of some devices is, (machine, device) each."""
    return max(1 - room.left[at][device] / max(1, machines[at].num_bytes) for at, device in some)


def room_of(replicas: Sequence[Replica], machines: Sequence[Host], found: Placement) -> Room:
    """What a placement leaves."""
    room = Room(machines)
    for replica, at, devices in zip(replicas, found.hosts, found.devices, strict=True):
        if at is not None:
            room.put(replica, at, devices)
    return room


def refusals(
    replicas: Sequence[Replica], machines: Sequence[Host], found: Placement
) -> list[tuple[int, str]]:
    """(replica, why it has no machine) of those that have none."""
    room = room_of(replicas, machines, found)
    return [
        (i, reason(replicas[i], machines, room)) for i, at in enumerate(found.hosts) if at is None
    ]


def reason(replica: Replica, machines: Sequence[Host], room: Room) -> str:
    """Why one replica fits on no machine as the others are placed."""
    if not machines:
        return "there is no machine"
    most = max(machine.devices for machine in machines)
    if replica.ranks > most:
        return f"no machine has {replica.ranks} devices for its ranks, the most are {most}"
    each = " for each rank" if replica.ranks > 1 else ""
    enough = [at for at, host in enumerate(machines) if host.devices >= replica.ranks]
    largest = max((machines[at] for at in enough), key=lambda machine: machine.num_bytes)
    if replica.share > largest.num_bytes:
        return f"the largest machine, {largest.name}, has {gib(largest.num_bytes)}{each}"
    left = {at: sorted(room.left[at])[-replica.ranks] for at in enough}
    free = max(enough, key=lambda at: left[at])
    if replica.share <= left[free]:
        return "every machine with room for it has another copy, and they are to be apart"
    return f"{gib(left[free])} are left{each} at most, on {machines[free].name}"
