"""GSM8K: grade-school word problems with four solved examples before each (Cobbe et al., 2021)."""

import json
import re
from pathlib import Path

from headway.evals.tasks.task import Chat, EvalTask, TaskQuestion
from headway.evals.text import read_data, spread

FILE, SHOTS_FILE = "eval/gsm8k/test.jsonl", "eval/gsm8k/train.jsonl"
SHOTS = 4
MAX_TOKENS = 256
CALCULATOR = re.compile(r"<<[^>]*>>")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def read(data: Path, limit: int) -> EvalTask:
    """Read `limit` questions of the test set, evenly spread."""
    shots: Chat = []
    if (data / SHOTS_FILE).exists():
        for row in map(json.loads, read_data(data / SHOTS_FILE).splitlines()[:SHOTS]):
            answer = CALCULATOR.sub("", row["answer"])
            shots += [
                {"role": "user", "content": row["question"]},
                {"role": "assistant", "content": answer},
            ]
    lines = spread(read_data(data / FILE).splitlines(), limit)
    return EvalTask("gsm8k", [question(json.loads(line), shots) for line in lines], (), MAX_TOKENS)


def question(row: dict[str, str], shots: Chat) -> TaskQuestion:
    """Return a question after the solved examples."""
    answer = row["answer"].rpartition("####")[2].strip()
    messages = [*shots, {"role": "user", "content": row["question"]}]
    return TaskQuestion(messages, answer, lambda reply: last_number(reply) == last_number(answer))


def last_number(text: str) -> float | None:
    """Return the last number after ####, or of the whole text: "so 3 + 4 = 1,007." gives 1007."""
    numbers = NUMBER.findall(text.rpartition("####")[2])
    return float(numbers[-1].replace(",", "")) if numbers else None
