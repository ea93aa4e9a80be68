"""The coding agents that `headway launch` knows: their configuration, and how each is started.

A row is an agent; each of its functions is given the server, the model and its context.
"""

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.core.errors import UsageError

KEY_VARIABLE = "HEADWAY_API_KEY"
NO_KEY = "none"
"""Agents want a key where the server wants none."""
CLAUDE_CONTEXT = (
    *("CLAUDE_CODE_MAX_CONTEXT_TOKENS", "CLAUDE_CODE_AUTO_COMPACT_WINDOW"),
    "CLAUDE_CODE_MAX_OUTPUT_TOKENS",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server and the model an agent is to use; `context` is None when it was not told."""

    base: str
    model: str
    key: str
    context: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """A row: `path` from the environment, `merged` from what is there, `hint` how to start it."""

    title: str
    path: Callable[[Mapping[str, str]], Path]
    merged: Callable[[Target, str], str]
    hint: Callable[[Target], str]
    start: Callable[[Target], tuple[list[str], dict[str, str | None]]]
    """(arguments, environment) of the program; None takes a variable away."""
    package: str


def home(environment: Mapping[str, str], variable: str, default: str) -> Path:
    """The folder a variable names, or one below the home folder."""
    given = environment.get(variable)
    return Path(given).expanduser() if given else Path.home() / default


def codex(target: Target, _: str) -> str:
    """A profile of its own: a file that Codex lays over config.toml."""
    quoted = json.dumps  # a JSON string is a TOML string
    lines = [
        f"model = {quoted(target.model)}",
        'model_provider = "headway"',
        'web_search = "disabled"',  # it would be asked of the server, which runs no tools
        *([f"model_context_window = {target.context}"] if target.context else []),
        "",
        "[model_providers.headway]",
        'name = "Headway"',
        f"base_url = {quoted(target.base + '/v1')}",
        'wire_api = "responses"',
        *([f"env_key = {quoted(KEY_VARIABLE)}"] if target.key != NO_KEY else []),
    ]
    return "\n".join(lines) + "\n"


def start_codex(target: Target) -> tuple[list[str], dict[str, str | None]]:
    """The profile's lines as `-c name=value`."""
    quoted = json.dumps
    provider = {
        "name": "Headway",
        "base_url": f"{target.base}/v1",
        "wire_api": "responses",
        **({"env_key": KEY_VARIABLE} if target.key != NO_KEY else {}),
    }
    values = {
        "model": quoted(target.model),
        "model_provider": quoted("headway"),
        "web_search": quoted("disabled"),
        **({"model_context_window": str(target.context)} if target.context else {}),
        **{f"model_providers.headway.{name}": quoted(text) for name, text in provider.items()},
    }
    arguments = [part for name, text in values.items() for part in ("-c", f"{name}={text}")]
    return arguments, key_of(target)


def claude_variables(target: Target) -> dict[str, str]:
    """What Claude Code reads; every tier is the one model, and as much context as it has."""
    found = {
        "ANTHROPIC_BASE_URL": target.base,
        "ANTHROPIC_AUTH_TOKEN": target.key,
        "ANTHROPIC_MODEL": target.model,
        "ANTHROPIC_DEFAULT_OPUS_MODEL": target.model,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": target.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": target.model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    if target.context:
        found |= {
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(target.context),
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(target.context),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(longest_answer(target.context)),
        }
    return found


def claude(target: Target, text: str) -> str:
    """Variables in the `env` of settings.json."""
    settings = parsed(text)
    env = section(settings, "env")
    env.pop("ANTHROPIC_API_KEY", None)  # two credentials are one too many
    for name in CLAUDE_CONTEXT:
        env.pop(name, None)  # of another server's model
    env |= claude_variables(target)
    return indented(settings)


def start_claude(target: Target) -> tuple[list[str], dict[str, str | None]]:
    """The environment, and once more as settings, which go before those of the user's file.

    The key is in the environment alone: everybody may read arguments.
    """
    variables = claude_variables(target)
    told = {name: text for name, text in variables.items() if name != "ANTHROPIC_AUTH_TOKEN"}
    arguments = ["--settings", json.dumps({"env": told})]
    return arguments, {**dict.fromkeys(CLAUDE_CONTEXT), **variables, "ANTHROPIC_API_KEY": None}


def longest_answer(context: int) -> int:
    """A quarter of the context: the rest is for what the agent reads."""
    return max(1, context // 4)


def opencode(target: Target, text: str) -> str:
    """A provider beside the others; the model that is the default stays so."""
    settings = parsed(text)
    settings.setdefault("$schema", "https://opencode.ai/config.json")
    section(settings, "provider")["headway"] = opencode_provider(target)
    return indented(settings)


def opencode_provider(target: Target) -> dict[str, Any]:
    """The provider's entry."""
    model: dict[str, Any] = {"name": target.model}
    if target.context:
        model["limit"] = {"context": target.context, "output": longest_answer(target.context)}
    return {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Headway",
        "options": {
            "baseURL": f"{target.base}/v1",
            "apiKey": NO_KEY if target.key == NO_KEY else f"{{env:{KEY_VARIABLE}}}",
        },
        "models": {target.model: model},
    }


def start_opencode(target: Target) -> tuple[list[str], dict[str, str | None]]:
    """A configuration in a variable, which opencode lays over the user's files."""
    content = {
        "provider": {"headway": opencode_provider(target)},
        "model": f"headway/{target.model}",
        "small_model": f"headway/{target.model}",
    }
    return [], {"OPENCODE_CONFIG_CONTENT": json.dumps(content), **key_of(target)}


def key_of(target: Target) -> dict[str, str | None]:
    """The variable that codex and opencode read the key from."""
    return {} if target.key == NO_KEY else {KEY_VARIABLE: target.key}


def parsed(text: str) -> dict[str, Any]:
    """The JSON object of a configuration file, {} for none; UsageError where it has comments."""
    try:
        content = json.loads(text) if text.strip() else {}
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise UsageError(
            "The configuration that is there is not plain JSON (comments are not kept).",
            "Run it without --write and merge what is printed by hand.",
        )
    return content


def section(settings: dict[str, Any], name: str) -> dict[str, Any]:
    """The object under `name`, made when it is not there."""
    found = settings.setdefault(name, {})
    if not isinstance(found, dict):
        raise UsageError(f"{name} in the configuration is not an object.", "Mend it first.")
    return found


def indented(settings: dict[str, Any]) -> str:
    return json.dumps(settings, indent=2, ensure_ascii=False) + "\n"


def exported(target: Target) -> str:
    """The words that give an agent the key."""
    return "" if target.key == NO_KEY else f"export {KEY_VARIABLE}=… && "


AGENTS = {
    "codex": Agent(
        title="Codex",
        path=lambda env: home(env, "CODEX_HOME", ".codex") / "headway.config.toml",
        merged=codex,
        hint=lambda target: f"{exported(target)}codex --profile headway",
        start=start_codex,
        package="@openai/codex",
    ),
    "claude": Agent(
        title="Claude Code",
        path=lambda env: home(env, "CLAUDE_CONFIG_DIR", ".claude") / "settings.json",
        merged=claude,
        hint=lambda target: "claude",
        start=start_claude,
        package="@anthropic-ai/claude-code",
    ),
    "opencode": Agent(
        title="opencode",
        path=lambda env: home(env, "XDG_CONFIG_HOME", ".config") / "opencode" / "opencode.json",
        merged=opencode,
        hint=lambda target: (
            f"{exported(target)}opencode --model {shlex.quote('headway/' + target.model)}"
        ),
        start=start_opencode,
        package="opencode-ai",
    ),
}
