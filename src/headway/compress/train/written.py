"""A trained student as a folder: its config, its weights in the type they had, its text files."""

from pathlib import Path

from headway.compress.folder import copy_text_files, write_model
from headway.compress.train.model import TrainedModel
from headway.core.model_spec import read_json


def write_student(student: TrainedModel, folder: Path, out: Path) -> None:
    """Fill `out`; `folder` is what the student was before."""
    assert not any(linear.fake for linear in student.linears.values()), "not written yet"
    copy_text_files(folder, out)
    config = read_json(folder / "config.json")
    write_model(out, config, student.tensors(), student.spec.dtype)
