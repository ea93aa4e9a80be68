"""Which attention backend a model gets, and in which format it may keep keys and values."""

from headway.config.options import EngineOptions
from headway.config.speculation_config import choose_method
from headway.core.errors import UsageError
from headway.core.machine import Accelerator
from headway.spec import ModelSpec
from headway.spec.kv_format import CHANNELS, kv_format

DEFAULT_ATTENTION = "sdpa"
ON_DEVICE = ("triton", "varlen", "flashinfer")
"""Backends of a GPU alone."""
CAPTURED = ("triton", "varlen")
"""Those that decide nothing on the host: a graph may hold them."""
LIBRARIES = {"varlen": ("torch's", "soft caps or sinks"), "flashinfer": ("FlashInfer's", "sinks")}
"""Those that are not ours, in 16 bits alone: whose they are, and what they do not know."""
FLASHINFER_HEADS = (64, 128, 256)
"""Head sizes whose FlashAttention-2 kernels FlashInfer is tested with."""
OWN_KERNELS = ("cuda", "cublas")
"""Values of `--kernels` with our own on a GPU: all of them, or all but 16-bit products."""


def choose_attention(
    options: EngineOptions,
    kernels: str,
    device: str,
    model: ModelSpec,
    dtype: str,
    accelerator: Accelerator | None,
) -> tuple[str, str]:
    """native where the kernels are and read the model's keys, else torch's."""
    on_device = kernels in OWN_KERNELS and options.attention_backend in ("auto", "triton")
    if model.latent is not None and options.attention_backend in ("auto", "native", *ON_DEVICE):
        if on_device:
            return "triton", "it reads latent rows, and comes with the kernels of the GPU"
        if options.attention_backend != "auto":
            raise UsageError(
                f"--attention-backend {options.attention_backend}: {model.architecture} has "
                "latent attention, which it does not read yet.",
                "Use --attention-backend auto.",
            )
        return DEFAULT_ATTENTION, "the native one does not read latent keys yet"
    if options.attention_backend == "native" and kernels != "native":
        raise UsageError(
            "--attention-backend native: the native kernels are not used here.",
            "Use --attention-backend auto, and --dry-run to see why under kernels.",
        )
    if options.attention_backend in ON_DEVICE:
        name = check_on_device(options.attention_backend, kernels, device, model)
        check_library(name, model, dtype, accelerator)
        return name, "given"
    if options.attention_backend != "auto":
        return options.attention_backend, "given"
    if kernels in OWN_KERNELS:
        return "triton", "it comes with the kernels of the GPU, and knows all that a layer asks for"
    if kernels == "native":
        return "native", "it comes with the native kernels"
    return DEFAULT_ATTENTION, f"the faster one on {device}"


def check_on_device(name: str, kernels: str, device: str, model: ModelSpec) -> str:
    """The name of a GPU's backend, where it runs and attends as the model does."""
    if not device.startswith("cuda"):
        raise UsageError(
            f"--attention-backend {name}: it is a GPU's, and the device is {device}.",
            "Use --attention-backend auto.",
        )
    if name == "triton" and kernels not in OWN_KERNELS:
        raise UsageError(
            "--attention-backend triton: our own kernels are not used here.",
            "Use --attention-backend auto, and --dry-run to see why under kernels.",
        )
    return name


def check_library(name: str, model: ModelSpec, dtype: str, accelerator: Accelerator | None) -> None:
    """UsageError where a library's attention is not there, or does not attend as the model does."""
    if name not in LIBRARIES:
        return
    if name == "flashinfer" and not (accelerator and accelerator.has_flashinfer):
        raise UsageError(
            "--attention-backend flashinfer: FlashInfer is not installed.",
            "pip install flashinfer-python==0.7.2.post1, or use --attention-backend auto.",
        )
    if dtype == "float32":
        raise UsageError(
            f"--attention-backend {name}: it attends in 16 bits, and the model is in float32.",
            "Use --attention-backend triton, or --dtype bfloat16.",
        )
    sinks = model.sink_logits or any(layer.sinks for layer in model.layers)
    if sinks or (name == "varlen" and model.attention_softcap):
        owner, less = LIBRARIES[name]
        raise UsageError(
            f"--attention-backend {name}: {model.architecture} has {less} here, which {owner} "
            "kernel does not know.",
            "Use --attention-backend triton.",
        )
    sizes = {group.head_dim for group in model.kv_groups}
    if name == "flashinfer" and not sizes <= set(FLASHINFER_HEADS):
        raise UsageError(
            f"--attention-backend flashinfer: heads of {model.architecture} have "
            f"{min(sizes - set(FLASHINFER_HEADS))} numbers, and FlashInfer has kernels for "
            f"{', '.join(map(str, FLASHINFER_HEADS))}.",
            "Use --attention-backend triton, which knows any size.",
        )


