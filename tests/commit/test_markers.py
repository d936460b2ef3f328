"""Markers in a bucket: writers, deleters and readers that are stopped, killed, or late, with the other one acting meanwhile."""

import errno
import time
import uuid

import numpy as np
import pytest

import t5ckpt
from t5ckpt.catalog.layouts import ListedStep
from t5ckpt.catalog.listing import steps_in
from t5ckpt.commit.deletion import delete_step, hide, rename_damaged
from t5ckpt.commit.garbage_collection import collect
from t5ckpt.commit.holds import hold, pin_in
from t5ckpt.commit.markers import HIDE, Marker, is_about_to_hide, seconds_for
from t5ckpt.commit.retention import Retention, remove_positions
from t5ckpt.commit.taken_steps import StepTakenError
from t5ckpt.commit.transaction import Transaction
from t5ckpt.errors import AccessDeniedError, StepKeptError, StorageError
from t5ckpt.format.manifest import split_facts
from t5ckpt.format.names import TRAIN_DS_PREFIX, parse_marker
from t5ckpt.policies import KeepAll, KeepLatest
from t5ckpt.storage import open_storage
from t5ckpt.testing import FakeClock, FaultyStorage

HORIZON = 3600
STEP = ListedStep(1, 'checkpoint_1')
STATE = {'w': np.ones(8, np.float32)}


class Killed(BaseException):
    """The process is dead."""


def new_run():
    return open_storage(f'memory://{uuid.uuid4().hex}/run')


def save(place, value, clock=time.time, step=1, dataset_iterator=None, **options):
    state = {'w': np.full(8, value, np.float32)}
    with t5ckpt.Checkpointer(
        state, None, place, dataset_iterator, options=t5ckpt.CheckpointerOptions(clock=clock, inline_bytes=0)
    ) as ck:
        return ck.save(state, step=step, **options)


def markers(run):
    return run.names('.t5ckpt/busy', '')


def has(run, value, step=1):
    assert t5ckpt.all_steps(run.url()) == [step]
    assert t5ckpt.load_t5x_checkpoint(run.url())['w'][0] == value
    assert t5ckpt.verify(run.url(), full=True).ok
    return True


class Acting(FaultyStorage):
    """The storage of a process that is stopped before one request, while ``act`` runs."""

    def __init__(self, inner, name, key, act):
        super().__init__(inner)
        self._at = name, key
        self.act = act

    def before_operation(self, name, key):
        super().before_operation(name, key)
        if self.act is not None and name in self._at[0] and self._at[1] in key:
            act, self.act = self.act, None
            act()


MANIFEST_PUT = ('replace', '/checkpoint')
LIST_PUT = ('write', 'integrity.0.json')


@pytest.mark.parametrize('stops_at', [MANIFEST_PUT, LIST_PUT])
@pytest.mark.parametrize('value', [1.0, 2.0])
@pytest.mark.parametrize('seconds', [10, HORIZON + 1, 3 * HORIZON])
def test_the_first_manifest_counts(stops_at, value, seconds):
    """Another process has saved the step meanwhile. Its checkpoint stays; also where both have the same manifest."""
    run, clock = new_run(), FakeClock()

    def act():
        clock.advance(seconds)
        assert save(run, value, clock) is not None

    late = Acting(run, *stops_at, act)
    if stops_at == LIST_PUT and seconds > HORIZON:
        with pytest.raises(StorageError, match='Try again'):
            save(late, 1.0, clock)
    else:
        assert save(late, 1.0, clock) is None
    assert has(run, value)
    clock.advance(3 * HORIZON)
    collect(run, clock)
    assert has(run, value)
    assert not markers(run)
    assert {key.split('/')[1] for key, _ in run.walk('checkpoint_1')} == {
        'checkpoint',
        *run.names('checkpoint_1', 't5ckpt-'),
    }
    assert len(run.names('checkpoint_1', 't5ckpt-')) == 1


