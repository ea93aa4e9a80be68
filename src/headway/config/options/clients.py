"""The options of the verbs beside the server: `batch`, `key`, `launch`, `pull` and `trace`."""

from dataclasses import dataclass

from headway.config.options.field import option


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """Where a batch without a server puts its results, and how much of it runs at once."""

    output: str = option(
        "", "File of the results; by default FILE.results.jsonl. What it holds stays.", common=True
    )
    served_model_name: list[str] = option(
        [], "Names the lines may use for the model; by default the folder's.", common=True
    )
    concurrency: int | None = option(
        None, "Lines in the engine at once; by default twice what it runs.", low=1, high=8192
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyOptions:
    """Where a new key's row goes, and what the key may do."""

    file: str = option(
        "",
        "Key file that the row is added to, and made where there is none; or of a revoked key.",
        common=True,
    )
    admin: bool = option(
        False, "The key may also read /metrics, /stats, /trace and /calibration.", common=True
    )
    gateway: bool = option(
        False, "The key is that of a gateway, which asks for callers of its own.", common=True
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceOptions:
    """Where models may go."""

    machines: str = option(
        "", "YAML file of machines: memory, price an hour, how many.", common=True
    )
    json: str = option("", "File that gets the placement for programs.", common=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """Which server a coding agent is set up for, and whether its files are written."""

    url: str = option("http://127.0.0.1:8000", "The server.", common=True)
    model: str = option("", "Which model; by default the server's first.", common=True)
    api_key: str = option("", "Key of the server.", common=True, secret=True)
    write: bool = option(
        False, "Write the configuration, after a backup, instead of printing it.", common=True
    )
    run: bool = option(
        False,
        "Start the agent, set up for the server; no file is written. Behind -- stand its own "
        "arguments.",
        common=True,
    )
    restore: bool = option(False, "Put back what was there before --write.", common=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOptions:
    """What `pull` fetches."""

    revision: str = option("main", "Branch, tag or commit.", common=True)
    hub_token: str = option(
        "", "Token for models that want one; also HF_TOKEN.", common=True, secret=True
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """What `trace` fetches, and from whom."""

    seconds: float = option(
        5.0, "How far back the trace goes.", low=0.001, high=300, unit="seconds", common=True
    )
    api_key: str = option("", "Key of the server.", common=True, secret=True)
