"""One process fails, disagrees, hangs: all are told who and why, and nothing half-done is seen."""

import os
import pathlib
import signal
import time

import pytest

import t5ckpt

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def leftovers(directory: pathlib.Path) -> list[str]:
    return [path.name for path in directory.iterdir() if '.tmp-' in path.name]


@pytest.mark.parametrize(
    ('process', 'operation', 'key'),
    [
        (2, 'write', 'integrity.2.json'),
        (3, 'write_chunk', 'checkpoint_1'),
        (0, 'make_dir', 'checkpoint_1'),
        (0, 'write', 'integrity.0.json'),
        (0, 'write', '/checkpoint'),
        (0, 'sync_tree', 'checkpoint_1'),
        (0, 'publish', 'checkpoint_1'),
    ],
)
def test_a_fault_in_one_process_fails_all(four, tmp_path, process, operation, key):
    errors = four.errors('save_with_fault', tmp_path, process, operation, key)
    assert errors[process][0] == 'NoSpaceError'
    for index, (kind, text) in enumerate(errors):
        if index != process:
            assert kind == 'RemoteError'
            assert f'process {process}: NoSpaceError: ' in text
            assert 'the save of step 1' in text
    assert t5ckpt.all_steps(tmp_path) == []
    assert leftovers(tmp_path) == []
    four.run('save', tmp_path)
    four.run('restore', tmp_path)


@pytest.mark.parametrize(
    ('what', 'words'),
    [
        ('step', ['-step: 1', '+step: 2']),
        ('directory', ['+directory: ', '-other']),
        ('shape', ['-target/small: float32 (64,)', '+target/small: float32 (128,)']),
        ('tree', ['+target/more: float32 (64,)']),
        ('dtype', ['+target/small: bfloat16 (64,)']),
        ('devices', ['-target/both: float32', '+target/both: float32']),
        ('sharding', ['-target/both: float32', '+target/both: float32']),
    ],
)
def test_disagreement_is_shown_before_anything_is_written(four, tmp_path, what, words):
    directory = tmp_path / 'run'
    errors = four.errors('save_differently', directory, what)
    for kind, text in errors:
        assert kind == 'DisagreementError'
        assert 'process 3' in text
        assert all(word in text for word in words)
    assert [path.name for path in tmp_path.iterdir()] == []
    four.run('save', directory)


def test_a_leaf_that_one_process_cannot_save(four, tmp_path):
    errors = four.errors('save_differently', tmp_path, 'leaf')
    assert errors[3][0] == 'UnsupportedLeafError'
    assert all(kind == 'RemoteError' and 'process 3: UnsupportedLeafError' in text for kind, text in errors[:3])
    assert list(tmp_path.iterdir()) == []


def test_host_local_arrays_are_refused_with_the_cure(four, tmp_path):
    for kind, text in four.errors('save_local', tmp_path):
        assert kind == 'DisagreementError'
        assert '-here/0: float32 (4, 4)' in text
        assert '+here/0: float32 (4, 4)' in text
        assert ', all of process 0' in text
        assert ', all of process 1' in text
        assert 'out_shardings' in text
        assert 'jax.device_get' in text
        assert 'everywhere:' not in text
        # Two lines of each leaf would hide the cure.
        assert len(text.splitlines()) < 30
    assert list(tmp_path.iterdir()) == []


def test_restoring_what_is_not_there(four, tmp_path):
    errors = four.errors('restore', tmp_path)
    assert errors[0][0] == 'CheckpointNotFoundError'
    assert all(kind == 'RemoteError' and 'no complete checkpoint' in text for kind, text in errors[1:])


def test_memory_storage_is_refused_for_several_processes(four):
    for kind, text in four.errors('save', 'memory://x'):
        assert kind == 'UnsupportedTopologyError'
        assert 'share' in text


def test_a_damaged_chunk_fails_the_restore_of_all(four, tmp_path):
    four.run('save', tmp_path)
    os.truncate(next((tmp_path / 'checkpoint_1' / 'target.both').glob('0.*')), 100)
    errors = four.errors('restore', tmp_path)
    assert 'CorruptCheckpointError' in [kind for kind, _ in errors]
    assert all('has 100 bytes' in text for _, text in errors)


