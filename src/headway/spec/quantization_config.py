"""Whether a folder is quantized, and by which method, before any of its weights is looked at.

`quantization_config` of config.json decides, or the file that AutoGPTQ and AutoAWQ once wrote
beside it.
"""

from pathlib import Path
from typing import Any

from headway.core.errors import UnsupportedModelError
from headway.spec.formats import METHODS
from headway.spec.model_files import read_document
from headway.spec.values import mapping

OLD_CONFIGS = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""File beside config.json → the method that wrote it."""
SPELLINGS = {"fbgemm_fp8": "fp8", "compressed_tensors": "compressed-tensors"}
"""As configs name them → as we do."""


def quantization_config(model: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The quantization config of a folder, with `quant_method`; {} of one in 16 or 32 bits."""
    quantization = mapping(config, "quantization_config")
    for name, method in OLD_CONFIGS.items() if not quantization else ():
        quantization = quantization or {"quant_method": method} | (read_document(model, name) or {})
        if quantization.keys() == {"quant_method"}:
            quantization = {}
    return quantization


def quantization_method(config: dict[str, Any]) -> str:
    """One of METHODS, "" of an empty config; UnsupportedModelError for others, by name."""
    if not config:
        return ""
    given = str(config.get("quant_method") or "unknown").lower()
    if given == "gptq" and str(config.get("checkpoint_format") or "").lower() == "awq":
        return "awq"  # as GPTQModel writes it
    method = SPELLINGS.get(given, given)
    if method not in METHODS:
        raise UnsupportedModelError(
            f"The checkpoint is quantized with {given[:40]}, which is not read.",
            f"Give the unquantized folder of the same model, or one in {', '.join(METHODS)}.",
        )
    return method
