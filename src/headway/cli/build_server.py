"""The composition root of a server: options → models with their engines' clients → ServerState.

folder → tokenizer, Telemetry, engine clients (`cli.engines`), admission rules → ServedModel
ServedModel, Keyring, fallback                                                → ServerState
"""

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import headway
from headway.cli.common import (
    draft_model_folder,
    make_scorer,
    model_folder,
    model_name,
    read_tokenizer,
)
from headway.cli.engines import count_engines, join_clients, make_clients
from headway.config.options import Bytes, EngineOptions, LogOptions, ServerOptions, to_arguments
from headway.config.served_spec import as_served
from headway.config.speculation_config import DRAFTERS
from headway.core.errors import UsageError
from headway.core.service import ServiceClass, service_classes
from headway.core.slo import DEFAULT_CLASS
from headway.spec import read_model_spec
from headway.spec.formats import FORMATS
from headway.spec.model_files import read_document, sampling_defaults
from headway.telemetry.contention import CoreWatch, CpuWatch

if TYPE_CHECKING:
    from headway.admit.admission import Rules
    from headway.edge.keys import Keyring
    from headway.server.models import ServedModel, ServerState

FALLBACK_KV_MEMORY = Bytes(-20)
"""KV memory of the fallback engine as a share of the free memory, while the first one loads."""
FIRST_MODEL_OPTIONS = (
    *("max_model_len", "tokenizer", "chat_template", "fp8", "draft_model", "draft_vocab_size"),
    *("kv_layers", "kv_read", "kv_keep", "kv_cache_dtype_skip_layers"),
    *("tensor_parallel_size", "pipeline_parallel_size", "sum_parts"),
    "decode_context_parallel_size",
)
"""Engine options that hold for one model alone: its layers, heads, weights and vocabulary."""


def make_state(
    folder: Path,
    engine_options: EngineOptions,
    options: ServerOptions,
    logs: LogOptions,
    keyring: "Keyring",
    classes: dict[str, ServiceClass],
    progress: Callable[[int, int], None],
) -> "ServerState":
    """Return the server's state for one model folder, and its fallback."""
    from headway.server.models import ServerState
    from headway.telemetry.request_log import RequestLog

    check_context(classes, draft_model_folder(folder, engine_options))
    model = make_model(folder, engine_options, options, logs, classes, progress)
    state = ServerState(
        keyring=keyring,
        models=dict.fromkeys(model.names, model),
        options=options,
        fingerprint=fingerprint(folder, engine_options),
    )
    state.log_stats = logs.log_stats
    add_fallback(state, engine_options, logs)
    attach_cpu_watches(state)
    for row in state.rows:
        row.telemetry.request_log = RequestLog(every=logs.log_requests)
    return state


def make_model(
    folder: Path,
    engine_options: EngineOptions,
    options: ServerOptions,
    logs: LogOptions,
    classes: dict[str, ServiceClass],
    progress: Callable[[int, int], None],
) -> "ServedModel":
    """Return the row of the model table: tokenizer, telemetry, and the clients of its engines."""
    from headway.server.models import ServedModel, answer_formats
    from headway.telemetry.live import Telemetry
    from headway.telemetry.trace import otlp_provider, span_writer

    names = options.served_model_name or [model_name(folder)]
    tokenizer = read_tokenizer(folder, engine_options)
    telemetry = Telemetry(
        names,
        as_served(read_model_spec(folder), engine_options),
        prefix=options.metrics_prefix,
        classes=classes,
        slo_target=options.slo_target,
        price_per_hour=options.price_per_hour,
        cached_price=options.cached_price,
        version=headway.__version__,
    )

    if options.otlp_endpoint:
        provider = otlp_provider(options.otlp_endpoint, "headway")
        telemetry.on_finish = span_writer(provider, telemetry.clock, names[0])

    telemetry.engines.num = count_engines(options)
    clients = make_clients(folder, engine_options, options, logs, tokenizer, telemetry, progress)
    format, reasoning = answer_formats(tokenizer, options.tool_call_parser)
    model = ServedModel(
        names=names,
        client=clients[0],
        num_engines=len(clients),
        tokenizer=tokenizer,
        telemetry=telemetry,
        defaults=sampling_defaults(folder),
        created=int(time.time()),
        format=format,
        reasoning=reasoning,
        rules=make_rules(options, engine_options),
        scorer=make_scorer(folder, engine_options),
    )
    model.client = join_clients(clients, options, telemetry, model.admission.queues)
    return model


