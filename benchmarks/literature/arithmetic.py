"""Claims that are arithmetic, by the code with which servers plan memory and price tokens.

`--dry-run` divides memory into KV blocks with `bytes_per_token` of the same KV groups, the planner
and the telemetry price tokens with the same formulas: a claim that does not come out tells of a
fault in them, or of one in the literature.
"""

from dataclasses import replace

from headway.perf.roofline import utilization
from headway.spec import LayerSpec, ModelSpec
from headway.spec.quantization import Quantization, planned_bytes
from headway.telemetry.formulas import kv_bytes, usd_per_million
from literature import shapes
from literature.claim import Claim, Figure, Finding, Promise
from literature.lean import held
from literature.pictures import bars
from literature.subject import Subject

GB = 1e9
CONTEXT, REACH, PERIOD = 8192, 1024, 6
"""Tokens of a context and of a window, and of so many layers one that sees everything."""
Layers = tuple[LayerSpec, ...]
AI_ENGINEERING = "C. Huyen, AI Engineering (2025), chapter 9"
POPE = "Pope et al., Efficiently Scaling Transformer Inference (2022)"
CHARACTER_AI = "Character.AI, Optimizing AI Inference at Character.AI (2024)"


def kv_gb(spec: ModelSpec, requests: int, tokens: int) -> float:
    """GB that so many contexts hold, in whole blocks, as the memory plan counts them."""
    return requests * held(spec, "bfloat16", tokens) / GB


def kv_13b(subject: Subject) -> Finding:
    """Blocks of the plan beside the formula of the telemetry."""
    spec = shapes.spec_of(shapes.LLAMA_2_13B)
    planned = kv_gb(spec, 32, 2048)
    formula = kv_bytes(32 * 2048, spec.num_layers, spec.num_kv_heads, spec.head_dim, 2) / GB
    weights = spec.weight_bytes("bfloat16") / GB
    return Finding(
        figures=[
            Figure(name="KV of 32 requests of 2,048 tokens", value=planned, unit=" GB"),
            Figure(name="the same by 2 · tokens · layers · width · 2", value=formula, unit=" GB"),
            Figure(name="its weights in 16 bits", value=weights, unit=" GB"),
        ],
        promise=Promise(low=54, exact=True),
        why="Llama 2 13B keeps 0.82 MB a token: 32 full contexts hold twice what its weights do.",
    )


def kv_500b(subject: Subject) -> Finding:
    """PaLM 540B's sizes with multi-head attention of 48 heads of 128."""
    spec = shapes.spec_of(shapes.PALM_MULTI_HEAD)
    multi_query = replace(spec, num_kv_heads=1)
    whole, one = kv_gb(spec, 512, 2048), kv_gb(multi_query, 512, 2048)
    return Finding(
        figures=[
            Figure(name="KV of 512 requests of 2,048 tokens", value=whole / 1e3, unit=" TB"),
            Figure(name="the same with one KV head", value=one / 1e3, unit=" TB"),
        ],
        promise=Promise(low=3.0, exact=True),
        why="With every head's keys and values kept it is three times the weights in 16 bits; "
        "with one KV head a 48th.",
    )


def window(subject: Subject) -> Finding:
    """A context of 10,240 tokens in all layers, and in windows of 1,024."""
    full = held(shapes.spec_of(shapes.LLAMA_2_7B), "bfloat16", 10_240)
    less = held(shapes.windowed(shapes.LLAMA_2_7B, 1024), "bfloat16", 10_240)
    return Finding(
        figures=[
            Figure(name="of the KV of 10,240 tokens", value=100 * less / full, unit="%"),
            Figure(name="full attention", value=full / 2**20, unit=" MiB"),
            Figure(name="windows of 1,024", value=less / 2**20, unit=" MiB"),
        ],
        promise=Promise(low=10.0, exact=True),
        why="While it decodes a sequence holds the blocks that its window reaches and no others; "
        "one block of 16 tokens more where the window begins inside one."
        if less * 10 > full
        else "While it decodes a sequence holds the blocks that its window reaches and no others.",
    )


def twenty_times(subject: Subject) -> Finding:
    """One means more each, on a Llama of 8B with grouped KV heads, at 8,192 tokens."""
    spec = shapes.spec_of(shapes.LLAMA_3_8B)
    one_head = replace(spec, num_kv_heads=1)
    windows = replace(one_head, layers=windowed(spec.layers))
    shared = replace(windows, layers=shared_by_neighbours(windows.layers))
    rows = (
        ("grouped KV heads", spec, "bfloat16"),
        ("one KV head", one_head, "bfloat16"),
        (f"windows of {REACH:,} in {PERIOD - 1} of {PERIOD} layers", windows, "bfloat16"),
        ("shared by neighbours", shared, "bfloat16"),
        ("in int8", shared, "int8"),
    )
    sizes = [(name, held(each, dtype, CONTEXT)) for name, each, dtype in rows]
    times = [Figure(name=name, value=sizes[0][1] / size, unit="x") for name, size in sizes[1:]]
    return Finding(
        figures=[times[2], times[0], times[1], times[3]],
        promise=Promise(low=20.0),
        why="Multi-query gives 8, windows in five of six layers about 3.4 at this length and more "
        "at longer ones, sharing by neighbours the rest; the weights have to be trained so.",
        picture=bars([(name, size / 2**20) for name, size in sizes], "MiB of 8,192 tokens"),
    )


