"""Who is asked: a folder, for which servers are started as they are needed, or a running URL."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from headway.measure.server_process import ServerProcess
from headway.spec import ModelSpec, read_model_spec
from literature.asking import Asking

T = TypeVar("T")
REPEATS = 9
PATIENT = ("--max-queue-wait=10m",)
"""Claims fill a server on purpose: one that is slow refuses nobody for it."""


@dataclass(slots=True, kw_only=True)
class Subject:
    """A folder or a URL. `repeats` is how often what is timed is repeated.

    It is a context manager: a server that it started ends with it.
    """

    folder: Path | None = None
    url: str = ""
    api_key: str = ""
    repeats: int = REPEATS
    options: dict[str, str] = field(default_factory=dict)
    """The engine's, by name: of the server that is started, and of engines in this process."""
    watch: Callable[[str], None] = lambda text: None
    _made: dict[Any, Any] = field(default_factory=dict)
    _open: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def once(self, make: Callable[["Subject"], T]) -> T:
        """What `make` gives of this subject, made once however many claims want it."""
        if make not in self._made:
            self._made[make] = make(self)
        found: T = self._made[make]
        return found

    def server(self) -> Asking:
        """The server at the URL, or one of the folder that is started now."""
        return self.once(started)

    def add(self, started: ServerProcess) -> ServerProcess:
        """A server that ends with this subject."""
        return self._open.enter_context(started)

    def model(self) -> tuple[Path, ModelSpec]:
        """The folder and the model's dimensions; only claims that need a folder ask."""
        assert self.folder is not None, "a URL has no folder"
        return self.folder, read_model_spec(self.folder)


def started(subject: Subject) -> Asking:
    """Whom claims about a server ask."""
    url = subject.url
    if not url:
        assert subject.folder is not None
        subject.watch("a server is started")
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in subject.options.items()]
        url = subject.add(ServerProcess(subject.folder, [*PATIENT, *flags])).url
    return Asking.of(url, subject.api_key)
