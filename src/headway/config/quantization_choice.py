"""In which formats a model holds its weights here: asked for, its checkpoint's own, or refused."""

from dataclasses import replace

from headway.config.attention_choice import OWN_KERNELS
from headway.config.options import EngineOptions
from headway.core.errors import UsageError
from headway.spec import ModelSpec
from headway.spec.formats import FORMATS, GROUPS, INT8, MARLIN, PLAIN, ROTATED_INT8, Format
from headway.spec.quantization import Quantization

FP8_SAID = {
    "exact": "",
    "int8": ", FP8 rounded once more to int8, given",
    "scaled": ", activations rounded to FP8 by token, given",
}
FORMATS_ON_DEVICE = dict.fromkeys(OWN_KERNELS, frozenset({"int8", "int4", "fp8"}))
"""Kernels of an accelerator → the kinds of rounded weights that they multiply."""


def check_formats_on(device: str, given: str, kernels: str, model: ModelSpec) -> None:
    """Raise UsageError where a format is not in the table of the device's kernels."""
    kinds = {format.kind for _, format in model.formats} - {"none"}
    there = FORMATS_ON_DEVICE.get(kernels, frozenset())
    if given in there | {"none"} and kinds <= there:
        return
    what = f"--quantization {given}" if given != "none" else f"A folder in {model.quantization}"
    raise UsageError(
        f"{what} is not there on {device} with --kernels {kernels} yet.",
        "Use --device cpu, or the folder in bf16, fp16 or fp32.",
    )


def choose_quantization(
    options: EngineOptions, device: str, kernels: str, model: ModelSpec
) -> tuple[Quantization, str]:
    """What is asked for, where it is there, in groups of 32, 64 or 128.

    What the checkpoint holds rounded stays as it is; a method that is given must be its own.
    """
    if options.quantization_group not in (0, *GROUPS):
        raise UsageError(
            f"--quantization-group {options.quantization_group} is not one of {GROUPS}.",
            "Leave it out: formats are then measured; or take 64, 32 or 128 for one format.",
        )
    own, given = model.quantization, options.quantization
    if MARLIN.get(given, given) == own:
        given = "none"
    elif given not in FORMATS or (given == "fp8" and own):
        raise UsageError(
            f"--quantization {given}: the folder is {f'in {own}' if own else 'not quantized'}.",
            "Leave it out: the folder's own quantization_config decides.",
        )
    elif given == "fp8" and kernels not in OWN_KERNELS:
        raise UsageError(
            f"--quantization fp8: with the kernels of {device} ({kernels}) FP8 takes as many bytes "
            "as int8, and is slower and less exact.",
            "Use --quantization int8, or --device cuda with --kernels cuda.",
        )
    if options.quantization_head != "int8" and given != "int4":
        raise UsageError(
            f"--quantization-head {options.quantization_head} is for --quantization int4.",
            "Add --quantization int4, or leave it out.",
        )
    in_fp8 = any(format.kind == "fp8" for _, format in model.formats)
    if options.fp8 != "exact" and not in_fp8 and (given, options.fp8) != ("fp8", "scaled"):
        raise UsageError(
            f"--fp8 {options.fp8}: no weights of the model are in FP8.",
            "Leave it out; --quantization int8 rounds weights of 16 bits.",
        )
    check_scaled(options, kernels, model)
    if device != "cpu":
        check_formats_on(device, given, kernels, model)
    why = "given" if given != "none" else "the checkpoint's weights as they are"
    if model.profile:
        why = "given; formats by module from the model's profile"
    elif model.formats:
        rest = f"; what it holds in 16 bits in {given}, given" if given != "none" else ""
        fp8 = FP8_SAID[options.fp8]
        why = f"{own}, the checkpoint's weights as they are{fp8}{rest}"
    packed = kernels in ("native", *OWN_KERNELS) or (given != "int4" and not model.formats)
    group, head = options.quantization_group or 64, options.quantization_head
    int8 = ROTATED_INT8 if device == "cpu" else INT8
    made = Quantization.of(given, group, packed, model.formats, head, options.fp8, int8)
    return replace(made, profile=model.profile), why


def measures_formats(options: EngineOptions, device: str) -> bool:
    """Whether int4 takes a measured format for each matrix: on a CPU, unless a group is given."""
    measured = options.quantization == "int4" and not options.quantization_group
    return measured and device == "cpu" and options.load_format != "dummy"


def experts_at_once(quantization: Quantization, kernels: str, model: ModelSpec) -> bool:
    """Whether a GPU multiplies all experts of a layer in one product; true of a model without."""
    sparse = [index for index, layer in enumerate(model.layers) if layer.sparse]
    if model.experts is None or not sparse:
        return True
    names = [f"layers.{i}.mlp.{part}" for i in sparse for part in ("gate_up", "down")]
    formats = {format for name in names for format, _ in quantization.formats_of(name)}
    return kernels in OWN_KERNELS and all(map(is_grouped, formats))


def is_grouped(format: Format) -> bool:
    """Whether `runtime.kernels.grouped` has a product of experts in this format."""
    if format.kind == "int4":
        return format.group in GROUPS and not format.permuted
    whole = format.group % 16 == 0 and format.offsets == "none" and not format.permuted
    return format == PLAIN or whole


def check_scaled(options: EngineOptions, kernels: str, model: ModelSpec) -> None:
    """UsageError where `--fp8 scaled` is asked for and cannot be: it is a GPU's product, of a scale
    for each output."""
    if options.fp8 != "scaled":
        return
    if kernels not in OWN_KERNELS:
        raise UsageError(
            f"--fp8 scaled: the product of FP8 is a GPU's, and the kernels are {kernels}.",
            "Use --fp8 exact or int8, or --device cuda.",
        )
    if any(format.kind == "fp8" and format.group for _, format in model.formats):
        raise UsageError(
            "--fp8 scaled: the folder has a scale for each block of inputs, and it takes one for "
            "each output.",
            "Use --fp8 exact or int8.",
        )
