"""The run's storage loses its id between two starts of a job of four."""

import json
import shutil

import pytest
from tier_disks import COUNT, Place, restored, saved
from tier_scenarios import TWICE

import t5ckpt

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


@pytest.mark.parametrize('lost', [None, 0])
def test_a_start_writes_the_id_again(four, tmp_path, lost):
    """Any disk with a save of the run is enough; that of process 0 may be lost, too."""
    place = Place(tmp_path)
    saved(four, place, [1], persist=[1])
    saved(four, place, [2], persist=[])
    (identity,) = {json.loads((disk / '.t5ckpt' / 'tier.json').read_text())['id'] for disk in place.disks}
    (place.run / '.t5ckpt' / 'run_id').unlink()
    if lost is not None:
        shutil.rmtree(place.disks[lost])
    assert [answer['step'] for answer in restored(four, place, persist=[])] == [2] * COUNT
    assert (place.run / '.t5ckpt' / 'run_id').read_text() == identity


def test_a_deleted_run_is_refused(four, tmp_path):
    place = Place(tmp_path)
    saved(four, place, [1])
    shutil.rmtree(place.run)
    place.begin(four, TWICE)
    assert all('as if it was deleted' in text for _, text in four.errors('tiers_restore'))
    four.run('tiers_close')
    assert t5ckpt.all_steps(place.run) == []
