"""Any text that comes from outside, through every verb, repr, error and log line: nothing of it acts, or begins a line."""

import contextlib
import inspect
import io
import json
import logging
import shutil
import tempfile
import warnings
from pathlib import Path

import hypothesis
import msgpack
import numpy as np
import pytest
from hypothesis import strategies as st
from support.damage import with_fields
from support.facts import facts_of, put_facts

import t5ckpt
from t5ckpt import errors
from t5ckpt.cli import VERBS
from t5ckpt.cli.app import run
from t5ckpt.core.text import lines

MARK = 'forged'
ACTING = [
    *map(chr, [*range(1, 32), *range(127, 160)]),
    *'\u061c\u200b\u200e\u200f\u2028\u2029\u202a\u202e\u2066\u2069\ufeff',
]
MARKUP = ['<script>alert(1)</script>', '&lt;', '[red]', '[/]', '{0}', '%s', '%(x)d', "'", '"', '`', 'w', 'é']
PIECES = st.lists(st.sampled_from([*ACTING, *MARKUP, '\x1b]0;x\x07', '\x9b2J']), min_size=1, max_size=12).map(''.join)
HOSTILE = st.tuples(PIECES, PIECES, PIECES).map(
    lambda parts: f'{parts[0]}\x1b[2J\n{MARK}{parts[1]}\r{MARK}{parts[2]}\u202e'
)
FEW = hypothesis.settings(max_examples=4, phases=[hypothesis.Phase.generate], derandomize=True, deadline=None)


def assert_harmless(text, where=''):
    bad = [letter for letter in text if letter != '\n' and not letter.isprintable()]
    assert not bad, (where, bad, text)
    assert not any(line.lstrip().startswith(MARK) for line in text.split('\n')), (where, text)


def save(path, text, steps=(1, 2)):
    tree = {
        'target': {f'w{text}': np.ones((2, 3), np.float32), f'i{text}': np.arange(3), 'p': 1.5},
        f'text{text}': text,
    }
    for step in steps:
        with t5ckpt.Checkpointer(
            tree, checkpoints_dir=path, keep=5, options=t5ckpt.CheckpointerOptions(inline_bytes=8)
        ) as ck:
            ck.save(tree, step=step, metrics={f'loss{text}': 1.5}, custom_metadata={f'note{text}': text})
    return tree


def edit(step_dir, text):
    """Text of unknown origin: the facts, the reason of a pin, unknown files."""
    evil = {'writer': {'name': text, 'version': text}, 'keep': {'policy': text, 'keep': text}}
    evil |= {'source': {'format': text, 'path': text}}
    put_facts(step_dir, with_fields(facts_of(step_dir), **evil))
    (step_dir / 'PINNED').write_text(text)
    (step_dir / text.replace('/', ' ')).write_text('x')


def broken(parent, text):
    """Checkpoints that do not open, or are damaged."""
    for step, spec in enumerate(
        [{'driver': text}, {'dtype': text}, {'metadata': {'shape': [text]}}, {'kvstore': text}]
    ):
        leaf = {
            'driver': 'zarr',
            'kvstore': {'driver': 'file', 'path': 'w/'},
            'metadata': {'shape': [1], 'chunks': [1]},
        }
        state = {f'w{text}': leaf | {'dtype': 'float32'} | spec}
        (parent / f'checkpoint_{step}').mkdir(parents=True)
        (parent / f'checkpoint_{step}' / 'checkpoint').write_bytes(msgpack.packb({'version': 3, 'optimizer': state}))
        yield parent / f'checkpoint_{step}'


@contextlib.contextmanager
def hostile_run(text):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / 'run'
        save(path, text)
        edit(path / 'checkpoint_2', text)
        damaged = path.with_name('damaged') / 'checkpoint_1'
        shutil.copytree(path / 'checkpoint_1', damaged)
        for file in damaged.glob('target.w*/0*'):
            file.write_bytes(b'x')
        yield Path(folder)


