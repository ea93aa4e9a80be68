"""The options of `headway tune`: beside the load's (`bench`) and the engine's own."""

from dataclasses import dataclass

from headway.config.options.field import Seconds, option


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """What may be changed, how much is tried, and what is done with the answer."""

    calibration: str = option(
        "",
        "What steps take here: a file of `headway bench --calibrate`. Without it a server is "
        "started and measured first.",
        common=True,
    )
    candidates: int = option(
        96, "Settings that are simulated, the default among them.", low=2, high=10_000
    )
    trials: int = option(
        3,
        "So many settings are run on the real server, in turns with the default: the best, and "
        "those that tell most where the simulation may be wrong; 0: none.",
        low=0,
        high=3,
        common=True,
    )
    minutes: float = option(
        20.0, "The longest that all of it takes.", low=0.5, high=1440, unit="minutes", common=True
    )
    block: Seconds = option(
        Seconds(60), "One real run is at most this long.", low=2, high=600, unit="seconds"
    )
    knobs: list[str] = option(
        [], "Only these options are changed; by default all that the tuner knows.", common=True
    )
    gate: bool = option(
        False,
        "Try weights and KV of other formats too; one counts only where `headway eval --gate` "
        "lets it pass.",
        common=True,
    )
    questions: int = option(10, "Questions of each skill that the gate asks.", low=1)
    write: str = option("", "Write the settings here, as YAML for --config.", common=True)
    prefer: str = option(
        "goodput",
        "Of settings whose goodput is within a twentieth of the best: the highest of it, the "
        "shortest wait, the fastest tokens, or the most of them.",
        choices=("goodput", "ttft", "tpot", "throughput"),
        common=True,
    )