def make_rules(options: ServerOptions, engine_options: EngineOptions) -> "Rules":
    """Return the rules of admission from the options."""
    from headway.admit.admission import Rules
    from headway.config.scheduler_config import SchedulerConfig
    from headway.engine.policy import POLICIES

    return Rules(
        max_queue=options.max_queue,
        max_queue_wait_s=options.max_queue_wait,
        scheduler=SchedulerConfig.of(engine_options),
        order=POLICIES[engine_options.policy].queue_order,
        prefix_cache=engine_options.prefix_cache,
    )


def make_classes(options: ServerOptions) -> dict[str, ServiceClass]:
    """Return the service classes by name, from `--classes`, `--slo` and `--batch-price`.

    With a fallback the default class is not best effort: the fallback answers late requests.
    """
    classes = service_classes(options.slo, Path(options.classes) if options.classes else None)
    if options.batch_price is not None:
        classes["batch"] = replace(classes["batch"], price=options.batch_price)
    if options.fallback_model:
        classes[DEFAULT_CLASS] = replace(classes[DEFAULT_CLASS], best_effort=False)
    return classes


def check_context(classes: dict[str, ServiceClass], drafting: Path | None) -> None:
    """Raise UsageError for a class with keep_context where there is no draft model."""
    for row in classes.values():
        if row.keep_context is not None and row.keep_context < 1 and drafting is None:
            raise UsageError(
                f"The class {row.name} has keep_context, and no model says what may be cut.",
                "Add --draft-model FOLDER, or leave keep_context out.",
            )


def fingerprint(folder: Path, options: EngineOptions) -> str:
    """Return `system_fingerprint`: the same for the same version, model config and options."""
    config = json.dumps(read_document(folder, "config.json"))
    parts = [headway.__version__, config, *to_arguments(options)]
    return "fp_" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def add_fallback(state: "ServerState", engine_options: EngineOptions, logs: LogOptions) -> None:
    """Add the upstream or the second engine of `--fallback-model` to the state."""
    from headway.edge.upstream import FallbackUpstream, split_name

    if not state.options.fallback_model:
        return
    name, place = split_name(state.options.fallback_model)
    if "://" in place:
        state.upstream = FallbackUpstream(place, name, os.environ.get("HEADWAY_FALLBACK_KEY", ""))
        return
    folder = model_folder(place)
    name = name or model_name(folder)
    if name in state.models:
        raise UsageError(
            f"--fallback-model {place}: the name {name} is taken.", f"Write other={place}."
        )
    options = replace(
        state.options,
        served_model_name=[name],
        fallback_model="",
        otlp_endpoint="",
        replicas=1,
        prefill_replicas=0,
        decode_replicas=0,
    )
    classes, quiet = make_classes(options), lambda done, total: None
    state.models[name] = make_model(
        folder, fallback_engine_options(engine_options), options, logs, classes, quiet
    )
    state.fallback_model = name


def fallback_engine_options(options: EngineOptions) -> EngineOptions:
    """Return the options of the fallback's engine: all but those of the first model alone.

    `--kv-layers FILE` has layers of the first model, whose gate judged no other weights, and
    `--speculative-method medusa,ngram` becomes `ngram` where other weights have no heads.
    """
    own = EngineOptions()
    method = options.speculative_method
    if method is not None:
        shared = [each.strip() for each in method.split(",") if each.strip() not in DRAFTERS]
        method = ",".join(shared) or "off"
    return replace(
        options,
        **{name: getattr(own, name) for name in FIRST_MODEL_OPTIONS},
        kv_memory=options.kv_memory or FALLBACK_KV_MEMORY,
        quantization=options.quantization if options.quantization in FORMATS else "none",
        speculative_method=method,
    )


def attach_cpu_watches(state: "ServerState") -> None:
    """Attach the watches of core and CPU use to telemetry; CPU use for a single model only."""
    for row in state.rows:
        row.telemetry.core_watch = CoreWatch(row.telemetry.clock.now_s)
        row.telemetry.cpu_watch = CpuWatch() if len(state.rows) == 1 else None
