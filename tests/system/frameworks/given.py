"""What every first example is asked and reports; run by the framework's own Python."""

import json
import sys
from dataclasses import dataclass

from pydantic import BaseModel


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@dataclass
class Questions:
    """The server, questions about the weather, and texts that name a person and an age."""

    url: str
    weather: list[str]
    people: list[str]


def questions() -> Questions:
    """Those of the command line, as JSON."""
    return Questions(**json.loads(sys.argv[1]))


def report(called: list[str], said: list[str] | None, records: list[list[dict]]) -> None:
    """The last line printed: the cities asked for, the answers, and the people in each way."""
    print(json.dumps({"called": called, "said": said, "records": records}))
