"""A claim about what limits a step: prefill follows the machine's FLOP/s, decode its bytes.

Threads and formats are varied one at a time. A model that caches hold shows nothing of the kind, so
where the folder's is one a shape of 130 million parameters with random weights stands in for it.
"""

import time
from dataclasses import dataclass
from typing import Any

from literature.claim import Claim, Figure, Finding, Promise, ratio_of
from literature.engines import EngineFactory
from literature.pictures import groups
from literature.shapes import SMALL
from literature.subject import Subject

PROMPT, STEPS = 256, 24
CACHED = 64 * 2**20
"""Bytes of weights that a last-level cache may hold."""
WAYS: dict[str, dict[str, Any]] = {
    "16 bits, one thread": {"quantization": "none"},
    "16 bits, two threads": {"quantization": "none", "threads": 2},
    "int8, one thread": {"quantization": "int8"},
    "int4, one thread": {"quantization": "int4"},
}
PLAIN, TWO = "16 bits, one thread", "16 bits, two threads"
ON_THE_WALL = "16 bits, one thread, by the clock on the wall"
"""One thread is timed by what it computes, which work beside it hardly touches; two are not."""


@dataclass(slots=True)
class Steps:
    """Seconds of a prompt and of a decode step, by way and repeat; of which model."""

    prefill: dict[str, list[float]]
    decode: dict[str, list[float]]
    bytes: dict[str, float]
    long_prefill: list[float]
    model: str

    def add(self, way: str, seconds: tuple[float, float]) -> None:
        """A prompt's and a decode step's."""
        for rows, each in zip((self.prefill, self.decode), seconds, strict=True):
            rows.setdefault(way, []).append(each)


def factory_of(subject: Subject, options: dict[str, Any]) -> EngineFactory:
    """The folder's model, or the shape in its place."""
    folder, spec = subject.model()
    wanted = {"dtype": "bfloat16", "max_num_seqs": 4, "kv_memory": "128MiB"}
    wanted |= {**subject.options, **options}
    if spec.weight_bytes("bfloat16") >= CACHED:
        return EngineFactory.of(folder, **wanted)
    return EngineFactory.of_shape(SMALL, max_model_len=2048, **wanted)


def steps(subject: Subject) -> Steps:
    """All ways; a way's engine is there alone, since two of them would share the cores."""
    _, spec = subject.model()
    own = spec.weight_bytes("bfloat16") >= CACHED
    name = "this model" if own else "a shape of 130M parameters, random weights"
    found = Steps({}, {}, {}, [], name)
    for way, options in WAYS.items():
        subject.watch(f"steps of {name}: {way}")
        factory = factory_of(subject, options)
        factory.step_s(PROMPT, 1, 4)
        found.bytes[way] = factory.executor.describe().bytes_per_weight or 2.0
        for _ in range(max(3, subject.repeats // 2)):
            if way != TWO:
                found.add(way, factory.step_s(PROMPT, 1, STEPS))
            if way in (PLAIN, TWO):
                timed = ON_THE_WALL if way == PLAIN else TWO
                found.add(timed, factory.step_s(PROMPT, 1, STEPS, time.perf_counter))
            if way == PLAIN:
                found.long_prefill.append(factory.step_s(2 * PROMPT, 1, 2)[0])
    return found


def roofs(subject: Subject) -> Finding:
    """What a second thread and half the bytes do to each of the two."""
    found = subject.once(steps)
    int8, int4 = "int8, one thread", "int4, one thread"
    decode, prefill = found.decode, found.prefill
    return Finding(
        figures=[
            ratio_of("decode, int8 in place of 16 bits", decode[PLAIN], decode[int8]),
            ratio_of("decode, int4", decode[PLAIN], decode[int4]),
            ratio_of("decode, two threads", decode[ON_THE_WALL], decode[TWO]),
            ratio_of("prefill, two threads", prefill[ON_THE_WALL], prefill[TWO]),
            ratio_of("prefill, int8", prefill[PLAIN], prefill[int8]),
            ratio_of("prefill, twice the prompt takes", found.long_prefill, prefill[PLAIN]),
            Figure(name="bytes a weight, int8 over 16 bits", value=found.bytes[int8] / 2),
        ],
        promise=Promise(low=1.8, high=2.2),
        why=f"Of {found.model}: half the bytes make decode nearly twice as fast. Prefill follows "
        "products: it gains from a second thread, and from int8 only where the CPU multiplies "
        "int8 faster than 16 bits.",
        picture=groups(
            list(WAYS),
            {"decode": faster(found.decode), "prefill": faster(found.prefill)},
            "times as fast",
        ),
    )


def faster(rows: dict[str, list[float]]) -> list[float]:
    """Each way over the plain one."""
    base = {TWO: ON_THE_WALL}
    return [ratio_of(way, rows[base.get(way, PLAIN)], rows[way]).value for way in WAYS]


CLAIMS = (
    Claim(
        key="roofline",
        family="Bottlenecks",
        says="Prefill follows FLOP/s and decode follows bytes: half the bytes, twice the tokens.",
        source="common in serving literature (roofline: Williams et al., 2009)",
        measure=roofs,
        needs="folder",
        how="A prompt of 256 tokens and decode steps of one request, threads, formats and lengths "
        "varied one at a time, by CPU time; threads by the clock on the wall.",
    ),
)
