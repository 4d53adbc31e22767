"""A pair that has met."""

from __future__ import annotations

import pytest

from tests.unit.connector.scenario import World


@pytest.fixture
def world() -> World:
    """Prefill and decode after their handshake."""
    world = World()
    world.net.advance(1.0)
    return world