@pytest.mark.parametrize('stops_at', [MANIFEST_PUT, LIST_PUT])
def test_a_writer_whose_files_were_collected_is_not_told_that_it_saved(stops_at):
    run, clock = new_run(), FakeClock()

    def act():
        clock.advance(2 * HORIZON + 2)
        collect(run, clock)
        assert not run.names('checkpoint_1', 't5ckpt-')

    with pytest.raises(StorageError, match='took 7202 s, and at most 3600 s are allowed, so it was given up'):
        save(Acting(run, *stops_at, act), 1.0, clock)
    assert steps_in(run) == []
    assert save(run, 2.0, clock) is not None
    assert has(run, 2.0)


def test_a_manifest_within_the_second_horizon_is_there_to_stay():
    """It was sent in time. Nothing is collected before it can arrive."""
    run, clock = new_run(), FakeClock()

    def act():
        clock.advance(HORIZON + 100)
        collect(run, clock)

    assert save(Acting(run, *MANIFEST_PUT, act), 1.0, clock) is not None
    clock.advance(2 * HORIZON)
    collect(run, clock)
    assert has(run, 1.0)


def test_many_bytes_have_a_longer_horizon():
    run, clock = new_run(), FakeClock()
    work = Transaction(run, 1, clock, seconds=seconds_for(10**11))
    run.write(f'checkpoint_1/{work.generation}/w/0', b'chunk')
    clock.advance(2 * 49_000)
    collect(run, clock)
    assert list(run.walk('checkpoint_1'))
    clock.advance(2 * 1_001)
    collect(run, clock)
    assert not list(run.walk('checkpoint_1'))


def test_two_writers_at_once():
    run, clock, found = new_run(), FakeClock(), []
    assert save(Acting(run, *MANIFEST_PUT, lambda: found.append(Transaction(run, 1, clock))), 1.0, clock) is not None
    source = new_run()
    save(source, 2.0)
    with pytest.raises(StepTakenError), found[0]:
        found[0].commit(*split_facts(source.read('checkpoint_1/checkpoint')), [])
    assert has(run, 1.0)


@pytest.mark.parametrize('is_saved_again', [False, True])
def test_a_manifest_that_arrives_after_its_step_was_deleted(is_saved_again):
    """The request was repeated by the client, and the first one arrives after the deletion."""
    run, clock = new_run(), FakeClock()
    save(run, 1.0, clock)
    manifest = run.read('checkpoint_1/checkpoint')
    delete_step(run, 1, clock)
    run.write('checkpoint_1/checkpoint', manifest)
    if is_saved_again:
        assert save(run, 2.0, clock) is not None
    clock.advance(2 * HORIZON + 2)
    collect(run, clock)
    assert has(run, 2.0) if is_saved_again else not list(run.walk('checkpoint_1'))
    assert not markers(run)


def test_a_manifest_without_files_that_arrives_just_before_that_of_a_save():
    run, clock = new_run(), FakeClock()
    save(run, 1.0, clock)
    manifest = run.read('checkpoint_1/checkpoint')
    delete_step(run, 1, clock)
    assert (
        save(Acting(run, *MANIFEST_PUT, lambda: run.write('checkpoint_1/checkpoint', manifest)), 2.0, clock) is not None
    )
    assert has(run, 2.0)


def test_what_is_collected_is_what_the_marker_names():
    """A save that is under way, and a file of a stranger, stay."""
    run, clock = new_run(), FakeClock()
    save(run, 1.0, clock)
    save(run, 2.0, clock, overwrite=True)
    clock.advance(2 * HORIZON + 2)
    under_way = Transaction(run, 1, clock, overwrite=True)
    chunk = f'checkpoint_1/{under_way.generation}/w/0'
    run.write(chunk, b'chunk')
    run.write('checkpoint_1/notes.txt', b'mine')
    collect(run, clock)
    assert run.read(chunk) == b'chunk'
    assert run.read('checkpoint_1/notes.txt') == b'mine'
    with under_way:
        pass
    assert has(run, 2.0)


def test_an_overwrite_that_was_killed_before_it_removed_the_old_files():
    run, clock = new_run(), FakeClock()
    save(run, 1.0, clock)
    (old,) = run.names('checkpoint_1', 't5ckpt-')

    class Dying(FaultyStorage):
        def replace(self, key, data, version):
            written = super().replace(key, data, version)
            if key.endswith('/checkpoint'):
                raise Killed
            return written

    with pytest.raises(Killed):
        save(Dying(run), 2.0, clock, overwrite=True)
    assert has(run, 2.0)
    assert old in run.names('checkpoint_1', 't5ckpt-')
    clock.advance(2 * HORIZON + 2)
    collect(run, clock)
    assert old not in run.names('checkpoint_1', 't5ckpt-')
    assert has(run, 2.0)


