"""Keys and limits: who is found, what is refused and for how long, what a key file may say."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from headway.core.clock import VirtualClock
from headway.core.errors import RequestError, UsageError
from headway.core.service import KeyLimits
from headway.edge.auth import KEY, OPERATOR, PUBLIC, is_local_name
from headway.edge.key_file import add_row, digest, make_key, read_rows, revoke_row, row_text
from headway.edge.keys import Keyring, anonymous_caller
from headway.server.app import ACCESS, access


def key_file(tmp_path, text: str):
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    return path


def row(name: str, key: str, more: str = "") -> str:
    return f"  - name: {name}\n    sha256: {digest(key).hex()}\n{more}"


def test_a_key_has_its_owner(tmp_path):
    limits = "    class: batch\n    weight: 2.5\n    limits: {requests_at_once: 2}\n"
    text = "keys:\n" + row("alice", "one", limits) + row("ops", "two", "    admin: true\n")
    ring = Keyring(flags=["three"], file=key_file(tmp_path, text), classes={"batch"})
    alice, ops, flag = ring.find("one"), ring.find("two"), ring.find("three")
    assert (alice.principal.name, alice.admin, alice.service_class) == ("alice", False, "batch")
    assert alice.meter.limits == KeyLimits(requests_at_once=2)
    assert (alice.weight, ops.weight, flag.weight) == (2.5, None, None)
    assert (ops.principal.name, ops.admin, ops.service_class) == ("ops", True, None)
    assert (flag.principal.name, flag.admin) == ("api-key-1", True)
    assert len({caller.principal.cache_salt for caller in (alice, ops, flag)}) == 3
    for wrong in ("", "four", "On", "one ", "one\0", digest("one").hex(), "é", "\udcff"):
        assert ring.find(wrong) is None


def test_no_key_is_kept(tmp_path):
    ring = Keyring(flags=[], file=key_file(tmp_path, "keys:\n" + row("alice", "sesame")))
    assert "sesame" not in repr(ring)


def test_every_key_is_compared(monkeypatch):
    """Finding the first takes as long as finding none."""
    from headway.edge import keys

    seen = []
    real = keys.hmac.compare_digest
    monkeypatch.setattr(keys.hmac, "compare_digest", lambda a, b: seen.append(b) or real(a, b))
    ring = Keyring(flags=["one", "two", "three"])
    for key in ("one", "three", "none"):
        seen.clear()
        ring.find(key)
        assert len(seen) == 3


def test_reading_again_keeps_what_is_used_up(tmp_path):
    limits = "    limits: {requests_per_minute: 1}\n"
    path = key_file(tmp_path, "keys:\n" + row("alice", "one", limits))
    ring = Keyring(file=path, clock=VirtualClock())
    ring.find("one").meter.enter()
    path.write_text("keys:\n" + row("bob", "two") + row("alice", "one", limits))
    ring.reload()
    assert ring.find("two").principal.name == "bob"
    with pytest.raises(RequestError):
        ring.find("one").meter.enter()
    path.write_text("keys: [")
    with pytest.raises(UsageError):
        ring.reload()
    assert ring.find("two") is not None
    path.write_text("keys:\n" + row("bob", "two"))
    ring.reload()
    assert ring.find("one") is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "keys.yaml"),
        ("keys: 5", "Expected `array`"),
        ("[1]", "keys.yaml"),
        ("keys:\n  - name: a", "sha256"),
        ("keys:\n  - {name: a, sha256: abc}", "64 digits"),
        ("keys:\n  - {name: a, key: secret}", "unknown field `key`"),
        ("keys:\n" + row("a", "x", "    class: fast\n"), "the class 'fast'"),
        ("keys:\n" + row("a", "x", "    limits: {requests_at_once: 0}\n"), "at least 1"),
        ("keys:\n" + row("a", "x", "    limits: {tokens: 5}\n"), "unknown field `tokens`"),
        ("keys:\n" + row("a", "x", "    weight: 0\n"), "weight must be between 0.001 and 1000"),
        ("keys:\n" + row("a", "x", "    admin: maybe\n"), "Expected `bool`"),
        ("keys:\n" + row("a", "x") + row("a", "y"), "twice"),
        ("keys:\n" + row("a", "x") + row("b", "x"), "twice"),
        ("keys:\n" + row("anonymous", "x"), "cannot be a key's name"),
        ('keys:\n  - {name: "a\\nb", sha256: ' + "f" * 64 + "}", "cannot be a key's name"),
        ("a: &a [*a]", "keys.yaml"),
        ("keys:\n" + row("a", "x", "    classes: []\n"), "one at least"),
        ("keys:\n" + row("a", "x", "    classes: [fast]\n"), "the class 'fast'"),
        ("keys:\n" + row("a", "x", "    class: x\n    classes: [batch]\n"), "does not name"),
        ("keys:\n" + row("a", "x") + "keys:\n" + row("b", "y"), "line 4: the key 'keys' is there"),
    ],
)
def test_what_a_key_file_may_not_say(tmp_path, text, words):
    with pytest.raises(UsageError) as refused:
        Keyring(file=key_file(tmp_path, text), classes={"batch"})
    assert words in refused.value.cause
    assert "secret" not in str(refused.value)


def test_an_empty_key_file_lets_nobody_in(tmp_path):
    ring = Keyring(file=key_file(tmp_path, "keys: []"))
    assert ring
    assert ring.find("") is None
    assert not Keyring()


def test_a_missing_key_file(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        Keyring(file=tmp_path / "none.yaml")


def test_a_made_key_lets_in(tmp_path):
    key = make_key()
    assert len(key) > 40
    assert key != make_key()
    ring = Keyring(file=key_file(tmp_path, "keys:\n" + row_text('Al "the" cat: #1', key)))
    assert ring.find(key).principal.name == 'Al "the" cat: #1'


# ── rows that are added ─────────────────────────────────────────────────────────────────────


def test_a_row_is_added_to_what_is_there(tmp_path):
    """Comments stay, each key works, a new file is its owner's alone."""
    path = tmp_path / "keys.yaml"
    keys = [make_key() for _ in range(4)]
    add_row(path, "first", keys[0])
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    path.write_text("# mine\n" + path.read_text() + "    limits: {requests_at_once: 2}  # few")
    for number, key in enumerate(keys[1:]):
        add_row(path, f"key {number}: #", key)
    assert path.stat().st_mode & 0o777 == 0o640, "what everybody might do is taken away"
    ring = Keyring(file=path)
    names = [ring.find(key).principal.name for key in keys]
    assert names == ["first", "key 0: #", "key 1: #", "key 2: #"]
    assert ring.find(keys[0]).meter.limits.requests_at_once == 2
    assert path.read_text().startswith("# mine\n") and list(tmp_path.iterdir()) == [path]


