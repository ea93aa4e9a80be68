"""Which model goes on which machine: bin packing by memory, the cheapest machines first.

Given what each replica takes and what each machine has, a placement at the least price, then with
the fullest machine as empty as that price allows, or why not everything can be placed. First fit in
falling order of size gives an answer at once; with few replicas branch and bound then finds the
cheapest there is. Worked example, two machines of 32 GiB at 1 and one of 64 GiB at 1.5:

    replicas of 30, 20 and 12 GiB   on the one of 64 (62 used): 1.5, where two small ones cost 2
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

EXACT_UP_TO = 12
"""Replicas for which the cheapest placement is searched to the end."""
MOST_NODES = 2_000_000
"""Of the search; beyond it the best one found is given, and called that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One copy of a model: the bytes it takes, and whether no other copy may be beside it."""

    model: str
    num_bytes: int
    apart: bool = False
    why: str = ""
    """What the bytes are of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine: the bytes it has for models, and what it costs an hour."""

    name: str
    num_bytes: int
    price: float = 0.0


@dataclass(slots=True)
class Placement:
    """`hosts[i]` is the index of the machine of replica i, None where it has none."""

    hosts: list[int | None]
    price: float = 0.0
    is_cheapest: bool = False
    """Whether no cheaper placement exists; else none was found."""


@dataclass(slots=True)
class Room:
    """What is left of the machines while replicas are put on them."""

    machines: Sequence[Host]
    left: list[int] = field(init=False)
    models: list[dict[str, int]] = field(init=False)
    """On each machine, how many copies of each model."""

    def __post_init__(self) -> None:
        self.left = [machine.num_bytes for machine in self.machines]
        self.models = [{} for _ in self.machines]

    def is_open(self, at: int) -> bool:
        """Whether something is on it."""
        return bool(self.models[at])

    def takes(self, replica: Replica, at: int) -> bool:
        beside = replica.apart and replica.model in self.models[at]
        return replica.num_bytes <= self.left[at] and not beside

    def put(self, replica: Replica, at: int) -> None:
        self.left[at] -= replica.num_bytes
        counts = self.models[at]
        counts[replica.model] = counts.get(replica.model, 0) + 1

    def take(self, replica: Replica, at: int) -> None:
        """The opposite of `put`."""
        self.left[at] += replica.num_bytes
        counts = self.models[at]
        counts[replica.model] -= 1
        if not counts[replica.model]:
            del counts[replica.model]


def place(replicas: Sequence[Replica], machines: Sequence[Host]) -> Placement:
    """Put every replica on a machine; those that fit nowhere have None."""
    order = sorted(range(len(replicas)), key=lambda i: (-replicas[i].num_bytes, replicas[i].model))
    found = first_fit(replicas, machines, order)
    if len(replicas) <= EXACT_UP_TO:
        found = Search(replicas, machines, order, found).run()
    if None not in found.hosts:
        spread(replicas, machines, found)
    return found


def cost(hosts: Sequence[int | None], machines: Sequence[Host]) -> float:
    """What the machines cost that something is on."""
    return sum(machines[at].price for at in {at for at in hosts if at is not None})


def first_fit(
    replicas: Sequence[Replica], machines: Sequence[Host], order: Sequence[int]
) -> Placement:
    """The largest first, each on the open machine that it fills best, else on a new one.

    A new one is the one with the least price for a byte of those that hold it.
    """
    room = Room(machines)
    hosts: list[int | None] = [None] * len(replicas)
    rest = sum(replica.num_bytes for replica in replicas)
    for i in order:
        fitting = [at for at in range(len(machines)) if room.takes(replicas[i], at)]
        opened = [at for at in fitting if room.is_open(at)]
        chosen = None
        if opened:
            chosen = min(opened, key=lambda at: room.left[at])
        elif fitting:
            chosen = min(fitting, key=lambda at: by_price(machines[at], rest))
        if chosen is not None:
            room.put(replicas[i], chosen)
            hosts[i] = chosen
        rest -= replicas[i].num_bytes
    return Placement(hosts, cost(hosts, machines))


def by_price(machine: Host, wanted: int) -> tuple[float, int]:
    """The price of a byte that can be used of it; of equals the smaller."""
    return machine.price / max(1, min(machine.num_bytes, wanted)), machine.num_bytes


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
        self.hosts: list[int | None] = [None] * len(replicas)
        self.nodes = 0
        sizes = [replicas[i].num_bytes for i in order]
        self.rest = [sum(sizes[at:]) for at in range(len(sizes) + 1)]
        self.by_byte = sorted(
            range(len(machines)), key=lambda at: machines[at].price / max(1, machines[at].num_bytes)
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
            self.best = Placement(list(self.hosts), price)
            return
        i, tried = self.order[depth], set[tuple[float, int]]()
        replica = self.replicas[i]
        for at in self._candidates(depth, replica):
            machine, is_open = self.machines[at], self.room.is_open(at)
            if not is_open:
                if (machine.price, machine.num_bytes) in tried:
                    continue
                tried.add((machine.price, machine.num_bytes))
            self.room.put(replica, at)
            self.hosts[i] = at
            self._go(depth + 1, price + (0.0 if is_open else machine.price))
            self.hosts[i] = None
            self.room.take(replica, at)

    def _candidates(self, depth: int, replica: Replica) -> list[int]:
        """Machines that take it, open ones first; not before the one of an equal replica."""
        before = self.replicas[self.order[depth - 1]] if depth else None
        least = -1
        if before is not None and before == replica:
            least = self.hosts[self.order[depth - 1]] or 0
        ranks = [at for at in self.by_byte if self.room.takes(replica, at)]
        if least >= 0:
            rank = {at: number for number, at in enumerate(self.by_byte)}
            ranks = [at for at in ranks if rank[at] >= rank[least]]
        return sorted(ranks, key=lambda at: not self.room.is_open(at))

    def _least_more(self, depth: int) -> float:
        """The least that what is left can cost beyond the machines that are open."""
        free = sum(left for at, left in enumerate(self.room.left) if self.room.is_open(at))
        wanted, least = self.rest[depth] - free, 0.0
        for at in self.by_byte:
            if wanted <= 0:
                break
            if not self.room.is_open(at):
                machine = self.machines[at]
                least += machine.price * min(1.0, wanted / max(1, machine.num_bytes))
                wanted -= machine.num_bytes
        return least if wanted <= 0 else inf


def spread(replicas: Sequence[Replica], machines: Sequence[Host], found: Placement) -> None:
    """Move replicas from the fullest machine to another open one while that empties it.

    The price stays; with machines that cost nothing all are open.
    """
    room = Room(machines)
    for replica, at in zip(replicas, found.hosts, strict=True):
        assert at is not None
        room.put(replica, at)
    usable = [at for at in range(len(machines)) if room.is_open(at) or not machines[at].price]
    for _ in range(10 * len(replicas)):
        share = {at: 1 - room.left[at] / max(1, machines[at].num_bytes) for at in usable}
        fullest = max(usable, key=lambda at: share[at], default=None)
        if fullest is None or not move_one(replicas, machines, found, room, usable, fullest):
            return


def move_one(
    replicas: Sequence[Replica],
    machines: Sequence[Host],
    found: Placement,
    room: Room,
    usable: Sequence[int],
    fullest: int,
) -> bool:
    """Whether a replica of the fullest machine could go where it makes less of a peak.

    Of 4, 4, 2 and 2 on one machine a 4 goes first, then a 2: 6 and 6.
    """

    def share(at: int, num_bytes: int) -> float:
        """How full a machine is with so many bytes more."""
        return 1 - (room.left[at] - num_bytes) / max(1, machines[at].num_bytes)

    own = [i for i, at in enumerate(found.hosts) if at == fullest]
    if len(own) == 1 and machines[fullest].price:
        return False  # it would be empty, and another one open
    moves = [
        (max(share(at, replicas[i].num_bytes), share(fullest, -replicas[i].num_bytes)), i, at)
        for i in own
        for at in usable
        if at != fullest and room.takes(replicas[i], at)
    ]
    after, i, at = min(moves, default=(inf, 0, 0))
    if after >= share(fullest, 0):
        return False
    room.take(replicas[i], fullest)
    room.put(replicas[i], at)
    found.hosts[i] = at
    return True


def refusals(
    replicas: Sequence[Replica], machines: Sequence[Host], found: Placement
) -> list[tuple[int, str]]:
    """(replica, why it has no machine) of those that have none."""
    room = Room(machines)
    for replica, at in zip(replicas, found.hosts, strict=True):
        if at is not None:
            room.put(replica, at)
    return [
        (i, reason(replicas[i], machines, room)) for i, at in enumerate(found.hosts) if at is None
    ]


def reason(replica: Replica, machines: Sequence[Host], room: Room) -> str:
    """Why one replica fits on no machine as the others are placed."""
    if not machines:
        return "there is no machine"
    largest = max(machines, key=lambda machine: machine.num_bytes)
    if replica.num_bytes > largest.num_bytes:
        return f"the largest machine, {largest.name}, has {largest.num_bytes / 2**30:.1f} GiB"
    free = max(range(len(machines)), key=lambda at: room.left[at])
    told = f"{room.left[free] / 2**30:.1f} GiB are left at most, on {machines[free].name}"
    if replica.num_bytes <= room.left[free]:
        return "every machine with room for it has another copy, and they are to be apart"
    return told
