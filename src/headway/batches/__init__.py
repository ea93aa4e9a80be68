"""Files and batches over any endpoints: lines, life cycle, `/v1/files` and `/v1/batches`.

A server runs lines on its engine, a gateway on its upstreams, `headway batch` without a server.
"""

from pathlib import Path

from headway.batches.files.store import Files
from headway.batches.host import BatchHost
from headway.batches.runner import Runner
from headway.batches.store import Batches
from headway.edge.database import Database, default_folder


def open_runner(state: BatchHost) -> Runner:
    """Return the runner of batches on the data folder of the options; no file is created yet.

    Without an option, all but one of a user's processes have a folder named by their port.
    """
    options = state.options
    if options.data_dir:
        database = Database(Path(options.data_dir).expanduser())
    else:
        folder, has_port = default_folder(), options.port and not options.uds
        database = Database(folder, folder / f"port-{options.port}" if has_port else None)
    return Runner(state, Batches(Files(database, state.clock)))
