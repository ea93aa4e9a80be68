"""The options of `headway quantize`: formats, method, calibration, budget, and what is written."""

from dataclasses import dataclass

from headway.config.options.field import Bytes, Seconds, option


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeOptions:
    """One folder quantized; the evaluation beside it is `GateOptions`."""

    format: str = option(
        "mixed",
        "mixed: int4 or int8 by module, under a budget of bytes, seconds or KL (default: the bytes "
        "of llama.cpp's Q4_K_M); int4 in groups; int8 for weights and inputs.",
        choices=("int4", "int8", "mixed"),
        common=True,
    )
    group: int = option(64, "int4: inputs that share a scale: 32, 64 or 128.", common=True)
    head: str = option(
        "int8",
        "The head: int8, int4 (by --group: smaller, faster, dearer), or none to leave it as it is.",
        choices=("int8", "int4", "none"),
        common=True,
    )
    method: str = option(
        "gptq",
        "gptq rounds so that later inputs make good what earlier ones lose; nearest does not.",
        choices=("gptq", "nearest"),
        common=True,
    )
    ignore: list[str] = option(
        [],
        "Leave these in the type of the model: a matrix by its name in the checkpoint, or a "
        "regular expression as re:.*down_proj. Repeat for more.",
        common=True,
    )
    transform: str = option(
        "auto",
        "Before rounding: awq or smooth scale channels, rotate turns the residual stream; auto "
        "rotates a model whose norms stand before its layers.",
        choices=("auto", "none", "awq", "smooth", "rotate"),
        common=True,
    )
    calibrate: list[str] = option(
        ["self"],
        "Where rows of tokens come from: a .txt, a .jsonl of chats, skills, or self: the model "
        "writes them; with a share as books.txt:0.5. Repeat for more.",
        common=True,
    )
    rows: int = option(64, "Rows of calibration.", low=1, high=100_000, common=True)
    row_length: int = option(512, "Tokens of a row.", low=2, high=65_536, unit="tokens")
    max_bits: float | None = option(
        None,
        "mixed: most bits of a weight of the layers in the mean, scales included.",
        low=4,
        high=16,
        common=True,
    )
    max_bytes: Bytes | None = option(None, "mixed: most bytes of the layers' weights.", low=1)
    max_step: Seconds | None = option(
        None,
        "mixed: longest time of a decode step's linear layers, measured on this machine.",
        low=0,
        unit="seconds",
    )
    max_kl: float | None = option(
        None,
        "mixed: most divergence from FOLDER on rows of the calibration; then the cheapest formats.",
        low=0,
        unit="nats per token",
        common=True,
    )
    positive_scales: bool = option(
        False, "int4: scales above zero alone, at a tenth more loss, as some readers need."
    )
    readable_by: str = option(
        "headway",
        "vllm keeps scales positive and the head as it is, whatever --head says.",
        choices=("headway", "vllm"),
        common=True,
    )
    file_format: str = option(
        "compressed-tensors",
        "Format of the files; gptq holds int4 of one group and a plain head.",
        choices=("compressed-tensors", "gptq"),
    )
    threads: int | None = option(None, "CPU threads to compute with.", low=1, high=1024)
    seed: int = option(0, "Seed of the rows that are drawn, and of a rotation.", low=0)
