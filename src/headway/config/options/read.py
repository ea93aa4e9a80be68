"""From flags, the environment and a YAML file to one frozen options object, with provenance.

Precedence: flag, environment, file, default (derived values come later, in `config.resolve`).
An unknown flag or key is a UsageError that names the nearest known one.
"""

import argparse
import dataclasses
import difflib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from headway.config.options import vllm
from headway.config.options.field import (
    FALSE,
    TRUE,
    environment_name,
    flag_name,
    parse_value,
    split,
    value_type,
)
from headway.config.options.renamed import (
    RenamedOption,
    list_renamed,
    rename_options,
)
from headway.config.options.tables import EngineOptions
from headway.core.errors import UsageError
from headway.core.yaml_file import read_yaml

log = logging.getLogger(__name__)

Options = TypeVar("Options")
NO_OPTIONS = frozenset(
    {
        *("HEADWAY_CONFIG", "HEADWAY_FALLBACK_KEY"),
        *("HEADWAY_PARENT", "HEADWAY_SHARED_WEIGHTS"),  # of an engine's process
        *("HEADWAY_SHARED", "HEADWAY_EXAMPLES", "HEADWAY_SCHEMAS", "HEADWAY_SCREENSHOTS"),
        *("HEADWAY_FUZZ", "HEADWAY_HYPOTHESIS", "HEADWAY_KILLS", "HEADWAY_SOAK_S"),  # of tests
        *("HEADWAY_SANITIZE", "HEADWAY_TEST_SEED"),
    }
)
"""Variables that are read elsewhere."""
TYPO = 0.75
"""The likeness of an unknown name to a known one from which on it is a misspelling."""
REMOVED = {
    "batch_window": "Write --batching dynamic:50ms.",
    "max_queue_bytes": "Leave it out: bodies of waiting requests have 128 MiB in all.",
    "playbook": "Leave it out: headway doctor URL lists its findings in that order.",
    "retune": "Leave it out; headway tune finds settings, headway doctor URL --what-if tries one.",
    "storage_price": "Leave it out: kv_tier_bytes of /metrics times the price of a GB is the cost.",
    "switch_roles": "Leave it out: --prefill-replicas and --decode-replicas are a fixed ratio.",
}
"""Removed option → what to do instead."""


class Parser(argparse.ArgumentParser):
    """argparse that raises UsageError, and leaves help and abbreviations to us."""

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message[:1].upper()}{message[1:]}.", "See --help.")


def fields_of(tables: Sequence[type]) -> dict[str, tuple[type, dataclasses.Field[Any]]]:
    """name → (its table, its field); the first table that has a name owns it."""
    rows: dict[str, tuple[type, dataclasses.Field[Any]]] = {}
    for table in tables:
        for field in dataclasses.fields(table):
            rows.setdefault(field.name, (table, field))
    return rows


def read_options(
    tables: Sequence[type],
    arguments: Sequence[str],
    environment: Mapping[str, str],
    warn: Callable[[str], None] = log.warning,
) -> tuple[dict[type, Any], list[str], dict[str, str]]:
    """Read the options of `tables`.

    Returns table → options object, the positional arguments, and name → where its value is from
    (`flag`, `environment`, `file`). `warn` gets a line for each old name of a renamed option.
    Raises UsageError.
    """
    rows = fields_of(tables)
    others = frozenset(vllm.BY_NAME) - rows.keys() if EngineOptions in tables else frozenset()
    flags, positionals = read_flags(rows, arguments, others, warn)
    path = flags.pop("config", None) or environment.get("HEADWAY_CONFIG")
    file = read_file(path, rows, others, warn)
    environment = rename_variables(environment, list_renamed(rows), warn)
    for name in REMOVED if EngineOptions in tables else ():
        if environment_name(name) in environment:
            refuse_removed(environment_name(name), name)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, (table, field) in rows.items():
        variable = environment_name(name)
        if name in flags:
            values[name] = parse_value(table, field, flags[name], flag_name(name))
            sources[name] = "flag"
        elif variable in environment:
            values[name] = parse_value(table, field, environment[variable], variable)
            sources[name] = "environment"
        elif name in file:
            values[name] = parse_value(table, field, file[name], f"key {name}")
            sources[name] = "file"
    chosen = {
        table: table(**{name: values[name] for name in values if name in names(table)})
        for table in tables
    }
    return chosen, positionals, sources


