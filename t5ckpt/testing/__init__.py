"""Tools for tests of checkpointing, in this project and in others: faults, a clock, states, a test suite for storages."""

from __future__ import annotations

from t5ckpt.testing.clock import FakeClock
from t5ckpt.testing.conformance import StorageConformance
from t5ckpt.testing.faulty import FaultyStorage
from t5ckpt.testing.states import mixed_state, t5x_state

__all__ = ['FakeClock', 'FaultyStorage', 'StorageConformance', 'mixed_state', 't5x_state']
