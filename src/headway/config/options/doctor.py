"""The options of `headway doctor`."""

from dataclasses import dataclass

from headway.config.options.field import Seconds, option


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """How long to look, and how to tell."""

    seconds: Seconds = option(
        Seconds(20),
        "How long a live server is watched.",
        low=1,
        high=300,
        unit="seconds",
        common=True,
    )
    json: bool = option(False, "Print one JSON object instead of tables.", common=True)
    html: str = option(
        "", "URL or report: write one page with plots here; it needs no network.", common=True
    )
    machine: bool = option(
        False,
        "The machine and its kernels alone, measured on all cores, without the plan for a model.",
        common=True,
    )
    data: str = option(
        "",
        "A file of recorded chats, a body a line: what their prompts and answers could do without, "
        "counted offline.",
        common=True,
    )
    model: str = option("", "URL: which model, where several are served.")
    api_key: str = option("", "Key to send.", secret=True)
    price_per_hour: float | None = option(
        None, "What the machine costs, when the server was not told.", low=0, unit="USD"
    )
    accelerators: str = option(
        "", "CSV of accelerators (columns accelerator, mem_bw_gbs, bf16_dense_tflops, …)."
    )
    what_if: list[str] = option(
        [],
        "URL: simulate the last minutes with a change, rate=2x, max_num_seqs=128, prompts=0.8x, "
        "prefix=1500, kv=int8; several times for several.",
        separator="",
        common=True,
    )
    simulate: bool = option(
        True, "URL: simulate what the fixes give, from the server's own steps and traffic."
    )
    probe_seconds: Seconds = option(
        Seconds(3),
        "Without a URL: how long the machine is measured.",
        low=0,
        high=60,
        unit="seconds",
    )
