"""`headway launch codex|claude|opencode`: point a coding agent at this server.

`cli/agents.py` has a row for each agent: where its configuration is and what is added to it. It is
printed by default; `--write` keeps a copy of the old file, and `--restore` puts that copy back.
Nothing that the user wrote is deleted: what `--restore` replaces is kept as a second copy. `--run`
starts the agent with the same configuration in its arguments and environment, and writes no file.
"""

import json
import os
import shutil
import stat
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.cli.agents import AGENTS, KEY_VARIABLE, NO_KEY, Agent, AgentTarget
from headway.config.options import LaunchOptions
from headway.core.errors import HeadwayError, UsageError
from headway.core.regular_file import read_text

if TYPE_CHECKING:
    from headway.cli.main import VerbCall

LIST_TIMEOUT_S = 10.0
BACKUP, ABSENT, REPLACED = ".headway-backup", ".headway-absent", ".headway-replaced"


def launch(call: "VerbCall") -> int:
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
        return start(call.positionals[0], agent, find_target(options), call.passthrough)
    if call.passthrough:
        raise UsageError(
            f"Arguments after -- are for the agent: {call.passthrough[0]}.", "Give --run as well."
        )
    target = find_target(options)
    if options.write:
        print(write(path, agent.merge(target, read(path))))
        print(agent.hint(target))
        return 0
    print(f"# {path}")
    print(agent.merge(hide_key(target), ""), end="")
    print(f"# {agent.hint(target)}")
    print("# headway launch with --write merges this into the file and keeps a backup;")
    print("# with --run it starts the agent so, and writes nothing.")
    return 0


def start(name: str, agent: Agent, target: AgentTarget, more: list[str]) -> int:
    """Replace this process by the agent; HeadwayError where it is not installed."""
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


def hide_key(target: AgentTarget) -> AgentTarget:
    """Return the target with the key's variable in place of the key, for printing."""
    key = NO_KEY if target.key == NO_KEY else f"${KEY_VARIABLE}"
    return AgentTarget(base=target.base, model=target.model, key=key, context=target.context)


# ── the server ──────────────────────────────────────────────────────────────────────────────


def find_target(options: LaunchOptions) -> AgentTarget:
    """Return the target from the options and the server's list of models.

    Raises HeadwayError where the server does not answer and no model is named.
    """
    base = options.url.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise UsageError(f"{options.url} is not a URL.", "Write http://127.0.0.1:8000")
    key = options.api_key or NO_KEY
    try:
        cards = fetch_models(base, options.api_key)
    except HeadwayError:
        if not options.model:
            raise
        return AgentTarget(base=base, model=options.model, key=key, context=None)
    card = next((c for c in cards if c["id"] == options.model or not options.model), None)
    if card is None:
        there = ", ".join(card["id"] for card in cards)
        raise UsageError(f"{base} does not serve {options.model}.", f"It serves {there}.")
    if "messages" not in card.get("accepts", ["messages"]):
        print(f"{card['id']} has no chat template: an agent needs one.", file=sys.stderr)
    return AgentTarget(base=base, model=card["id"], key=key, context=card.get("max_model_len"))


def fetch_models(base: str, key: str) -> list[dict[str, Any]]:
    """Return the entries of /v1/models."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"{base}/v1/models", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=LIST_TIMEOUT_S) as answer:
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


# ── files ───────────────────────────────────────────────────────────────────────────────────


def read(path: Path) -> str:
    """Return the text of a file, "" without one."""
    try:
        return read_text(path)
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}.", "Correct it first.") from None


def write(path: Path, text: str) -> str:
    """Write `text` after a copy of the old file; a second write keeps the first copy."""
    path = path.resolve()  # a link to a dotfile stays a link
    backup, absent = with_suffix(path, BACKUP), with_suffix(path, ABSENT)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not backup.exists() and not absent.exists():
            if path.exists():
                write_whole(backup, path.read_bytes(), mode_of(path))
            else:
                write_whole(absent, b"", 0o600)
        write_whole(path, text.encode(), mode_of(path))
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror}.", "Run it without --write."
        ) from None
    return f"{path} is written; headway launch … --restore puts back what was there."


def restore(path: Path) -> str:
    """Put the copy back; what it replaces is kept as a second copy."""
    path = path.resolve()
    backup, absent = with_suffix(path, BACKUP), with_suffix(path, ABSENT)
    if not backup.exists() and not absent.exists():
        raise UsageError(f"There is no backup of {path}.", "Nothing was written there by --write.")
    replaced = with_suffix(path, REPLACED)
    if path.exists():
        os.replace(path, replaced)
    if backup.exists():
        os.replace(backup, path)
        return f"{path} is as it was; what it replaced is {replaced}."
    absent.unlink()
    return f"{path} is gone, as before; what was there is {replaced}."


def with_suffix(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def mode_of(path: Path) -> int:
    """Return the file's mode; a new file is for its owner alone, because it may have a key."""
    return stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o600


def write_whole(path: Path, data: bytes, mode: int) -> None:
    """Write a file atomically."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            os.fchmod(file.fileno(), mode)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
