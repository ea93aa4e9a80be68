"""MBU of decode by three witnesses: `python benchmarks/mbu_agreement.py FOLDER`.

A server and an offline engine hold the same model and decode in turns, so that both meet the same
machine; the best round of each counts, for other work on the machine only slows rounds down. In
each round the server streams to as many clients as the offline batch has rows; three figures come
out, each as bytes that had to be read per second, and as MBU on one common ceiling:

    server    from its step records, as `/stats` prints it
    client    from the times at which chunks arrive, as a load generator sees it
    offline   from the offline engine's tokens per second of wall time, as `peers_offline.py` has it

Any folder with a config.json will do: weights are random.
"""

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path

from common import get_json, serving
from headway import LLM
from headway.spec import ModelSpec
from offline import Rates

PROMPT, TOKENS, PAUSE_S = 128, 48, 11.0
"""After the pause the 10 s window of /stats holds the next round alone."""


async def stream(port: int, body: bytes) -> list[float]:
    """The times at which the chunks of one answer came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    times, lines = [], []
    async for line in reader:
        lines.append(line)
        if line.startswith(b"data: [DONE]"):
            writer.close()
            return times
        if line.startswith(b"data: ") and b'"finish_reason":null' in line:
            times.append(time.perf_counter())
    raise SystemExit(f"a stream ended early: {b''.join(lines[-20:]).decode()}")


async def streams(port: int, body: bytes, count: int) -> list[list[float]]:
    return await asyncio.gather(*(stream(port, body) for _ in range(count)))


def bytes_a_step(spec: ModelSpec, dtype: str, rows: int, context: float) -> float:
    """The weights once, and the KV of every row."""
    kv = sum(
        group.bytes_per_token(dtype) * group.attended_tokens(round(context))
        for group in spec.kv_groups
    )
    return spec.step_weight_bytes(dtype) + rows * kv


def ask_server(port: int, model: str, rows: int, spec: ModelSpec, dtype: str) -> dict[str, float]:
    """(server, client) in bytes/s of one round, from the steps in which all rows decode."""
    url = f"http://127.0.0.1:{port}"
    body = {
        "model": model, "prompt": list(range(300, 300 + PROMPT)), "max_tokens": TOKENS,
        "ignore_eos": True, "stream": True, "temperature": 0,
    }  # fmt: skip
    arrived = asyncio.run(streams(port, json.dumps(body).encode(), rows))
    begin = max(times[0] for times in arrived)
    end = min(times[-1] for times in arrived)
    steps = statistics.mean(sum(begin < t <= end for t in times) for times in arrived)
    context = PROMPT + TOKENS / 2
    place = get_json(url + "/stats")["windows"][0]["decode"]
    return {
        "server": place["bytes_per_s"],
        "client": steps / (end - begin) * bytes_a_step(spec, dtype, rows, context),
    }


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", default="1,8")
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    llm = LLM(
        chosen.folder, load_format="dummy", max_model_len=1024, max_num_seqs=32,
        skip_tokenizer_init=True,
    )  # fmt: skip
    rates, dtype = Rates(llm, PROMPT), llm.settings.dtype
    flags = ("--load-format=dummy", "--skip-tokenizer-init", "--max-model-len=1024")
    with serving(chosen.folder, *flags, "--max-num-seqs=32", "--log-level=error") as (url, _):
        port = int(url.rpartition(":")[2])
        model = get_json(f"{url}/v1/models")["data"][0]["id"]
        for rows in map(int, chosen.rows.split(",")):
            found: dict[str, list[float]] = {"server": [], "client": [], "offline": []}
            for _ in range(chosen.rounds):
                time.sleep(PAUSE_S)
                for name, value in ask_server(port, model, rows, llm.spec, dtype).items():
                    found[name].append(value)
                each = bytes_a_step(llm.spec, dtype, rows, PROMPT + TOKENS / 2)
                found["offline"].append(rates.decode(rows) / rows * each)
                last = "  ".join(f"{name} {v[-1] / 1e9:.2f}" for name, v in found.items())
                print(f"batch {rows}, GB/s: {last}", flush=True)
            llm.engine.executor.probe(1.0)
            ceilings = [
                llm.engine.executor.describe().ceilings.bandwidth_bytes_per_s,
                get_json(f"{url}/stats")["machine"]["bandwidth_bytes_per_s"],
            ]
            report(rows, found, max(ceilings))


def report(rows: int, found: dict[str, list[float]], ceiling: float) -> None:
    """One line a witness: its best round, for other work on the machine only slows rounds down."""
    print(f"\nbatch {rows}, ceiling {ceiling / 1e9:.1f} GB/s", flush=True)
    best = {name: max(values) for name, values in found.items()}
    for name, value in best.items():
        ratio = value / best["server"]
        print(f"{name:<8} {value / 1e9:6.2f} GB/s   MBU {value / ceiling:4.0%}   {ratio:6.3f}")


if __name__ == "__main__":
    main()