def windowed(layers: Layers) -> Layers:
    """All layers but every sixth see `REACH` tokens."""
    return tuple(
        replace(layer, window=0 if at % PERIOD == 0 else REACH) for at, layer in enumerate(layers)
    )


def shared_by_neighbours(layers: Layers) -> Layers:
    """Of two layers with windows in a row the second reads what the first keeps."""
    found = list(layers)
    for at in range(1, len(found)):
        before = found[at - 1]
        if found[at].window and found[at].window == before.window and before.kv_from is None:
            found[at] = replace(found[at], kv_from=at - 1)
    return tuple(found)


def mbu(subject: Subject) -> Finding:
    """The formula that `/stats` and bench use, on a model of 7e9 weights and on Llama 2 7B."""
    round_seven = utilization(7e9 * 2 * 100, 1.0, 2e12) or 0.0
    spec = shapes.spec_of(shapes.LLAMA_2_7B)
    real = utilization(spec.step_weight_bytes("bfloat16") * 100, 1.0, 2e12) or 0.0
    kv = spec.kv_bytes_per_token("bfloat16") * 2048 * 100 / 2e12
    return Finding(
        figures=[
            Figure(name="7e9 weights of 2 bytes", value=100 * round_seven, unit="%"),
            Figure(name="Llama 2 7B, what a step reads", value=100 * real, unit="%"),
            Figure(name="… and the KV of 2,048 tokens", value=100 * (real + kv), unit="%"),
        ],
        promise=Promise(low=70.0, exact=True),
        why="A step reads no embedding table, which is looked up, but the KV of its contexts: the "
        "round figure leaves both out.",
    )


def million(subject: Subject) -> Finding:
    """$2 an hour over 360,000 tokens an hour."""
    price = usd_per_million(2.0, 100.0) or 0.0
    busy = [(rows, usd_per_million(2.0, 100.0 * rows) or 0.0) for rows in (1, 8, 32)]
    return Finding(
        figures=[
            Figure(name="a million tokens at 100 tok/s", value=price, unit=" $"),
            *(Figure(name=f"at {rows} times the tokens", value=usd, unit=" $")
              for rows, usd in busy[1:]),
        ],
        promise=Promise(low=5.56, exact=True),
        why="It is the price of one stream: the same hour at 32 rows costs a 32nd a token where "
        "throughput keeps up, which is what batching is for.",
    )  # fmt: skip


def half_each_time(subject: Subject) -> Finding:
    """Bytes of all weights of Llama 2 7B as the memory plan counts them, with scales."""
    spec = shapes.spec_of(shapes.LLAMA_2_7B)
    plain = spec.weight_bytes("bfloat16") / GB
    int8, int4 = (
        planned_bytes(Quantization.of(kind, group=64, head=kind), spec, "bfloat16") / GB
        for kind in ("int8", "int4")
    )
    return Finding(
        figures=[
            Figure(name="16 bits to int4", value=plain / int4, unit="x"),
            Figure(name="16 bits to int8", value=plain / int8, unit="x"),
            Figure(name="int8 to int4", value=int8 / int4, unit="x"),
            Figure(name="in int4", value=int4, unit=" GB"),
        ],
        promise=Promise(low=4.0, high=4.0),
        why="Scales of groups of 64 take half a bit a weight, and the embedding stays in 16 bits: "
        "a little less than half each time.",
        picture=bars([("16 bits", plain), ("int8", int8), ("int4", int4)], "GB of Llama 2 7B"),
    )


CLAIMS = (
    Claim(
        key="kv-13b",
        family="KV",
        says="The KV cache of a 13B model takes 54 GB at 32 requests of 2,048 tokens.",
        source=AI_ENGINEERING,
        measure=kv_13b,
        how="By the memory plan's arithmetic on Llama 2 13B's sizes.",
    ),
    Claim(
        key="kv-500b",
        family="KV",
        says="That of a 500B model with multi-head attention takes 3 TB at 512 x 2,048.",
        source=POPE,
        measure=kv_500b,
        how="The same on PaLM 540B's sizes with 48 heads of 128.",
    ),
    Claim(
        key="kv-window",
        family="KV",
        says="A window of 1k in place of a context of 10k is a tenth of the KV.",
        source=AI_ENGINEERING,
        measure=window,
        how="Blocks that one sequence holds while it decodes, with windows in all layers.",
    ),
    Claim(
        key="kv-twenty",
        family="KV",
        says="Multi-query, windows and sharing across layers make KV more than 20 times smaller.",
        source=CHARACTER_AI,
        measure=twenty_times,
        how="Blocks of one context of 8,192 tokens on Llama 3 8B's sizes, one means more each.",
    ),
    Claim(
        key="mbu",
        family="Bottlenecks",
        says="A 7B model in 16 bits at 100 tok/s on 2 TB/s uses 70% of the bandwidth.",
        source=f"{AI_ENGINEERING}; Databricks, LLM Inference Performance Engineering (2023)",
        measure=mbu,
        how="By the formula of /stats.",
    ),
    Claim(
        key="dollars",
        family="Bottlenecks",
        says="At $2 an hour and 100 tok/s a million output tokens cost $5.56.",
        source=AI_ENGINEERING,
        measure=million,
        how="By the formula of bench and /stats.",
    ),
    Claim(
        key="half-bytes",
        family="Quantization",
        says="Each step from 16 to 8 to 4 bits halves the bytes.",
        source="common in serving literature",
        measure=half_each_time,
        how="By the memory plan's arithmetic on Llama 2 7B, groups of 64, with the head.",
    ),
)
