"""What generation_config.json may set: odd values are an error that names file and field."""

import json
from pathlib import Path

import pytest

from headway.core.errors import ModelError
from headway.spec.model_files import sampling_defaults
from headway.spec.read import eos_ids

ODD = [
    '{"temperature": "hot"}',
    '{"temperature": NaN}',
    '{"temperature": Infinity}',
    '{"temperature": -1}',
    '{"temperature": true}',
    '{"temperature": {"a": 1}}',
    '{"temperature": 1' + "0" * 400 + "}",
    '{"top_p": [0.5]}',
    '{"top_p": 7}',
    '{"top_k": -5}',
    '{"top_k": 2.5}',
    '{"top_k": "all"}',
    '{"min_p": 3}',
    '{"repetition_penalty": 0}',
    '{"repetition_penalty": -Infinity}',
]


@pytest.mark.parametrize("text", ODD)
def test_an_odd_value_is_named_with_its_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    (field,) = json.loads(text)
    with pytest.raises(ModelError) as refused:
        sampling_defaults(tmp_path)
    assert refused.value.cause.startswith("generation_config.json: ")
    assert field in refused.value.cause and field in refused.value.fix


def test_values_that_a_request_may_have_are_taken(tmp_path: Path) -> None:
    told = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0, "repetition_penalty": 1.1}
    (tmp_path / "generation_config.json").write_text(json.dumps({**told, "max_length": 20}))
    assert sampling_defaults(tmp_path) == told


@pytest.mark.parametrize("ids", ["</s>", -1, [1, "2"], [[1]], 2**40, True, 1.5])
def test_end_tokens_are_named_with_the_file_they_stand_in(ids: object) -> None:
    with pytest.raises(ModelError, match=r"^generation_config.json: eos_token_id"):
        eos_ids({}, {"eos_token_id": ids})
    with pytest.raises(ModelError, match=r"^config.json: eos_token_id"):
        eos_ids({"eos_token_id": ids}, {})
