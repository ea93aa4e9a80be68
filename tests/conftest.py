"""Fixtures that tests of several rooms share, and hypothesis settings that repeat.

`HEADWAY_HYPOTHESIS=explore` draws new examples at each run; the default draws the same ones.
"""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "repeat", deadline=None, derandomize=True, database=None, suppress_health_check=SLOW
)
settings.register_profile("explore", deadline=None, database=None, suppress_health_check=SLOW)
settings.load_profile(os.environ.get("HEADWAY_HYPOTHESIS", "repeat"))

# Modules whose assertions tell their values as a test's do.
SHARED = (
    "engine_world cached_world admission_house batch_runs batch_calls grammar_engine resolve_cases "
    "telemetry_cases drive parity.cobatch"
)
pytest.register_assert_rewrite(*SHARED.split())

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))  # last: its modules hide none of ours


@pytest.fixture(scope="session")
def shared() -> Path:
    """The shared data beside the repository, or where HEADWAY_SHARED says it is."""
    folder = Path(os.environ.get("HEADWAY_SHARED") or ROOT / ".." / "shared") / "data"
    if not folder.is_dir():
        pytest.skip(f"no shared data at {folder}; set HEADWAY_SHARED to its parent")
    return folder.resolve()


@pytest.fixture(scope="session")
def one_thread() -> None:
    """Compute with one thread of torch, as the executor does for models this small."""
    import torch

    torch.set_num_threads(1)
