"""Classes of traffic: several streams of requests at once, each with its objectives.

A class is the common options with some of its own on top, from the `--classes` file, or a name in
`--slo` and `--share`. Shares divide the rate: 0.7 and 0.3 of 10 requests per second are 7 and 3.
"""

import dataclasses
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headway.bench.workload import Conversation, Traffic, build, is_trace, rate_of
from headway.config.options import BenchOptions
from headway.config.options.field import parse_value
from headway.core.errors import UsageError
from headway.core.slo import DEFAULT_CLASS, Slo, parse_classes, parse_slo
from headway.core.yaml_file import read_yaml

CLASS_OPTIONS = frozenset(
    "workload input_len output_len prefix_len num_prefixes turns think_time scale_length arrivals "
    "rate burstiness ramp_from speed duration num_requests".split()
)
"""Options that a class may set for itself."""
FIELDS = {field.name: field for field in dataclasses.fields(BenchOptions)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficClass:
    """One class: the options it is built from, and its objectives or None."""

    name: str
    options: BenchOptions
    slo: Slo | None


def read_classes(options: BenchOptions) -> list[TrafficClass]:
    """Return the classes that the options define; one named `default` when they define none."""
    slos = parse_classes(options.slo)
    shares = dict(parse_share(text) for text in options.share)
    own: dict[str, dict[str, Any]] = read_class_file(options.classes) if options.classes else {}
    for name, keys in own.items():
        if "slo" in keys:
            slos[name] = parse_slo(str(keys.pop("slo")))
        if "share" in keys:
            shares[name] = parse_share(f"{name}={keys.pop('share')}")[1]
    names = list(dict.fromkeys([*own, *slos, *shares])) or [DEFAULT_CLASS]
    if DEFAULT_CLASS in slos and len(names) > 1:  # objectives without a name are everybody's
        slos = dict.fromkeys(names, slos[DEFAULT_CLASS]) | slos
        names = [name for name in names if name != DEFAULT_CLASS or name in shares or name in own]
    for name in shares.keys() & names:
        if "rate" in own.get(name, {}):
            raise UsageError(f"Class {name} has a rate and a share.", "Give it one of them.")
    divided = [name for name in names if "rate" not in own.get(name, {})]
    given = sum(shares.get(name, 1.0) for name in divided)
    classes = []
    for name in names:
        changes = class_options(name, own.get(name, {}))
        if name in divided:
            part = shares.get(name, 1.0) / given
            if options.rate is not None and "speed" not in changes:
                changes["rate"] = options.rate * part
            elif not is_trace(changes.get("workload", options.workload)):
                changes["rate"] = rate_of(options) * part
            changes["ramp_from"] = changes.get("ramp_from", options.ramp_from) * part
            if options.num_requests is not None:
                changes.setdefault("num_requests", max(1, round(options.num_requests * part)))
        classes.append(
            TrafficClass(name=name, options=replace(options, **changes), slo=slos.get(name))
        )
    return classes


def parse_share(text: str) -> tuple[str, float]:
    """Parse interactive=0.7 → ("interactive", 0.7)."""
    name, _, value = text.partition("=")
    try:
        share = float(value)
    except ValueError:
        share = 0.0
    if not name or not 0 < share < float("inf"):
        raise UsageError(f"--share: {text!r} is not a share.", "Write interactive=0.7.")
    return name, share


def class_options(name: str, keys: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of one class as option values; UsageError names the key."""
    values = {}
    for key, value in keys.items():
        option = key.replace("-", "_")
        if option not in CLASS_OPTIONS:
            raise UsageError(
                f"--classes: {name} has no option {key}.",
                f"A class may have: share, slo, {', '.join(sorted(CLASS_OPTIONS))}.",
            )
        source = f"--classes: {name}.{key}"
        values[option] = parse_value(BenchOptions, FIELDS[option], value, source)
    if "rate" in values and "speed" in values:
        raise UsageError(f"--classes: {name} has a rate and a speed.", "Give it one of them.")
    return values


def read_class_file(path: str) -> dict[str, dict[str, Any]]:
    """Return class → its keys, from YAML."""
    content = read_yaml(Path(path), "--classes")
    if not isinstance(content, dict) or not all(isinstance(v, dict) for v in content.values()):
        raise UsageError(
            f"--classes {path} holds no classes.", "Write interactive: {share: 0.7, slo: ttft=1s}."
        )
    return {str(name): dict(keys) for name, keys in content.items()}


def build_all(classes: list[TrafficClass]) -> Traffic:
    """Return the traffic of all classes together, by time."""
    parts = [build(each.options, each.name) for each in classes]
    conversations: list[Conversation] = sorted(
        (talk for part in parts for talk in part.conversations), key=lambda talk: talk.at_s
    )
    if not conversations:
        raise UsageError("No request falls into the time.", "Raise --rate or --duration.")
    return Traffic(
        conversations=conversations,
        span_s=max(part.span_s for part in parts),
        scale=min(part.scale for part in parts),
        quantum_s=max(part.quantum_s for part in parts),
    )