def said_by(words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.suppress(SystemExit):
        run([str(word) for word in words])
    return out.getvalue() + '\n' + err.getvalue()


def verbs(at, text, leaf):
    run_, one = at / 'run', at / 'run/checkpoint_1'
    yield from (['ls', run_], ['ls', run_, '--all'], ['ls', at / text], ['ls', run_, '--json'])
    yield from (['best', run_], ['best', run_, text], ['best', at / text], ['best', run_, '--json'])
    yield from (['show', run_, '--step', '2'], ['show', run_, '--grep', f'{text}('], ['show', run_, '--grep', 'zzz'])
    yield from (['cat', one, leaf], ['cat', one, f'text{text}'], ['cat', one, text], ['cat', one, f'{leaf}[9,{text}]'])
    yield from (
        ['cat', one, f'text{text}[0]'],
        ['cat', one, f'{leaf}[99]'],
        ['stats', one],
        ['stats', at / 'run', '--json'],
    )
    yield from (['diff', one, run_, '--step', text], ['diff', one, run_ / 'checkpoint_2'], ['diff', one, at / text])
    yield from (['report', run_, '-o', at / 'run.html'], ['report', at / text, '-o', at / text])
    yield from (['verify', run_], ['verify', at / 'damaged', '--full'], ['verify', run_, '--step', '2'])
    yield from (['prune', run_, '--best', text, '--dry-run'], ['prune', run_, '--keep', '1', '--dry-run'])
    yield from (['pin', f'{run_}@1'], ['unpin', f'{run_}@1'], ['pin', at / text])
    yield from (['cp', one, at / 'copy'], ['cp', one, at / f'new{text}'], ['cp', one, at / 'copy', '--leave', text])
    yield from (['cp', one, at / 'renamed', '--rename', '(.*)', f'x{text}/\\1'], ['cp', at / text, at / 'y'])
    yield from (
        ['convert', 'to-safetensors', one, at / 'x.safetensors'],
        ['convert', 'to-safetensors', one, at / 'z.safetensors', '--take', f'no{text}('],
    )
    yield ['convert', 'to-hf', one, at / 'hf']
    yield from (
        ['convert', 'safetensors', at / 'x.safetensors', at / f'in{text}', '--as-step', '8'],
        ['convert', 'safetensors', at / text, at / 'n2'],
    )
    yield from (
        ['convert', 'hf', at / text, at / 'n3'],
        ['show', at / 'x.safetensors'],
        ['cat', at / 'x.safetensors', text],
    )
    yield from (['cp', at / 'damaged', at / 'fixed'], ['cp', at / 'damaged', at / 'fixed', '--leave', text])
    yield from (['cp', at / 'damaged', at / 'fixed', '--leave', '.*w.*'], ['cp', at / text, at / 'f2'])
    yield from (['convert', 'tf', at / text, at / 'tf'], ['convert', 'flax', one, at / 'fl'], ['convert', text, '', ''])
    yield from (['convert', 'orbax', at / text, at / 'or'], ['convert', 'seqax', at / 'run', at / 'sq'])
    yield from (
        [text],
        ['ls', f'--{text}'],
        ['rm', run_, '9'],
        ['rm', run_, text],
        ['rm', run_, '2', '--yes'],
        ['rm', at / text],
    )


@pytest.mark.slow
@hypothesis.settings(FEW, max_examples=2)
@hypothesis.given(HOSTILE)
def test_every_verb(text):
    with hostile_run(text) as at:
        leaf = next(name for name in t5ckpt.open_checkpoint(at / 'run/checkpoint_1') if name.startswith('target/w'))
        words = [*verbs(at, text, leaf), *(['show', path] for path in broken(at / 'broken', text))]
        assert {each[0] for each in words} >= set(VERBS)
        for each in words:
            assert_harmless(said_by(each), each[:2])


@FEW
@hypothesis.given(HOSTILE)
def test_every_repr(text):
    with hostile_run(text) as at:
        view, run_ = t5ckpt.open_checkpoint(at / 'run', 2), t5ckpt.open_run(at / 'run')
        name = next(name for name in view if name.startswith('target/w'))
        series = run_.series(name, lambda leaf: float(np.asarray(leaf).sum()))
        save(at / 'other', 'other', (1,))
        found = t5ckpt.diff(at / 'run/checkpoint_1', at / 'other')
        checkpointer = t5ckpt.Checkpointer({f'a{text}': np.ones(2)}, checkpoints_dir=at / f'ck{text}')
        pending = checkpointer.save_async({f'a{text}': np.ones(2)}, step=1)
        pending.result()
        objects = [view, view['target'], view[name], view[name][0], run_, series, view.stats(), found, *found.leaves]
        objects += [t5ckpt.verify(at / each, full=True) for each in ('run', 'damaged')]
        objects += [*view.infos(), *run_.summaries(), checkpointer, pending]
        objects += [
            errors.LeafProblem(text, kind, text, text, text, (text,)) for kind in ('missing', 'shape', 'sharding')
        ]
        checkpointer.close()
        for each in objects:
            assert_harmless(repr(each), type(each))
            if not isinstance(each, str):
                assert_harmless(str(each), type(each))
            page = each._repr_html_() if hasattr(each, '_repr_html_') else ''
            assert_harmless(page, type(each))
            assert '<script' not in page


def all_kinds():
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]
    return [kind for kind in kinds if issubclass(kind, (errors.T5CkptError, errors.T5CkptWarning))]


