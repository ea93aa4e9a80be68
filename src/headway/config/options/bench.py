"""The options of `headway bench`: what is sent, when, to whom, and what is written about it."""

from dataclasses import dataclass

from headway.config.options.field import Seconds, option


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """One load test. Most of them may also be given per class, in the `--classes` file."""

    model: str = option("", "Model to ask for; the server's first by default.", common=True)
    endpoint: str = option(
        "completions",
        "Which API is asked.",
        choices=("completions", "chat"),
        common=True,
    )
    api_key: str = option("", "Key to send.", secret=True)
    workload: str = option(
        "synthetic",
        "synthetic, shared-prefix or chat, or KIND:FILE with prompts, azure, mooncake or sharegpt.",
        common=True,
    )
    input_len: str = option(
        "256", "Prompt lengths: 512, uniform:64-256, normal:256,64 or lognormal:256,0.8.",
        unit="tokens", common=True,
    )  # fmt: skip
    output_len: str = option(
        "64", "Answer lengths, written as prompt lengths.", unit="tokens", common=True
    )
    prefix_len: int = option(
        256, "shared-prefix and chat: tokens that prompts begin with alike.", low=0, unit="tokens"
    )
    num_prefixes: int = option(1, "How many such beginnings there are.", low=1)
    turns: str = option("uniform:2-5", "chat: turns of a conversation, written as lengths.")
    think_time: Seconds = option(
        Seconds(2.0), "chat: mean pause between an answer and the next turn.", low=0, unit="seconds"
    )
    prompt_format: str = option(
        "auto",
        "Prompts as token ids or as text; auto sends ids where the server takes them.",
        choices=("auto", "ids", "text"),
    )
    vocab_size: int = option(
        0, "Ids of prompts stay below; 0 takes 500, and a trace's ids as they are.", low=0
    )
    scale_length: int | None = option(
        None,
        "Traces: multiply lengths by one factor so that the longest fits into this.",
        low=2,
        unit="tokens",
    )
    arrivals: str = option(
        "auto",
        "When requests are sent; auto is the trace's own times, else poisson.",
        choices=("auto", "poisson", "gamma", "constant", "ramp", "trace"),
        common=True,
    )
    rate: float | None = option(
        None,
        "Requests (conversations) per second: 4, or a trace's own; its times are stretched.",
        low=0.001,
        common=True,
    )
    burstiness: float = option(
        1.0, "gamma: shape of the gaps; 1 is poisson, below 1 comes in bursts.", low=0.001
    )
    ramp_from: float = option(0.0, "ramp: the rate at the start; it ends at --rate.", low=0)
    speed: float = option(1.0, "Traces: replay this many times as fast; or give --rate.", low=0.001)
    concurrency: int | None = option(
        None,
        "Closed loop: this many requests at a time, each sent when one has been answered.",
        low=1,
        common=True,
    )
    duration: Seconds | None = option(
        None,
        "How long requests are sent: 30 s, or the trace's length.",
        low=0.01,
        unit="seconds",
        common=True,
    )
    num_requests: int | None = option(
        None, "Send this many instead of for a duration.", low=1, common=True
    )
    warmup: Seconds | None = option(
        None,
        "Cut from the start of what counts: a tenth of the time, at most 30 s.",
        low=0,
        unit="seconds",
    )
    cooldown: Seconds | None = option(
        None, "Cut from the end, in the same way.", low=0, unit="seconds"
    )
    timeout: Seconds = option(
        Seconds(600.0),
        "After this long without its whole answer a request failed.",
        low=0.01,
        unit="seconds",
    )
    slo: list[str] = option(
        [],
        "Objectives, ttft=500ms,tpot=50ms, or of a class: interactive:ttft=500ms.",
        separator="",
        common=True,
    )
    share: list[str] = option([], "A class's share of the traffic: interactive=0.7.")
    classes: str = option("", "YAML file: class → share, slo and other options of its own.")
    attainment: float = option(
        0.9, "Share of requests that must meet their objectives.", low=0.01, high=1.0
    )
    find_goodput: bool = option(
        False, "Search the highest rate that keeps --attainment; needs --slo.", common=True
    )
    max_rate: float = option(1000.0, "find-goodput: the highest rate it tries.", low=0.001)
    ignore_eos: bool = option(True, "Ask for answers of the full length where the server can.")
    temperature: float = option(0.0, "Of every request.", low=0, high=2)
    price_per_hour: float | None = option(
        None,
        "What the server costs an hour, for the cost per million tokens.",
        low=0,
        unit="dollars",
    )
    seed: int = option(0, "Same seed, same requests at the same times.", low=0)
    calibrate: str = option(
        "", "Write what the server's steps took during the load here, for headway simulate."
    )
    words: list[str] = option(
        [], "Also print what other tools call each figure: vllm, aiperf, guidellm, llmperf."
    )
    json: str = option("", "Write the report with all raw timestamps here.", common=True)
    csv: str = option("", "Write one line a request here.")
    html: str = option("", "Write one page with plots here; it needs no network.", common=True)
