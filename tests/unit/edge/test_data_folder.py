"""A data folder in which something is not ours: it is named, and what it leads to is untouched."""

import os
import sqlite3
from pathlib import Path

import pytest

from headway.core.errors import StorageError
from headway.edge.database import Database


async def open_folder(folder: Path) -> None:
    database = Database(folder)
    try:
        await database.run(lambda connection: connection.execute("SELECT 1"))
    finally:
        await database.close()


@pytest.mark.parametrize("name", ["headway.db", "headway.db-wal"])
async def test_a_pipe_in_the_place_of_the_database_is_named(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(StorageError, match=f"{name} in it is not a regular file"):
        await open_folder(tmp_path)


async def test_files_behind_a_link_are_not_removed(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "data"
    outside.mkdir()
    folder.mkdir()
    precious = outside / ("file-" + "0" * 32)
    precious.write_text("precious")
    (folder / "files").symlink_to(outside)
    with pytest.raises(StorageError, match="files in it is a link"):
        await open_folder(folder)
    assert precious.read_text() == "precious"


async def test_only_what_has_our_names_is_swept(tmp_path: Path) -> None:
    await open_folder(tmp_path)
    ours = tmp_path / "files" / ("file-" + "a" * 32)
    upload = tmp_path / "files" / ("file-" + "b" * 32 + ".part")
    other, folder = tmp_path / "files" / "notes.txt", tmp_path / "files" / ("file-" + "c" * 32)
    for path in (ours, upload, other):
        path.write_text("x")
    folder.mkdir()
    await open_folder(tmp_path)
    assert not ours.exists() and not upload.exists() and other.exists() and folder.is_dir()
    with sqlite3.connect(tmp_path / "headway.db") as connection:
        assert connection.execute("SELECT count(*) FROM files").fetchone() == (0,)