def test_a_step_that_is_replaced_while_all_read_it_is_not_damaged(four, tmp_path):
    for seed, name in enumerate(('run', 'other')):
        four.run('save', tmp_path / name, 1, seed)
    errors = four.errors('restore_replaced', tmp_path / 'run', tmp_path / 'other')
    assert all('was replaced while it was being read' in text for _, text in errors), errors
    assert not any('Corrupt' in kind + text for kind, text in errors), errors


def test_a_restore_does_not_disturb_the_save_before_it(four, tmp_path):
    """Nothing is committed that one process failed to write."""
    kinds = four.run('restore_between', tmp_path)
    assert [kind for kind, _ in kinds] == ['RemoteError', 'NoSpaceError', 'RemoteError', 'RemoteError']
    assert all(steps == [1] for _, steps in kinds)


def test_no_collective_before_all_have_read(four, tmp_path):
    assert four.run('share_after_failure', tmp_path) == ['RemoteError', 'StorageError', 'RemoteError', 'RemoteError']


def test_a_restore_to_local_arrays_warns(four, tmp_path):
    four.run('save', tmp_path)
    for answer in four.run('restore_local', tmp_path):
        assert answer == ['target/both: the template gives no sharding over the devices of all processes', True]


def test_restoring_different_steps(four, tmp_path):
    four.run('many_saves', tmp_path, 4)
    errors = four.errors('restore_another_step', tmp_path)
    assert errors[3][0] == 'DisagreementError'
    assert all('step 1 of' in text and 'step 0 of' not in text for _, text in errors)


@pytest.mark.parametrize(
    ('name', 'values'),
    [('verify', ('quick', 'full')), ('share_replicated', (True, False)), ('follow_links', (False, True))],
)
@pytest.mark.parametrize('action', ['save', 'restore'])
def test_an_option_that_differs_is_named_with_both_values(four, tmp_path, action, name, values):
    four.run('save', tmp_path)
    each = [{name: values[index > 1]} for index in range(4)]
    for kind, text in four.errors(f'{action}_with', tmp_path, each=each):
        assert kind == 'DisagreementError'
        assert f'{name} is {values[0]} in processes 0, 1, and {values[1]} in processes 2, 3. Every process' in text


def test_an_initial_checkpoint_in_some_processes_only(four, tmp_path):
    four.run('save_small', tmp_path / 'old', [1])
    each = [str(tmp_path / 'old') if index else None for index in range(4)]
    for _, text in four.errors('come_back', tmp_path / 'new', each=each):
        assert 'initial_checkpoint' in text
        assert '[False, True, True, True]. Every process of the job has to pass it.' in text


def test_only_a_passed_deadline_is_a_time_out(four, tmp_path):
    for index, (raised, votes) in enumerate(four.run('coordination_errors', tmp_path)):
        (again, text, code), *late = raised
        assert (again, code) == ('CoordinationError', 'ALREADY_EXISTS')
        assert "the test, in 'own/" in text
        assert 'already exists' in text
        assert [kind for kind, *_ in late] == ['ProcessMissingError'] * 3
        others = ', '.join(str(other) for other in range(4) if other != index)
        for who, (_, text, _) in zip(('process 1', 'process 0', f'processes {others}'), late, strict=True):
            assert f'{who} did not arrive at' in text
            assert 'within 1 s' in text
        assert votes == [0, 1, 2, 3]


def test_a_process_that_hangs_is_named_and_comes_back(four, tmp_path):
    """Three time out and name the fourth; when it goes on it fails, too, and the next save of all is well."""
    four.signal(2, signal.SIGSTOP)
    four.start('save_slowly', tmp_path, 2.0)
    time.sleep(4)
    four.signal(2, signal.SIGCONT)
    answers = four.answers()
    for index, (error, step) in enumerate(answers):
        assert error[0] == 'ProcessMissingError', answers
        if index != 2:
            assert "process 2 did not arrive at 'agree' within 2 s" in error[1]
            assert 'DEADLINE_EXCEEDED' not in error[1]
        assert step == 2
    assert t5ckpt.all_steps(tmp_path) == [2]
