"""Batches: their lines, their life, and `/v1/batches`; the offline verb runs the same lines."""

from pathlib import Path

from headway.edge.database import Database, default_folder
from headway.server.batches.runner import Runner
from headway.server.batches.store import Batches
from headway.server.files.store import Files
from headway.server.models import State


def open_runner(state: State) -> Runner:
    """The runner of a server's batches, on the data folder of its options; nothing is made yet."""
    folder = state.options.data_dir
    database = Database(Path(folder).expanduser() if folder else default_folder())
    return Runner(state, Batches(Files(database, state.clock)))
