"""Replicas, tensor, pipeline or context parallel on eight devices, by the planner's figures.

    python benchmarks/ways_to_scale.py [--machine H100-SXM5-80GB] [--devices 8]

Nothing runs: memory is what the engine would reserve, times are the planner's roofline of the
datasheet, half-way between the best and the worst that is believed (`advise.plan.machines`). Stages
have a step each, of other requests, and the chunks of a prompt follow each other through them.
Ranks that hold parts of contexts compute the rows of their tokens, so weights are read by each and
keys and values by one. Tokens a second: of as many rows as a step of the promised time and the
memory hold, each at the context of the load.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from common import markdown, write_json
from headway.advise.plan.machines import (
    LINK_BYTES_PER_S,
    REDUCE_S,
    fitting,
    on_datasheet,
    sheet_named,
)
from headway.advise.simulate.machine import between
from headway.advise.simulate.truth import Roofline
from headway.config.options import EngineOptions
from headway.perf.model import Work
from headway.spec import ModelSpec
from headway.spec.dealt import SPLIT_TOKENS
from literature.shapes import LLAMA_3_8B, llama, spec_of

LLAMA_3_70B = llama(8192, 28672, 80, 64, num_key_value_heads=8, vocab_size=128256)
CHUNK, ROWS = 2048, 256
HALF_WAY = 0.5
COLUMNS = ("servers of", "a server's KV, tokens", "a prompt alone", "a token alone",
           "rows of a server", "tokens/s of all", "prompt tokens/s of all")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked: a model, contexts of so many tokens, steps of so long at most."""

    name: str
    spec: ModelSpec
    context: int
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Way:
    """How the devices of a server share a model."""

    tensor: int = 1
    stages: int = 1
    context: int = 1

    @property
    def devices(self) -> int:
        return self.tensor * self.stages * self.context

    def __str__(self) -> str:
        sizes = {"tensor": self.tensor, "stages": self.stages, "context": self.context}
        return ", ".join(f"{name} {n}" for name, n in sizes.items() if n > 1) or "one device"


LOADS = (
    Load("8B, chats of 2,048 tokens", spec_of(LLAMA_3_8B), 2048, 0.03),
    Load("70B, chats of 2,048 tokens", spec_of(LLAMA_3_70B), 2048, 0.06),
    Load(
        "8B, contexts of 524,288 tokens",
        spec_of({**LLAMA_3_8B, "max_position_embeddings": 2**20}),
        2**19,
        0.06,
    ),
)
WAYS = (
    *(Way(), Way(tensor=2), Way(tensor=4), Way(tensor=8), Way(stages=2), Way(stages=4)),
    *(Way(stages=8), Way(tensor=2, stages=2), Way(tensor=4, stages=2), Way(context=2)),
    *(Way(context=4), Way(context=8), Way(tensor=2, context=2), Way(tensor=2, context=4)),
    *(Way(tensor=4, context=2), Way(stages=2, context=2)),
)


def with_context(took: Roofline, spec: ModelSpec, parts: int) -> Roofline:
    """Steps whose contexts lie on so many ranks, which meet twice a layer; without `sums_bytes`."""
    if parts == 1:
        return took
    queries = 2 * spec.q_size * spec.num_layers * (parts - 1) / parts
    return replace(
        took,
        read_s=took.read_s / parts,
        token_s=took.token_s / parts,
        attended_s=took.attended_s / parts,
        fixed_s=took.fixed_s + 2 * spec.num_layers * REDUCE_S,
        token_link_s=took.token_link_s / parts + queries / LINK_BYTES_PER_S,
    )


