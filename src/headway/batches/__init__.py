"""Files and batches over any endpoints: their lines, their life, `/v1/files` and `/v1/batches`.

A server runs lines on its engine, a gateway on its upstreams, the offline verb without either. It
imports core and edge.
"""

from pathlib import Path

from headway.batches.files.store import Files
from headway.batches.host import Host
from headway.batches.runner import Runner
from headway.batches.store import Batches
from headway.edge.database import Database, default_folder


def open_runner(state: Host) -> Runner:
    """The runner of a server's batches, on the data folder of its options; nothing is made yet."""
    folder = state.options.data_dir
    database = Database(Path(folder).expanduser() if folder else default_folder())
    return Runner(state, Batches(Files(database, state.clock)))
