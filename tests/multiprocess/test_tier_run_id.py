"""The run's storage is emptied between two starts of a job of four: training goes on from the disks."""

import json
import shutil

import pytest
from tier_disks import COUNT, Place, saved
from tier_scenarios import TWICE

import t5ckpt

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


@pytest.mark.parametrize('lost', [None, 0])
@pytest.mark.parametrize('emptied', ['', '.t5ckpt/run_id'])
def test_an_emptied_run_goes_on(four, tmp_path, lost, emptied):
    """The disk of process 0 may be lost, too. The next upload writes the id again."""
    place = Place(tmp_path)
    saved(four, place, [1])
    (identity,) = {json.loads((disk / '.t5ckpt' / 'tier.json').read_text())['id'] for disk in place.disks}
    if emptied:
        (place.run / emptied).unlink()
    else:
        shutil.rmtree(place.run)
    if lost is not None:
        shutil.rmtree(place.disks[lost])
    place.begin(four, TWICE)
    answers = four.run('tiers_restore')
    assert [(answer['step'], answer['bytes'][2]) for answer in answers] == [(1, 0)] * COUNT
    assert four.run('tiers_save', 2) == [2] * COUNT
    assert four.run('tiers_wait', 2) == [None] * COUNT
    four.run('tiers_close')
    assert t5ckpt.latest_step(place.run) == 2
    assert (place.run / '.t5ckpt' / 'run_id').read_text() == identity
