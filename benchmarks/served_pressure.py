"""What a server process streams beyond what its loop writes token by token: one chunk or several.

`python benchmarks/served_pressure.py [FOLDER]`. The executor does nothing but wait 10 ms a step, so
64 streams ask for 6,400 tokens a second and 256 for 25,600. A server that joins the steps that wait
for a stream (`frontend/pressure.py`) and one that never does take turns; of each the tokens a
second that arrive, the CPU time that the server's process spends on one, and how many come in a
chunk.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path

from common import free_port, running
from engine_overhead import PROMPT, cpu_s, load

START = """
import runpy, sys
from headway.frontend import pressure
pressure.BEHIND = int(sys.argv.pop(1))
runpy.run_module("headway.cli.main", run_name="__main__", alter_sys=True)
"""
NEVER = 10**9


def turn(folder: Path, streams: int, tokens: int, behind: int) -> dict[str, float]:
    """One server, warmed up, then one round of all streams."""
    port = free_port()
    flags = ["serve", str(folder), f"--port={port}", "--executor=null", "--log-level=error"]
    flags.append("--max-queue-wait=60")  # all streams come at once
    command = [sys.executable, "-c", START, str(behind), *flags, f"--max-num-seqs={streams}"]
    asked = {"model": folder.resolve().name, "prompt": PROMPT[:32], "ignore_eos": True}
    asked |= {"max_tokens": tokens, "stream": True}
    body = json.dumps(asked).encode()
    with running(command, port) as (_, pid):
        asyncio.run(load(port, "/v1/completions", body, streams))
        spent_s, began_s = cpu_s(pid), time.perf_counter()
        chunks = asyncio.run(load(port, "/v1/completions", body, streams))
        took_s, spent_s = time.perf_counter() - began_s, cpu_s(pid) - spent_s
    made = streams * tokens
    return {
        "tokens_per_s": made / took_s,
        "server_us": spent_s / made * 1e6,
        "tokens_per_chunk": made / chunks,
    }


def main() -> None:
    """Print a table: streams, joined or not, medians of the turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--streams", type=int, nargs="*", default=[64, 256])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    from headway.cli.common import model_folder
    from headway.frontend.pressure import BEHIND

    folder = model_folder(str(given.folder) if given.folder else None)
    print("streams   steps joined   tokens/s   server µs a token   tokens a chunk")
    for streams in given.streams:
        found: dict[int, list[dict[str, float]]] = {NEVER: [], BEHIND: []}
        for _ in range(given.turns):
            for behind, turns in found.items():
                turns.append(turn(folder, streams, given.tokens, behind))
        for behind, turns in found.items():
            middle = {name: statistics.median(one[name] for one in turns) for name in turns[0]}
            said = "never" if behind == NEVER else f"from {behind} on"
            print(
                f"{streams:>7}   {said:>12}   {middle['tokens_per_s']:>8.0f}   "
                f"{middle['server_us']:>17.1f}   {middle['tokens_per_chunk']:>14.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
