"""`headway gateway drift`: upstreams of one model, compared now; also the probes of a gateway."""

import asyncio
from collections.abc import Callable
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headway.config.options import DriftOptions, GatewayOptions
from headway.core.errors import HeadwayError, UsageError
from headway.core.progress import items_bar
from headway.core.regular_file import read_bytes

if TYPE_CHECKING:
    from headway.cli.main import Call
    from headway.gateway.config import Config
    from headway.gateway.drift.compare import Finding, Probe, Sheet

ALARM = 5
"""The exit status that says: they differ."""
SEED = 11


def drift(call: "Call") -> int:
    """Ask, compare, print; 0, or 5 where something differs."""
    from headway.measure.saved import write

    options: DriftOptions = call.options[DriftOptions]
    config = config_of(call.positionals)
    probes = read_probes(options.probes, options.number)
    rows = [row for row in config.models if options.model in ("", row.name)]
    rows = [row for row in rows if len(row.upstreams) > 1]
    if not rows:
        raise UsageError("No model has two upstreams to compare.", "Name two, or another --model.")
    if "--dry-run" in call.switches:
        for row in rows:
            print(f"{row.name}: {len(probes)} probes, twice, to {', '.join(row.upstreams)}")
        return 0
    total = 2 * len(probes) * sum(len(row.upstreams) for row in rows)
    with items_bar("probes", total) as advance:
        found = asyncio.run(compared(config, [row.name for row in rows], probes, advance))
    show(found)
    if options.json:
        write(options.json, msgspec.json.encode(found))
    return ALARM if any(each.alarm for each in found) else 0


def config_of(words: list[str]) -> "Config":
    """The configuration of a file, or of URLs."""
    from headway.gateway.config import of_urls, read_config

    if len(words) == 1 and not words[0].startswith("http"):
        return read_config(Path(words[0]))
    if len(words) < 2:
        raise UsageError(
            "drift takes a gateway's file, or two URLs.", "headway gateway drift gateway.yaml"
        )
    return of_urls(words)


def read_probes(file: str, number: int) -> "list[Probe]":
    """The probes of a file, or the same questions of the skills each time."""
    from headway.gateway.drift.compare import Probe

    if not file:
        return skill_probes(number)
    try:
        lines = [line for line in read_bytes(Path(file)).splitlines() if line.strip()]
        return [msgspec.json.decode(line, type=Probe) for line in lines][:number]
    except OSError as error:
        raise UsageError(f"probes {file}: {error.strerror}.", "Check the path.") from error
    except msgspec.MsgspecError as error:
        how = '{"messages": [{"role": "user", "content": "…"}]} a line'
        raise UsageError(f"probes {file}: {str(error)[:200]}.", how) from error


def skill_probes(number: int) -> "list[Probe]":
    """Questions of all skills and levels in turn: easy ones, hard ones, and stories."""
    from headway.evals.skills.suite import LEVELS, SKILLS, examples
    from headway.gateway.drift.compare import Probe

    streams = [examples(skill, level, SEED) for level in LEVELS for skill in SKILLS]
    turns = chain.from_iterable(zip_longest(*streams))  # some skills have a hundred questions
    asked = (one for one in turns if one is not None)
    return [Probe(messages=one.messages) for one in islice(asked, number)]


async def compared(
    config: "Config", models: list[str], probes: "list[Probe]", advance: Callable[[], None]
) -> "list[Finding]":
    """Each upstream of a model beside the first."""
    from headway.gateway import probe
    from headway.gateway.drift.ask import sheet_of
    from headway.gateway.drift.compare import compare
    from headway.gateway.state import State

    state = State(options=GatewayOptions(), config=config)
    found: list[Finding] = []
    try:
        await asyncio.gather(*(each.look() for each in state.upstreams.values()))
        for model in models:
            sheets: list[Sheet] = []
            for upstream in state.pools[model].upstreams:
                try:
                    at = state.clock.wall_s()
                    sheets.append(await sheet_of(upstream, model, probes, at, advance))
                except probe.FAILED as error:
                    raise HeadwayError(
                        f"{upstream.name} does not answer: {error or type(error).__name__}.",
                        "Is it up?",
                    ) from error
            found += [compare(sheets[0], sheet) for sheet in sheets[1:]]
    finally:
        await state.stop()
    return found


def show(found: "list[Finding]") -> None:
    """A line a pair."""
    print("pair                                   changed  itself  p        nats    verdict")
    for each in found:
        pair = f"{each.first} → {each.second}"
        nats = f"{each.kl:.4f}" if each.kl is not None else "–"
        verdict = f"differs: {each.suspect}" if each.alarm else "alike"
        counts = f"{each.changed:>7} {each.changed_control:>7}  {each.p:<8.2g} {nats:<7}"
        print(f"{pair:<38} {counts} {verdict}")
