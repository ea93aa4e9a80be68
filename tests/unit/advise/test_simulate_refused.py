"""What a simulation cannot know without a measurement is refused by name."""

import pytest

from headway.cli.main import main


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
    told = capsys.readouterr()
    name, _, value = flag.partition("=")
    assert f"{name} {value}: what its steps take is known by measuring" in told.out + told.err
    assert status == (2 if verb == ("simulate",) else 1), "plan says so of its one machine"
