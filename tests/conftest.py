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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where tests run in several processes: those of one folder that share worlds stay together, and those of one file."""
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            of_worlds = "worlds" in getattr(item, "fixturenames", ())
            together = f"worlds of {item.path.parent.name}" if of_worlds else str(item.path)
            item.add_marker(pytest.mark.xdist_group(together))


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """Processes that distributed cases run in; made when first asked for, ended with the session."""
    from tests.worlds.world import Worlds

    made = Worlds()
    yield made
    made.close()
