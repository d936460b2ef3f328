"""A storage that records when chunk files are written."""

import time

from t5ckpt.testing import FaultyStorage


class TimedStorage(FaultyStorage):
    """Keeps in ``times``, by ``time.monotonic``, when the write of each file of the array ``w`` began."""

    def __init__(self, inner):
        super().__init__(inner)
        self.times = []

    def before_operation(self, name, key):
        super().before_operation(name, key)
        if name == 'write' and '/w/' in key:
            self.times.append(time.monotonic())