def test_an_overwrite_of_what_another_one_has_replaced_is_dropped():
    run, clock = new_run(), FakeClock()
    save(run, 1.0, clock)
    first = Acting(run, *MANIFEST_PUT, lambda: save(run, 3.0, clock, overwrite=True))
    assert save(first, 2.0, clock, overwrite=True) is None
    assert has(run, 3.0)


def test_a_server_that_compares_no_versions_replaces_nothing():
    run = new_run()
    save(run, 1.0)

    class Careless(FaultyStorage):
        compares_versions = False

    with pytest.raises(t5ckpt.errors.UnsupportedFormatError, match=r'does not compare versions.*t5ckpt rm .*@1'):
        save(Careless(run), 2.0, overwrite=True)
    assert has(run, 1.0)
    assert not markers(run)


def killed_deleter(run, clock):
    """A deleter that was killed after its marker."""

    def die():
        raise Killed

    with pytest.raises(Killed):
        hide(Acting(run, 'delete_unchanged', 'checkpoint', die), STEP, clock)


@pytest.mark.slow
def test_a_reader_waits_for_a_deleter_that_has_not_decided():
    """For as long as its request may arrive. The step is there then, and garbage collection removes the marker."""
    run, clock = new_run(), FakeClock()
    save(run, 1.0, clock)
    marker = Marker(run, 1, clock, HIDE, [''])
    with hold(run, 1, 60, clock) as is_there:
        assert not is_there
    clock.advance(2 * HORIZON + 2)
    with hold(run, 1, 60, clock) as is_there:
        assert is_there
    with pytest.raises(StorageError, match='took 7202 s'):
        marker.check()
    collect(run, clock)
    assert not markers(run)
    assert has(run, 1.0)


@pytest.mark.parametrize('on_disk', [False, True])
def test_a_deleter_that_is_stopped_gives_up(on_disk, tmp_path):
    run, clock = open_storage(tmp_path) if on_disk else new_run(), FakeClock()
    save(run, 1.0, clock)
    with pytest.raises(StorageError, match='took 3601 s, and at most 3600 s are allowed'):
        hide(Acting(run, 'is_file', 'PINNED', lambda: clock.advance(3601)), STEP, clock)
    assert has(run, 1.0)
    assert not markers(run)
    assert not list(tmp_path.glob('busy_*'))


@pytest.mark.parametrize('change', [remove_positions, rename_damaged])
def test_who_is_stopped_after_the_look_for_holds_changes_nothing(change, tmp_path):
    """A reader that holds the step meanwhile finds no announcement any more."""
    run, clock = new_run() if change is remove_positions else open_storage(tmp_path), FakeClock()
    save(run, 1.0, clock, dataset_iterator=Position())
    before = {key: run.read(key) for key, _ in run.walk('checkpoint_1')}
    with pytest.raises(StorageError, match='took 10800 s, and at most 3600 s are allowed'):
        change(Acting(run, 'is_file', 'PINNED', lambda: clock.advance(3 * HORIZON)), 1, clock)
    assert before == {key: run.read(key) for key, _ in run.walk('checkpoint_1')}


@pytest.mark.parametrize('mark', ['_METADATA', 'metadata.json'])
def test_a_step_that_another_program_saves_after_a_deletion_is_not_collected(mark):
    """In the place of the deleted one, with names of files that T5X's steps have, too."""
    run, clock = new_run(), FakeClock()
    save(run, 1.0, clock)
    (generation,) = run.names('checkpoint_1', 't5ckpt-')
    delete_step(run, 1, clock)
    names = {f'checkpoint_1/{name}' for name in (mark, 'params.w/.zarray', 'params.w/0.0')}
    # The deleter was killed.
    for name in (*names, f'checkpoint_1/{generation}/w/0'):
        run.write(name, b'{}')
    clock.advance(3 * HORIZON)
    collect(run, clock)
    assert {key for key, _ in run.walk('checkpoint_1')} == names


