"""Runs that another user has made, or that several users share: nothing is half deleted, and nothing unreadable looks new."""

import os
import pathlib
import shutil
import tempfile

import pytest
from support.users import run_as_users

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(os.geteuid() != 0, reason='only root can become other users'),
]


@pytest.fixture
def place():
    """A directory to which everybody has access; those of pytest are root's alone."""
    made = pathlib.Path(tempfile.mkdtemp(dir='/tmp'))
    yield made
    shutil.rmtree(made)


UNREADABLE = """
found = {}
calls = {
    'all_steps': lambda: t5ckpt.all_steps(run),
    'restore': lambda: str(checkpointer().restore()),
    'restore_or_init': lambda: str(t5ckpt.restore_or_init(checkpointer(), lambda: STATE)),
    'load': lambda: str(t5ckpt.load_t5x_checkpoint(run)),
    'save': lambda: save(4),
    'delete': lambda: checkpointer().delete(3),
    'pin': lambda: t5ckpt.pin_checkpoint(run + '/checkpoint_3'),
    'cp': lambda: t5ckpt.copy_checkpoint(run, sys.argv[1] + '/out').path,
}
os.mkdir(run)
os.chown(run, A, GROUP)
for step in (1, 2, 3):
    become(A, lambda: save(step))
for name, modes in {'': (0, 0o300, 0o400, 0o600), 'checkpoint_3': (0, 0o300, 0o400), 'checkpoint_3/checkpoint': (0,)}.items():
    for mode in modes:
        place = os.path.join(run, name)
        before = os.stat(place).st_mode
        os.chmod(place, mode)
        there = tree()
        for call, function in calls.items():
            if call != 'save' or not name:
                found[f'{name} {mode:o} {call}'] = become(A, function), tree() == there
        os.chmod(place, before)
print(json.dumps(found))
"""


@pytest.mark.slow
def test_what_may_not_be_read_is_an_error_and_never_a_new_run(place):
    found = run_as_users(UNREADABLE, place)
    assert len(found) == 4 * 8 + 4 * 7
    for case, (answer, is_unchanged) in found.items():
        # A step that may not be read counts as a step, and opening it is an error. A step that may not be listed can be read.
        if not (case.startswith('checkpoint_3') and case.endswith('all_steps')) and case != 'checkpoint_3 300 load':
            assert answer[0] == 'AccessDeniedError', (case, answer)
            assert str(place / 'run') in answer[1], (case, answer)
            assert 'Permission denied' in answer[1], (case, answer)
        assert is_unchanged, case


SHARED = """
from t5ckpt.cli.app import run as run_verb

def verb(*words):
    def call():
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            run_verb([*words])
        except SystemExit as ended:
            return ended.code
    return call

found = {}
for mode in (0o2770, 0o3770):
    for umask in (0o002, 0o007, 0o022, 0o027, 0o077):
        shutil.rmtree(run, ignore_errors=True)
        os.mkdir(run)
        os.chown(run, A, GROUP)
        os.chmod(run, mode)
        for step in (1, 2, 3):
            assert become(A, lambda: save(step), umask) == step
        whole = tree()
        pruned = become(B, verb('prune', run, '--keep', '2', '--yes'), umask)
        removed = become(B, verb('rm', run, '2', '--yes'), umask)
        replaced = become(B, lambda: checkpointer().save(STATE, step=3, overwrite=True).step, umask)
        saved = become(B, lambda: save(4, keep=1), umask)
        after = tree()
        halves = [name for name, files in after.items() if name != run and '_4' not in name and files != whole.get(name)]
        found[f'{mode:o} {umask:03o}'] = [pruned, removed, replaced, saved, sorted(os.listdir(run)), halves]
        assert become(A, lambda: save(5), umask) == 5
print(json.dumps(found))
"""


@pytest.mark.slow
def test_two_users_share_a_run(place):
    """With a umask for groups each deletes steps of the other; else, and in a sticky directory, no step is touched."""
    found = run_as_users(SHARED, place)
    all_steps = [f'checkpoint_{step}' for step in (1, 2, 3, 4)]
    for case, (pruned, removed, replaced, saved, names, halves) in found.items():
        mode, umask = case.split()
        may_delete = mode == '2770' and umask in ('002', '007')
        assert halves == [], case
        assert saved == 4, case
        assert names == (['checkpoint_4'] if may_delete else all_steps), case
        # An unreadable step stays by plan; what a rule lets go and the directory keeps is the storage's refusal.
        assert pruned == (0 if may_delete or umask == '077' else 4), case
        assert removed == (0 if may_delete else 4), case
        assert (replaced == 3) if may_delete else (replaced[0] == 'AccessDeniedError'), (case, replaced)


