"""The locks of directories: an interrupted close releases nothing that belongs to another caller."""

import os
import sys

import pytest

from t5ckpt.storage.directory_lock import lock_directory


def test_a_close_that_is_interrupted_closes_no_foreign_descriptor(tmp_path):
    """The interrupt comes when os.close has returned."""

    def interrupt(frame, event, function):
        if event == 'c_return' and function is os.close:
            raise KeyboardInterrupt

    lock = lock_directory(str(tmp_path))
    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            lock.close()
    finally:
        sys.setprofile(None)
    again = lock_directory(str(tmp_path))
    lock.close()
    assert again.is_current()
    again.close()