def sums_bytes(spec: ModelSpec, parts: int, context: int) -> float:
    """What a rank is handed of the sums of one row at `context`: for each split of the others a
    head's weighted values, the highest score and the sum of the weights, as the kernels pad them.
    """
    splits = -(-context // SPLIT_TOKENS) * (parts - 1) / parts
    return splits * spec.num_heads * (spec.head_dim + 16) * 4 * spec.num_layers


@dataclass(frozen=True, slots=True)
class Server:
    """What one server of some devices takes."""

    load: Load
    way: Way
    took: Roofline
    kv_tokens: int

    def sums_s(self, rows: int, context: int) -> float:
        """What the sums of so many rows take between ranks that hold parts of contexts, each of
        which has a share of the heads."""
        way = self.way
        handed = rows * sums_bytes(self.load.spec, way.context, context) / way.tensor
        return handed / LINK_BYTES_PER_S

    def step_s(self, rows: int) -> float:
        """A step of so many decodes, through all stages."""
        context = self.load.context
        took_s = self.took.seconds(Work(rows, rows, rows * context, rows * context))
        return took_s + self.sums_s(rows, context)

    def chunks_s(self, tokens: int) -> Iterator[float]:
        """A prompt's chunks, each through all stages."""
        for begin in range(0, tokens, CHUNK):
            count = min(CHUNK, tokens - begin)
            attended = count * begin + count * (count + 1) // 2
            end = begin + count
            took_s = self.took.seconds(Work(count, int(end == tokens), attended, end))
            yield took_s + self.sums_s(count, end)

    @property
    def in_flight(self) -> tuple[int, int]:
        """(steps at once, rows of each): as many as the promised time and the memory hold."""
        held = self.kv_tokens // self.load.context
        steps = min(self.way.stages, held)
        most, rows = min(ROWS, held // steps), 0
        while rows < most and self.step_s(rows + 1) <= self.load.tpot_s:
            rows += 1
        return steps, rows

    def told(self, servers: int) -> dict[str, float]:
        """The figures of so many such servers."""
        (steps, rows), stages = self.in_flight, self.way.stages
        each_s = list(self.chunks_s(self.load.context))
        return {
            "kv_tokens": self.kv_tokens,
            "prompt_s": each_s[0] + sum(each_s[1:]) / stages,
            "token_s": self.step_s(1),
            "rows": rows * steps,
            "tokens_per_s": servers * steps * rows / self.step_s(rows) if rows else 0.0,
            "prompt_tokens_per_s": servers * stages * self.load.context / sum(each_s),
        }


def server_of(load: Load, way: Way, machine: str) -> Server | None:
    """A server of the devices that `way` takes; None where they do not hold one such context."""
    sheet, _ = sheet_named(machine)
    settings = fitting(load.spec, EngineOptions(), sheet, way.devices)
    if settings is None:
        return None
    token_bytes = sum(group.bytes_per_token("bfloat16") for group in load.spec.kv_groups)
    copies = (way.context - 1) * load.spec.weight_bytes("bfloat16")
    kv_tokens = settings.cache.num_blocks[0] * settings.cache.block_size
    kv_tokens -= int(copies / token_bytes)
    if kv_tokens < load.context:
        return None
    planned = on_datasheet(Path(load.name), load.spec, settings, sheet, way.tensor, way.stages)
    assert planned.ends is not None
    took = between(*planned.ends, HALF_WAY)
    return Server(load, way, with_context(took, load.spec, way.context), kv_tokens)


def shown(way: Way, servers: int, told: dict[str, float]) -> list[str]:
    """A row of the table."""
    return [
        f"{servers} of {way}",
        f"{told['kv_tokens']:,.0f}",
        f"{told['prompt_s']:.2f} s",
        f"{1e3 * told['token_s']:.1f} ms",
        f"{told['rows']:.0f}" if told["rows"] else "none in time",
        f"{told['tokens_per_s']:,.0f}",
        f"{told['prompt_tokens_per_s']:,.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--machine", default="H100-SXM5-80GB", help="a row of the planner's table")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: dict[str, dict[str, dict[str, float]]] = {}
    for load in LOADS:
        rows, found[load.name] = [], {}
        for way in WAYS:
            servers = given.devices // way.devices
            server = server_of(load, way, given.machine) if servers else None
            if server is None:
                rows.append([f"{servers} of {way}", "too little", *[""] * 5])
                continue
            told = found[load.name][str(way)] = server.told(servers)
            rows.append(shown(way, servers, told))
        print(f"\n{load.name}, a step of {1e3 * load.tpot_s:g} ms at most, on {given.devices} "
              f"{given.machine}\n")  # fmt: skip
        print(markdown(list(COLUMNS), rows), flush=True)
    write_json(given.json, found)


if __name__ == "__main__":
    main()
