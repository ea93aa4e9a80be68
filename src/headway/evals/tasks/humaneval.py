"""HumanEval: functions to complete (Chen et al., 2021); their tests run only with --run-code.

Without execution the reference solutions are scored as text after their prompts. With it, a reply
runs in a child process: without the environment's modules, in an empty temporary folder, with
limits on time, memory and file size. This is no sandbox: the program may read files and use the
network.
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
from headway.evals.tasks.task import EvalTask, TaskQuestion
from headway.evals.text import TextWindow, spread

NAME = "humaneval"
FILE = "eval/humaneval/HumanEval.jsonl.gz"
MAX_TOKENS = 384
TIMEOUT_S, MEMORY_BYTES, FILE_BYTES = 10, 1 << 30, 1 << 20
INSTRUCTION = "Complete this Python function. Answer with the whole function in one code block.\n\n"
BLOCK = re.compile(r"```(?:python|py)?\n(.*?)(?:```|\Z)", re.DOTALL)
LIMITS = {"CPU": TIMEOUT_S, "AS": MEMORY_BYTES, "FSIZE": FILE_BYTES, "CORE": 0}
CHILD_PROGRAM = f"""
import resource, runpy
for name, most in {LIMITS}.items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (most, most))
runpy.run_path("program.py", run_name="__main__")
"""
"""The child process sets its limits (CPU time, memory, file size) and runs the program."""
MAX_CHARS = 2000
"""Longer prompts (with their solution) are not scored as text: 8 of the 164."""


def rows(data: Path) -> list[dict[str, Any]]:
    """Read the rows of the data file."""
    try:
        with gzip.open(data / FILE, "rt", encoding="utf-8") as file:
            return [json.loads(line) for line in file]
    except (OSError, ValueError) as error:
        raise UsageError(f"{data / FILE} cannot be read: {error}.", "Copy it again.") from error


def windows(data: Path) -> list[TextWindow]:
    """Return each prompt as context, with its reference solution as target."""
    windows = [
        TextWindow(context=row["prompt"], target=row["canonical_solution"]) for row in rows(data)
    ]
    return [each for each in windows if len(each.context) + len(each.target) <= MAX_CHARS]


def read(data: Path, limit: int) -> EvalTask:
    """Read `limit` functions, evenly spread."""
    return EvalTask(NAME, [question(row) for row in spread(rows(data), limit)], (), MAX_TOKENS)


def question(row: dict[str, Any]) -> TaskQuestion:
    """Return a function to complete; a reply is right if the function's tests pass."""
    messages = [{"role": "user", "content": INSTRUCTION + row["prompt"]}]
    return TaskQuestion(messages, row["canonical_solution"], lambda reply: passes(row, reply))


def program_of(row: dict[str, Any], reply: str) -> str:
    """Join the prompt, the reply (a whole function or only its body) and the tests to a program."""
    block = BLOCK.search(reply)
    code = block[1] if block else reply
    whole = f"def {row['entry_point']}(" in code
    before = row["prompt"].partition("def ")[0] if whole else row["prompt"]
    return f"{before}{code}\n{row['test']}\ncheck({row['entry_point']})\n"


def passes(row: dict[str, Any], reply: str) -> bool:
    """Run the program in a child process; its process group is killed at the end."""
    with tempfile.TemporaryDirectory(prefix="headway-humaneval-") as folder:
        program = program_of(row, reply).encode("utf-8", "replace")
        (Path(folder) / "program.py").write_bytes(program)
        child = subprocess.Popen(
            [sys.executable, "-I", "-c", CHILD_PROGRAM],
            cwd=folder,
            env={"PATH": os.defpath},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return child.wait(TIMEOUT_S) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
