"""The engines of a served model: the command of each, and its share of the machine."""

import logging
import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from headway.cli.common import folder_stamp
from headway.config.memory_plan import DEFAULT_KV_SHARE
from headway.config.options import Bytes, EngineOptions, LogOptions, ServerOptions, to_arguments
from headway.core.errors import UsageError

if TYPE_CHECKING:
    from headway.admit.engine_queues import EngineQueues
    from headway.core.records import StepRecord
    from headway.frontend.client import EngineClient
    from headway.frontend.process import ProcessClient
    from headway.frontend.text import Tokenizer
    from headway.telemetry.live import Telemetry

log = logging.getLogger(__name__)


def count_engines(options: ServerOptions) -> int:
    """Return how many engines the options ask for; UsageError where they contradict each other.

    `--prefill-replicas 1 --decode-replicas 2` are three.
    """
    prefill, decode = options.prefill_replicas, options.decode_replicas
    if not prefill and not decode:
        return options.replicas
    if not prefill or not decode:
        missing = "--decode-replicas" if prefill else "--prefill-replicas"
        raise UsageError(
            "Prefill and decode engines: there must be at least one of each.", f"Add {missing} 1."
        )
    if options.replicas not in (1, prefill + decode):
        raise UsageError(
            f"--replicas {options.replicas} is not {prefill} for prompts and {decode} for answers.",
            "Leave --replicas out.",
        )
    return prefill + decode


def check_pools(engine: EngineOptions, options: ServerOptions) -> None:
    """Raise UsageError for options that several engines cannot have.

    Prefill engines need a prefix cache and one process each, so that decode engines can fetch their
    blocks. Several engines cannot share a disk folder, because each one erases what tenants have
    there.
    """
    count = count_engines(options)
    if engine.kv_disk and count > 1:
        raise UsageError(
            f"--kv-disk {engine.kv_disk}: {count} engines cannot share the folder, so all but one "
            "would be without.",
            "Leave one of them out, or start servers with a folder each behind headway gateway.",
        )
    if not options.prefill_replicas and not options.decode_replicas:
        return
    refused = {
        f"--tensor-parallel-size {engine.tensor_parallel_size}": engine.tensor_parallel_size > 1,
        f"--pipeline-parallel-size {engine.pipeline_parallel_size}": engine.pipeline_parallel_size
        != 1,
        f"--decode-context-parallel-size {engine.decode_context_parallel_size}": (
            engine.decode_context_parallel_size > 1
        ),
        "--executor null": engine.executor == "null",
        "--no-prefix-cache": not engine.prefix_cache,
    }
    for named in (name for name, given in refused.items() if given):
        raise UsageError(
            f"{named}: engines for prompts hand their blocks over to engines for answers, and "
            "that needs a prefix cache and the memory of one process.",
            f"Leave out {named.split()[0]}, or use --replicas in place of --prefill-replicas and "
            "--decode-replicas.",
        )


def join_clients(
    clients: "list[ProcessClient]",
    options: ServerOptions,
    telemetry: "Telemetry",
    queues: "EngineQueues",
) -> "EngineClient":
    """Return one client for all engines; admission and telemetry are notified of transfers."""
    from headway.frontend.pools import PREFILL, PrefillDecodePools
    from headway.frontend.replicas import Replicas
    from headway.telemetry.counting import count_handover

    if len(clients) == 1:
        return clients[0]
    if not options.prefill_replicas:
        return Replicas(clients, on_moved=queues.on_failover)
    pools = PrefillDecodePools(
        clients,
        options.prefill_replicas,
        on_moved=queues.on_failover,
        on_handed=queues.on_handover,
        on_outcome=partial(count_handover, telemetry.registry),
    )
    telemetry.engines.roles = pools.roles
    pools.on_roles = queues.on_roles
    queues.on_roles([role == PREFILL for role in pools.roles])
    return pools


def make_clients(
    folder: Path,
    engine_options: EngineOptions,
    options: ServerOptions,
    logs: LogOptions,
    tokenizer: "Tokenizer | None",
    telemetry: "Telemetry",
    progress: Callable[[int, int], None],
) -> "list[ProcessClient]":
    """Return a client for each engine with its start command; they share the poisonous requests."""
    from headway.assemble import PEERS
    from headway.frontend.process import ProcessClient

    count = count_engines(options)
    peers = [PEERS] if options.prefill_replicas else []
    shared = divide_machine(folder, engine_options, count)
    poison: dict[bytes, None] = {}
    weights = share_weights(shared, count)

    def command(sockets: Path) -> list[str]:
        arguments = [*peers, *to_arguments(shared), *to_arguments(logs)]
        return [sys.executable, "-m", "headway.assemble", str(sockets), str(folder), *arguments]

    clients = [
        ProcessClient(
            command,
            tokenizer=tokenizer,
            timeout_s=options.engine_timeout,
            step_timeout_s=options.step_timeout,
            stamp=partial(folder_stamp, folder),
            on_record=partial(count_step, telemetry, engine),
            on_ready=partial(telemetry.on_ready, engine=engine),
            on_probe=telemetry.on_probe,
            on_death=partial(telemetry.on_death, engine),
            on_progress=progress if engine == 0 else lambda done, total: None,
            poison=poison,
            weights=weights,
        )
        for engine in range(count)
    ]
    for descriptor in weights:
        weakref.finalize(clients[0], os.close, descriptor)
    return clients


def share_weights(options: EngineOptions, count: int) -> list[int]:
    """Return descriptors of memory in which several engines share weights; [] for one engine.

    The second is for the draft model. GPUs hold their own weights, and ranks have parts of their
    own.
    """
    ranks = options.tensor_parallel_size, options.decode_context_parallel_size
    is_cut = any(size > 1 for size in ranks) or options.pipeline_parallel_size != 1
    if count == 1 or options.device == "cuda" or is_cut:
        return []
    from headway.runtime.shared_weights import create_shared_files

    return create_shared_files(2)


def count_step(telemetry: "Telemetry", engine: int, record: "StepRecord") -> None:
    """Count a step as one of this engine."""
    record.engine = engine
    telemetry.on_step(record)


def divide_machine(folder: Path, options: EngineOptions, replicas: int) -> EngineOptions:
    """Return the options of each of several engines on one machine.

    Cores and KV memory are divided; values of `--threads` and `--kv-memory` hold for each engine.
    Four engines on 16 cores get four threads and 10% of the free RAM each.
    """
    if replicas == 1 or options.device == "cuda":
        return options
    from headway.planning import plan_settings

    if replicas > (os.cpu_count() or 1):
        log.warning("%d engines are more than this machine has cores.", replicas)
    threads, memory = options.threads, options.kv_memory
    if threads is None:
        threads = max(1, plan_settings(folder, options)[1].threads // replicas)
    if memory is None and options.gpu_memory_utilization is None:
        memory = Bytes(-max(1, round(100 * DEFAULT_KV_SHARE / replicas)))
    return replace(options, threads=threads, kv_memory=memory)