def check_environment(tables: Sequence[type], environment: Mapping[str, str]) -> None:
    """Raise UsageError for a variable HEADWAY_… that is an option of none of `tables`."""
    rows = fields_of(tables)
    known = {environment_name(name): name for name in rows}
    known |= {environment_name(row.old): row.old for row in list_renamed(rows)}
    unknown = (name for name in environment if name.startswith("HEADWAY_"))
    for variable in sorted(set(unknown) - known.keys() - NO_OPTIONS):
        refuse_removed(variable, variable.removeprefix("HEADWAY_").lower())
        near = difflib.get_close_matches(variable, list(known), 1, 0.75)
        meant = f"Did you mean {near[0]}? " if near else ""
        raise UsageError(
            f"The environment has {variable}, and there is no such option.",
            f"{meant}Unset it; names that begin with HEADWAY_ are options. Kubernetes sets some "
            "for a Service named headway: enableServiceLinks: false.",
        )


def rename_variables(
    environment: Mapping[str, str],
    renamed: Sequence[RenamedOption],
    warn: Callable[[str], None],
) -> dict[str, str]:
    """Return `environment` with the variables of renamed options under their names of today."""
    spelled = {
        name: environment[environment_name(name)]
        for row in renamed
        for name in (row.old, row.new)
        if environment_name(name) in environment
    }
    values = rename_options(spelled, renamed, warn, environment_name)
    return dict(environment) | {environment_name(name): value for name, value in values.items()}


def names(table: type) -> set[str]:
    """The option names of one table."""
    return {field.name for field in dataclasses.fields(table)}


def read_flags(
    rows: Mapping[str, tuple[type, dataclasses.Field[Any]]],
    arguments: Sequence[str],
    others: frozenset[str] = frozenset(),
    warn: Callable[[str], None] = log.warning,
) -> tuple[dict[str, Any], list[str]]:
    """(name → text, positionals); a list flag may be given several times.

    `others` are names of vLLM's that are understood as well.
    """
    renamed = list_renamed(rows)
    parser = Parser()
    parser.add_argument("--config", default=argparse.SUPPRESS)
    for name, (table, _) in rows.items():
        kind, many = value_type(table, name)
        if kind is bool:
            parser.add_argument(flag_name(name), dest=name, default=argparse.SUPPRESS)
        else:
            action = "append" if many else "store"
            parser.add_argument(
                flag_name(name), dest=name, action=action, default=argparse.SUPPRESS
            )
    for name in [*others, *(row.old for row in renamed)]:
        parser.add_argument(flag_name(name), dest=name, default=argparse.SUPPRESS)
    parser.add_argument("positionals", nargs="*")
    old = {row.old for row in renamed if value_type(rows[row.new][0], row.new)[0] is bool}
    spelled = spell_out(rows, arguments, others & vllm.SWITCHES | old)
    parsed, unknown = parser.parse_known_intermixed_args(spelled)
    refuse_unknown([text for text in unknown if text.startswith("-")], rows, bool(others))
    flags = vars(parsed)
    positionals = flags.pop("positionals") + [t for t in unknown if not t.startswith("-")]
    flags = {
        name: [part for text in value for part in items(text, rows[name][1])]
        if isinstance(value, list)
        else value
        for name, value in flags.items()
    }
    flags = rename_options(flags, renamed, warn)
    if others:
        config = {"config": flags.pop("config")} if "config" in flags else {}
        flags = vllm.translate(flags, frozenset(rows)) | config
    return flags, positionals


def items(text: str, field: dataclasses.Field[Any]) -> list[str]:
    """The values in one flag of a list: 'a,b' and '["a", "b"]' are two, '[]' is none."""
    values = vllm.json_list(text)
    return split(text, field.metadata["separator"]) if values is None else values


def spell_out(
    rows: Mapping[str, tuple[type, dataclasses.Field[Any]]],
    arguments: Sequence[str],
    others: frozenset[str] = frozenset(),
) -> list[str]:
    """--insecure → --insecure=true, unless a word such as `false` follows: the model may, too.

    --no-insecure → --insecure=false, --max_model_len → --max-model-len. `others` are switches of
    vLLM's, and old names of ours.
    """
    arguments = [with_dashes(text) for text in arguments]
    ours = {name for name, (table, _) in rows.items() if value_type(table, name)[0] is bool}
    switches = {flag_name(name) for name in ours | others}
    following = [*arguments[1:], ""]
    denied = {"--no-" + switch.removeprefix("--"): f"{switch}=false" for switch in switches}
    return [
        f"{text}=true"
        if text in switches and after.lower() not in TRUE | FALSE
        else denied.get(text, text)
        for text, after in zip(arguments, following)
    ]


