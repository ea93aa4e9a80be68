"""`headway launch codex|claude|opencode`: how a coding agent is pointed at this server.

`cli/agents.py` has a row for each: where its configuration lies and what ours adds to it. It is
printed by default; `--write` keeps a copy of what was there, and `--restore` puts that copy back.
Nothing is deleted that the user wrote: what `--restore` replaces is kept beside it. `--run` starts
the agent with the same configuration in its arguments and its environment, and touches no file.
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

from headway.cli.agents import AGENTS, KEY_VARIABLE, NO_KEY, Agent, Target
from headway.config.options import LaunchOptions
from headway.core.errors import HeadwayError, UsageError
from headway.core.regular_file import read_text

if TYPE_CHECKING:
    from headway.cli.main import Call

TIMEOUT_S = 10.0
BACKUP, ABSENT, REPLACED = ".headway-backup", ".headway-absent", ".headway-replaced"


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


# ── files ───────────────────────────────────────────────────────────────────────────────────


def read(path: Path) -> str:
    """What is there, "" for no file."""
    try:
        return read_text(path)
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
