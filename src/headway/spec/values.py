"""Values out of parsed JSON: of the right kind, or an error that names the key at fault."""

from typing import Any

from headway.core.errors import ModelError


def positive(
    config: dict[str, Any], key: str, default: int | None = None, most: int = 2**31 - 1
) -> int:
    """The positive integer under `key`, at most `most`, or ModelError naming it."""
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
        raise wrong(key, f"a positive integer up to {most}", value)
    return value


def number(config: dict[str, Any], key: str, default: float | None = None) -> float:
    """The positive number under `key`, or ModelError naming it."""
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise wrong(key, "a positive number", value)
    return float(value)


def numbers(config: dict[str, Any], key: str) -> tuple[float, ...]:
    """The positive numbers of the list under `key`, or ModelError naming it."""
    value = config.get(key)
    if not isinstance(value, list) or not value:
        raise wrong(key, "a list of positive numbers", value)
    return tuple(number({key: each}, key) for each in value)


def optional_number(config: dict[str, Any], key: str, absent: float = 0.0) -> float:
    """The positive number under `key`; null and 0 are 0, and a key that is not there `absent`."""
    if key not in config:
        return absent
    return number(config, key) if config[key] not in (None, 0) else 0.0


def flag(config: dict[str, Any], key: str, default: bool = False) -> bool:
    """true or false under `key`, or ModelError naming it."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise wrong(key, "true or false", value)
    return value


def mapping(config: dict[str, Any], key: str) -> dict[str, Any]:
    """The object under `key` (absent is empty), or ModelError naming it."""
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise wrong(key, "an object", value)
    return value


def token_ids(config: dict[str, Any], key: str, file: str = "config.json") -> tuple[int, ...]:
    """The token id or ids under `key` (absent is none), or ModelError naming it and `file`."""
    value = config.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < 2**31 for i in ids):
        raise wrong(key, "a token id or a list of them", value, file)
    return tuple(ids)


def switches(config: dict[str, Any], key: str, count: int) -> list[bool] | None:
    """A list of at least `count` zeros and ones under `key`, one a layer; None when absent."""
    value = config.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) < count or any(v not in (0, 1) for v in value):
        raise wrong(key, f"a list of {count} zeros and ones", value)
    return [bool(v) for v in value[:count]]


def wrong(key: str, kind: str, value: Any, file: str = "config.json") -> ModelError:
    """The error for a value of the wrong kind."""
    return ModelError(
        f"{file}: {key} must be {kind}, not {str(value)[:80]!r}.",
        f"Copy {file} again from the model's source.",
    )
