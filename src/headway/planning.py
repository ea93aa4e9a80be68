"""Decide how a model is served on this machine, before its weights are read.

    folder, options → ModelSpec, machine → Settings, each with its reason

`plan_settings` is what `--dry-run`, the planner and the simulator need; `headway.assemble` builds
an engine from it. Torch is imported only inside functions.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from headway.config.kv_layers import narrowing
from headway.config.options import EngineOptions
from headway.config.quantization_choice import measures_formats
from headway.config.reasons import Reason
from headway.config.resolve import Settings, choose_device, resolve
from headway.config.served_spec import as_served
from headway.config.speculation_config import DraftHead, choose_method
from headway.core.errors import UsageError
from headway.core.machine import Accelerator, Machine, probe_machine, processor_name
from headway.core.plan import Ceilings
from headway.spec import ModelSpec, read_model_spec
from headway.spec.embedded import model_folder
from headway.spec.model_files import TOKENIZER_FILE, read_document


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