def check_less(options: EngineOptions, backend: str, kv_dtype: str) -> None:
    """UsageError for what reads or keeps less and is not there so."""
    check_bounds(options, backend, kv_dtype)
    check_choosing(options, backend, kv_dtype)


def check_bounds(options: EngineOptions, backend: str, kv_dtype: str) -> None:
    """UsageError where `--kv-read` is given and keys of this kind cannot be chosen among."""
    if options.kv_read and backend not in ("native", "reference"):
        raise UsageError(
            f"--kv-read {options.kv_read}: {backend} attention reads everything.",
            "Use --attention-backend native (on a CPU), or leave --kv-read out.",
        )
    if options.kv_read and kv_format(kv_dtype).block_size:
        raise UsageError(
            f"--kv-read {options.kv_read}: --kv-cache-dtype {kv_dtype} has no bounds of keys yet.",
            "Use --kv-cache-dtype int8.",
        )


def check_choosing(options: EngineOptions, backend: str, kv_dtype: str) -> None:
    """UsageError where `--kv-keep` is given beside what cannot choose yet."""
    if not options.kv_keep:
        return
    guesses = choose_method(options) not in ("auto", "off") or bool(options.draft_model)
    refused = {
        f"{backend} attention reads whole contexts alone": backend not in ("native", "reference"),
        f"--kv-cache-dtype {kv_dtype} rounds tokens that follow each other": bool(
            kv_format(kv_dtype).block_size
        ),
        f"--kv-read {options.kv_read} reads blocks of them": bool(options.kv_read),
        "draft tokens (--speculative-method, --draft-model) are not verified behind what was "
        "chosen yet": guesses,
    }
    for why, is_so in refused.items():
        if is_so:
            raise UsageError(
                f"--kv-keep {options.kv_keep}: {why}.",
                "Use --attention-backend native (on a CPU), --kv-cache-dtype auto or int8, no "
                "--kv-read and --speculative-method off; or leave --kv-keep out.",
            )


def choose_kv_dtype(
    options: EngineOptions, backend: str, dtype: str, model: ModelSpec
) -> tuple[str, str]:
    """The type of the model unless the user names another."""
    if options.kv_cache_dtype == "auto":
        return dtype, "the type of the model"
    asked = kv_format(options.kv_cache_dtype)
    if model.latent is not None:
        raise UsageError(
            f"--kv-cache-dtype {options.kv_cache_dtype}: the latent rows of {model.architecture} "
            "are not rounded yet.",
            "Use --kv-cache-dtype auto.",
        )
    if asked.block_size and backend == "reference":
        backend = "native"
    if backend != "native" and (backend, options.kv_cache_dtype) != ("triton", "int8"):
        raise UsageError(
            f"--kv-cache-dtype {options.kv_cache_dtype}: {backend} attention reads no such KV.",
            "Use --attention-backend native (on a CPU) or triton (on a GPU, int8), or "
            "--kv-cache-dtype auto.",
        )
    if asked.block_size and model.head_dim % CHANNELS:
        raise UsageError(
            f"--kv-cache-dtype {options.kv_cache_dtype}: heads of {model.head_dim} numbers are no "
            f"whole groups of {CHANNELS}.",
            "Use --kv-cache-dtype int8.",
        )
    if asked.block_size and any(layer.sinks for layer in model.layers):
        raise UsageError(
            f"--kv-cache-dtype {options.kv_cache_dtype}: layers with sinks (--kv-layers "
            f"{options.kv_layers}) do not read it.",
            "Use --kv-cache-dtype int8, or windows without sinks.",
        )
    return options.kv_cache_dtype, "given"
