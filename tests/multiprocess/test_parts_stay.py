"""A job of one process starts on the local directory of a job of four: it renames and drops nothing that the four need."""

import logging

import pytest
import scenarios
from tier_disks import COUNT, restored, saved
from tier_scenarios import TWICE

import t5ckpt
from t5ckpt.errors import StepMismatchWarning, UnsupportedTopologyError

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def alone(place):
    """The checkpointer of a job of one process on disk 1."""
    state, tier = scenarios.state(2, leaves=TWICE), t5ckpt.LocalTier(place.disks[1], persist=t5ckpt.SaveAt([]))
    return t5ckpt.Checkpointer(state, checkpoints_dir=place.run, local=tier), state


def test_a_start_without_a_save_leaves_the_newer_part(four, place, caplog):
    """Step 1 is in the bucket; step 2 is only on the disks, and waits for its upload."""
    saved(four, place, [1, 2], persist=[1])
    for disk in place.disks:
        (disk / '.t5ckpt' / 'to_persist').mkdir(exist_ok=True)
        (disk / '.t5ckpt' / 'to_persist' / '2').touch()
    for restore in (lambda ck: t5ckpt.restore_or_init(ck, None), lambda ck: ck.restore()):
        caplog.clear()
        ck, _ = alone(place)
        with caplog.at_level(logging.WARNING), ck:
            restore(ck)
            assert ck.all_steps() == [1]
        texts = [
            'local step 2 was not restored: 4 processes saved it, and this job has 1',
            'local steps [2] are not restored',
        ]
        assert [any(text in line for text in texts) for line in caplog.messages].count(True) == 1
        assert not [line for line in caplog.messages if 'damaged' in line]
    assert place.steps_on(1) == ['checkpoint_1', 'checkpoint_2']
    answers = restored(four, place, persist=[])
    assert [answer['step'] for answer in answers] == [2] * COUNT
    assert t5ckpt.all_steps(place.run) == [1, 2], 'the upload of step 2 still waited'


def test_a_save_of_the_step_itself_renames_the_part(four, place, caplog):
    saved(four, place, [1, 2], persist=[1])
    (place.disks[1] / '.t5ckpt' / 'to_persist').mkdir(exist_ok=True)
    (place.disks[1] / '.t5ckpt' / 'to_persist' / '2').touch()
    ck, state = alone(place)
    with caplog.at_level(logging.WARNING), ck:
        t5ckpt.restore_or_init(ck, None)
        with pytest.warns(StepMismatchWarning):
            assert ck.save(state, step=2).step == 2
    assert any('which not all processes of the job have, was renamed' in line for line in caplog.messages)
    assert not [line for line in caplog.messages if 'Skipping' in line]
    assert [name[:22] for name in place.steps_on(1)] == ['checkpoint_1', 'checkpoint_2', 'checkpoint_2.damaged-1']
    assert t5ckpt.all_steps(place.run) == [1, 2], 'the upload of the part was owed'


def test_parts_alone_are_an_error_and_no_fresh_start(four, place):
    saved(four, place, [1], persist=[])
    ck, state = alone(place)
    with (
        ck,
        pytest.raises(
            UnsupportedTopologyError, match=r'step 1: 4 processes saved it, and this job has 1\. Start as many'
        ),
    ):
        t5ckpt.restore_or_init(ck, lambda: state)
    assert place.steps_on(1) == ['checkpoint_1']
