"""Why each setting has its value: what `--dry-run` and `headway doctor` print beside it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why one setting has its value, in words a user can check."""

    name: str
    value: str
    why: str

    def __str__(self) -> str:
        return f"{self.name} = {self.value}: {self.why}"


class Reasons(list[Reason]):
    """The reasons so far, in the order of the decisions."""

    def choose(self, name: str, choice: tuple[T, str], shown: Callable[[T], str] = str) -> T:
        """The value of `choice`, (value, why), noted under `name` in the words of `shown`."""
        value, why = choice
        self.append(Reason(name=name, value=shown(value), why=why))
        return value
