"""The engines behind a served model: the command of each, and its share of the machine."""

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from headway.cli.common import stamp_of
from headway.core.memory_plan import DEFAULT_KV_SHARE
from headway.core.options import Bytes, EngineOptions, LogOptions, ServerOptions, to_arguments

if TYPE_CHECKING:
    from headway.frontend.process import ProcessClient
    from headway.frontend.text import Tokenizer
    from headway.telemetry.live import Telemetry
    from headway.telemetry.records import StepRecord

log = logging.getLogger(__name__)


def make_clients(
    folder: Path,
    engine_options: EngineOptions,
    options: ServerOptions,
    logs: LogOptions,
    tokenizer: "Tokenizer | None",
    telemetry: "Telemetry",
    progress: Callable[[int, int], None],
) -> "list[ProcessClient]":
    """A client for each engine, with the command that starts it; they share what is poisonous."""
    from headway.frontend.process import ProcessClient

    shared = share_of_machine(folder, engine_options, options.replicas)
    poison: dict[bytes, None] = {}

    def command(sockets: Path) -> list[str]:
        arguments = [*to_arguments(shared), *to_arguments(logs)]
        return [sys.executable, "-m", "headway.assemble", str(sockets), str(folder), *arguments]

    return [
        ProcessClient(
            command,
            tokenizer=tokenizer,
            timeout_s=options.engine_timeout,
            step_timeout_s=options.step_timeout,
            stamp=partial(stamp_of, folder),
            on_record=partial(on_step_of, telemetry, engine),
            on_ready=partial(telemetry.on_ready, engine=engine),
            on_probe=telemetry.on_probe,
            on_death=partial(telemetry.on_death, engine),
            on_progress=progress if engine == 0 else lambda done, total: None,
            poison=poison,
        )
        for engine in range(options.replicas)
    ]


def on_step_of(telemetry: "Telemetry", engine: int, record: "StepRecord") -> None:
    """Count a step as one of this engine."""
    record.engine = engine
    telemetry.on_step(record)


def share_of_machine(folder: Path, options: EngineOptions, replicas: int) -> EngineOptions:
    """What each of several engines on one machine is started with.

    Cores and the memory for KV are divided; what `--threads` and `--kv-memory` give is each
    engine's own. Four engines on 16 cores get four threads and 10% of the free RAM each.
    """
    if replicas == 1 or options.device == "cuda":
        return options
    from headway.assemble import plan_settings

    if replicas > (os.cpu_count() or 1):
        log.warning("--replicas %d is more than this machine has cores.", replicas)
    threads, memory = options.threads, options.kv_memory
    if threads is None:
        threads = max(1, plan_settings(folder, options)[1].threads // replicas)
    if memory is None and options.gpu_memory_utilization is None:
        memory = Bytes(-max(1, round(100 * DEFAULT_KV_SHARE / replicas)))
    return replace(options, threads=threads, kv_memory=memory)
