"""Options under their old names: as a flag, a YAML key, a variable, an argument of `LLM`."""

import pytest

from headway.config.options import EngineOptions, LogOptions, ServerOptions, read_options
from headway.config.options.field import environment_name, flag_name
from headway.config.resolve import resolve
from headway.llm import make_options
from resolve_cases import machine, model

SERVE = (ServerOptions, EngineOptions, LogOptions)
PLACES = ("flag", "file", "environment", "LLM")
ENGINE_CASES = [
    ({"speculate": "off"}, "off", 8),
    ({"speculate": "auto"}, "lookup,suffixes,forced,lookahead", 8),
    ({"speculate": "lookup"}, "lookup", 8),
    ({"speculate": "suffixes"}, "suffixes", 8),
    ({"speculate": "forced"}, "forced", 8),
    ({"speculate": "lookahead"}, "lookahead", 8),
    ({"speculate": "forced, lookup,suffixes", "max_drafts": 5}, "forced,lookup,suffixes", 5),
    ({"speculate": "auto", "max_drafts": 64, "draft_model": "small"},
     "lookup,suffixes,forced,draft", 64),
    ({"speculate": "draft", "draft_model": "small"}, "draft", 8),
]  # fmt: skip
"""Engine options by their old names → `speculate` and `max_drafts` of `/stats`."""


def read(place, given, folder):
    """Option tables of `headway serve`, or of `LLM`, from options given in one place."""
    if place == "LLM":
        return {EngineOptions: make_options(given)}
    arguments, environment = [], {}
    if place == "flag":
        arguments = [f"{flag_name(name)}={value}" for name, value in given.items()]
    elif place == "environment":
        environment = {environment_name(name): str(value) for name, value in given.items()}
    else:
        file = folder / "headway.yaml"
        file.write_text("".join(f'{name}: "{value}"\n' for name, value in given.items()))
        arguments = ["--config", str(file)]
    return read_options(SERVE, arguments, environment)[0]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("given", "sources", "most"), ENGINE_CASES)
def test_an_old_name_has_its_meaning(place, given, sources, most, tmp_path):
    options = read(place, given, tmp_path)[EngineOptions]
    shown = resolve(options, machine(), model())[0].told()
    assert (shown["speculate"], shown["max_drafts"]) == (sources, str(most))


@pytest.mark.parametrize("place", [place for place in PLACES if place != "LLM"])
def test_an_old_switch_has_its_meaning(place, tmp_path):
    """`LLM` has no gate, and no such option."""
    default = ServerOptions()
    assert read(place, {"kv_ungated": "false"}, tmp_path)[ServerOptions] == default
    assert read(place, {"kv_ungated": "true"}, tmp_path)[ServerOptions] != default
    for flags, same in ((["--kv-ungated"], False), (["--no-kv-ungated"], True)):
        assert (read_options(SERVE, flags, {})[0][ServerOptions] == default) == same
