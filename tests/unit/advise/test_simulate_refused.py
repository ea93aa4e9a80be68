"""What a simulation cannot know without a measurement is refused by name."""

from collections.abc import Callable

import msgspec
import pytest
from msgspec.structs import replace

from headway.advise.simulate.truth import check_measured_alone
from headway.cli.main import main
from headway.config.options import EngineOptions
from headway.config.options.field import Bytes
from headway.core.errors import UsageError
from headway.planning import plan_settings
from headway.spec.embedded import model_folder
from headway.telemetry.calibration import fingerprint
from simulated_house import measured_here


@pytest.mark.parametrize(
    "flag",
    [
        "--tensor-parallel-size=3",
        "--pipeline-parallel-size=2",
        "--decode-context-parallel-size=2",
        "--kv-read=25%",
        "--kv-keep=25%",
    ],
)
@pytest.mark.parametrize("verb", [("simulate",), ("plan", "--slo=ttft=1s", "--machines=here")])
def test_a_roofline_leaves_no_option_out_in_silence(verb, flag, capsys):
    status = main([*verb, "headway-tiny", "--kv-memory=32MiB", flag, "--num-requests=4"])
    printed = capsys.readouterr()
    name, _, value = flag.partition("=")
    assert (
        f"{name} {value}: the time of its steps can only be measured" in printed.out + printed.err
    )
    assert status == (2 if verb == ("simulate",) else 1), "plan says so of its one machine"


@pytest.fixture
def calibrated(tmp_path) -> Callable[[EngineOptions], str]:
    """A calibration's file, of a server that such options start here."""

    def write(options: EngineOptions) -> str:
        result = measured_here(options)
        spec, _, _, _ = plan_settings(model_folder(None), options)
        path = tmp_path / "here.json"
        path.write_bytes(msgspec.json.encode(replace(result, fingerprint=fingerprint(spec))))
        return str(path)

    return write


MEMORY = Bytes(2**25)
HAS = {
    "tensor_parallel_size": ("1", "3"),
    "pipeline_parallel_size": ("1", "2"),
    "decode_context_parallel_size": ("1", "2"),
    "kv_read": ("1.0", "0.25"),
    "kv_keep": ("1", "0.25"),
}


@pytest.mark.parametrize("name", HAS)
@pytest.mark.parametrize("transfer", [[], ["--transfer"]])
def test_a_calibration_of_a_server_without_it_is_refused(name, transfer, calibrated, capsys):
    """Also where parts are scaled: the roofline does not know what it does to a step."""
    path = calibrated(EngineOptions(kv_memory=MEMORY))
    flag, value = "--" + name.replace("_", "-"), HAS[name][1]
    given = [*transfer, flag, value, "--kv-memory=32MiB", "--num-requests=4"]
    assert main(["simulate", "headway-tiny", "--calibration", path, *given]) == 2
    had, has = HAS[name]
    assert f"The calibration is of {flag} {had}; here it is {has}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "has",
    [{"kv_read": "25%"}, {"kv_keep": "25%"}, {"tensor_parallel_size": 3}, {}],
    ids=["kv_read", "kv_keep", "ranks", "none"],
)
def test_a_calibration_of_a_server_that_has_it_is_simulated(has, calibrated, capsys):
    """And is no calibration of one that has not."""
    path = calibrated(EngineOptions(kv_memory=MEMORY, **has))
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in has.items()]
    command = ["simulate", "headway-tiny", "--calibration", path, "--kv-memory=32MiB"]
    load = ["--rate=4", "--num-requests=8", "--input-len=20", "--output-len=4"]
    assert main([*command, *load, *flags]) == 0, capsys.readouterr().err
    assert (main([*command, *load]) == 2) == bool(has)


def test_a_calibration_that_tells_nothing_of_it_is_of_a_server_without(calibrated):
    settings = measured_here(EngineOptions()).settings
    before = {name: value for name, value in settings.items() if name not in HAS}
    old = replace(measured_here(EngineOptions()), settings=before)
    check_measured_alone(old, settings)
    with pytest.raises(UsageError, match=r"of --kv-read 1\.0; here it is 0\.25"):
        check_measured_alone(old, {**settings, "kv_read": "0.25"})
