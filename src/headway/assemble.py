"""The file that joins an engine to a runtime, and the entry point of the engine process.

`assemble` reads a model folder, resolves the settings and returns a ready `Engine`. Torch is
imported only here, inside functions. The server's client starts `python -m headway.assemble`.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from headway.config.kv_layers import narrowing
from headway.config.options import EngineOptions, LogOptions, read_options
from headway.config.quantization_choice import measures_formats
from headway.config.reasons import Reason
from headway.config.resolve import Settings, choose_device, resolve
from headway.config.served_spec import as_served
from headway.config.speculation_config import DraftHead, choose_method
from headway.core.clock import Clock
from headway.core.errors import CapacityError, HeadwayError, UsageError
from headway.core.logs import set_up_logs
from headway.core.machine import Accelerator, Machine, memory, probe_machine, processor_name
from headway.core.plan import Ceilings, Executor
from headway.engine.calibration import calibrate, calibrate_drafts
from headway.engine.engine import Engine
from headway.engine.grammar.grammars import Grammars
from headway.engine.grammar.vocabulary import VocabularySource
from headway.engine.handover import Handover
from headway.engine.messages import WEIGHTS_VARIABLE
from headway.perf.model import prior_of
from headway.spec import ModelSpec, read_model_spec
from headway.spec.embedded import model_folder
from headway.spec.model_files import TOKENIZER_FILE, has_document, read_document

if TYPE_CHECKING:
    from headway.runtime.shared_weights import SharedWeights
    from headway.runtime.weight_cache import Lookup

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


def plan_settings(
    folder: Path, options: EngineOptions, shared_bytes: int = 0
) -> tuple[ModelSpec, Settings, list[Reason], Machine]:
    """Decide everything that does not need the weights: this is what `--dry-run` prints.

    `shared_bytes` of the weights are already in memory that this engine shares.
    """
    from headway.runtime.native.available import best_instruction_set

    accelerator = None if options.device == "cpu" else probe_cuda(options.device)
    machine = probe_machine(accelerator, best_instruction_set())
    machine = replace(
        machine, free_bytes=min(machine.free_bytes + shared_bytes, machine.total_bytes)
    )
    whole, why = with_formats(folder, read_spec(folder, options), options, machine)
    spec = as_served(whole, options)
    draft = read_draft(folder, options, spec)
    draft_head = read_draft_head(folder, options, spec)
    drafting = None if draft is None else draft[1]
    settings, reasons = resolve(options, machine, spec, drafting, draft_head)
    if settings.device != "cpu":
        from headway.runtime.cuda.memory import step_bytes

        counted = step_bytes(spec, settings)
        settings, reasons = resolve(options, machine, spec, drafting, draft_head, counted)
    if why:
        reasons = [
            replace(one, why=f"given, {why}") if one.name == "quantization" else one
            for one in reasons
        ]
    cache = replace(settings.cache, narrowed=narrowing(whole, spec))
    return spec, replace(settings, cache=cache), reasons, machine


def with_formats(
    folder: Path, spec: ModelSpec, options: EngineOptions, machine: Machine
) -> tuple[ModelSpec, str]:
    """Return (the spec with a measured format for each matrix, why) for int4 without a group;
    else (the unchanged spec, "").
    """
    if not measures_formats(options, choose_device(options, machine)[0]):
        return spec, ""
    from headway.compress.at_load import choose_formats

    chosen = choose_formats(folder, spec, Path(options.tokenizer or folder))
    return chosen.spec, chosen.why


def read_spec(model: Path, options: EngineOptions) -> ModelSpec:
    """Return the dimensions of a model, and the formats of its quantized matrices.

    Formats are read from the headers and scales of the weights, so random weights have none.
    """
    spec = read_model_spec(model)
    if not spec.quantization or options.load_format == "dummy":
        return spec
    from headway.runtime.checkpoint import checkpoint_formats

    return replace(spec, formats=checkpoint_formats(model, spec))


def read_draft(
    folder: Path, options: EngineOptions, spec: ModelSpec
) -> tuple[Path, ModelSpec] | None:
    """Return the draft model's folder and dimensions, or None; raises UsageError if it cannot
    draft."""
    if not options.draft_model:
        return None
    path = model_folder(options.draft_model)
    draft = read_spec(path, options)
    if draft.num_parameters >= spec.num_parameters:
        raise UsageError(
            f"--draft-model {options.draft_model} has {draft.num_parameters:,} parameters, and the "
            f"model {spec.num_parameters:,}: it would only slow it down.",
            "Name a smaller model.",
        )
    if not options.skip_tokenizer_init:
        check_same_tokens(Path(options.tokenizer) if options.tokenizer else folder, path)
    return path, draft


def read_draft_head(folder: Path, options: EngineOptions, spec: ModelSpec) -> DraftHead | None:
    """Return the draft layer (EAGLE) or Medusa heads in the folder, if the options allow them.

    Raises CheckpointError for a file that does not fit.
    """
    methods = choose_method(options).split(",")
    if methods == ["auto"] and not options.draft_model:
        methods = ["eagle", "medusa"]
    from headway.runtime.eagle_file import read_eagle_spec
    from headway.runtime.medusa_file import read_medusa_spec

    draft_head: DraftHead | None = None
    if "eagle" in methods:
        draft_head = read_eagle_spec(folder, spec)
    if draft_head is None and "medusa" in methods:
        draft_head = read_medusa_spec(folder, spec)
    return draft_head


def check_same_tokens(model: Path, draft: Path) -> None:
    """Raise UsageError if a token id has another text in the draft's tokenizer.

    Ids that only one of them has are padding, and never proposed.
    """
    documents = [read_document(path, TOKENIZER_FILE) for path in (model, draft)]
    if None in documents:
        raise UsageError(
            f"--draft-model needs a tokenizer.json beside both models to compare them; "
            f"{(model if documents[0] is None else draft).name} has none.",
            "Add it, or serve token ids with --skip-tokenizer-init.",
        )
    if documents[0] == documents[1]:
        return
    from tokenizers import Tokenizer

    own, other = (
        {number: text for text, number in Tokenizer.from_str(json.dumps(d)).get_vocab().items()}
        for d in documents
    )
    for number in sorted(own.keys() & other.keys()):
        if own[number] != other[number]:
            raise UsageError(
                f"--draft-model has another tokenizer: token {number} is {other[number]!r} there "
                f"and {own[number]!r} in the model's.",
                "Name a draft of the same family.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """A machine and the plan of one model on it; `ceilings` and `flops_per_s` may be unmeasured."""

    spec: ModelSpec
    settings: Settings
    reasons: list[Reason]
    machine: Machine
    processor: str
    kernels: dict[str, tuple[str, str]]
    ceilings: Ceilings
    flops_per_s: dict[str, float]


def examine_machine(folder: Path, options: EngineOptions, budget_s: float) -> Examined:
    """Choose kernels and measure ceilings for `budget_s` seconds, without the weights."""
    spec, settings, reasons, machine = plan_settings(folder, options)
    from headway.runtime.attention import choose_attention
    from headway.runtime.kernels import choose_kernels
    from headway.runtime.peaks import measure_peaks
    from headway.runtime.probe import DeviceProbe, use_threads

    kernels = choose_kernels(settings, machine)
    use_threads(settings, kernels)
    probe = DeviceProbe(kernels, settings, machine, [])
    peaks: dict[str, float] = {}
    if budget_s:
        probe.run(budget_s / 2)
        peaks = measure_peaks(settings.device, budget_s / 2, kernels.library)
    return Examined(
        spec=spec,
        settings=settings,
        reasons=reasons,
        machine=machine,
        processor=processor_name(),
        kernels={**kernels.reasons, "attention": choose_attention(settings, kernels.library)[1]},
        ceilings=probe.ceilings,
        flops_per_s=peaks,
    )


def probe_cuda(device: str) -> Accelerator | None:
    """Return the CUDA device, or None; torch is not imported if there is no driver."""
    if device == "auto" and not Path("/dev/nvidiactl").exists():
        return None
    from headway.runtime.cuda.available import probe_accelerator

    return probe_accelerator(device)


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
    engine = Engine(
        executor,
        settings,
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        clock=clock,
        grammars=make_grammars(folder, options, spec, settings, clock),
        prior=prior_of(spec, executor.describe(), settings.dtype, settings.cache.dtype),
    )
    if settings.max_model_len > 1:
        engine.warm_up()
        if options.executor != "null" and clock is None:
            calibrate(engine, CALIBRATION_S)
            calibrate_drafts(engine, DRAFT_CALIBRATION_S)
    return Assembled(engine=engine, spec=spec, settings=settings, reasons=reasons)


def check_joins(engine: Engine) -> None:
    """Raise UsageError for an engine whose KV blocks other engines cannot find or fetch."""
    if not engine.settings.cache.prefix_cache:
        raise UsageError(
            "Without a prefix cache no engine finds what another has computed.",
            "Leave out --no-prefix-cache, or --prefill-replicas and --decode-replicas.",
        )
    if not hasattr(engine.executor, "join_peers"):
        raise UsageError(
            "KV blocks are not handed over between ranks, nor by --executor null.",
            "Use --replicas in place of --prefill-replicas and --decode-replicas.",
        )


def join_peers(
    engine: Engine, folder: Path, address: str, *, secret: bytes = b"", root: Path | None = None
) -> Handover:
    """Let `engine`, with the model of `folder`, exchange sequences with other engines.

    `address` is "unix:PATH" or "HOST:PORT"; engines on several machines need the same `secret`.
    Digests of the weights are stored next to `root`, by default that of the disk tier. Raises
    OSError, and UsageError for an engine whose KV blocks other engines cannot find or fetch.
    """
    check_joins(engine)
    assert hasattr(engine.executor, "join_peers")
    joined = engine.executor.join_peers(folder, address, secret, root)
    return Handover(engine, *joined)


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
    draft = read_draft(folder, options, spec)
    shared = share_weights(folder, settings, draft, weights)
    is_there = bool(shared) and not shared[0].fills
    lookup = None if is_there else look_up_weights(folder, settings, alone=not shared)
    from headway.runtime.cuda.executor import CudaExecutor
    from headway.runtime.executor import TorchExecutor
    from headway.runtime.memory import keep_freed

    kind = TorchExecutor if settings.device == "cpu" else CudaExecutor
    try:
        executor = kind(folder, spec, settings, machine, progress, lookup, draft, shared=shared)
    except OSError as error:
        raise CapacityError(
            f"Memory for weights that the engines share could not be had: {error}.",
            "Serve a smaller model, or free memory.",
        ) from error
    keep_freed()  # after loading: memory that loading frees goes back to the system
    return executor


def share_weights(
    folder: Path,
    settings: Settings,
    draft: tuple[Path, ModelSpec] | None,
    weights: Sequence[int],
) -> "list[SharedWeights]":
    """Return the memory of the model's and its drafter's weights that several engines share.

    Without shared memory it is []. The first one is entered if no other engine is filling it.
    """
    if not weights or settings.device != "cpu" or settings.load_format == "dummy":
        return []
    from headway.runtime.native.available import best_instruction_set, compiled_module
    from headway.runtime.shared_weights import SharedWeights, stall_timeout_s
    from headway.runtime.weight_key import Key, text_of_drafter

    instruction_set, _ = best_instruction_set()
    kernels = compiled_module() if instruction_set else None
    key = Key(folder=folder, settings=settings, instruction_set=instruction_set, kernels=kernels)
    drafter = replace(key, folder=draft[0]).text_of_files() if draft else text_of_drafter(folder)
    texts = key.text_of_files(), drafter
    longest_s = stall_timeout_s(sum(path.stat().st_size for path in key.files))
    shared = [SharedWeights(one, text, longest_s) for one, text in zip(weights, texts, strict=True)]
    shared[0].enter(waits=False)
    return shared


def look_up_weights(folder: Path, settings: Settings, *, alone: bool = True) -> "Lookup | None":
    """Start the lookup of packed weights of `folder` in the cache; torch is not needed.

    An engine that is `alone` loads them into its own memory, if the plan leaves enough free; an
    engine with shared memory copies them from the file.
    """
    from headway.runtime.native.available import best_instruction_set, compiled_module
    from headway.runtime.weight_cache import Lookup, WeightCache, default_folder
    from headway.runtime.weight_key import Key

    cache = default_folder()
    instruction_set, _ = best_instruction_set()
    if settings.parallel.is_cut or not settings.weight_cache_bytes:
        return None
    if cache is None or not instruction_set:
        return None
    key = Key(
        folder=folder,
        settings=settings,
        instruction_set=instruction_set,
        kernels=compiled_module(),
    )
    sizes = zip(settings.cache.num_blocks, settings.cache.block_bytes, strict=True)
    room_bytes = memory()[1] - sum(count * size for count, size in sizes) if alone else 0
    return Lookup(WeightCache(cache, settings.weight_cache_bytes), key, room_bytes)


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