def with_dashes(text: str) -> str:
    """--max_model_len=9_000 → --max-model-len=9_000; what is no flag stays."""
    name, equals, value = text.partition("=")
    return name.replace("_", "-") + equals + value if text.startswith("--") else text


def refuse_unknown(
    unknown: Sequence[str],
    rows: Mapping[str, tuple[type, dataclasses.Field[Any]]],
    has_vllm: bool = False,
) -> None:
    """Raise UsageError for the first unknown flag, naming the nearest known one."""
    if not unknown:
        return
    flag = unknown[0].partition("=")[0]
    refuse_removed(flag, flag.removeprefix("--").replace("-", "_"))
    raise UsageError(
        f"There is no option {flag}.", advice(flag, [flag_name(n) for n in rows], has_vllm)
    )


def advice(given: str, known: Sequence[str], has_vllm: bool) -> str:
    """Return what to write in place of an unknown name: the nearest known one, or vLLM's table."""
    near = difflib.get_close_matches(given, known, 1, 0.5)
    has_vllm = has_vllm and not difflib.get_close_matches(given, known, 1, TYPO)
    meant = f"Did you mean {near[0]}?" if near else "See --help=all."
    return f"{meant} {vllm.SEE_TABLE}" if has_vllm else meant


def refuse_removed(spelling: str, name: str) -> None:
    """Raise UsageError where `name` is a removed option; `spelling` is the caller's."""
    if name in REMOVED:
        raise UsageError(f"{spelling}: that option is gone.", REMOVED[name])


def read_file(
    path: str | None,
    rows: Mapping[str, tuple[type, dataclasses.Field[Any]]],
    others: frozenset[str] = frozenset(),
    warn: Callable[[str], None] = log.warning,
) -> dict[str, Any]:
    """The YAML file's keys (dashes or underscores), every one of them known, or vLLM's."""
    if path is None:
        return {}
    content = read_yaml(Path(path), "--config")
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"--config {path} holds no keys.", "Write lines such as port: 8000.")
    keys: dict[str, Any] = {}
    for given, value in content.items():
        key = str(given).replace("-", "_")
        if key in keys:
            raise UsageError(
                f"--config {path}: {given} is there twice, with dashes and with underscores.",
                "Keep one of the two.",
            )
        keys[key] = value
    keys = rename_options(keys, list_renamed(rows), warn, str, f"--config {path}: ")
    if others:
        keys = vllm.translate(keys, frozenset(rows), lambda name: f"--config {path}: {name}")
    for key in keys:
        if key not in rows:
            refuse_removed(f"--config {path}: {key}", key)
            raise UsageError(
                f"--config {path}: there is no option {key}.",
                advice(key, list(rows), bool(others)),
            )
    return keys


def to_arguments(options: Any) -> list[str]:
    """The flags that make `options` again: what the engine's process is started with."""
    arguments: list[str] = []
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        default = (
            field.default_factory()
            if field.default_factory is not dataclasses.MISSING
            else field.default
        )
        if value == default:
            continue
        for item in value if isinstance(value, list) else [value]:
            arguments.append(f"{flag_name(field.name)}={format_value(item)}")
    return arguments


def format_value(value: Any) -> str:
    """The text that parses to `value`: Bytes(-40) → 40%."""
    share = getattr(value, "share", None)
    return f"{-int(value)}%" if share is not None else str(value)


def help_text(tables: Sequence[type], topic: str = "") -> str:
    """The options' help: the common ones, `all`, or those whose name or help has the word."""
    lines = []
    for name, (table, field) in fields_of(tables).items():
        rules = field.metadata
        matches = topic.lower() in f"{name} {rules['help']}".lower().replace("_", "-")
        if not (rules["common"] if not topic else topic == "all" or matches):
            continue
        kind, many = value_type(table, name)
        value = "" if kind is bool else " " + (rules["unit"] or kind.__name__).upper()
        notes = [rules["help"]]
        if rules["choices"]:
            notes.append(f"[{'|'.join(rules['choices'])}]")
        if not any(field.default is empty for empty in (dataclasses.MISSING, None, "", False)):
            notes.append(f"(default {format_value(field.default)})")
        if many:
            notes.append("(several: repeat or separate by commas)")
        lines.append(f"  {flag_name(name) + value:<34} {' '.join(notes)}")
    return "\n".join(lines)
