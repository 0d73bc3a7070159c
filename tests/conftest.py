"""Shared fixtures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.worlds.world import Worlds

# How long an example takes says how busy the machine is, not whether the code is right.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """Processes that distributed cases run in; made when first asked for, ended with the session."""
    from tests.worlds.world import Worlds

    made = Worlds()
    yield made
    made.close()
