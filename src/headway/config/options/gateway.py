"""The options of `headway gateway`; its upstreams, models and budgets are in a file."""

from dataclasses import dataclass

from headway.config.options.field import Bytes, Seconds, option


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """What the gateway's process needs to know."""

    upstream: list[str] = option(
        [], "Without a file: URLs of replicas, such as http://a:8000/v1.", common=True
    )
    host: str = option("127.0.0.1", "Address to listen on.", common=True)
    port: int = option(8080, "Port to listen on.", low=0, high=65535, common=True)
    ssl_certfile: str = option("", "Certificate and its chain (PEM): serve HTTPS.")
    ssl_keyfile: str = option("", "Private key (PEM) of --ssl-certfile.")
    uds: str = option("", "Unix socket to listen on, instead of --host and --port.")
    api_key: list[str] = option(
        [],
        "Keys that may ask; without one everybody on this address may.",
        common=True,
        secret=True,
    )
    key_file: str = option(
        "", "YAML file of keys as hashes, with names and limits; SIGHUP reads it again."
    )
    key_api: bool = option(
        False, "Operators make, list and delete keys by POST, GET and DELETE /keys."
    )
    insecure: bool = option(False, "Listen beyond this machine although there is no API key.")
    allowed_origins: list[str] = option(
        [], "Web pages that may ask (CORS), such as http://localhost:3000 or *."
    )
    root_path: str = option(
        "", "Path below which a reverse proxy serves this gateway, such as /models."
    )
    max_body: Bytes = option(Bytes(10_000_000), "Largest request body.", low=1)
    data_dir: str = option(
        "",
        "Folder of the ledger, files and batches; by default headway in the user's state folder.",
    )
    max_file: Bytes = option(Bytes(200_000_000), "Largest uploaded file.", low=1)
    file_quota: Bytes = option(
        Bytes(10_000_000_000), "Most bytes that the files of one key may take.", low=1
    )
    batch_concurrency: int | None = option(
        None,
        "Lines of batches that run at once while nobody else asks; else one.",
        low=1,
        high=4096,
    )
    cached_price: float = option(
        0.1, "What a batch's cached token costs, as a share of another's.", low=0, high=1
    )
    drain_timeout: Seconds = option(
        Seconds(30.0), "On SIGTERM: how long running requests may take.", low=0, unit="seconds"
    )
    max_connections: int = option(
        4096, "Most connections at once; half of them from one address.", low=2, high=100_000
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpendOptions:
    """What `headway gateway spend` tells."""

    by: str = option(
        "key,model", "What is summed by: some of key, team, model, tag, day.", common=True
    )
    since: str = option("", "First day (UTC), as 2026-11-01; by default 30 days ago.", common=True)
    until: str = option("", "Day (UTC) before which it ends; by default tomorrow.", common=True)
    key: str = option("", "This key alone.", common=True)
    csv: bool = option(False, "Comma-separated values in place of a table.", common=True)
    data_dir: str = option(
        "",
        "Data folder of the gateway; by default headway in the user's state folder.",
        common=True,
    )
