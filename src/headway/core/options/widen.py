"""The options of `headway widen`."""

from dataclasses import dataclass

from headway.core.options.field import option


@dataclass(frozen=True, slots=True, kw_only=True)
class WidenOptions:
    """The shape to fill, and the type of the weights."""

    like: str = option(
        "",
        "The shape: qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, llama-3.2-1b or smollm2-135m.",
        common=True,
    )
    dtype: str = option(
        "auto",
        "Type of the weights; auto keeps bfloat16 and writes float32 for any other.",
        choices=("auto", "bfloat16", "float32"),
        common=True,
    )
