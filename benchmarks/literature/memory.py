"""A claim about KV memory: how many more requests fit in pages than in contiguous reservations.

The real scheduler and block tables run over an executor that computes nothing, so that what is
counted is memory alone. The memory is that of a 13B model on 40 GB, as in the paper.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from headway.config.cache_config import CacheConfig
from headway.config.resolve import Settings
from literature.claim import Claim, Figure, Finding, Promise, median_of, ratio_of
from literature.engines import EngineFactory, Lengths
from literature.pictures import bars
from literature.shapes import LLAMA_2_13B, spec_of
from literature.subject import Subject

VLLM = "Kwon et al., PagedAttention (2023), section 6.2: OPT-13B over Orca (Max)"
KV_BYTES, BLOCK, LONGEST = 12e9, 16, 2048
PROMPT, ANSWER, SPREAD = 161, 338, 0.8
"""ShareGPT's mean lengths in the paper, and the spread of their logarithm here."""
REQUESTS = 120
TOKENS = int(KV_BYTES / spec_of(LLAMA_2_13B).kv_bytes_per_token("bfloat16"))


def lengths(seed: int) -> Lengths:
    """Lognormal prompts and answers of the paper's means, cut so that both fit."""
    draw = np.random.default_rng(seed)

    def drawn(mean: int) -> list[int]:
        values = draw.lognormal(np.log(mean) - SPREAD**2 / 2, SPREAD, REQUESTS)
        return [int(value) for value in np.clip(values, 4, LONGEST // 2)]

    return list(zip(drawn(PROMPT), drawn(ANSWER), strict=True))


def factory() -> EngineFactory:
    """An engine's parts for the 13B model's memory; nothing is computed."""
    from headway.runtime.null import NullExecutor

    spec = spec_of(LLAMA_2_13B)
    size = BLOCK * spec.kv_bytes_per_token("bfloat16")
    settings = Settings(
        device="cpu",
        dtype="bfloat16",
        load_format="dummy",
        attention_backend="none",
        max_model_len=LONGEST,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        cache=CacheConfig(num_blocks=(int(KV_BYTES / size) + 1,), block_bytes=(size,)),
        threads=1,
        seed=0,
    )
    return EngineFactory(executor=NullExecutor(), settings=settings, spec=spec)


def running(factory: EngineFactory, load: Lengths, seed: int) -> tuple[float, int]:
    """(rows a step while others wait, preemptions) of a full queue."""
    engine = factory.engine()
    factory.add(engine, load, seed)
    rows: list[int] = []
    while engine.has_work:
        _, record = engine.step()
        if record.num_waiting and record.num_tokens:
            rows.append(record.num_running)
    return float(np.mean(rows[len(rows) // 4 :])), engine.scheduler.num_preemptions


@dataclass(slots=True)
class Fit:
    """Requests at once by draw: in pages, and where what each will take is reserved."""

    paged: list[float] = field(default_factory=list)
    oracle: list[float] = field(default_factory=list)
    preempted: int = 0


def fitted(subject: Subject) -> Fit:
    """Several full queues."""
    here, found = factory(), Fit()
    for seed in range(max(3, subject.repeats // 2)):
        load = lengths(seed)
        rows, count = running(here, load, seed)
        found.paged.append(rows)
        found.preempted += count
        found.oracle.append(TOKENS / mean(prompt + answer for prompt, answer in load))
    return found


def paging(subject: Subject) -> Finding:
    """Pages beside a reservation of the longest context, and beside one that knows the answer."""
    found, whole = subject.once(fitted), TOKENS // LONGEST
    preempted = 100 * found.preempted / (REQUESTS * len(found.paged))
    name = f"requests at once over reserving {LONGEST:,} tokens each"
    return Finding(
        figures=[
            ratio_of(name, found.paged, [whole]),
            ratio_of("over reserving what each will take", found.paged, found.oracle),
            median_of("in pages", found.paged),
            Figure(name=f"with {LONGEST:,} tokens each", value=whole),
            Figure(name="preemptions a hundred requests", value=preempted),
        ],
        promise=Promise(low=4.3),
        why="A page holds tokens that exist, a reservation those that may come. Against one that "
        "knows each answer the gain is small here: it is counted without the holes that the "
        "paper's allocator leaves, and a queue that is always full preempts.",
        picture=bars(
            [
                (f"{LONGEST:,} tokens each", whole),
                ("what each will take", mean(found.oracle)),
                ("pages", mean(found.paged)),
            ],
            f"requests at once in {KV_BYTES / 1e9:g} GB",
        ),
    )


def mean(values: Iterable[float]) -> float:
    """Of some numbers."""
    return float(np.mean(list(values)))


CLAIMS = (
    Claim(
        key="kv-paging",
        family="KV",
        says="Paged KV holds 4.3 times the requests that contiguous reservations hold.",
        source=VLLM,
        measure=paging,
        how="The real scheduler and blocks of a 13B model on 12 GB of KV, ShareGPT's mean lengths, "
        "a queue that is always full; nothing is computed.",
    ),
)