def test_a_manifest_is_deleted_only_in_the_version_that_was_read():
    run, clock = new_run(), FakeClock()
    save(run, 1.0, clock)
    slow = Acting(run, 'delete_unchanged', 'checkpoint', lambda: save(run, 2.0, clock, overwrite=True))
    with pytest.raises(StorageError, match='was replaced by another process in the meantime'):
        delete_step(slow, 1, clock)
    assert has(run, 2.0)


def test_a_deletion_that_fails_before_it_hides_leaves_no_marker():
    """A reader would wait for it."""
    run = new_run()
    save(run, 1.0)

    def fail():
        raise StorageError(5, 'injected')

    with pytest.raises(StorageError, match='injected'):
        delete_step(Acting(run, 'is_file', 'PINNED', fail), 1, time.time)
    assert not markers(run)
    with hold(run, 1, 60, time.time) as is_there:
        assert is_there


def test_who_may_not_delete_keeps_no_reader_from_a_step():
    run, clock = new_run(), FakeClock()
    save(run, 1.0, clock)

    class Denying(FaultyStorage):
        def before_operation(self, name, key):
            if name.startswith('delete'):
                raise AccessDeniedError(errno.EACCES, 'injected')

    with pytest.raises(AccessDeniedError):
        hide(Denying(run), STEP, clock)
    with hold(run, 1, 60, clock) as is_there:
        assert is_there
    pin_in(run, 'checkpoint_1', 'mine', clock)
    with pytest.raises(AccessDeniedError):
        hide(Denying(run), STEP, clock, even_pinned=True)
    with hold(run, 1, 60, clock) as is_there:
        assert is_there


def test_a_deleted_step_leaves_its_marker_until_late_requests_have_arrived():
    run, clock = new_run(), FakeClock()
    save(run, 1.0, clock)
    delete_step(run, 1, clock)
    assert not list(run.walk('checkpoint_1'))
    (name,) = markers(run)
    assert parse_marker(f'.t5ckpt/busy/{name}').due == int(clock() + 2 * HORIZON) + 1
    save(run, 2.0, clock)
    # A reader does not wait for who has decided.
    with hold(run, 1, 60, clock) as is_there:
        assert is_there
    clock.advance(2 * HORIZON + 2)
    collect(run, clock)
    assert not markers(run)
    assert has(run, 2.0)


def test_the_files_of_a_deleter_that_was_killed_are_collected():
    run, clock = new_run(), FakeClock()
    save(run, 1.0, clock)
    hide(run, STEP, clock)
    assert steps_in(run) == []
    clock.advance(2 * HORIZON + 2)
    collect(run, clock)
    assert not list(run.walk(''))


def test_a_deleter_that_was_killed_before_it_hid_deletes_nothing():
    run, clock = new_run(), FakeClock()
    save(run, 1.0, clock)
    killed_deleter(run, clock)
    clock.advance(2 * HORIZON + 2)
    collect(run, clock)
    assert has(run, 1.0)
    assert not markers(run)


@pytest.mark.parametrize('arrives', ['before it is killed', 'after the deletion'])
def test_the_file_of_a_pin_that_was_killed_is_collected(arrives):
    """The step was deleted before the file was written. On a file system its directory is gone then."""
    run, clock = new_run(), FakeClock()
    for step in (1, 2):
        save(run, 1.0, clock, step)

    class Dying(FaultyStorage):
        def write(self, key, data):
            if key.endswith('PINNED'):
                if arrives == 'before it is killed':
                    delete_step(run, 1, clock)
                    super().write(key, data)
                raise Killed
            super().write(key, data)

    with pytest.raises(Killed):
        pin_in(Dying(run), 'checkpoint_1', '1', clock)
    if arrives == 'after the deletion':
        remove = hide(run, STEP, clock)
        run.write('checkpoint_1/PINNED', b'1')
        clock.advance(4000)
        remove()
    clock.advance(2 * HORIZON + 2)
    collect(run, clock)
    assert not list(run.walk('checkpoint_1'))
    assert not markers(run)
    pin_in(run, 'checkpoint_2', '1', clock)
    assert not markers(run)


