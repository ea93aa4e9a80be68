"""The options of `headway plan`: beside the load's (`bench`) and the engine's own."""

from dataclasses import dataclass

from headway.config.options.field import option


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What will be asked, on which machines, and what must hold."""

    prompts: str = option(
        "",
        "Prompt lengths by percentile, p50=800,p95=4000,p99=9000, where there is no trace.",
        unit="tokens",
        common=True,
    )
    answers: str = option("", "Answer lengths by percentile.", unit="tokens", common=True)
    burst: str = option(
        "", "Peaks: 3x:30s/10m is three times the rate for 30 s in every 10 minutes.", common=True
    )
    cacheable: str = option(
        "",
        "Share of prompt tokens that others begin with, too: 0.4, or 0.4:1500 with the length of "
        "those beginnings.",
        common=True,
    )
    retries: float = option(
        0.0, "Share of requests that people send once more of their own.", low=0, high=1
    )
    growth: float = option(1.0, "Plan for so many times the traffic.", low=0.01, common=True)
    machines: list[str] = option(
        ["here"],
        "here, accelerators by name (--machines=list shows them), FILE.json calibrations, FILE.csv "
        "datasheets as FILE.csv:NAME.",
        common=True,
    )
    calibration: str = option(
        "", "What steps take here: a file of `headway bench --calibrate`.", common=True
    )
    formats: list[str] = option(
        ["none"], "Weight formats to plan with: none, int8, int4. A rounded one wants an eval."
    )
    survive: int = option(0, "Servers that may be lost without a promise broken.", low=0, high=64)
    price: list[str] = option(
        [], "What a machine costs an hour: NAME=2.5; else the dated price of the table."
    )
    answer_limit: int | None = option(
        None, "The max_tokens that clients send; by default four times the p99.", low=1
    )
    most_requests: int = option(
        2000, "The longest stretch of traffic that is simulated.", low=50, high=1_000_000
    )
