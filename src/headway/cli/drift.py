"""`headway gateway drift`: compare the upstreams of one model; also reads a gateway's probes."""

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
    from headway.cli.main import VerbCall
    from headway.gateway.config import Config
    from headway.gateway.drift.compare import DriftFinding, DriftProbe, ProbeAnswers

DIFFERENT_STATUS = 5
"""Exit status where upstreams differ."""
SEED = 11


def drift(call: "VerbCall") -> int:
    """Ask, compare, print; return 0, or 5 where upstreams differ."""
    from headway.measure.saved import write

    options: DriftOptions = call.options[DriftOptions]
    config = read_upstreams(call.positionals)
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
        findings = asyncio.run(
            compare_upstreams(config, [row.name for row in rows], probes, advance)
        )
    print_findings(findings)
    if options.json:
        write(options.json, msgspec.json.encode(findings))
    return DIFFERENT_STATUS if any(each.alarm for each in findings) else 0


def read_upstreams(words: list[str]) -> "Config":
    """Return the configuration of a file, or of URLs."""
    from headway.gateway.config import config_of_urls, read_config

    if len(words) == 1 and not words[0].startswith("http"):
        return read_config(Path(words[0]))
    if len(words) < 2:
        raise UsageError(
            "drift takes a gateway's file, or two URLs.", "headway gateway drift gateway.yaml"
        )
    return config_of_urls(words)


def read_probes(file: str, number: int) -> "list[DriftProbe]":
    """The probes of a file, or the same questions of the skills each time."""
    from headway.gateway.drift.compare import DriftProbe

    if not file:
        return skill_probes(number)
    try:
        lines = [line for line in read_bytes(Path(file)).splitlines() if line.strip()]
        return [msgspec.json.decode(line, type=DriftProbe) for line in lines][:number]
    except OSError as error:
        raise UsageError(f"probes {file}: {error.strerror}.", "Check the path.") from error
    except msgspec.MsgspecError as error:
        how = '{"messages": [{"role": "user", "content": "…"}]} a line'
        raise UsageError(f"probes {file}: {str(error)[:200]}.", how) from error


def skill_probes(number: int) -> "list[DriftProbe]":
    """Return questions of all skills and levels in turn."""
    from headway.evals.skills.suite import LEVELS, SKILLS, examples
    from headway.gateway.drift.compare import DriftProbe

    streams = [examples(skill, level, SEED) for level in LEVELS for skill in SKILLS]
    turns = chain.from_iterable(zip_longest(*streams))  # some skills have a hundred questions
    questions = (one for one in turns if one is not None)
    return [DriftProbe(messages=one.messages) for one in islice(questions, number)]


async def compare_upstreams(
    config: "Config", models: list[str], probes: "list[DriftProbe]", advance: Callable[[], None]
) -> "list[DriftFinding]":
    """Compare each upstream of a model with the first one."""
    from headway.gateway import probe
    from headway.gateway.drift.ask import collect_answers
    from headway.gateway.drift.compare import compare
    from headway.gateway.state import GatewayState

    state = GatewayState(options=GatewayOptions(), config=config)
    findings: list[DriftFinding] = []
    try:
        await asyncio.gather(*(each.check_health() for each in state.upstreams.values()))
        for model in models:
            sheets: list[ProbeAnswers] = []
            for upstream in state.pools[model].upstreams:
                try:
                    at = state.clock.wall_s()
                    sheets.append(await collect_answers(upstream, model, probes, at, advance))
                except probe.PROBE_FAILURES as error:
                    raise HeadwayError(
                        f"{upstream.name} does not answer: {error or type(error).__name__}.",
                        "Is it up?",
                    ) from error
            findings += [compare(sheets[0], sheet) for sheet in sheets[1:]]
    finally:
        await state.stop()
    return findings


def print_findings(findings: "list[DriftFinding]") -> None:
    """Print a line for each pair."""
    print("pair                                   changed  itself  p        nats    verdict")
    for each in findings:
        pair = f"{each.first} → {each.second}"
        nats = f"{each.kl:.4f}" if each.kl is not None else "–"
        verdict = f"differs: {each.suspect}" if each.alarm else "alike"
        counts = f"{each.changed:>7} {each.changed_control:>7}  {each.p:<8.2g} {nats:<7}"
        print(f"{pair:<38} {counts} {verdict}")
