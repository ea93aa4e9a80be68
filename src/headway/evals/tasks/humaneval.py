"""HumanEval: functions to complete (Chen et al., 2021), judged by their tests only where asked.

Without execution the code is a text: how well the model expects the reference solution behind its
prompt. With it, what the model writes runs in a child process of its own: isolated from the
environment's modules, in an empty folder that is removed, with bounds on time, memory and files.
That is no sandbox: such a program may still read files and use the network.
"""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from headway.core.errors import UsageError
from headway.evals.tasks.task import Question, Task
from headway.evals.text import Window, spread

NAME = "humaneval"
FILE = "eval/humaneval/HumanEval.jsonl.gz"
MAX_TOKENS = 384
SECONDS, MEMORY_BYTES, FILE_BYTES = 10, 1 << 30, 1 << 20
ASKED = "Complete this Python function. Answer with the whole function in one code block.\n\n"
BLOCK = re.compile(r"```(?:python|py)?\n(.*?)(?:```|\Z)", re.DOTALL)
LIMITS = {"CPU": SECONDS, "AS": MEMORY_BYTES, "FSIZE": FILE_BYTES, "CORE": 0}
BOUNDED = f"""
import resource, runpy
for name, most in {LIMITS}.items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (most, most))
runpy.run_path("program.py", run_name="__main__")
"""
"""The child: its limits of processor time, memory and size of a file, then the program."""
MOST_CHARS = 2000
"""Longer prompts with their solution are left out of the text: 8 of the 164."""


def rows(data: Path) -> list[dict[str, Any]]:
    """The file's rows."""
    try:
        with gzip.open(data / FILE, "rt", encoding="utf-8") as file:
            return [json.loads(line) for line in file]
    except (OSError, ValueError) as error:
        raise UsageError(f"{data / FILE} cannot be read: {error}.", "Copy it again.") from error


def windows(data: Path) -> list[Window]:
    """Each prompt as context, its reference solution as what is scored."""
    found = [Window(context=row["prompt"], target=row["canonical_solution"]) for row in rows(data)]
    return [each for each in found if len(each.context) + len(each.target) <= MOST_CHARS]


def read(data: Path, limit: int) -> Task:
    """`limit` functions, evenly spread, whose tests are run."""
    return Task(NAME, [question(row) for row in spread(rows(data), limit)], (), MAX_TOKENS)


def question(row: dict[str, Any]) -> Question:
    """A function to complete; a reply is right when its tests pass."""
    messages = [{"role": "user", "content": ASKED + row["prompt"]}]
    return Question(messages, row["canonical_solution"], lambda reply: passes(row, reply))


def program_of(row: dict[str, Any], reply: str) -> str:
    """What the reply makes of the prompt, and its tests: a whole function, or only its body."""
    found = BLOCK.search(reply)
    code = found[1] if found else reply
    whole = f"def {row['entry_point']}(" in code
    before = row["prompt"].partition("def ")[0] if whole else row["prompt"]
    return f"{before}{code}\n{row['test']}\ncheck({row['entry_point']})\n"


def passes(row: dict[str, Any], reply: str) -> bool:
    """Whether the program ends well within its bounds; what it started ends with it."""
    with tempfile.TemporaryDirectory(prefix="headway-humaneval-") as folder:
        program = program_of(row, reply).encode("utf-8", "replace")
        (Path(folder) / "program.py").write_bytes(program)
        child = subprocess.Popen(
            [sys.executable, "-I", "-c", BOUNDED],
            cwd=folder,
            env={"PATH": os.defpath},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return child.wait(SECONDS) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
