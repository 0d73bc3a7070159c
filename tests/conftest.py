"""Shared fixtures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.worlds.world import Worlds


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """Processes that distributed cases run in; made when first asked for, ended with the session."""
    from tests.worlds.world import Worlds

    made = Worlds()
    yield made
    made.close()
