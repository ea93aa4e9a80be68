"""Interface of the process that serves files and batches: a server, or a gateway."""

from typing import Protocol

from headway.core.clock import Clock
from headway.edge.keys import Keyring
from headway.edge.lanes import BodyPool


class BatchHostOptions(Protocol):
    """Options of the process for files and batches."""

    @property
    def port(self) -> int: ...

    @property
    def uds(self) -> str: ...

    @property
    def data_dir(self) -> str: ...

    @property
    def max_body(self) -> int: ...

    @property
    def max_file(self) -> int: ...

    @property
    def file_quota(self) -> int: ...

    @property
    def batch_concurrency(self) -> int | None: ...

    @property
    def cached_price(self) -> float: ...


class BatchHost(Protocol):
    """Process that answers the lines of batches: a server, or a gateway."""

    @property
    def options(self) -> BatchHostOptions: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def keyring(self) -> Keyring: ...

    @property
    def pool(self) -> BodyPool: ...

    @property
    def unnamed(self) -> str | None:
        """Return the model of a line that names none, where there is only one."""
        ...

    @property
    def model_names(self) -> tuple[str, ...]:
        """Return the models that a line may name."""
        ...

    @property
    def batch_price(self) -> float:
        """Return the price of a token in the batch class relative to the default class."""
        ...

    def takes_lines(self, model: str) -> bool:
        """Return whether a line for this model may run now."""
        ...

    def num_at_once(self, model: str) -> int:
        """Return how many requests this model runs at once; 1 if unknown."""
        ...
