"""The options of A in `headway eval B --against A`: those of the engine, named `--against-…`."""

import dataclasses

from headway.config.options.field import flag_name, value_type
from headway.config.options.read import format_value
from headway.config.options.tables import EngineOptions

OF_ONE = (
    *("dtype", "fp8", "quantization", "quantization_group", "quantization_head"),
    *("kv_cache_dtype", "kv_cache_dtype_skip_layers", "kv_layers", "kv_read", "kv_keep"),
)
"""Options that say what a model answers: given plainly they hold for B alone."""
OF_BOTH = ("kernels", "attention_backend")
"""Options that hold for both unless A has its own; the rest of the engine's always do."""
PREFIX = "against_"


def of_reference(name: str) -> tuple[str, object, object]:
    """The field of A for an option of the engine."""
    field = next(f for f in dataclasses.fields(EngineOptions) if f.name == name)
    kind, _ = value_type(EngineOptions, name)
    default = "A's own" if name in OF_ONE else "as for B"
    metadata = {**field.metadata, "help": f"{'--' + name.replace('_', '-')} of a folder A: "
                f"{default} by default.", "common": False}  # fmt: skip
    return PREFIX + name, kind | None, dataclasses.field(default=None, metadata=metadata)


AgainstOptions = dataclasses.make_dataclass(
    "AgainstOptions", [of_reference(name) for name in (*OF_ONE, *OF_BOTH)], frozen=True
)


def reference_engine(engine: EngineOptions, against: object = None) -> EngineOptions:
    """What A is loaded with: B's options, its own where they say what a model answers."""
    defaults = EngineOptions()
    own = {name: getattr(defaults, name) for name in OF_ONE}
    for name in (*OF_ONE, *OF_BOTH):
        given = getattr(against, PREFIX + name, None)
        own |= {} if given is None else {name: given}
    return dataclasses.replace(engine, **own)


def against_arguments(engine: EngineOptions) -> list[str]:
    """The flags that give A the formats of `engine`: --against-quantization=int8."""
    defaults = EngineOptions()
    return [
        f"{flag_name(PREFIX + name)}={format_value(value)}"
        for name in OF_ONE
        if (value := getattr(engine, name)) != getattr(defaults, name)
    ]
