"""How a checkpoint stores its linear layers, according to its config: rules from names to schemes.

Nothing here reads weights or needs torch.
"""

import re
import re._constants as opcode  # type: ignore[import-not-found]
import re._parser as parser  # type: ignore[import-not-found]
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from headway.core.errors import CheckpointError, UnsupportedModelError
from headway.runtime.checkpoint_files import shown

MAX_PATTERN_CHARS, MAX_REPEATS = 500, 5
"""Chosen: names have at most 80 characters; each unbounded repeat may try them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How one linear layer is stored: `layout` names its reader, `label` is used in errors.

    `group` inputs share a scale; 0: all inputs of an output. `block` is (outputs, inputs) of FP8
    scales; (0, 0): all outputs and inputs, (1, 0): a scale for each output.
    """

    layout: str
    label: str
    bits: int = 8
    group: int = 0
    symmetric: bool = True
    block: tuple[int, int] = (0, 0)


REPEATS = (opcode.MAX_REPEAT, opcode.MIN_REPEAT, opcode.POSSESSIVE_REPEAT)
Match = Callable[[str], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schemes:
    """The rules of one checkpoint, in order; None stands for a layer in the type of the model.

    `named` are modules that a rule names exactly. `version` is GPTQ's checkpoint format.
    """

    method: str
    rules: tuple[tuple[Match, Scheme | None], ...]
    named: tuple[str, ...] = ()
    version: str = ""

    def scheme_of(self, module: str) -> Scheme | None:
        """Return the scheme of the first matching rule: `model.layers.0.mlp.down_proj`."""
        for matches, scheme in self.rules:
            if matches(module):
                return scheme
        return None


def match_all(module: str) -> bool:
    """Match every module: the rule for the rest."""
    return True


def match_head(module: str) -> bool:
    """Match the output matrix, which most methods leave in the type of the model."""
    return module == "lm_head"


def match_name(name: str) -> Match:
    """Return the rule for one module."""
    return lambda module: module == name


def match_pattern(pattern: str, where: str) -> Match:
    """Return the rule for modules whose names begin with what a regular expression describes."""
    compiled = compile_pattern(pattern, where)
    return lambda module: compiled.match(module) is not None


def compile_pattern(pattern: str, where: str) -> re.Pattern[str]:
    """Compile a regular expression of a config. Raises CheckpointError for one that could take
    forever.

    (a+)+ is refused, and so are more than MAX_REPEATS repeats.
    """
    try:
        if (
            len(pattern) <= MAX_PATTERN_CHARS
            and count_repeats(parser.parse(pattern)) <= MAX_REPEATS
        ):
            return re.compile(pattern)
        fault = "is too complex"
    except (re.error, RecursionError, OverflowError, ValueError):
        fault = "is not a regular expression"
    raise CheckpointError(
        f"config.json: {where} has {shown(pattern)[:80]!r}, which {fault}.",
        "Write the names of the modules, or a shorter expression.",
    )


def count_repeats(pattern: Any, is_nested: bool = False) -> int:
    """Count the repeats of variable length in a parsed pattern; nested ones count as too many.

    So does a choice inside a repeat: (a|aa)* tries as many ways as (a+)+.
    """
    count = 0
    for operation, argument in pattern:
        if operation in REPEATS:
            least, most, body = argument
            count += least != most and most > 1
            if is_nested and least != most:
                return MAX_REPEATS + 1
            count += count_repeats(body, is_nested or most > 1)
        elif operation is opcode.BRANCH:
            if is_nested:
                return MAX_REPEATS + 1
            count += sum(count_repeats(branch) for branch in argument[1])
        elif isinstance(argument, tuple):
            parts = [part for part in argument if isinstance(part, parser.SubPattern)]
            count += sum(count_repeats(part, is_nested) for part in parts)
    return count


def raise_unsupported(label: str, what: str) -> NoReturn:
    """Raise the error for a variant that is not read."""
    raise UnsupportedModelError(
        f"The checkpoint is quantized with {shown(label)}, {what}.",
        "docs/checkpoints.md lists what is read; or give the unquantized folder.",
    )


def invalid_value(key: str, value: object, expected: str) -> CheckpointError:
    """Return the error for an invalid value in the quantization config."""
    return CheckpointError(
        f"config.json: quantization_config.{shown(key)} is {shown(value)[:60]}.",
        f"It must be {expected}.",
    )


def get_integer(config: dict[str, Any], key: str, default: int | None = None) -> int:
    """Return an integer of the config. Raises CheckpointError for anything else."""
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > 1 << 20:
        raise invalid_value(key, value, "a whole number")
    return value


def get_boolean(config: dict[str, Any], key: str, default: bool) -> bool:
    """Return a flag of the config; null means the default."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise invalid_value(key, value, "true or false")
    return value


def get_strings(config: dict[str, Any], key: str) -> list[str]:
    """Return a list of strings of the config; null and a missing key are empty."""
    value = config.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise invalid_value(key, value, "a list of names")
    return value


def get_object(config: dict[str, Any], key: str) -> dict[str, Any]:
    """Return an object of the config; null and a missing key are empty."""
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise invalid_value(key, value, "an object")
    return value