def test_an_operators_row_is_added_among_others(tmp_path):
    path = key_file(tmp_path, f"keys:\n- name: a\n  sha256: {digest('x').hex()}\n")
    add_row(path, "ops", "y", admin=True)
    add_row(path, "b", "z")
    add_row(path, "gw", "w", gateway=True)
    assert [(each.name, each.admin, each.gateway) for each in read_rows(path)] == [
        ("a", False, False), ("ops", True, False), ("b", False, False), ("gw", False, True),
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["", "# none yet\n", "keys:\n", "keys:", "more: 1\nkeys:\n"])
def test_a_row_is_added_where_there_is_none(tmp_path, text):
    path = key_file(tmp_path, text)
    add_row(path, "a", "one")
    assert [each.name for each in read_rows(path)] == ["a"]


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        ("keys:\n" + row("alice", "x"), "alice", "there is a key 'alice' already"),
        ("keys:\n" + row("alice", "x") + "keys:\n" + row("bob", "y"), "carol", "there twice"),
        ("keys: []\n", "a", "cannot be added at its end"),
        ("keys:\n" + row("alice", "x") + "other: 1\n", "b", "cannot be added at its end"),
        ("keys: [", "a", "is not YAML"),
        ("keys: 5", "a", "keys.yaml: Expected `array`"),
        ("", "anonymous", "cannot be a key's name"),
        ("", "a\nb", "cannot be a key's name"),
    ],
)
def test_what_a_row_is_not_added_to(tmp_path, text, name, words):
    path = key_file(tmp_path, text)
    with pytest.raises(UsageError) as refused:
        add_row(path, name, "one")
    assert words in refused.value.cause
    assert path.read_text() == text and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text", ["model: tiny\n", "[1]", "words", "5"])
def test_a_file_of_something_else_is_no_key_file(tmp_path, text):
    """It is not to be written to; the fix is one that helps."""
    path = key_file(tmp_path, text)
    with pytest.raises(UsageError, match=f"--file {path}: it has no `keys:`") as refused:
        add_row(path, "a", "one")
    assert "another file" in refused.value.fix and path.read_text() == text
    with pytest.raises(UsageError, match=f"--key-file {path}: it has no `keys:`") as refused:
        read_rows(path)
    assert "another file" in refused.value.fix


