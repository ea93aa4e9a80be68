"""Does the drift check find what it should, and is it silent about equals?

    python benchmarks/drift.py found                 int4, a template, a temperature and others
    python benchmarks/drift.py equals [--sets 34]    equals that are not bit-equal, 6 pairs a set

Each variant is a `headway serve` of the embedded model; `temperature` is a proxy that samples at
0.3 what is asked at 0, `newline` a template without one newline. Equals compute the same in bf16
and round otherwise: native kernels, torch's, and torch's with two sequences at once in short chunks
of prompts, whose products depend on the rows beside. Each is compared with each.
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from common import heading, line, serving
from headway.cli.drift import skill_probes
from headway.core.clock import SystemClock
from headway.gateway.config import UpstreamRow
from headway.gateway.drift.ask import sheet_of
from headway.gateway.drift.compare import Finding, Probe, Sheet, compare
from headway.gateway.upstream import Upstream

NUMBER = 200
FOUND: dict[str, tuple[str, ...]] = {
    "again": (),
    "float32": ("--dtype=float32",),
    "int8": ("--quantization=int8",),
    "int4": ("--quantization=int4",),
    "newline": (),
    "temperature": (),
}
EQUALS: dict[str, tuple[str, ...]] = {
    "native": (),
    "torch": ("--kernels=torch",),
    "batch": ("--kernels=torch", "--max-num-seqs=2", "--max-num-batched-tokens=64"),
}
COLUMNS = (
    "beside headway-tiny",
    "changed",
    "itself",
    "p",
    "nats a token",
    "lower bound",
    "verdict",
)


@contextlib.asynccontextmanager
async def sampling(url: str) -> AsyncIterator[str]:
    """A proxy that samples at 0.3 whatever is asked."""
    session = aiohttp.ClientSession()

    async def relay(request: web.Request) -> web.Response:
        body: Any = await request.json() if request.can_read_body else None
        if body is not None:
            body["temperature"] = 0.3
        async with session.request(request.method, url + request.path, json=body) as answer:
            data = await answer.read()
            return web.Response(body=data, status=answer.status, content_type="application/json")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", relay)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
        await session.close()


async def sheet(name: str, url: str, probes: list[Probe]) -> Sheet:
    """The answers of one server."""
    async with contextlib.AsyncExitStack() as stack:
        if name == "temperature":
            url = await stack.enter_async_context(sampling(url))
        upstream = Upstream(UpstreamRow(url=f"{url}/v1", name=name), SystemClock())
        stack.push_async_callback(upstream.close)
        return await sheet_of(upstream, "headway-tiny", probes, 0.0)


def flags(name: str, given: tuple[str, ...], folder: Path) -> tuple[str, ...]:
    """The flags of a variant; a template without its newline is a file."""
    if name != "newline":
        return given
    source = Path(__file__).parents[1] / "src/headway/embedded/headway-tiny"
    template = json.loads((source / "tokenizer_config.json").read_text())["chat_template"]
    changed = template.replace("<|im_end|>\\n", "<|im_end|>").replace("<|im_end|>\n", "<|im_end|>")
    assert changed != template, "the template has no such newline"
    (folder / "template.jinja").write_text(changed)
    return (f"--chat-template={folder / 'template.jinja'}",)


def row(finding: Finding) -> str:
    verdict = finding.suspect if finding.alarm else "alike"
    kl, low = (
        f"{value:.2g}" if value is not None else "" for value in (finding.kl, finding.kl_low)
    )
    counts = (finding.changed, finding.changed_control, f"{finding.p:.2g}", kl, low, verdict)
    return line((finding.second, *counts))


def found() -> None:
    """Each variant beside the plain one."""
    probes = skill_probes(NUMBER)
    print(heading(COLUMNS), flush=True)
    with tempfile.TemporaryDirectory() as name, serving("") as (plain_url, _):
        plain = asyncio.run(sheet("plain", plain_url, probes))
        for variant, given in FOUND.items():
            with serving("", *flags(variant, given, Path(name))) as (url, _):
                print(row(compare(plain, asyncio.run(sheet(variant, url, probes)))), flush=True)


def equals(first: int, num_sets: int) -> None:
    """Each ordered pair of equals, on `num_sets` sets of probes that have none in common."""
    probes = skill_probes(NUMBER * (first + num_sets))
    if len(probes) < NUMBER * (first + num_sets):
        raise SystemExit(f"there are {len(probes)} probes: {len(probes) // NUMBER} sets of them")
    findings: list[Finding] = []
    with contextlib.ExitStack() as stack:
        urls = {name: stack.enter_context(serving("", *given))[0] for name, given in EQUALS.items()}
        for number in range(first, first + num_sets):
            part = probes[number * NUMBER : (number + 1) * NUMBER]
            sheets = [asyncio.run(sheet(name, url, part)) for name, url in urls.items()]
            findings += [compare(a, b) for a in sheets for b in sheets if a is not b]
            counts = " ".join(str(each.changed) for each in findings[-6:])
            alarms = [each for each in findings if each.alarm]
            told = f"set {number}: changed {counts}; {len(alarms)} alarms of {len(findings)}"
            print(told, file=sys.stderr, flush=True)
    changed = sum(each.changed > 0 for each in findings)
    alarms = [each for each in findings if each.alarm]
    most = max(each.kl or 0.0 for each in findings)
    print(
        f"{len(findings)} comparisons of equals, {changed} with answers that changed, "
        f"at most {max(each.changed for each in findings)}; most nats a token {most:.2g}; "
        f"{len(alarms)} alarms"
    )
    for each in alarms:
        print(each)


def main() -> None:
    os.environ["HEADWAY_LOG_LEVEL"] = "error"
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("found", "equals"))
    parser.add_argument("--sets", type=int, default=34)
    parser.add_argument("--first", type=int, default=0, help="the number of the first set")
    given = parser.parse_args()
    if given.what == "found":
        found()
    else:
        equals(given.first, given.sets)


if __name__ == "__main__":
    main()
