"""All errors that a user can see, in one tree.

    HeadwayError                 something the user can act on: a cause and a fix, two lines
    ├── UsageError               a flag, a YAML key or an environment variable is wrong      exit 2
    ├── ModelError               this folder cannot be served                                exit 3
    │   ├── CheckpointError      its weights are missing, truncated, left over or corrupt
    │   ├── UnsupportedModelError  its architecture or quantization is not supported
    │   └── TokenizerError       its tokenizer or chat template is missing or unreadable
    ├── CapacityError            the model or the context does not fit in the memory         exit 3
    ├── PortInUseError           another process listens there                               exit 4
    └── RequestError             one request is refused; the server answers it as HTTP
        ├── OverloadedError      the server has more to do than it can promise          503
        │   └── ShedError        the engine gives up a request that was admitted         503
        ├── EngineDownError      the engine died or is not ready                             503
        │   └── ShutdownError    the process ends                                        503
        ├── StorageError         the disk is full, or the data folder cannot be used         507
        └── ServerFaultError     an internal error; the body has no details                  500

Bugs are `assert`s and plain exceptions: they are never converted to one of these. An
`ExecutorLostError` is not shown to users: the engine's process ends, and a new one continues.
"""


class ExecutorLostError(RuntimeError):
    """The executor is lost for good, for example a rank of it: the engine has to restart."""


class HeadwayError(Exception):
    """Error that a user can fix; `cause` says what is wrong and `fix` what to do."""

    exit_code = 1

    def __init__(self, cause: str, fix: str = "") -> None:
        super().__init__(cause)
        self.cause = cause
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.cause}\n{self.fix}" if self.fix else self.cause


class UsageError(HeadwayError):
    """The user sees it when a flag, a YAML key or an environment variable is not acceptable."""

    exit_code = 2


class ModelError(HeadwayError):
    """The user sees it when the model folder cannot be served."""

    exit_code = 3


class CheckpointError(ModelError):
    """The user sees it when weights are missing, truncated, left over or corrupt."""


class UnsupportedModelError(ModelError):
    """The user sees it when the architecture, a variant of it or its quantization is unknown."""


class TokenizerError(ModelError):
    """The user sees it when the tokenizer or the chat template is missing or unreadable."""


class CapacityError(HeadwayError):
    """The user sees it when weights or one full context do not fit in the memory."""

    exit_code = 3


class PortInUseError(HeadwayError):
    """The user sees it when another process already listens on the address or the socket."""

    exit_code = 4


class RequestError(HeadwayError):
    """The client sees it as an HTTP error body; all other requests continue.

    `param` is the field at fault (`messages[2].role`), `code` the machine-readable reason
    (`integer_below_min_value`), `status` the HTTP status. `reason` names the limit that refused
    admission, for the metric; `allow` the methods of a path (405).
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        retry_after_s: float | None = None,
        reason: str | None = None,
        allow: str | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.allow = allow
        self.param = param
        self.code = code
        self.status = status
        self.retry_after_s = retry_after_s

    @property
    def type(self) -> str:
        """Return the OpenAI `type` of the status: 400 → invalid_request_error."""
        return ERROR_TYPES.get(self.status, "invalid_request_error")


class OverloadedError(RequestError):
    """The client sees it when the server is full: which limit, and for how long."""

    def __init__(self, message: str, *, reason: str, retry_after_s: float) -> None:
        super().__init__(
            message, code="overloaded", status=503, retry_after_s=retry_after_s, reason=reason
        )


class ShedError(OverloadedError):
    """The client sees it when its request was admitted and can no longer meet its objectives."""

    def __init__(
        self,
        message: str = "The server is too busy to answer within the objectives of this request.",
    ) -> None:
        super().__init__(message, reason="given_up", retry_after_s=1.0)


class EngineDownError(RequestError):
    """The client sees it when the engine is loading, draining, or died under the request."""

    def __init__(self, message: str, *, code: str = "overloaded", retry_after_s: float = 1) -> None:
        super().__init__(message, code=code, status=503, retry_after_s=retry_after_s)


class ShutdownError(EngineDownError):
    """The client sees it when it sends a request, or still waits, while the process ends."""

    def __init__(self) -> None:
        super().__init__("The server is shutting down.", code="shutting_down")


class StorageError(RequestError):
    """The client sees it when the disk is full or files and batches cannot be kept."""

    def __init__(self, message: str, *, code: str = "storage_full", status: int = 507) -> None:
        super().__init__(message, code=code, status=status)


class ServerFaultError(RequestError):
    """The client sees it when a step failed with this request in it; details are in the log."""

    def __init__(self, message: str = "The server failed on this request.") -> None:
        super().__init__(message, code="internal_error", status=500)


ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    502: "server_error",
    503: "server_error",
    504: "server_error",
    507: "server_error",
}