MARKERS = """
os.mkdir(run)
os.chown(run, A, GROUP)
os.chmod(run, 0o2770)
become(A, lambda: save(1), 0o002)
record = {'directories': [], 'unix': time.time() - 7300, 'seconds': 3600, 'owner': {'place': 'x', 'pid': 1}}
for step in (1, 7):
    name = f'{run}/busy_{step}.{int(time.time()) - 100}.0123456789abcdef'
    with open(name, 'w') as file:
        json.dump({**record, 'action': 'hide'}, file)
    os.chown(name, A, GROUP)
    os.chmod(name, 0o600)
    os.utime(name, (time.time() - 7300,) * 2)
print(json.dumps({
    'save': become(B, lambda: save(2)),
    'restore': become(B, lambda: float(checkpointer().restore(1)['w'][5])),
    'delete': become(B, lambda: checkpointer().delete(1)),
    'owner': become(A, lambda: save(3)),
    'names': sorted(os.listdir(run)),
}))
"""


def test_a_marker_of_another_user_that_cannot_be_read_keeps_nobody_from_a_step(place):
    """Of a killed deleter with umask 077, which may act no more."""
    found = run_as_users(MARKERS, place)
    assert (found['save'], found['restore'], found['delete'], found['owner']) == (2, 5.0, None, 3)
    assert found['names'] == ['checkpoint_2', 'checkpoint_3']


OLDER = """
def restored_step():
    ck = checkpointer()
    t5ckpt.restore_or_init(ck, lambda: STATE)
    return ck.restored_step

os.mkdir(run)
os.chown(run, A, GROUP)
for step in (1, 2, 3):
    become(A, lambda: save(step))
os.chmod(os.path.join(run, 'checkpoint_1'), 0)
found = {'all': become(A, lambda: t5ckpt.all_steps(run)), 'newest': become(A, restored_step)}
for step in (2, 3):
    with open(os.path.join(run, f'checkpoint_{step}/checkpoint'), 'r+b') as file:
        file.seek(-1, os.SEEK_END)
        file.write(b'?')
found['damaged'] = become(A, restored_step)
print(json.dumps(found))
"""


def test_an_older_step_that_may_not_be_read_does_not_stop_a_restart_from_the_newest(place):
    found = run_as_users(OLDER, place)
    assert found['all'] == [1, 2, 3]
    assert found['newest'] == 3
    # With all others damaged, the one that may be whole is not passed over.
    assert found['damaged'][0] == 'AccessDeniedError'
    assert 'checkpoint_1' in found['damaged'][1]


LINKS = """
os.mkdir(run)
os.chown(run, A, GROUP)
become(A, lambda: save(1))
private = sys.argv[1] + '/private'
os.mkdir(private, 0o700)
found = []
for name in ('notes', 'checkpoint_5'):
    os.symlink(private + '/x', f'{run}/{name}')
    found += [become(A, lambda: t5ckpt.all_steps(run)), become(A, lambda: save(2 + len(found)))]
print(json.dumps(found))
"""


def test_a_link_to_what_may_not_be_entered_stops_no_listing(place):
    """The link of a step is one that may not be read; a stray link is not a step."""
    assert run_as_users(LINKS, place) == [[1], 2, [1, 2, 5], 4]


REPLACED = """
os.mkdir(run)
os.chown(run, A, GROUP)
os.chmod(run, 0o2770)
become(A, lambda: save(3))
other = sys.argv[1] + '/other'
os.mkdir(other)
os.chown(other, B, GROUP)
target, run = run, other
become(B, lambda: save(3))
run = target
there = tree()
found = become(B, lambda: t5ckpt.copy_checkpoint(other, target, t5ckpt.ConvertOptions(overwrite=True)).path)
print(json.dumps([found, tree() == there]))
"""


def test_a_copy_does_not_replace_a_step_whose_files_it_could_not_remove(place):
    found, is_unchanged = run_as_users(REPLACED, place)
    assert found[0] == 'AccessDeniedError', found
    assert 'belongs to user 4001' in found[1]
    assert is_unchanged


READ_ONLY = """
os.mkdir(run)
os.chown(run, A, GROUP)
become(A, lambda: save(1))
for place, names, files in os.walk(run + '/checkpoint_1'):
    for name in [place, *(os.path.join(place, name) for name in files)]:
        os.chmod(name, os.stat(name).st_mode & ~0o222)
refused = become(A, lambda: checkpointer().delete(1))
words = refused[1].split('Make it writable: ')[1].split()
assert words[0] == 'chmod', words
cured = become(A, lambda: os.spawnvp(os.P_WAIT, words[0], words))
print(json.dumps([refused, cured, become(A, lambda: checkpointer().delete(1)), sorted(os.listdir(run))]))
"""


def test_the_cure_for_a_read_only_step_of_ones_own_works(place):
    """Neither another user nor the group can help the owner of a directory without write permission."""
    refused, cured, deleted, names = run_as_users(READ_ONLY, place)
    assert refused[0] == 'AccessDeniedError', refused
    assert (cured, deleted, names) == (0, None, []), refused
