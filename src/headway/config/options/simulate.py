"""The options of `headway simulate`: beside the load's (`bench`) and the engine's own."""

from dataclasses import dataclass

from headway.config.options.field import Seconds, option


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """What the simulated server runs on, how many there are, and how its clients behave."""

    calibration: str = option(
        "",
        "File of `headway bench --calibrate`: what steps take here. Without it the roofline of "
        "this machine is taken, as an interval.",
        common=True,
    )
    transfer: bool = option(
        False, "Let a calibration of another model or format stand in, scaled by the roofline."
    )
    replicas: int = option(
        1,
        "Engines of one server, as with serve; they share the cores that a calibration tells of. "
        "Servers on machines of their own: headway plan.",
        low=1,
        high=1024,
        common=True,
    )
    runs: int = option(
        3, "Simulate this often, the machine's good and bad times drawn anew.", low=1, high=100
    )
    answer_limit: int | None = option(
        None,
        "The max_tokens that clients send: the engine knows no more than this of an answer's "
        "length. By default the length itself, as bench sends it.",
        low=1,
        unit="tokens",
    )
    retries: int = option(
        0, "Tries after a 429 or 503 that a client adds, after the pause that it is told.", low=0
    )
    served_slo: list[str] = option(
        [], "Objectives that the server was started with (its --slo).", separator=""
    )
    served_classes: str = option("", "Class file that the server was started with (its --classes).")
    max_queue: int | None = option(
        None,
        "Most requests that wait for a first token; by default 4 for each that runs, at least 256.",
        low=1,
    )
    max_queue_wait: Seconds | None = option(
        None,
        "Longest predicted wait of any request; by default 60 s for requests that ask for no "
        "objective, else from the objective.",
        low=0,
        unit="seconds",
    )
