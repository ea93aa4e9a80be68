"""`headway gateway FILE`: one address before many servers."""

import contextlib
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headway.config.options import GatewayOptions, LogOptions
from headway.core.errors import UsageError
from headway.core.logs import line_of, set_up_logs, write_in_thread

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from headway.cli.main import VerbCall
    from headway.edge.keys import Keyring
    from headway.gateway.config import Config


def gateway(call: "VerbCall") -> int:
    """Serve until a signal; return 0 after the running requests have ended."""
    options: GatewayOptions = call.options[GatewayOptions]
    config = read(call)
    if "--dry-run" in call.switches:
        print_config(config)
        check_names(config, options)
        return 0
    logs: LogOptions = call.options[LogOptions]
    set_up_logs(logs.log_level, logs.log_format)

    from headway.edge import root_path, serving
    from headway.edge.notify import Notifier
    from headway.gateway import run
    from headway.gateway.ledger import Ledger
    from headway.gateway.state import GatewayState, ledger_folder
    from headway.telemetry.request_log import RequestLog

    keyring = keyring_of(options)
    if options.key_api and not keyring:
        raise UsageError(
            "--key-api needs a key that may make others.",
            "Add --api-key KEY, or --key-file with a row of `headway key NAME --admin`.",
        )
    serving.check_place(options, call.sources, has_key=bool(keyring), insecure=options.insecure)
    root_path.check_root_path(options.root_path)
    notifier = Notifier.take(os.environ)
    state = GatewayState(
        options=options,
        config=config,
        keyring=keyring,
        ledger=Ledger(ledger_folder(options.data_dir)),
        request_log=RequestLog(every=logs.log_requests),
    )
    with serving.open_listener(options) as (listener, url):
        place = url if options.uds else url + "/v1"

        def on_ready() -> None:
            routes = [f"  {line}" for line in config.routes()]
            text = "\n".join([f"Headway's gateway is ready: {place}", *routes])
            with contextlib.suppress(OSError):
                print(line_of(text, logging.INFO, logs.log_format), flush=True)

        with write_in_thread("headway.requests", logs.log_format):
            serving.run(run.serve(state, listener, lambda: read(call), on_ready, notifier))
    log.info("ended")
    return 0


def read(call: "VerbCall") -> "Config":
    """Return the configuration of the command; raises UsageError."""
    from headway.gateway.config import config_of_urls, read_config

    options: GatewayOptions = call.options[GatewayOptions]
    how = "headway gateway gateway.yaml, or headway gateway --upstream http://host:8000/v1"
    if len(call.positionals) > 1:
        raise UsageError("gateway takes one file.", how)
    if call.positionals and options.upstream:
        raise UsageError("A file and --upstream exclude each other.", "Put it into the file.")
    if call.positionals:
        return with_probes(read_config(Path(call.positionals[0])))
    if not options.upstream:
        raise UsageError("gateway needs a file or an --upstream.", how)
    return config_of_urls(options.upstream)


def with_probes(config: "Config") -> "Config":
    """Return the configuration with the probes by which its upstreams are compared."""
    if config.drift is None:
        return config
    from headway.cli.drift import read_probes

    probes = read_probes(config.drift.probes, config.drift.number)
    return msgspec.structs.replace(config, probes=tuple(probes))


def keyring_of(options: GatewayOptions) -> "Keyring":
    """Return the keys of flags and of the key file."""
    from headway.edge.keys import Keyring

    file = Path(options.key_file) if options.key_file else None
    return Keyring(flags=options.api_key, file=file)


def check_names(config: "Config", options: GatewayOptions) -> None:
    """Raise UsageError for a budget or a team's key of a name that no key has."""
    from headway.core.principal import ANONYMOUS
    from headway.gateway.config import format_suggestion
    from headway.gateway.ledger import read_made_names
    from headway.gateway.state import ledger_folder

    names = [*sorted(keyring_of(options).reserved_names)] or [ANONYMOUS]
    if options.key_api:
        names += read_made_names(ledger_folder(options.data_dir) / "ledger.db")
    places = [("budgets", name) for name in config.budgets if name != "*"]
    places += [(f"teams: {team}", key) for team, row in config.teams.items() for key in row.keys]
    for where, name in places:
        if name not in names and name.rpartition("/")[0] not in names:
            raise UsageError(
                f"{where}: there is no key {name[:64]!r}.",
                f"{format_suggestion(name, names)} Give the --key-file that the gateway has.",
            )


def print_config(config: "Config") -> None:
    """Print the routes and the warnings of a configuration, for `--dry-run`."""
    from headway.gateway.money import format_budget, format_price

    for row in config.upstreams:
        print(f"upstream {row.name:<22} {row.address} ({row.kind}), {format_price(row.price)}")
    for line in config.routes():
        print(f"model    {line}")
    for rollout in config.rollouts:
        steps = ", ".join(f"{step:g}%" for step in rollout.steps)
        print(
            f"rollout  {rollout.name:<22} {rollout.model}: {', '.join(rollout.canary)} at {steps}"
        )
    for name, budget in config.budgets.items():
        print(f"budget   {name:<22} {format_budget(budget)}")
    for name, team in config.teams.items():
        print(f"team     {name:<22} {format_budget(team.budget)}: {', '.join(team.keys)}")
    for warning in config.warnings:
        print(f"warning  {warning}")
