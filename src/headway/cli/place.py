"""`headway plan --place MODELS.yaml --machines FILE`: which model goes on which machine."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from headway.config.memory_plan import gib
from headway.config.options import PlaceOptions
from headway.core.errors import UsageError

if TYPE_CHECKING:
    from headway.cli.main import Call
    from headway.cluster.place import Host, Placement, Replica

UNPLACED = 5
"""The exit status where something has no machine."""


def place(call: "Call") -> int:
    """Print the placement; 5 where something has no machine, with the reason."""
    options = call.options[PlaceOptions]
    if len(call.positionals) != 1 or not options.machines:
        raise UsageError(
            "plan --place takes one file of models, and --machines.",
            "headway plan --place models.yaml --machines machines.yaml",
        )
    from headway.cluster import place as placing
    from headway.cluster.place_files import read_machines, read_models

    replicas = read_models(Path(call.positionals[0]))
    machines = read_machines(Path(options.machines))
    found = placing.place(replicas, machines)
    refused = placing.refusals(replicas, machines, found)
    if options.json:
        Path(options.json).write_text(json.dumps(as_json(replicas, machines, found, refused)))
    print(table(replicas, machines, found))
    for i, why in refused:
        replica = replicas[i]
        print(f"{replica.model} has no machine: it takes {gib(replica.num_bytes)}; {why}.")
    return UNPLACED if refused else 0


def table(replicas: "list[Replica]", machines: "list[Host]", found: "Placement") -> str:
    """A line for each machine that is used, what is on it and why that takes what it takes."""
    lines = []
    for at, machine in enumerate(machines):
        own = [i for i, host in enumerate(found.hosts) if host == at]
        if not own:
            continue
        used = sum(replicas[i].num_bytes for i in own)
        share = used / machine.total
        lines.append(f"{machine.name}: {gib(used)} of {gib(machine.total)} ({share:.0%})")
        for i in own:
            each, where = replicas[i], ""
            if machine.devices > 1:
                numbers = ", ".join(map(str, sorted(found.devices[i])))
                where = f"device{'s' if each.ranks > 1 else ''} {numbers}: "
            lines.append(f"    {each.model:<20} {gib(each.num_bytes):>10}  {where}{each.why}")
    kind = "no placement is cheaper" if found.is_cheapest else "the cheapest that was found"
    used = len({at for at in found.hosts if at is not None})
    return "\n".join(
        [*lines, f"{used} of {len(machines)} machines, {found.price:g} an hour; {kind}."]
    )


def as_json(
    replicas: "list[Replica]",
    machines: "list[Host]",
    found: "Placement",
    refused: list[tuple[int, str]],
) -> dict[str, object]:
    """The same for programs."""
    reasons = dict(refused)
    return {
        "price": found.price,
        "is_cheapest": found.is_cheapest,
        "replicas": [
            {
                "model": replica.model,
                "bytes": replica.num_bytes,
                "machine": None if at is None else machines[at].name,
                "devices": sorted(found.devices[i]),
                "why_not": reasons.get(i),
            }
            for i, (replica, at) in enumerate(zip(replicas, found.hosts, strict=True))
        ],
    }
