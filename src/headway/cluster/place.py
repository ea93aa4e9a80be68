"""Placement of models on machines: bin packing by memory, the cheapest machines first.

The result is a placement at the lowest price and, at that price, with the lowest peak use of a
machine; or the reasons why not all replicas fit. First fit in falling order of size gives an answer
at once; with few replicas, branch and bound then finds the cheapest one. Example with two machines
of 32 GiB at price 1 and one of 64 GiB at 1.5:

    replicas of 30, 20 and 12 GiB   on the one of 64 (62 used): 1.5; two small ones would cost 2

A machine may have several devices. A replica with several ranks takes as many devices of one
machine, an equal share of each: one of 120 GiB on 2 ranks fits on two devices of 80, next to one of
20.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import inf

from headway.config.memory_plan import gib

MAX_EXACT_REPLICAS = 12
"""Number of replicas up to which the cheapest placement is searched."""
MAX_SEARCH_NODES = 2_000_000
"""Limit of the search; beyond it the result is the best one found, and marked as such."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReplica:
    """One copy of a model: bytes over all of its ranks, each on a device of its own.

    With `apart`, no other copy of the model may be on the same machine.
    """

    model: str
    num_bytes: int
    ranks: int = 1
    apart: bool = False
    why: str = ""
    """What the bytes consist of."""

    @property
    def share(self) -> int:
        """The bytes of each rank."""
        return -(-self.num_bytes // self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementMachine:
    """A machine: the bytes of each of its devices for models, and its price per hour."""

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
    """`hosts[i]` is the index of replica i's machine, or None; `devices[i]` are its devices
    there."""

    hosts: list[int | None]
    devices: list[tuple[int, ...]]
    price: float = 0.0
    is_cheapest: bool = False
    """Whether no cheaper placement exists; otherwise none was found."""


@dataclass(slots=True)
class Room:
    """The free bytes of the machines' devices during placement."""

    machines: Sequence[PlacementMachine]
    free: list[list[int]] = field(init=False)
    models: list[dict[str, int]] = field(init=False)
    """For each machine, the number of copies of each model."""

    def __post_init__(self) -> None:
        self.free = [[machine.num_bytes] * machine.devices for machine in self.machines]
        self.models = [{} for _ in self.machines]

    def is_open(self, at: int) -> bool:
        """Whether the machine has a replica."""
        return bool(self.models[at])

    def fits(self, replica: ModelReplica, at: int) -> bool:
        has_other_copy = replica.apart and replica.model in self.models[at]
        return not has_other_copy and len(self.fitting(replica, at)) >= replica.ranks

    def fitting(self, replica: ModelReplica, at: int) -> list[int]:
        """Return a machine's devices that can hold a rank of the replica, the fullest first."""
        free, share = self.free[at], replica.share
        devices = [device for device in range(len(free)) if free[device] >= share]
        return sorted(devices, key=lambda device: free[device])

    def choices(self, replica: ModelReplica, at: int) -> Iterator[tuple[int, ...]]:
        """Yield every choice of devices, the fullest first; equally full ones are interchangeable.

        Two devices of those with 5, 5 and 8 GiB free: (5, 5), and (5, 8) once.
        """
        alike: dict[int, list[int]] = {}
        for device in self.fitting(replica, at):
            alike.setdefault(self.free[at][device], []).append(device)
        counts = [range(min(len(group), replica.ranks), -1, -1) for group in alike.values()]
        for numbers in product(*counts):
            if sum(numbers) == replica.ranks:
                pairs = zip(alike.values(), numbers, strict=True)
                yield tuple(device for group, count in pairs for device in group[:count])

    def put(self, replica: ModelReplica, at: int, devices: Sequence[int]) -> None:
        for device in devices:
            self.free[at][device] -= replica.share
        counts = self.models[at]
        counts[replica.model] = counts.get(replica.model, 0) + 1

    def remove(self, replica: ModelReplica, at: int, devices: Sequence[int]) -> None:
        """Undo `put`."""
        for device in devices:
            self.free[at][device] += replica.share
        counts = self.models[at]
        counts[replica.model] -= 1
        if not counts[replica.model]:
            del counts[replica.model]


def place(replicas: Sequence[ModelReplica], machines: Sequence[PlacementMachine]) -> Placement:
    """Place every replica on a machine; those that fit nowhere get None."""
    order = sorted(range(len(replicas)), key=lambda i: size_key(replicas[i]))
    placement = first_fit(replicas, machines, order)
    if len(replicas) <= MAX_EXACT_REPLICAS:
        placement = BranchAndBound(replicas, machines, order, placement).run()
    if None not in placement.hosts:
        balance(replicas, machines, placement)
    return placement


def size_key(replica: ModelReplica) -> tuple[int, int, str]:
    """Sort key: the largest first, then the one with most ranks."""
    return -replica.num_bytes, -replica.ranks, replica.model


def cost(hosts: Sequence[int | None], machines: Sequence[PlacementMachine]) -> float:
    """Return the price of the machines that have a replica."""
    return sum(machines[at].price for at in {at for at in hosts if at is not None})


def first_fit(
    replicas: Sequence[ModelReplica], machines: Sequence[PlacementMachine], order: Sequence[int]
) -> Placement:
    """Place the largest first, each on the used machine that it fills best, else on a new one.

    On a machine it takes the fullest devices that hold it. A new machine is the one with the lowest
    price per byte of those that hold it.
    """
    room, placement = Room(machines), empty_placement(replicas)
    rest = sum(replica.num_bytes for replica in replicas)
    for i in order:
        fitting = [at for at in range(len(machines)) if room.fits(replicas[i], at)]
        opened = [at for at in fitting if room.is_open(at)]
        chosen = None
        if opened:
            chosen = min(opened, key=lambda at: tightest_free(room, replicas[i], at))
        elif fitting:
            chosen = min(fitting, key=lambda at: price_key(machines[at], rest))
        if chosen is not None:
            devices = tuple(room.fitting(replicas[i], chosen)[: replicas[i].ranks])
            room.put(replicas[i], chosen, devices)
            placement.hosts[i], placement.devices[i] = chosen, devices
        rest -= replicas[i].num_bytes
    placement.price = cost(placement.hosts, machines)
    return placement


def empty_placement(replicas: Sequence[ModelReplica]) -> Placement:
    """Return a placement without machines."""
    return Placement([None] * len(replicas), [()] * len(replicas))


def tightest_free(room: Room, replica: ModelReplica, at: int) -> int:
    """Return the free bytes of the fullest device of a machine that can hold a rank."""
    return room.free[at][room.fitting(replica, at)[0]]


def price_key(machine: PlacementMachine, needed: int) -> tuple[float, int]:
    """Sort key: the price per usable byte, then the size."""
    return machine.price / max(1, min(machine.total, needed)), machine.total


class BranchAndBound:
    """Branch and bound over the replicas in falling order of size.

    A branch ends if its machines, with the cheapest bytes for the remaining replicas, cost as much
    as the best known placement. Of equal machines one is tried; equal replicas keep their order.
    """

    def __init__(
        self,
        replicas: Sequence[ModelReplica],
        machines: Sequence[PlacementMachine],
        order: Sequence[int],
        best: Placement,
    ) -> None:
        self.replicas, self.machines, self.order, self.best = replicas, machines, order, best
        self.room = Room(machines)
        self.current = empty_placement(replicas)
        self.nodes = 0
        sizes = [replicas[i].num_bytes for i in order]
        self.rest = [sum(sizes[at:]) for at in range(len(sizes) + 1)]
        self.by_byte = sorted(
            range(len(machines)), key=lambda at: machines[at].price / max(1, machines[at].total)
        )

    def run(self) -> Placement:
        """Return the cheapest placement of all replicas, or the initial one if there is none."""
        if None in self.best.hosts:
            self.best.price = inf
        self._branch(0, 0.0)
        self.best.is_cheapest = self.nodes <= MAX_SEARCH_NODES and None not in self.best.hosts
        if None in self.best.hosts:
            self.best.price = cost(self.best.hosts, self.machines)
        return self.best

    def _branch(self, depth: int, price: float) -> None:
        self.nodes += 1
        if self.nodes > MAX_SEARCH_NODES or price + self._min_added_price(depth) >= self.best.price:
            return
        if depth == len(self.order):
            self.best = Placement(list(self.current.hosts), list(self.current.devices), price)
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
                self.current.hosts[i], self.current.devices[i] = at, devices
                self._branch(depth + 1, price + (0.0 if is_open else machine.price))
                self.current.hosts[i], self.current.devices[i] = None, ()
                self.room.remove(replica, at, devices)

    def _candidates(self, depth: int, replica: ModelReplica) -> list[int]:
        """Return machines that fit, used ones first; not before the machine of an equal replica."""
        before = self.replicas[self.order[depth - 1]] if depth else None
        first_allowed = -1
        if before is not None and before == replica:
            first_allowed = self.current.hosts[self.order[depth - 1]] or 0
        ranks = [at for at in self.by_byte if self.room.fits(replica, at)]
        if first_allowed >= 0:
            rank = {at: number for number, at in enumerate(self.by_byte)}
            ranks = [at for at in ranks if rank[at] >= rank[first_allowed]]
        return sorted(ranks, key=lambda at: not self.room.is_open(at))

    def _min_added_price(self, depth: int) -> float:
        """Return a lower bound of the added price for the remaining replicas."""
        free = sum(sum(own) for at, own in enumerate(self.room.free) if self.room.is_open(at))
        needed, price = self.rest[depth] - free, 0.0
        for at in self.by_byte:
            if needed <= 0:
                break
            if not self.room.is_open(at):
                machine = self.machines[at]
                price += machine.price * min(1.0, needed / max(1, machine.total))
                needed -= machine.total
        return price if needed <= 0 else inf


def balance(
    replicas: Sequence[ModelReplica], machines: Sequence[PlacementMachine], placement: Placement
) -> None:
    """Move replicas from the fullest device to others while that lowers the peak.

    The price is unchanged: only used machines are targets, and machines without a price.
    """
    room = room_of(replicas, machines, placement)
    usable = [at for at in range(len(machines)) if room.is_open(at) or not machines[at].price]
    for _ in range(10 * len(replicas)):
        full = [
            (1 - free / max(1, machines[at].num_bytes), at, device)
            for at in usable
            for device, free in enumerate(room.free[at])
        ]
        if not full or not move_one(replicas, machines, placement, room, usable, max(full)):
            return


def move_one(
    replicas: Sequence[ModelReplica],
    machines: Sequence[PlacementMachine],
    placement: Placement,
    room: Room,
    usable: Sequence[int],
    fullest: tuple[float, int, int],
) -> bool:
    """Move one replica of the fullest device (use, machine, device) if that lowers the peak.

    It goes to the emptiest devices of its machine or of another one; returns whether one was moved.
    Of 4, 4, 2 and 2 on one device a 4 goes first, then a 2: 6 and 6.
    """
    share, own_at, device = fullest
    there = [i for i, at in enumerate(placement.hosts) if at == own_at]
    moves = []
    for i in (i for i in there if device in placement.devices[i]):
        room.remove(replicas[i], own_at, placement.devices[i])
        for at in usable:
            if at != own_at and len(there) == 1 and machines[own_at].price:
                continue  # its machine would become empty, and another one used
            if room.fits(replicas[i], at):
                devices = tuple(room.fitting(replicas[i], at)[-replicas[i].ranks :])
                room.put(replicas[i], at, devices)
                touched = [(own_at, device), *((at, each) for each in devices)]
                moves.append((peak(room, machines, touched), i, at, devices))
                room.remove(replicas[i], at, devices)
        room.put(replicas[i], own_at, placement.devices[i])
    after, i, at, devices = min(moves, default=(inf, 0, 0, ()))
    if after >= share:
        return False
    room.remove(replicas[i], own_at, placement.devices[i])
    room.put(replicas[i], at, devices)
    placement.hosts[i], placement.devices[i] = at, devices
    return True


def peak(
    room: Room, machines: Sequence[PlacementMachine], some: Sequence[tuple[int, int]]
) -> float:
    """Return the highest use of some devices, given as (machine, device)."""
    return max(1 - room.free[at][device] / max(1, machines[at].num_bytes) for at, device in some)


def room_of(
    replicas: Sequence[ModelReplica], machines: Sequence[PlacementMachine], placement: Placement
) -> Room:
    """Return the free room of a placement."""
    room = Room(machines)
    for replica, at, devices in zip(replicas, placement.hosts, placement.devices, strict=True):
        if at is not None:
            room.put(replica, at, devices)
    return room


def refusals(
    replicas: Sequence[ModelReplica], machines: Sequence[PlacementMachine], placement: Placement
) -> list[tuple[int, str]]:
    """Return (replica, why it has no machine) for those without one."""
    room = room_of(replicas, machines, placement)
    return [
        (i, reason(replicas[i], machines, room))
        for i, at in enumerate(placement.hosts)
        if at is None
    ]


def reason(replica: ModelReplica, machines: Sequence[PlacementMachine], room: Room) -> str:
    """Return why one replica fits on no machine next to the placed ones."""
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
    free = {at: sorted(room.free[at])[-replica.ranks] for at in enough}
    emptiest = max(enough, key=lambda at: free[at])
    if replica.share <= free[emptiest]:
        return "every machine with room for it has another copy, and they are to be apart"
    return f"{gib(free[emptiest])} are left{each} at most, on {machines[emptiest].name}"
