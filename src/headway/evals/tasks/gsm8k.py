"""GSM8K: word problems of school mathematics, four solved ones before each (Cobbe et al., 2021)."""

import json
import re
from pathlib import Path

from headway.evals.tasks.task import Chat, Question, Task
from headway.evals.text import read_data, spread

FILE, SHOTS_FILE = "eval/gsm8k/test.jsonl", "eval/gsm8k/train.jsonl"
SHOTS = 4
MAX_TOKENS = 256
CALCULATOR = re.compile(r"<<[^>]*>>")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def read(data: Path, limit: int) -> Task:
    """`limit` questions of the test set, evenly spread."""
    shots: Chat = []
    if (data / SHOTS_FILE).exists():
        for row in map(json.loads, read_data(data / SHOTS_FILE).splitlines()[:SHOTS]):
            answer = CALCULATOR.sub("", row["answer"])
            shots += [
                {"role": "user", "content": row["question"]},
                {"role": "assistant", "content": answer},
            ]
    lines = spread(read_data(data / FILE).splitlines(), limit)
    return Task("gsm8k", [question(json.loads(line), shots) for line in lines], (), MAX_TOKENS)


def question(row: dict[str, str], shots: Chat) -> Question:
    """A row of the file behind the solved ones."""
    wanted = row["answer"].rpartition("####")[2].strip()
    messages = [*shots, {"role": "user", "content": row["question"]}]
    return Question(messages, wanted, lambda reply: last_number(reply) == last_number(wanted))


def last_number(text: str) -> float | None:
    """Of what stands behind ####, else of all: "so 3 + 4 = 1,007." is 1007."""
    found = NUMBER.findall(text.rpartition("####")[2])
    return float(found[-1].replace(",", "")) if found else None
