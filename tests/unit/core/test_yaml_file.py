"""YAML files that people write: a key that is there twice is an error, wherever one is read."""

from pathlib import Path

import pytest

from headway.bench.classes import read_class_file
from headway.config.options import ServerOptions, read_options
from headway.core.errors import UsageError
from headway.core.service import read_classes
from headway.core.yaml_file import parse_yaml
from headway.edge.key_file import read_rows


def read_config(path: Path) -> object:
    return read_options((ServerOptions,), [f"--config={path}"], {})


@pytest.mark.parametrize(
    ("read", "text", "line", "key"),
    [
        (read_rows, "keys: []\n# more\nkeys: []\n", 3, "keys"),
        (read_rows, "keys:\n  - name: a\n    admin: true\n    name: b\n", 4, "name"),
        (read_classes, "gold: {weight: 2}\ngold: {weight: 1}\n", 2, "gold"),
        (read_classes, "gold: {weight: 2, weight: 1}\n", 1, "weight"),
        (read_class_file, "a: {share: 1}\na: {share: 1}\n", 2, "a"),
        (read_config, "port: 1\nhost: x\nport: 2\n", 3, "port"),
    ],
)
def test_a_key_that_is_there_twice_is_named(tmp_path, read, text, line, key):
    path = tmp_path / "file.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as refused:
        read(path)
    assert f"{path}, line {line}: the key {key!r} is there twice" in refused.value.cause
    assert refused.value.fix


def test_one_option_in_two_spellings_is_there_twice(tmp_path):
    path = tmp_path / "file.yaml"
    path.write_text("max-queue: 1\nmax_queue: 2\n")
    with pytest.raises(UsageError, match="max_queue is there twice"):
        read_config(path)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("", None),
        ("a: 1\nb: {a: 2}\n", {"a": 1, "b": {"a": 2}}),
        ("- {a: 1}\n- {a: 2}\n", [{"a": 1}, {"a": 2}]),
        ("x: &x {a: 1, b: 2}\ny: {<<: *x, a: 3}\n", {"x": {"a": 1, "b": 2}, "y": {"a": 3, "b": 2}}),
        ("1: a\n'1': b\n", {1: "a", "1": "b"}),
        (
            "a: &a {k: 1}\nb: {c: &c {<<: *a, k: 2}}\nd: {<<: *c}\n",
            {"a": {"k": 1}, "b": {"c": {"k": 2}}, "d": {"k": 2}},
        ),
    ],
)
def test_what_is_no_duplicate(text, content):
    assert parse_yaml(text, "a file") == content


@pytest.mark.parametrize(
    "text",
    [
        *("a: [", "\t- x", "[" * 5000, "? [a]\n: 1", "a: !!python/name:os.system"),
        *("a: !!map [1]", "a: !!bool x", "a: !!timestamp x", "a: !!int ''"),
    ],
)
def test_what_is_no_yaml_is_told(text):
    with pytest.raises(UsageError, match="a file is not YAML"):
        parse_yaml(text, "a file")


def lines(first: str, each: str, count: int = 30) -> str:
    """A YAML text in which each line has the one before nine times."""
    rows = [f"a0: &a0 {first}"]
    rows += [f"a{i}: &a{i} {each.replace('@', f'*a{i - 1}')}" for i in range(1, count)]
    return "\n".join(rows) + "\n"


@pytest.mark.parametrize(
    "text",
    [
        lines("[x]", "[@,@,@,@,@,@,@,@,@]"),
        lines("{k: 1}", "{a: @, b: @, c: @, d: @}"),
        lines("{k: 1}", "{<<: [@,@,@,@,@,@,@,@,@]}"),
        "a: &a [*a]\n",
        "a: &a {b: *a}\n",
    ],
    ids=["lists", "mappings", "merges", "a list in itself", "a mapping in itself"],
)
def test_aliases_that_multiply_are_refused(text):
    with pytest.raises(UsageError, match="with its aliases, or contains itself"):
        parse_yaml(text, "FILE")
    assert parse_yaml("a: &a {b: 1}\nc: {<<: *a, d: [*a, *a]}\n", "FILE")["c"]["b"] == 1
