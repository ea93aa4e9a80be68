"""`headway plan --place MODELS.yaml --machines FILE`: which model goes on which machine."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from headway.config.memory_plan import gib
from headway.config.options import PlaceOptions
from headway.core.errors import UsageError

if TYPE_CHECKING:
    from headway.cli.main import VerbCall
    from headway.cluster.place import ModelReplica, Placement, PlacementMachine

UNPLACED_STATUS = 5
"""Exit status where a model has no machine."""


def place(call: "VerbCall") -> int:
    """Print the placement; return 5 where a model has no machine, with the reason."""
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
    placement = placing.place(replicas, machines)
    refused = placing.refusals(replicas, machines, placement)
    if options.json:
        Path(options.json).write_text(json.dumps(as_json(replicas, machines, placement, refused)))
    print(table(replicas, machines, placement))
    for i, why in refused:
        replica = replicas[i]
        print(f"{replica.model} has no machine: it takes {gib(replica.num_bytes)}; {why}.")
    return UNPLACED_STATUS if refused else 0


def table(
    replicas: "list[ModelReplica]", machines: "list[PlacementMachine]", placement: "Placement"
) -> str:
    """Return a line for each machine in use, with its models and the reasons of their sizes."""
    lines = []
    for at, machine in enumerate(machines):
        own = [i for i, host in enumerate(placement.hosts) if host == at]
        if not own:
            continue
        used = sum(replicas[i].num_bytes for i in own)
        share = used / machine.total
        lines.append(f"{machine.name}: {gib(used)} of {gib(machine.total)} ({share:.0%})")
        for i in own:
            each, where = replicas[i], ""
            if machine.devices > 1:
                numbers = ", ".join(map(str, sorted(placement.devices[i])))
                where = f"device{'s' if each.ranks > 1 else ''} {numbers}: "
            lines.append(f"    {each.model:<20} {gib(each.num_bytes):>10}  {where}{each.why}")
    kind = "no placement is cheaper" if placement.is_cheapest else "the cheapest that was found"
    used = len({at for at in placement.hosts if at is not None})
    return "\n".join(
        [*lines, f"{used} of {len(machines)} machines, {placement.price:g} an hour; {kind}."]
    )


def as_json(
    replicas: "list[ModelReplica]",
    machines: "list[PlacementMachine]",
    placement: "Placement",
    refused: list[tuple[int, str]],
) -> dict[str, object]:
    """Return the placement as the content of `--json`."""
    reasons = dict(refused)
    return {
        "price": placement.price,
        "is_cheapest": placement.is_cheapest,
        "replicas": [
            {
                "model": replica.model,
                "bytes": replica.num_bytes,
                "machine": None if at is None else machines[at].name,
                "devices": sorted(placement.devices[i]),
                "why_not": reasons.get(i),
            }
            for i, (replica, at) in enumerate(zip(replicas, placement.hosts, strict=True))
        ],
    }
