"""Files and batches over any endpoints: their lines, their life, `/v1/files` and `/v1/batches`.

A server runs lines on its engine, a gateway on its upstreams, the offline verb without either. It
imports core and edge.
"""

from pathlib import Path

from headway.batches.files.store import Files
from headway.batches.host import BatchHost
from headway.batches.runner import Runner
from headway.batches.store import Batches
from headway.edge.database import Database, default_folder


def open_runner(state: BatchHost) -> Runner:
    """The runner of a server's batches, on the data folder of its options; nothing is made yet.

    Of several processes of a user that name none, each but one has a folder of its port.
    """
    options = state.options
    if options.data_dir:
        database = Database(Path(options.data_dir).expanduser())
    else:
        folder, has_port = default_folder(), options.port and not options.uds
        database = Database(folder, folder / f"port-{options.port}" if has_port else None)
    return Runner(state, Batches(Files(database, state.clock)))
