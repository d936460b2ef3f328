"""What comes from a stranger's checkpoint is shown, and never obeyed by the terminal or the notebook."""

import json
import re
import shutil

import msgpack
import numpy as np
import pytest
from click.testing import CliRunner
from support.damage import with_fields
from support.facts import facts_of, put_facts

import t5ckpt
from t5ckpt import errors
from t5ckpt.cli.app import app, run

EVIL = '\x1b]0;owned\x07\x1b[2J\x9b31m\u202etxt\u2066\r\x00<script>alert(1)</script>'
TREE = {
    'target': {f'w{EVIL}': np.ones((2, 3), np.float32), f'v{EVIL}\nforged  row': np.float32(1)},
    f'text{EVIL}': EVIL,
}
_BAD = re.compile('[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]')


def save(path, tree=TREE, step=1):
    with t5ckpt.Checkpointer(tree, checkpoints_dir=path, options=t5ckpt.CheckpointerOptions(inline_bytes=16)) as ck:
        ck.save(tree, step=step, metrics={f'loss{EVIL}': 1.5})
    return path


@pytest.fixture(scope='module')
def hostile(tmp_path_factory):
    path = save(tmp_path_factory.mktemp('hostile') / 'run')
    save(path, step=2)
    step_dir = path / 'checkpoint_2'
    evil = {'writer': {'name': EVIL, 'version': EVIL}, 'keep': {'policy': EVIL, 'keep': EVIL}}
    put_facts(step_dir, with_fields(facts_of(step_dir), **evil))
    (step_dir / 'PINNED').write_text(EVIL)
    (step_dir / 'stray\x1b[2J\u202e').write_text('x')
    return path


def assert_harmless(text):
    found = _BAD.search(text)
    assert found is None, repr(text[max(0, found.start() - 60) : found.end() + 60])


def name_of(view):
    return next(name for name in view if name.startswith('target/w'))


def test_what_python_shows(hostile):
    view, run_ = t5ckpt.open_checkpoint(hostile), t5ckpt.open_run(hostile)
    name = name_of(view)
    series = run_.series(name, lambda leaf: float(np.asarray(leaf).sum()))
    other = {'target': {f'w{EVIL}': np.zeros((2, 3), np.float32)}}
    with t5ckpt.Checkpointer(other, checkpoints_dir=hostile.parent / 'other') as ck:
        ck.save(other, step=1)
    diff = t5ckpt.diff(hostile, hostile.parent / 'other')
    shown = (view, view['target'], run_, series, view.stats(), diff, t5ckpt.verify(hostile, full=True), *diff.leaves)
    for each in (*shown, *view.infos(), *run_.summaries(), view[name]):
        assert_harmless(repr(each))
        assert_harmless(str(each))
    for each in (view, run_, view.stats(), diff):
        page = each._repr_html_()
        assert_harmless(page)
        assert '<script' not in page
    assert sum('forged' in line for line in repr(view).splitlines()) == 1
    assert not any(line.startswith('forged') for line in repr(view).splitlines())


def test_what_errors_say(hostile, tmp_path):
    wrong = {'target': {f'w{EVIL}': np.ones((4, 3), np.float32), f'new{EVIL}\nforged': np.ones(2)}}
    raised = []
    with t5ckpt.Checkpointer(wrong, checkpoints_dir=hostile) as ck, pytest.raises(errors.TreeMismatchError) as caught:
        ck.restore(step=1)
    raised.append(caught.value)
    assert not any(line.startswith('forged') for line in str(caught.value).splitlines())
    view = t5ckpt.open_checkpoint(hostile)
    with pytest.raises(errors.CheckpointNotFoundError) as caught:
        view.select(f'nothing{EVIL}')
    raised.append(caught.value)
    copy = shutil.copytree(hostile / 'checkpoint_1', tmp_path / 'checkpoint_1')
    for path in copy.glob('target.w*/0*'):
        path.unlink()
    with pytest.raises(errors.CorruptCheckpointError) as caught:
        t5ckpt.load_t5x_checkpoint(copy, options=t5ckpt.CheckpointerOptions(mmap=False))
    raised.append(caught.value)
    for spec in ({'driver': EVIL}, {'dtype': EVIL}):
        step_dir = tmp_path / f'checkpoint_{len(raised) + 1}'
        step_dir.mkdir()
        leaf = {
            'driver': 'zarr',
            'kvstore': {'driver': 'file', 'path': 'w/'},
            'metadata': {'shape': [1], 'chunks': [1]},
        }
        state = {f'w{EVIL}': leaf | {'dtype': 'float32'} | spec}
        (step_dir / 'checkpoint').write_bytes(msgpack.packb({'version': 3, 'optimizer': state}))
        with pytest.raises(errors.FormatError) as caught:
            t5ckpt.load_t5x_checkpoint(step_dir)
        raised.append(caught.value)
    with pytest.raises(errors.UnsupportedLeafError) as caught:
        save(tmp_path / 'x', {f'w{EVIL}': object()})
    raised.append(caught.value)
    for error in raised:
        assert_harmless(str(error))


VERBS = [
    ['ls', 'RUN'],
    ['ls', 'RUN', '--all'],
    ['show', 'RUN'],
    ['cat', 'RUN', 'LEAF'],
    ['cat', 'RUN', f'text{EVIL}'],
    ['cat', 'RUN', f'nothing{EVIL}'],
    ['stats', 'RUN'],
    ['diff', 'RUN/checkpoint_1', 'RUN/checkpoint_2'],
    ['diff', 'RUN', f'nowhere{EVIL}'],
    ['report', 'RUN', '-o', 'OUT/run.html'],
    ['report', 'RUN', '-o', f'OUT/nothing{EVIL}/run.html', '--step', '7'],
    ['verify', 'RUN'],
    ['verify', 'RUN', '--full'],
    ['prune', 'RUN', '--keep', '1', '--dry-run'],
    ['pin', 'RUN'],
    ['unpin', 'RUN'],
    ['cp', 'RUN', 'OUT/copy'],
    ['convert', 'to-safetensors', 'RUN', 'OUT/x.safetensors'],
    ['convert', 'to-safetensors', 'RUN', 'OUT/x.safetensors', '--take', f'nothing{EVIL}('],
    ['ls', f'nowhere{EVIL}'],
    ['show', 'RUN', '--grep', f'{EVIL}('],
    ['rm', 'RUN', '2', '--yes'],
]


@pytest.mark.parametrize('verb', VERBS, ids=lambda verb: ' '.join(verb[:1]))
def test_what_the_command_line_prints(hostile, tmp_path, capfd, verb):
    leaf = name_of(t5ckpt.open_checkpoint(hostile))
    words = [word.replace('RUN', str(hostile)).replace('OUT', str(tmp_path)).replace('LEAF', leaf) for word in verb]
    with pytest.raises(SystemExit):
        run(words)
    out, err = capfd.readouterr()
    assert_harmless(out)
    assert_harmless(err)


@pytest.mark.parametrize('verb', [['ls'], ['show'], ['stats'], ['verify']])
def test_json_is_exact(hostile, verb):
    done = CliRunner().invoke(app, [*verb, str(hostile), '--json'])
    json.loads(done.output)
    assert_harmless(done.output)
    if verb != ['verify']:
        assert any(EVIL in text.replace('\\/', '/') for text in _texts(json.loads(done.output)))


def _texts(value):
    if isinstance(value, dict):
        for key, each in value.items():
            yield key
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, str):
        yield value