class Position:
    """A data iterator."""

    def save(self, filename):
        with open(f'{filename}.index', 'w', encoding='utf-8') as file:
            file.write('1')

    def load(self, filename):
        pass


@pytest.mark.parametrize('stops_at', [('read_with_version', '/checkpoint'), ('walk', 'checkpoint_1')])
def test_a_removal_leaves_the_pin_and_the_positions_of_a_later_save(stops_at):
    """They have the names of those of the step that was deleted."""
    run, clock = new_run(), FakeClock()
    save(run, 1.0, clock, dataset_iterator=Position())
    late = Acting(run, *stops_at, None)
    remove = hide(late, STEP, clock)

    def act():
        assert save(run, 2.0, clock, dataset_iterator=Position()) is not None
        pin_in(run, 'checkpoint_1', 'mine', clock)

    late.act = act
    remove()
    clock.advance(2 * HORIZON + 2)
    collect(run, clock)
    assert run.read('checkpoint_1/PINNED') == b'mine'
    assert run.read('checkpoint_1/train_ds-000-of-001.index') == b'1'
    assert has(run, 2.0)


@pytest.mark.parametrize('stops_at', [LIST_PUT, ('walk', 'checkpoint_1')])
def test_a_save_leaves_the_pin_of_a_faster_one(stops_at):
    run, clock = new_run(), FakeClock()
    run.write('checkpoint_1/PINNED', b'of a step that is gone')

    def act():
        assert save(run, 2.0, clock) is not None
        pin_in(run, 'checkpoint_1', 'mine', clock)

    assert save(Acting(run, *stops_at, act), 1.0, clock) is None
    assert has(run, 2.0)
    assert run.read('checkpoint_1/PINNED') == b'mine'


def test_positions_of_an_overwrite_that_is_under_way_are_not_removed():
    run, clock = new_run(), FakeClock()
    for step in (1, 2):
        save(run, 1.0, clock, step, dataset_iterator=Position())
    late = Acting(run, *MANIFEST_PUT, Retention(run, KeepAll(), clock, 1).carry_out)
    assert save(late, 2.0, clock, dataset_iterator=Position(), overwrite=True) is not None
    assert t5ckpt.verify(run.url(), 1, full=True).ok
    with t5ckpt.Checkpointer({'w': np.zeros(8, np.float32)}, None, run, Position()) as ck:
        ck.restore(1)


def test_positions_are_removed_under_a_marker():
    run, clock = new_run(), FakeClock()
    for step in (1, 2):
        save(run, 1.0, clock, step)
        run.write(f'checkpoint_{step}/train_ds-000-of-001', b'x')
    with hold(run, 1, 60, clock):
        Retention(run, KeepAll(), clock, 1).carry_out()
        assert run.names('checkpoint_1', 'train_ds')
    Retention(run, KeepAll(), clock, 1).carry_out()
    assert not run.names('checkpoint_1', 'train_ds')
    clock.advance(2 * HORIZON + 2)
    collect(run, clock)
    assert not markers(run)
    assert steps_in(run) == [1, 2]


def test_a_retention_that_fails_half_way_removes_what_it_has_hidden():
    class Failing(FaultyStorage):
        def names(self, key, beginning):
            if beginning == TRAIN_DS_PREFIX:
                raise StorageError(5, 'injected')
            return super().names(key, beginning)

    run = new_run()
    for step in (1, 2):
        save(run, 1.0, step=step)
    retention = Retention(Failing(run), KeepLatest(1), time.time, 1)
    with pytest.raises(StorageError, match='injected'):
        retention.carry_out()
    assert list(run.walk('checkpoint_1')) == []


def test_a_marker_of_another_program_is_left_alone(caplog):
    run, clock = new_run(), FakeClock()
    save(run, 1.0, clock)
    key = f'.t5ckpt/busy/1.{int(clock())}.0'
    run.write(key, b'{}')
    clock.advance(2 * HORIZON + 2)
    collect(run, clock)
    assert f'could not collect {run.url("checkpoint_1")}: ' in caplog.text
    assert 'is of another program, or damaged. If no program writes the step, remove it.' in caplog.text
    assert run.is_file(key)
    assert has(run, 1.0)


