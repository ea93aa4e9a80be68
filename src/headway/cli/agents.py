"""The coding agents that `headway launch` knows: their configuration, and how each is started.

A row is an agent; its functions take the server, the model and its context.
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
"""Key for a server without keys: agents require one."""
CLAUDE_CONTEXT_VARIABLES = (
    *("CLAUDE_CODE_MAX_CONTEXT_TOKENS", "CLAUDE_CODE_AUTO_COMPACT_WINDOW"),
    "CLAUDE_CODE_MAX_OUTPUT_TOKENS",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTarget:
    """The server and the model for an agent; `context` is None where it is not known."""

    base: str
    model: str
    key: str
    context: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """A row: `path` of its configuration, `merge` into an existing one, `hint` how to start it."""

    title: str
    path: Callable[[Mapping[str, str]], Path]
    merge: Callable[[AgentTarget, str], str]
    hint: Callable[[AgentTarget], str]
    start: Callable[[AgentTarget], tuple[list[str], dict[str, str | None]]]
    """Returns (arguments, environment) of the program; None removes a variable."""
    package: str


def home(environment: Mapping[str, str], variable: str, default: str) -> Path:
    """Return the folder that a variable names, or one below the home folder."""
    given = environment.get(variable)
    return Path(given).expanduser() if given else Path.home() / default


def codex(target: AgentTarget, _: str) -> str:
    """Return a profile, a file that Codex reads on top of config.toml."""
    quoted = json.dumps  # a JSON string is a TOML string
    lines = [
        f"model = {quoted(target.model)}",
        'model_provider = "headway"',
        'web_search = "disabled"',  # the server runs no tools
        *([f"model_context_window = {target.context}"] if target.context else []),
        "",
        "[model_providers.headway]",
        'name = "Headway"',
        f"base_url = {quoted(target.base + '/v1')}",
        'wire_api = "responses"',
        *([f"env_key = {quoted(KEY_VARIABLE)}"] if target.key != NO_KEY else []),
    ]
    return "\n".join(lines) + "\n"


def start_codex(target: AgentTarget) -> tuple[list[str], dict[str, str | None]]:
    """Return the profile's lines as `-c name=value`."""
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


def claude_variables(target: AgentTarget) -> dict[str, str]:
    """Return the variables of Claude Code: the one model for every tier, and its context."""
    variables = {
        "ANTHROPIC_BASE_URL": target.base,
        "ANTHROPIC_AUTH_TOKEN": target.key,
        "ANTHROPIC_MODEL": target.model,
        "ANTHROPIC_DEFAULT_OPUS_MODEL": target.model,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": target.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": target.model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    if target.context:
        variables |= {
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(target.context),
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(target.context),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(longest_answer(target.context)),
        }
    return variables


def claude(target: AgentTarget, text: str) -> str:
    """Return settings.json with the variables in `env`."""
    settings = parse_settings(text)
    env = section(settings, "env")
    env.pop("ANTHROPIC_API_KEY", None)  # conflicts with the token
    for name in CLAUDE_CONTEXT_VARIABLES:
        env.pop(name, None)  # may be of another model
    env |= claude_variables(target)
    return format_settings(settings)


def start_claude(target: AgentTarget) -> tuple[list[str], dict[str, str | None]]:
    """Return the environment, repeated as settings, which take precedence over the user's file.

    The key is in the environment alone, because arguments can be read by all users.
    """
    variables = claude_variables(target)
    settings = {name: text for name, text in variables.items() if name != "ANTHROPIC_AUTH_TOKEN"}
    arguments = ["--settings", json.dumps({"env": settings})]
    return arguments, {
        **dict.fromkeys(CLAUDE_CONTEXT_VARIABLES),
        **variables,
        "ANTHROPIC_API_KEY": None,
    }


def longest_answer(context: int) -> int:
    """Return a quarter of the context; the rest is for the prompt."""
    return max(1, context // 4)


def opencode(target: AgentTarget, text: str) -> str:
    """Return the configuration with a further provider; the default model stays."""
    settings = parse_settings(text)
    settings.setdefault("$schema", "https://opencode.ai/config.json")
    section(settings, "provider")["headway"] = opencode_provider(target)
    return format_settings(settings)


def opencode_provider(target: AgentTarget) -> dict[str, Any]:
    """Return the provider's entry."""
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


def start_opencode(target: AgentTarget) -> tuple[list[str], dict[str, str | None]]:
    """Return the configuration in a variable, which opencode reads on top of the user's files."""
    content = {
        "provider": {"headway": opencode_provider(target)},
        "model": f"headway/{target.model}",
        "small_model": f"headway/{target.model}",
    }
    return [], {"OPENCODE_CONFIG_CONTENT": json.dumps(content), **key_of(target)}


def key_of(target: AgentTarget) -> dict[str, str | None]:
    """Return the variable from which codex and opencode read the key."""
    return {} if target.key == NO_KEY else {KEY_VARIABLE: target.key}


def parse_settings(text: str) -> dict[str, Any]:
    """Parse the JSON object of a configuration file, {} for none; UsageError for comments."""
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
    """Return the object under `name`, created if missing."""
    value = settings.setdefault(name, {})
    if not isinstance(value, dict):
        raise UsageError(f"{name} in the configuration is not an object.", "Correct it first.")
    return value


def format_settings(settings: dict[str, Any]) -> str:
    return json.dumps(settings, indent=2, ensure_ascii=False) + "\n"


def export_prefix(target: AgentTarget) -> str:
    """Return the shell prefix that exports the key."""
    return "" if target.key == NO_KEY else f"export {KEY_VARIABLE}=… && "


AGENTS = {
    "codex": Agent(
        title="Codex",
        path=lambda env: home(env, "CODEX_HOME", ".codex") / "headway.config.toml",
        merge=codex,
        hint=lambda target: f"{export_prefix(target)}codex --profile headway",
        start=start_codex,
        package="@openai/codex",
    ),
    "claude": Agent(
        title="Claude Code",
        path=lambda env: home(env, "CLAUDE_CONFIG_DIR", ".claude") / "settings.json",
        merge=claude,
        hint=lambda target: "claude",
        start=start_claude,
        package="@anthropic-ai/claude-code",
    ),
    "opencode": Agent(
        title="opencode",
        path=lambda env: home(env, "XDG_CONFIG_HOME", ".config") / "opencode" / "opencode.json",
        merge=opencode,
        hint=lambda target: (
            f"{export_prefix(target)}opencode --model {shlex.quote('headway/' + target.model)}"
        ),
        start=start_opencode,
        package="opencode-ai",
    ),
}
