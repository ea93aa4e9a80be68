"""What files and batches need of the process that serves them: a server, or a gateway."""

from typing import Protocol

from headway.core.clock import Clock
from headway.edge.keys import Keyring
from headway.edge.lanes import BodyPool


class Limits(Protocol):
    """The options of that process that concern files and batches."""

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


class Host(Protocol):
    """Who answers the lines of batches, for whom, and how many at once."""

    @property
    def options(self) -> Limits: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def keyring(self) -> Keyring: ...

    @property
    def pool(self) -> BodyPool: ...

    @property
    def unnamed(self) -> str | None:
        """Whom a line without a model asks, where there is only one."""
        ...

    @property
    def model_names(self) -> tuple[str, ...]:
        """What a line may ask for."""
        ...

    @property
    def batch_price(self) -> float:
        """What a token of the class of batches costs beside another."""
        ...

    def takes_lines(self, model: str) -> bool:
        """Whether a line for this model may be asked now."""
        ...

    def num_at_once(self, model: str) -> int:
        """How many requests this model runs at once; 1 where nobody knows."""
        ...
