"""What all unit tests share: hypothesis settings that repeat, and the folder of shared data.

`HEADWAY_HYPOTHESIS=explore` draws new examples at each run; the default draws the same ones.
"""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "repeat", deadline=None, derandomize=True, database=None, suppress_health_check=SLOW
)
settings.register_profile("explore", deadline=None, database=None, suppress_health_check=SLOW)
settings.load_profile(os.environ.get("HEADWAY_HYPOTHESIS", "repeat"))

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def shared() -> Path:
    """The data folder beside the repository, or the one `HEADWAY_SHARED` names."""
    folder = Path(os.environ.get("HEADWAY_SHARED") or REPOSITORY.parent / "shared")
    if not (folder / "data").is_dir():
        pytest.skip(f"no shared data: set HEADWAY_SHARED ({folder} has no data folder)")
    return folder / "data"