def test_rows_added_at_once_are_all_there(tmp_path):
    """Twelve threads, each with a descriptor of its own, as twelve processes would be."""
    path = tmp_path / "keys.yaml"
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda number: add_row(path, f"k{number}", f"{number}"), range(12)))
    assert {each.name for each in read_rows(path)} == {f"k{number}" for number in range(12)}


def test_classes_that_a_key_may_name(tmp_path):
    text = "keys:\n" + row("a", "x", "    classes: [batch, interactive]\n") + row("b", "y")
    ring = Keyring(file=key_file(tmp_path, text), classes={"batch", "interactive"})
    some, any_class = ring.find("x"), ring.find("y")
    assert some.service_class == "batch", "the first of them, where the row names no other"
    assert [some.may_use(name) for name in ("interactive", "batch", "default")] == [1, 1, 0]
    assert any_class.may_use("default")
    lines = [caller.for_lines(caller.principal) for caller in (some, any_class, anonymous_caller())]
    assert [line.may_use("interactive") for line in lines] == [True, False, True]
    assert all(line.may_use("batch") for line in lines)


# ── paths and hosts ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("/", PUBLIC),
        ("/health", PUBLIC),
        ("/ready", PUBLIC),
        ("/v1/models", KEY),
        ("/v1/anything/new", KEY),
        ("/tokenize", KEY),
        ("/metrics", OPERATOR),
        ("/stats", OPERATOR),
        ("/a-route-nobody-named", OPERATOR),
        ("/health/", OPERATOR),
        ("//health", OPERATOR),
        ("/v1", OPERATOR),
        ("", OPERATOR),
    ],
)
def test_who_may_ask_where(path, wanted):
    assert access(path) == wanted


def test_few_paths_are_public():
    public = {path for path, wanted in ACCESS.items() if wanted == PUBLIC}
    assert {path for path in public if not path.startswith("/page/")} == {"/", "/health", "/ready"}


@pytest.mark.parametrize(
    "host",
    [
        *("", "localhost", "localhost:8000", "127.0.0.1:80", "10.1.2.3", "[::1]", "[::1]:8000"),
        *("a.localhost:1", "LOCALHOST.", "0.0.0.0:8000"),
    ],
)
def test_hosts_of_this_machine(host):
    assert is_local_name(host)


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8000", "localhost.evil.example", "notlocalhost"),
        *("127.0.0.1.evil.example:80", "a:b:c", "[::1].evil"),
    ],
)
def test_hosts_that_are_not(host):
    assert not is_local_name(host)


def test_a_revoked_key_lets_nobody_in_and_says_whose_blocks_go(tmp_path):
    path = key_file(tmp_path, "# ours\nkeys:\n" + row("bob", "two"))
    add_row(path, "alice", "one")
    ring = Keyring(file=path)
    alice = ring.find("one").principal
    revoke_row(path, "alice")
    revoke_row(path, "alice")
    assert path.read_text().startswith("# ours\n") and path.read_text().count("revoked") == 1
    ring.reload()
    assert ring.find("one") is None and ring.named("alice") is None
    assert ring.revoked == [alice] and ring.find("two").principal.name == "bob"
    with pytest.raises(UsageError, match="'alice' already"):
        add_row(path, "alice", "three")


@pytest.mark.parametrize("first", ["sha256: {}\n    name: a", 'name: a\n    sha256: "{}"  # mine'])
def test_a_row_is_revoked_however_it_is_written(tmp_path, first):
    path = key_file(tmp_path, f"keys:\n  - {first.format(digest('x').hex())}\n    admin: true\n")
    revoke_row(path, "a")
    (found,) = read_rows(path)
    assert (found.revoked, found.admin) == (True, True)


def test_what_cannot_be_revoked_is_said(tmp_path):
    path = key_file(tmp_path, f"keys: [{{name: a, sha256: {digest('x').hex()}}}]")
    before = path.read_text()
    with pytest.raises(UsageError, match="one line for each field") as raised:
        revoke_row(path, "a")
    assert "revoked: true" in raised.value.fix and path.read_text() == before
    with pytest.raises(UsageError, match="no key 'b'"):
        revoke_row(path, "b")
    with pytest.raises(UsageError, match="No such file"):
        revoke_row(tmp_path / "none.yaml", "a")


def test_a_gateways_users_blocks_are_its_own_and_its_keys(tmp_path):
    gate = Keyring(flags=["one"]).find("one")
    user = gate.for_user("u")
    assert user.principal.cache_owner == f"{gate.principal.cache_owner} u"