@pytest.mark.slow
def test_a_marker_that_cannot_be_read_keeps_readers_away_until_it_is_due():
    run, clock = new_run(), FakeClock()
    save(run, 1.0, clock)
    run.write(f'.t5ckpt/busy/1.{int(clock()) + 100}.abc', b'of another program')
    with hold(run, 1, 60, clock) as is_there:
        assert not is_there
    clock.advance(100 + 601)
    with hold(run, 1, 60, clock) as is_there:
        assert is_there
    pin_in(run, 'checkpoint_1', 'mine', clock)


class NoDeletion(FaultyStorage):
    """For a user who may write and not delete."""

    def before_operation(self, name, key):
        super().before_operation(name, key)
        if name.startswith('delete'):
            raise AccessDeniedError(errno.EACCES, 'injected')


@pytest.mark.parametrize('what', ['a pinned step', 'the rest of a step'])
def test_an_overwrite_by_a_user_who_may_not_delete_lets_readers_in(what):
    run, clock = new_run(), FakeClock()
    save(run, 1.0, clock)
    if what == 'a pinned step':
        work = Transaction(NoDeletion(run), 1, clock, overwrite=True)
        pin_in(run, 'checkpoint_1', 'mine', clock)
        with pytest.raises(StepKeptError), work:
            work.commit(*split_facts(run.read('checkpoint_1/checkpoint')), [])
        t5ckpt.unpin_checkpoint(f'{run.url()}/checkpoint_1')
    else:
        manifest = split_facts(run.read('checkpoint_1/checkpoint'))[0]
        run.delete_file('checkpoint_1/checkpoint')
        run.write('checkpoint_1/w/0', b'of T5X')
        with Transaction(NoDeletion(run), 1, clock) as work:
            work.commit(manifest, None, [])
    with hold(run, 1, 60, clock) as is_there:
        assert is_there


def test_a_denied_overwrite_lets_readers_in():
    class Denied(FaultyStorage):
        def before_operation(self, name, key):
            super().before_operation(name, key)
            if name == 'replace' and key == 'checkpoint_1/checkpoint':
                raise AccessDeniedError(errno.EACCES, 'injected')

    run, clock = new_run(), FakeClock()
    save(run, 1.0, clock)
    with pytest.raises(AccessDeniedError):
        save(Denied(run), 2.0, clock, overwrite=True)
    with hold(run, 1, 60, clock) as is_there:
        assert is_there


def test_a_collection_that_another_save_overtakes_is_repeated():
    run, clock = new_run(), FakeClock()
    save(run, 1.0, clock)
    marker = Marker(run, 1, clock)
    run.write(f'checkpoint_1/{marker.directory}/w/0', b'left')
    for name in {*run.names('checkpoint_1', 't5ckpt-')} - {marker.directory}:
        run.delete_tree(f'checkpoint_1/{name}')

    class Overtaken(FaultyStorage):
        def delete_unchanged(self, key, version):
            return False

    clock.advance(2 * HORIZON + 2)
    collect(Overtaken(run), clock)
    assert markers(run)
    collect(run, clock)
    assert not markers(run)
    assert [*run.walk('checkpoint_1')] == []


def test_the_markers_of_many_processes_cost_one_listing_of_the_step():
    run, clock = new_run(), FakeClock()
    save(run, 1.0, clock)
    for _ in range(20):
        Marker(run, 1, clock)
    clock.advance(2 * HORIZON + 2)
    walks = []

    class Counted(FaultyStorage):
        def before_operation(self, name, key):
            super().before_operation(name, key)
            walks.extend([key] if name == 'walk' and key == 'checkpoint_1' else [])

    collect(Counted(run), clock)
    assert len(walks) == 1
    assert not markers(run)


def test_a_live_marker_counts_whatever_link_leads_to_the_run(tmp_path):
    (tmp_path / 'run').mkdir()
    (tmp_path / 'link').symlink_to(tmp_path / 'run')
    marker = Marker(open_storage(tmp_path / 'run'), 1, time.time, HIDE)
    linked = open_storage(tmp_path / 'link')
    collect(linked, time.time)
    assert is_about_to_hide(linked, 1, time.time)
    marker.remove()
    assert not is_about_to_hide(linked, 1, time.time)
