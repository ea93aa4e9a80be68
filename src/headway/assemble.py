"""The composition root of an engine: settings, executor and engine of a model folder, joined.

    planning.plan_settings → runtime.build.build_executor → engine.build.build_engine → Engine

It is also the entry point of the engine process: the server's client starts
`python -m headway.assemble`. Torch is imported only inside functions.
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headway.config.options import EngineOptions, LogOptions, read_options
from headway.config.reasons import Reason
from headway.config.resolve import Settings
from headway.core.clock import Clock
from headway.core.errors import CapacityError, HeadwayError, UsageError
from headway.core.logs import set_up_logs
from headway.core.machine import Machine
from headway.core.plan import Executor
from headway.engine.build import build_engine
from headway.engine.calibration import calibrate, calibrate_drafts, warm_up
from headway.engine.engine import Engine
from headway.engine.grammar.grammars import Grammars
from headway.engine.grammar.vocabulary import VocabularySource
from headway.engine.handover import Handover
from headway.engine.messages import WEIGHTS_VARIABLE
from headway.perf.model import prior_of
from headway.planning import plan_settings, read_draft
from headway.spec import ModelSpec
from headway.spec.model_files import TOKENIZER_FILE, has_document

if TYPE_CHECKING:
    from headway.runtime.executor import TorchExecutor

Progress = Callable[[int, int], None]
NULL_STEP_S = 0.01
CALIBRATION_S, DRAFT_CALIBRATION_S = 0.8, 1.5
MAX_MASK_THREADS = 8
PEERS = "peers"
"""Argument of an engine process that exchanges sequences with the server's other engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """An engine, its model, and its settings with their reasons."""

    engine: Engine
    spec: ModelSpec
    settings: Settings
    reasons: list[Reason]


def assemble(
    folder: Path,
    options: EngineOptions,
    *,
    clock: Clock | None = None,
    progress: Progress | None = None,
    weights: Sequence[int] = (),
) -> Assembled:
    """Load the model of `folder` and join it to an engine; raises HeadwayError.

    `weights` are descriptors of memory that several engines share, see `runtime.shared_weights`.
    """
    from headway.runtime.shared_weights import filled_bytes

    shared_bytes = filled_bytes(weights)
    spec, settings, reasons, machine = plan_settings(folder, options, shared_bytes)
    executor = make_executor(folder, options, spec, settings, machine, progress, weights)
    engine = build_engine(
        executor,
        settings,
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        clock=clock,
        grammars=make_grammars(folder, options, spec, settings, clock),
        prior=prior_of(spec, executor.describe(), settings.dtype, settings.cache.dtype),
    )
    if settings.max_model_len > 1:
        warm_up(engine)
        if options.executor != "null" and clock is None:
            calibrate(engine, CALIBRATION_S)
            calibrate_drafts(engine, DRAFT_CALIBRATION_S)
    return Assembled(engine=engine, spec=spec, settings=settings, reasons=reasons)


def join_peers(
    engine: Engine, folder: Path, address: str, *, secret: bytes = b"", root: Path | None = None
) -> Handover:
    """Let `engine`, with the model of `folder`, exchange sequences with other engines.

    `address` is "unix:PATH" or "HOST:PORT"; engines on several machines need the same `secret`.
    Digests of the weights are stored next to `root`, by default that of the disk tier. Raises
    OSError, and UsageError for an engine whose KV blocks other engines cannot find or fetch.
    """
    from headway.runtime import build

    executor = check_joins(engine)
    return Handover(engine, *build.join_peers(executor, folder, address, secret, root))


def check_joins(engine: Engine) -> "TorchExecutor":
    """Return the executor whose blocks other engines can find and fetch; else UsageError."""
    from headway.runtime.executor import TorchExecutor

    if not engine.settings.cache.prefix_cache:
        raise UsageError(
            "Without a prefix cache no engine finds what another has computed.",
            "Leave out --no-prefix-cache, or --prefill-replicas and --decode-replicas.",
        )
    if not isinstance(engine.executor, TorchExecutor):
        raise UsageError(
            "KV blocks are not handed over between ranks, nor by --executor null.",
            "Use --replicas in place of --prefill-replicas and --decode-replicas.",
        )
    return engine.executor