@FEW
@hypothesis.given(HOSTILE)
def test_every_error_and_warning(text):
    for kind in all_kinds():
        if kind is errors.ProcessMissingError:
            assert_harmless(str(kind(text, text, (1,), 1.0)), kind)
            continue
        wanted = '  first\n  second'
        told = lines(text, *wanted.split('\n'))
        if kind is not errors.RemoteError:
            assert_harmless(str(kind(text)), kind)
            assert_harmless(str(kind(5, text)) if issubclass(kind, OSError) else '', kind)
        assert_harmless(str(kind(told)), kind)
        assert wanted in str(kind(told))


@FEW
@hypothesis.given(HOSTILE)
def test_what_is_raised_logged_and_warned(text):
    heard = io.StringIO()
    handler = logging.StreamHandler(heard)
    log = logging.getLogger('t5ckpt')
    log.addHandler(handler)
    said = []
    try:
        with hostile_run(text) as at, warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter('always')
            wrong = {'target': {f'w{text}': np.ones((4, 3), np.float32), f'new{text}': np.ones(2)}}
            with t5ckpt.Checkpointer(wrong, checkpoints_dir=at / 'run', keep_policy=t5ckpt.KeepBest(9, text)) as ck:
                said += [refused(lambda: ck.restore(step=1)), refused(lambda: ck.restore(path=at / 'damaged'))]
                said += [refused(lambda: ck.restore(step=1, only=text)), refused(lambda: ck.restore(path=at / text))]
                said += [refused(lambda: ck.save({f'x{text}': object()}, step=7))]
                ck.save({**wrong, f'extra{text}': np.ones(3)}, step=8, metrics={f'loss{text}': 2.0})
                said += [refused(lambda: ck.save(wrong, step=9, metrics={f'loss{text}': text}))]
            view = t5ckpt.open_checkpoint(at / 'run', 1)
            said += [
                refused(lambda: view.select(text)),
                refused(lambda: view[text]),
                refused(lambda: view[f'{text}/x']),
            ]
            said += [refused(lambda: t5ckpt.verify(at / 'damaged', full=True).raise_if_damaged())]
            said += [
                refused(lambda path=path: t5ckpt.load_t5x_checkpoint(path)) for path in broken(at / 'broken', text)
            ]
            said += [str(each.message) for each in warned]
            log.warning('%s: %s', text, ValueError(text))
    finally:
        log.removeHandler(handler)
    for each in [*said, heard.getvalue()]:
        assert each
        assert_harmless(each)


def refused(act):
    try:
        act()
    except Exception as error:  # noqa: BLE001 - whatever is raised is shown
        return str(error)
    raise AssertionError('nothing was raised')


def test_text_that_is_known_to_be_our_own_keeps_its_lines():
    assert json.dumps(str(errors.FormatError(lines('a', 'b\nc')))) == '"a\\nb\\\\nc"'
