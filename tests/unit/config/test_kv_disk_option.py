"""What `--kv-disk` and `--kv-disk-write` say, and what is refused by name."""

import pytest

from headway.config.kv_disk import (
    DEFAULT_BYTES,
    LEAST_BYTES,
    plan_disk,
    read_kv_disk,
    read_write_limit,
)
from headway.config.options import EngineOptions
from headway.config.reasons import Reasons
from headway.core.errors import UsageError


@pytest.mark.parametrize(
    ("text", "folder", "num_bytes"),
    [
        ("", "", 0),
        ("20GB", "", 20 * 10**9),
        ("512MiB", "", 512 * 2**20),
        ("/var/kv", "/var/kv", DEFAULT_BYTES),
        ("/var/kv:20GB", "/var/kv", 20 * 10**9),
        ("kv:1MB", "kv", LEAST_BYTES),
        ("~/kv", "~/kv", DEFAULT_BYTES),
        ("/a:b/kv", "/a:b/kv", DEFAULT_BYTES),
        ("/a:b/kv:2GB", "/a:b/kv", 2 * 10**9),
    ],
)
def test_a_size_a_folder_or_both(text: str, folder: str, num_bytes: int):
    assert read_kv_disk(text) == (folder, num_bytes)


@pytest.mark.parametrize("text", ["1kB", "/var/kv:5", "0", "/var/kv:0GB"])
def test_too_few_bytes_are_refused(text: str):
    """A bound below a block would keep nothing and say nothing."""
    with pytest.raises(UsageError, match="too few") as raised:
        read_kv_disk(text)
    assert "1MB" in raised.value.fix


@pytest.mark.parametrize("text", ["20XB", "20 gigs", "5.5.5GB:20GB", "7tbs"])
def test_what_looks_like_a_size_and_is_none_names_no_folder(text: str):
    with pytest.raises(UsageError, match="neither a number of bytes nor a path") as raised:
        read_kv_disk(text)
    folder, _, _ = text.partition(":")
    assert f"./{folder}" in raised.value.fix
    assert read_kv_disk(f"./{folder}") == (f"./{folder}", DEFAULT_BYTES)


@pytest.mark.parametrize(
    ("text", "bytes_s"), [("through", 0.0), ("100MB", 1e8), ("1GiB", float(2**30)), ("1", 1.0)]
)
def test_a_rate_or_all_at_once(text: str, bytes_s: float):
    assert read_write_limit(text) == bytes_s


@pytest.mark.parametrize("text", ["", "fast", "-1MB", "nan", "1e99XB"])
def test_what_is_no_rate_is_refused(text: str):
    with pytest.raises(UsageError, match="--kv-disk-write"):
        read_write_limit(text)


def test_no_rate_is_nothing_at_all():
    with pytest.raises(UsageError, match="is no rate"):
        read_write_limit("0MB")


def planned(**more: object) -> tuple[tuple[str, int, float], Reasons]:
    reasons = Reasons()
    return plan_disk(EngineOptions(**more), reasons), reasons


def why_of(reasons: Reasons) -> str:
    return next(reason.why for reason in reasons if reason.name == "kv_disk")


def test_nothing_reaches_a_disk_unless_it_is_asked_for():
    found, reasons = planned()
    assert found == ("", 0, 0.0)
    assert why_of(reasons) == "no prompt and no answer reaches a disk"


def test_who_asks_is_told_what_is_there():
    found, reasons = planned(kv_disk="/var/kv:2GB", kv_disk_write="through")
    assert found == ("/var/kv", 2 * 10**9, 0.0)
    assert why_of(reasons) == "in /var/kv; it holds prompts and answers"
    assert planned(kv_disk="2GB")[0] == ("", 2 * 10**9, 1e8)


def test_without_a_prefix_cache_there_is_nothing_to_keep():
    with pytest.raises(UsageError, match="--no-prefix-cache turns that off"):
        planned(kv_disk="2GB", prefix_cache=False)


def test_a_wrong_rate_is_refused_though_there_is_no_disk():
    """What is asked is honoured or refused, never dropped."""
    with pytest.raises(UsageError, match="--kv-disk-write"):
        planned(kv_disk_write="often")


def test_a_rate_without_a_disk_is_refused():
    with pytest.raises(UsageError, match="--kv-disk-write through: without --kv-disk"):
        planned(kv_disk_write="through")
