"""Options: where a value comes from, how it is spelled, and what is refused in which words."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.config.options import (
    HALVES,
    Bytes,
    EngineOptions,
    LogOptions,
    SamplingOptions,
    Seconds,
    ServerOptions,
    Stages,
    help_text,
    read_options,
    to_arguments,
)
from headway.config.options.field import MOST_STAGES, environment_name, flag_name, value_type
from headway.config.options.read import REMOVED, fields_of
from headway.config.options.vllm import SEE_TABLE
from headway.core.errors import UsageError

TABLES = [EngineOptions, ServerOptions, LogOptions, SamplingOptions]
FIELDS = [(table, field) for table in TABLES for field in dataclasses.fields(table)]


def read(*arguments, environment=None, tables=(EngineOptions, ServerOptions, LogOptions)):
    """All options of `tables` in one namespace."""
    chosen, positionals, sources = read_options(tables, arguments, environment or {})
    merged = {}
    for options in chosen.values():
        merged |= {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
    return merged, positionals, sources


def refusal(*arguments, **rest) -> UsageError:
    with pytest.raises(UsageError) as caught:
        read(*arguments, **rest)
    assert caught.value.exit_code == 2
    assert caught.value.fix
    return caught.value


def test_precedence(tmp_path):
    """Flag, environment, file, default: each hides what is behind it."""
    file = tmp_path / "headway.yaml"
    file.write_text("port: 1\nhost: file\nmax-num-seqs: 3\nlog_level: error\n")
    values, _, sources = read(
        *("--config", str(file), "--port", "2"),
        environment={"HEADWAY_PORT": "4", "HEADWAY_HOST": "environment", "PORT": "9"},
    )
    assert (values["port"], values["host"], values["max_num_seqs"]) == (2, "environment", 3)
    assert (values["log_level"], values["quantization_group"]) == ("error", 0)
    assert sources == {
        "port": "flag",
        "host": "environment",
        "max_num_seqs": "file",
        "log_level": "file",
    }


def test_file_named_by_the_environment(tmp_path):
    file = tmp_path / "headway.yaml"
    file.write_text("port: 1\n")
    assert read(environment={"HEADWAY_CONFIG": str(file)})[0]["port"] == 1


def test_defaults_when_nothing_is_said(tmp_path):
    values, positionals, sources = read()
    assert (positionals, sources) == ([], {})
    assert values == {
        **{f.name: getattr(EngineOptions(), f.name) for f in dataclasses.fields(EngineOptions)},
        **{f.name: getattr(ServerOptions(), f.name) for f in dataclasses.fields(ServerOptions)},
        **{f.name: getattr(LogOptions(), f.name) for f in dataclasses.fields(LogOptions)},
        "seed": 0,
    }
    empty = tmp_path / "empty.yaml"
    empty.write_text("# nothing\n")
    assert read("--config", str(empty))[0] == values


def test_positionals_may_stand_anywhere():
    for arguments in (
        ["model", "--port", "1", "--insecure"],
        ["--port", "1", "model", "--insecure"],
        ["--insecure", "model", "--port=1"],
        ["--port=1", "--insecure", "model"],
    ):
        values, positionals, _ = read(*arguments)
        assert (positionals, values["port"], values["insecure"]) == (["model"], 1, True)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("8192", 8192), ("32k", 32_000), ("32K", 32_768), ("1m", 10**6), ("1M", 2**20)),
        *(("1.5k", 1500), ("0.5K", 512), ("1_000", 1000), (" 7 ", 7), ("+7", 7)),
    ],
)
def test_integers(text, number):
    assert read(f"--max-model-len={text}")[0]["max_model_len"] == number
    assert read(environment={"HEADWAY_MAX_MODEL_LEN": text})[0]["max_model_len"] == number


@pytest.mark.parametrize("text", ["", "x", "1.5", "1e3", "k", "1kk", "1 k", "0x10", "9" * 5000])
def test_what_is_no_integer(text):
    assert "is not an integer (32k and 32K are fine)" in str(refusal(f"--max-model-len={text}"))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("4GiB", 4 * 2**30), ("500MB", 500 * 10**6), ("1073741824", 2**30), ("4g", 2**32)),
        *(("1.5 GiB", 3 * 2**29), ("10kb", 10_000), ("2TiB", 2**41), ("0", 0)),
    ],
)
def test_bytes(text, number):
    value = read(f"--kv-memory={text}")[0]["kv_memory"]
    assert (value, Bytes(value).share) == (number, None)


@pytest.mark.parametrize(("text", "share"), [("40%", 0.4), ("100%", 1.0), ("1%", 0.01)])
def test_shares(text, share):
    assert read(f"--kv-memory={text}")[0]["kv_memory"].share == share


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0.05", 0.05), ("50ms", 0.05), ("2", 2), ("1.5s", 1.5), ("2m", 120), ("1e-3", 0.001)],
)
def test_times(text, seconds):
    assert read(f"--drain-timeout={text}")[0]["drain_timeout"] == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "ms", "x", "5 days", "5MS", "nan", "infs", "1.2.3s"])
def test_what_is_no_time(text):
    assert "is not a time (0.05, 50ms or 2m)" in str(refusal(f"--drain-timeout={text}"))


@pytest.mark.parametrize("text", ["0%", "101%", "-5%", "%", "x%", "-1", "4 gigs", "", "4,5GB"])
def test_what_is_no_number_of_bytes(text):
    assert "is not a number of bytes" in str(refusal(f"--kv-memory={text}"))


def test_stages_are_a_number_or_halves():
    assert read("--pipeline-parallel-size=3")[0]["pipeline_parallel_size"] == 3
    halves = read("--pipeline-parallel-size=halves")[0]["pipeline_parallel_size"]
    assert halves == HALVES and halves.are_halves and f"{halves}" == "halves"
    for text in ("0", "65", "-2", "half", "2.5"):
        assert "or halves" in refusal(f"--pipeline-parallel-size={text}").cause


def test_share_of_what():
    """A share makes sense of memory alone: a body of 40% is refused."""
    assert "--max-body must be at least 1" in str(refusal("--max-body=40%"))


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ([], False),
        (["--insecure"], True),
        (["--insecure", "yes"], True),
        (["--insecure=off"], False),
        (["--insecure", "FALSE"], False),
        (["--insecure=1"], True),
    ],
)
def test_switches(arguments, value):
    values, positionals, _ = read(*arguments)
    assert (values["insecure"], positionals) == (value, [])


def test_what_is_no_switch():
    assert "is not true or false" in str(refusal("--insecure=maybe"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--served-model-name=a,b"],
        ["--served-model-name", "a", "--served-model-name", "b"],
        ["--served-model-name=a,,b,"],
    ],
)
def test_lists(arguments):
    assert read(*arguments)[0]["served_model_name"] == ["a", "b"]


def test_lists_in_a_file(tmp_path):
    file = tmp_path / "headway.yaml"
    file.write_text("served_model_name: [a, 'b,c']\napi-key: one\n")
    values, _, _ = read("--config", str(file))
    assert values["served_model_name"] == ["a", "b,c"]
    assert values["api_key"] == ["one"]


def test_empty_key_is_no_key():
    """HEADWAY_API_KEY= in a service file must not make the empty key a valid one."""
    assert read(environment={"HEADWAY_API_KEY": ""})[0]["api_key"] == []
    assert read("--api-key=")[0]["api_key"] == []


@pytest.mark.parametrize(
    ("flag", "near"),
    [
        ("--max-modl-len", "--max-model-len"),
        ("--maxmodellen", "--max-model-len"),
        ("--prot=5", "--port"),
        ("--api-keys", "--api-key"),
    ],
)
def test_unknown_flag_names_the_nearest(flag, near):
    error = refusal(flag, "5")
    assert error.cause == f"There is no option {flag.partition('=')[0]}."
    assert error.fix == f"Did you mean {near}?"


def test_flags_are_not_abbreviated():
    assert "There is no option --max-model" in str(refusal("--max-model", "5"))
    assert refusal("--zzzzzzzz").fix == f"See --help=all. {SEE_TABLE}"


def test_unknown_key_names_the_nearest(tmp_path):
    file = tmp_path / "headway.yaml"
    file.write_text("max-modle-len: 5\n")
    error = refusal("--config", str(file))
    assert "there is no option max_modle_len" in error.cause
    assert error.fix == "Did you mean max_model_len?"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"port: [", "is not YAML"),
        (b"\xff\xfe\xff", "is not YAML"),
        (b"host: 2024-13-45", "is not YAML"),
        (b"- port\n", "holds no keys"),
        (b"text", "holds no keys"),
        (b"port: true\n", "key port: True is not an integer"),
        (b"port: 80.5\n", "is not an integer"),
        (b"port: 99999\n", "out of range"),
        (b"host: !!python/object/apply:os.getcwd []\n", "is not YAML"),
    ],
)
def test_files_that_are_refused(tmp_path, content, words):
    file = tmp_path / "headway.yaml"
    file.write_bytes(content)
    assert words in str(refusal("--config", str(file)))


def test_missing_file():
    assert "No such file" in str(refusal("--config", "/nowhere/headway.yaml"))


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--port=65536", "--port must be between 0 and 65535"),
        ("--port=-1", "--port must be between 0 and 65535"),
        ("--max-num-seqs=0", "--max-num-seqs must be between 1 and 4096"),
        ("--max-model-len=0", "--max-model-len must be at least 1"),
        ("--gpu-memory-utilization=1.5", "must be between 0.05 and 1.0"),
        ("--gpu-memory-utilization=nan", "is not a number"),
        ("--gpu-memory-utilization=inf", "is not a number"),
        ("--dtype=int3", "'int3' is not one of auto, bfloat16, float16, float32"),
        ("--log-level=INFO", "is not one of"),
        ("--port", "expected one argument"),
    ],
)
def test_out_of_range_and_not_a_choice(argument, words):
    assert words in str(refusal(argument))


def test_source_is_named():
    assert "HEADWAY_PORT: 'x'" in refusal(environment={"HEADWAY_PORT": "x"}).cause
    assert "--port: 'x'" in refusal("--port=x").cause


# ── generated from the tables ───────────────────────────────────────────────────────────────────

words = st.text(
    st.characters(codec="utf-8", exclude_characters=",", exclude_categories=("Cs",)),
    min_size=1,
    max_size=8,
)


def values_of(table: type, field: dataclasses.Field) -> st.SearchStrategy:
    """Acceptable values of one option."""
    kind, many = value_type(table, field.name)
    rules = field.metadata
    low, high = rules["low"], rules["high"]
    if rules["choices"]:
        one = st.sampled_from(rules["choices"])
    elif kind is Bytes:
        one = st.integers(low if low is not None else -100, 2**50).map(Bytes)
    elif kind is int:
        one = st.integers(low, high)
    elif kind is Stages:
        one = st.integers(1, MOST_STAGES).map(Stages) | st.just(HALVES)
    elif kind in (float, Seconds):
        one = st.floats(low, high, allow_nan=False, allow_infinity=False).map(kind)
    else:
        one = {bool: st.booleans(), str: words}[kind]
    if many:
        return st.lists(one, max_size=3)
    return one | st.just(field.default)


def options_of(table: type) -> st.SearchStrategy:
    return st.builds(table, **{f.name: values_of(table, f) for f in dataclasses.fields(table)})


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.__name__)
@settings(max_examples=40)
@given(data=st.data())
def test_arguments_make_the_same_options_again(table, data):
    options = data.draw(options_of(table))
    chosen, positionals, _ = read_options([table], to_arguments(options), {})
    assert chosen[table] == options
    assert positionals == []


def test_defaults_need_no_arguments():
    assert [to_arguments(table()) for table in TABLES] == [[]] * len(TABLES)
    assert to_arguments(EngineOptions(kv_memory=Bytes(-40))) == ["--kv-memory=40%"]


def test_every_option_has_its_help():
    pages = {table: help_text([table], "all") for table in TABLES}
    faults = [
        f"{table.__name__}.{field.name}: {fault}"
        for table, field in FIELDS
        for fault in faults_of_help(field, pages[table])
    ]
    assert faults == []


def faults_of_help(field, page):
    """What is wrong with what an option says of itself, on the `page` of its table too."""
    text = field.metadata["help"]
    if not text.endswith("."):
        yield "its help ends without a full stop"
    if not (text[0] == text[0].upper() or text.split()[0].isalpha()):
        yield "its help begins small"
    if flag_name(field.name) not in page:
        yield "it is not in the help of its table"
    if environment_name(field.name) != "HEADWAY_" + field.name.upper():
        yield "its variable has another name"


def test_help_pages():
    common = help_text(TABLES)
    assert "--max-model-len" in common
    assert "--block-size" not in common
    everything = help_text(TABLES, "all")
    assert len(everything.splitlines()) == len(fields_of(TABLES))
    about_kv = help_text(TABLES, "kv")
    assert "--kv-memory" in about_kv
    assert "--port" not in about_kv
    assert "--max-num-seqs" in help_text(TABLES, "max-num")
    assert help_text(TABLES, "no such word") == ""


def test_help_lines_tell_unit_choices_and_default():
    lines = {line.split()[0]: line for line in help_text(TABLES, "all").splitlines()}
    assert "--block-size TOKENS" in lines["--block-size"]
    assert "(default 0)" in lines["--quantization-group"]
    assert "(default 0)" in lines["--seed"]
    assert "[auto|cpu|cuda]" in lines["--device"]
    assert "default" not in lines["--max-model-len"]
    assert "repeat or separate by commas" in lines["--api-key"]
    assert "BOOL" not in lines["--insecure"]


def test_options_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineOptions().dtype = "float32"


def test_at_most_101_options():
    """A user gives a model and a goal; many more would be a sign of something else."""
    assert 20 < len(fields_of(TABLES)) < 102


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_option_says_what_to_do_instead(name, tmp_path):
    """By flag, in a file, and in the environment, where it would go unheard."""
    file = tmp_path / "headway.yaml"
    file.write_text(f"{name}: 1\n")
    assert name not in fields_of(TABLES)
    for refused in (
        refusal(flag_name(name)),
        refusal(f"{flag_name(name)}=50ms"),
        refusal("--config", str(file)),
        refusal(environment={environment_name(name): "1"}),
    ):
        assert refused.cause.endswith("that option is gone.") and refused.fix == REMOVED[name]
