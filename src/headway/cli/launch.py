"""`headway launch codex|claude|opencode`: how a coding agent is pointed at this server.

Each agent is a row: where its configuration lies and what ours adds to it. Printed by default;
`--write` keeps a copy of what was there, and `--restore` puts that copy back. Nothing is deleted
that the user wrote: what `--restore` replaces is kept beside it. `--run` starts the agent with the
same configuration in its arguments and its environment, and touches no file.
"""

import json
import os
import shlex
import shutil
import stat
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.core.errors import HeadwayError, UsageError
from headway.core.options import LaunchOptions

if TYPE_CHECKING:
    from headway.cli.main import Call

TIMEOUT_S = 10.0
BACKUP, ABSENT, REPLACED = ".headway-backup", ".headway-absent", ".headway-replaced"
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


def launch(call: "Call") -> int:
    """Print, write or restore one agent's configuration."""
    if len(call.positionals) != 1 or call.positionals[0] not in AGENTS:
        raise UsageError(f"launch takes one of {', '.join(AGENTS)}.", "headway launch codex")
    agent = AGENTS[call.positionals[0]]
    options: LaunchOptions = call.options[LaunchOptions]
    path = agent.path(os.environ)
    if options.restore:
        print(restore(path))
        return 0
    if options.run:
        return start(call.positionals[0], agent, look(options), call.beyond)
    if call.beyond:
        raise UsageError(
            f"What is behind -- is for the agent: {call.beyond[0]}.", "Give --run as well."
        )
    target = look(options)
    if options.write:
        print(write(path, agent.merged(target, read(path))))
        print(agent.hint(target))
        return 0
    print(f"# {path}")
    print(agent.merged(target_in_words(target), ""), end="")
    print(f"# {agent.hint(target)}")
    print("# headway launch with --write merges this into the file and keeps a backup;")
    print("# with --run it starts the agent so, and writes nothing.")
    return 0


def start(name: str, agent: Agent, target: Target, more: list[str]) -> int:
    """Become the agent; raises HeadwayError where it is not installed."""
    program = shutil.which(name)
    if program is None:
        raise HeadwayError(
            f"{agent.title} is not installed: there is no {name} in PATH.",
            f"npm install --global {agent.package}",
        )
    arguments, changes = agent.start(target)
    environment = {key: value for key, value in os.environ.items() if key not in changes}
    environment |= {key: value for key, value in changes.items() if value is not None}
    sys.stdout.flush()
    try:
        os.execve(program, [name, *arguments, *more], environment)
    except OSError as error:
        raise HeadwayError(
            f"{program} does not start: {error.strerror}.", f"Install {agent.package} again."
        ) from error


def target_in_words(target: Target) -> Target:
    """The target with the key's variable in place of the key: what is printed may be shown."""
    key = NO_KEY if target.key == NO_KEY else f"${KEY_VARIABLE}"
    return Target(base=target.base, model=target.model, key=key, context=target.context)


# ── the server ──────────────────────────────────────────────────────────────────────────────


def look(options: LaunchOptions) -> Target:
    """What the server serves; HeadwayError when it cannot be asked and no model was named."""
    base = options.url.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise UsageError(f"{options.url} is not a URL.", "Write http://127.0.0.1:8000")
    key = options.api_key or NO_KEY
    try:
        cards = fetch_models(base, options.api_key)
    except HeadwayError:
        if not options.model:
            raise
        return Target(base=base, model=options.model, key=key, context=None)
    card = next((c for c in cards if c["id"] == options.model or not options.model), None)
    if card is None:
        there = ", ".join(card["id"] for card in cards)
        raise UsageError(f"{base} does not serve {options.model}.", f"It serves {there}.")
    if "messages" not in card.get("accepts", ["messages"]):
        print(f"{card['id']} has no chat template: an agent needs one.", file=sys.stderr)
    return Target(base=base, model=card["id"], key=key, context=card.get("max_model_len"))


def fetch_models(base: str, key: str) -> list[dict[str, Any]]:
    """The cards of /v1/models."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"{base}/v1/models", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            cards: list[dict[str, Any]] = json.loads(answer.read())["data"]
            return cards
    except urllib.error.HTTPError as error:
        with error:
            raise HeadwayError(
                f"{base} answered {error.code}.", "Check --url and --api-key."
            ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HeadwayError(
            f"{base} cannot be asked for its models: {error}.",
            "Start headway serve, or name the model with --model.",
        ) from None


# ── the agents ──────────────────────────────────────────────────────────────────────────────


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


# ── files ───────────────────────────────────────────────────────────────────────────────────


def read(path: Path) -> str:
    """What is there, "" for no file."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}.", "Mend it first.") from None


def write(path: Path, text: str) -> str:
    """Write `text` after a copy of what was there; a second write keeps the first copy."""
    path = path.resolve()  # a link to a dotfile stays a link
    backup, absent = beside(path, BACKUP), beside(path, ABSENT)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not backup.exists() and not absent.exists():
            if path.exists():
                put(backup, path.read_bytes(), mode_of(path))
            else:
                put(absent, b"", 0o600)
        put(path, text.encode(), mode_of(path))
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror}.", "Run it without --write."
        ) from None
    return f"{path} is written; headway launch … --restore puts back what was there."


def restore(path: Path) -> str:
    """Put the copy back; what it replaces is kept as a second copy."""
    path = path.resolve()
    backup, absent = beside(path, BACKUP), beside(path, ABSENT)
    if not backup.exists() and not absent.exists():
        raise UsageError(f"There is no backup of {path}.", "Nothing was written there by --write.")
    replaced = beside(path, REPLACED)
    if path.exists():
        os.replace(path, replaced)
    if backup.exists():
        os.replace(backup, path)
        return f"{path} is as it was; what it replaced is {replaced}."
    absent.unlink()
    return f"{path} is gone, as before; what was there is {replaced}."


def beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def mode_of(path: Path) -> int:
    """The file's own mode; a new one is for its owner alone, for it may hold a key."""
    return stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o600


def put(path: Path, data: bytes, mode: int) -> None:
    """Write a whole file or none."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            os.fchmod(file.fileno(), mode)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