def make_grammars(
    folder: Path,
    options: EngineOptions,
    spec: ModelSpec,
    settings: Settings,
    clock: Clock | None = None,
) -> Grammars | None:
    """Return the grammars for structured output, or None for a model without a tokenizer.

    Masks are computed on the cores that the model leaves free.
    """
    tokenizer = Path(options.tokenizer) if options.tokenizer else folder
    if options.skip_tokenizer_init or not has_document(tokenizer, TOKENIZER_FILE):
        return None
    source = VocabularySource(str(tokenizer), spec.vocab_size, spec.eos_token_ids)
    spare = (os.cpu_count() or 1) - settings.threads
    return Grammars(source, threads=min(max(spare, 1), MAX_MASK_THREADS), clock=clock)


def make_executor(
    folder: Path,
    options: EngineOptions,
    spec: ModelSpec,
    settings: Settings,
    machine: Machine,
    progress: Progress | None,
    weights: Sequence[int] = (),
) -> Executor:
    """Return the executor named by `--executor`."""
    if options.executor == "null":
        from headway.runtime.null import NullExecutor

        return NullExecutor(NULL_STEP_S)
    # torch reads this once, at its first large allocation: weights in huge pages, 12% at batch 1
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if settings.parallel.num_ranks > 1:
        from headway.runtime.parallel.leader import LeaderExecutor
        from headway.runtime.parallel.pipeline import PipelineExecutor

        leader = PipelineExecutor if settings.parallel.stages > 1 else LeaderExecutor
        return leader(folder, spec, settings, machine, progress)
    from headway.runtime.shared_weights import share_weights
    from headway.runtime.weight_cache import look_up_weights

    draft = read_draft(folder, options, spec)
    shared = share_weights(folder, settings, draft, weights)
    is_filled = bool(shared) and not shared[0].fills
    # reads the cache while torch is imported
    lookup = None if is_filled else look_up_weights(folder, settings, alone=not shared)
    from headway.runtime.build import WeightSource, build_executor
    from headway.runtime.cuda.executor import CudaExecutor
    from headway.runtime.executor import TorchExecutor
    from headway.runtime.memory import keep_freed

    kind = TorchExecutor if settings.device == "cpu" else CudaExecutor
    source = WeightSource(
        folder=folder, progress=progress, lookup=lookup, draft=draft, shared=shared
    )
    try:
        executor = build_executor(kind, source, spec, settings, machine)
    except OSError as error:
        raise CapacityError(
            f"Memory for weights that the engines share could not be had: {error}.",
            "Serve a smaller model, or free memory.",
        ) from error
    keep_freed()  # after loading: memory that loading frees goes back to the system
    return executor


def main() -> int:
    """Run an engine process and return the exit status."""
    try:
        return run_engine(sys.argv[1:])
    except HeadwayError as error:
        return error.exit_code


def run_engine(arguments: list[str]) -> int:
    """Run an engine; arguments are the socket folder, the model folder, then options.

    PEERS before the options joins it to the other engines of its server.
    """
    from headway.engine.process import serve_engine

    def build(progress: Progress) -> Engine:
        return assemble(folder, tables[EngineOptions], progress=progress, weights=shared).engine

    def join(engine: Engine, address: str) -> Handover:
        return join_peers(engine, folder, address)

    shared = [int(one) for one in os.environ.get(WEIGHTS_VARIABLE, "").split(",") if one]
    sockets, folder, rest = Path(arguments[0]), Path(arguments[1]), arguments[2:]
    has_peers = rest[:1] == [PEERS]
    tables, _, _ = read_options([EngineOptions, LogOptions], rest[has_peers:], {})
    set_up_logs(tables[LogOptions].log_level, tables[LogOptions].log_format)
    return serve_engine(sockets, build, join if has_peers else None)


if __name__ == "__main__":
    sys.exit(main())
