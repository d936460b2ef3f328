"""The command line, as a shell would call it: real processes, exit codes, output for people and for programs."""

import json
import math
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.cli import ROOT, t5ckpt_cli
from support.damage import with_fields
from support.facts import facts_of, put_facts

import t5ckpt
from t5ckpt.cli import VERBS
from t5ckpt.cli.app import run as run_verb
from t5ckpt.storage import open_storage


@pytest.fixture(scope='module')
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp('cli') / 'run'
    kernel = np.arange(64 * 128, dtype=np.float32).reshape(64, 128)
    state = {'target': {'mlp': {'kernel': kernel}, 'scale': np.ones(8, np.float32)}}
    with t5ckpt.Checkpointer(
        state, checkpoints_dir=run, options=t5ckpt.CheckpointerOptions(inline_bytes=1024)
    ) as checkpointer:
        for step in (0, 100, 200):
            checkpointer.save(state, step=step)
    t5ckpt.pin_checkpoint(run / 'checkpoint_0')
    (run / 'checkpoint_300.tmp-1700000000').mkdir()
    (run / 'checkpoint_300.tmp-1700000000' / 'x').write_bytes(b'1')
    (run / 'checkpoint_310.deleted-1700000000').mkdir()
    (run / 'checkpoint_150.damaged-1700000000').mkdir()
    (run / 'checkpoint_150.damaged-1700000000' / 'checkpoint').write_bytes(b'x')
    (run / 'checkpoint_400').mkdir()
    (run / 'checkpoint_400' / 'checkpoint').write_bytes(b'\x82')
    return run


@pytest.mark.parametrize('verb', VERBS)
def test_every_verb_explains_itself_with_an_example(verb, monkeypatch):
    monkeypatch.setenv('COLUMNS', '80')
    text = t5ckpt_cli(verb, '--help')
    assert max(map(len, text.splitlines())) <= 80
    assert f't5ckpt {verb} ' in text.partition('Example')[2]
    assert '--json' in text


def test_the_help_lists_every_verb_and_the_exit_codes():
    text = t5ckpt_cli('--help')
    assert all(f'  {verb}' in text for verb in VERBS)
    assert '130' in text


def test_ls_lists_complete_steps_as_a_table(run_dir):
    lines = t5ckpt_cli('ls', run_dir).splitlines()
    assert [line.split()[0] for line in lines] == ['step', '0', '100', '200']
    assert 'pinned' in lines[1]
    assert 'all are kept' in lines[3]


def test_ls_says_what_the_trainers_policy_says(tmp_path):
    """Each step's metric, and why it stays; a metric that TensorBoard's files have counts, too."""
    state = {'w': np.zeros(4, np.float32)}
    keep = t5ckpt.KeepLatest(1) | t5ckpt.KeepBest(1, 'eval/accuracy') | t5ckpt.KeepEvery(100)
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path, keep_policy=keep) as checkpointer:
        for step, accuracy in [(100, 0.25), (150, 0.5), (180, 0.3), (190, 0.125)]:
            checkpointer.save(state, step=step, metrics={'eval/accuracy': accuracy, 'loss': 1 / step})
    lines = t5ckpt_cli('ls', tmp_path).splitlines()
    assert lines[0].split() == ['step', 'size', 'age', 'eval/accuracy', 'state', 'kept', 'because', 'loss']
    rows = {line.split()[0]: line for line in lines[1:]}
    assert sorted(rows) == ['100', '150', '190']
    assert 'a multiple of 100' in rows['100']
    assert 'eval/accuracy 0.5, among the best 1 (max)' in rows['150']
    assert ' 0.5 ' in rows['150']
    assert 'one of the latest 1' in rows['190']
    told = json.loads(t5ckpt_cli('ls', tmp_path, '--json'))
    assert told[1]['kept'] == 'best; eval/accuracy 0.5, among the best 1 (max)'
    assert told[1]['metrics']['eval/accuracy'] == 0.5


def test_ls_of_many_metrics_begins_with_that_of_the_policy_and_fits(tmp_path):
    state = {'w': np.zeros(4, np.float32)}
    metrics = {f'train/metric_{number}': number for number in range(25)}
    with t5ckpt.Checkpointer(
        state, checkpoints_dir=tmp_path, keep_policy=t5ckpt.KeepBest(3, 'train/metric_7', 'min')
    ) as checkpointer:
        for step in (1, 2):
            checkpointer.save(state, step=step, metrics=metrics)
    lines = t5ckpt_cli('ls', tmp_path).splitlines()
    assert lines[0].split() == ['step', 'size', 'age', 'train/metric_7', 'state', 'kept', 'because']
    assert max(map(len, lines)) < 100
    assert lines[-1] == 'not listed: 24 metrics that no keep policy compares; --json has them'
    told = json.loads(t5ckpt_cli('ls', tmp_path, '--json'))
    assert told[0]['metrics'] == metrics


@pytest.mark.parametrize('losses', [[3.0, 2.0, 1.0], [1.0, 2.0, 3.0], [2.0, float('-inf'), 2.0], [float('nan')] * 3])
@pytest.mark.parametrize('pinned', [None, 2])
def test_ls_calls_best_the_step_that_best_prints(tmp_path, losses, pinned):
    state = {'w': np.zeros(4, np.float32)}
    keep = t5ckpt.KeepBest(2, 'loss', 'min')
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path, keep_policy=keep) as checkpointer:
        for step, loss in enumerate(losses):
            checkpointer.save(state, step=step, metrics={'loss': loss})
            if step == pinned:
                t5ckpt.pin_checkpoint(tmp_path / f'checkpoint_{step}')
    is_finite = any(map(math.isfinite, losses))
    best = t5ckpt_cli('best', tmp_path, code=0 if is_finite else 1).split('\n')[0]
    told = json.loads(t5ckpt_cli('ls', tmp_path, '--json'))
    named = [str(each['step']) for each in told if each['kept'].startswith('best; ')]
    assert named == ([best] if is_finite else [])


@pytest.mark.slow
def test_ls_gives_the_size_of_all_files_of_a_step_on_a_disk_and_in_a_bucket(run_dir, s3):
    url = s3.url()
    t5ckpt_cli('cp', run_dir, url, '--step', 100)
    (there,) = json.loads(t5ckpt_cli('ls', url, '--json'))
    storage = open_storage(url)
    assert there['bytes'] == sum(len(storage.read(key)) for key, _ in storage.walk('checkpoint_100'))
    here = json.loads(t5ckpt_cli('ls', run_dir, '--json'))[1]['bytes']
    assert here == sum(path.stat().st_size for path in (run_dir / 'checkpoint_100').rglob('*') if path.is_file())
    assert 0 <= there['bytes'] - here < 1000, 'the names below the directory of the copy are longer'


def test_ls_all_shows_what_is_not_complete(run_dir):
    entries = json.loads(t5ckpt_cli('ls', run_dir, '--all', '--json'))
    assert {entry['step']: entry['state'] for entry in entries} == {
        0: 'complete',
        100: 'complete',
        150: 'damaged',
        200: 'complete',
        300: 'unfinished',
        310: 'being deleted',
        400: 'broken',
    }


def test_ls_names_a_broken_step_that_it_does_not_list(run_dir, capsys):
    # A step that is being written has a name of its own, and is nothing to look after.
    told = 'broken, and therefore not listed: 400. t5ckpt ls --all lists every entry.\n'
    for words, expected in (([], told), (['--json'], told), (['--all'], '')):
        with pytest.raises(SystemExit):
            run_verb(['ls', str(run_dir), *words])
        assert capsys.readouterr().err == expected


def test_ls_counts_the_bytes_that_are_there(run_dir):
    by_step = {entry['step']: entry for entry in json.loads(t5ckpt_cli('ls', run_dir, '--json'))}
    files = (run_dir / 'checkpoint_100').rglob('*')
    assert by_step[100]['bytes'] == sum(file.stat().st_size for file in files if file.is_file())


def test_ls_loads_neither_jax_nor_tensorstore(run_dir):
    code = (
        'import sys; from t5ckpt.cli.app import run\n'
        f'try: run(["ls", {str(run_dir)!r}])\n'
        'finally: print(sorted({"jax", "flax", "tensorstore", "asyncio"} & set(sys.modules)))'
    )
    done = subprocess.run(
        [sys.executable, '-c', code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, 'PYTHONPATH': str(ROOT)},
    )
    assert done.stdout.splitlines()[-1] == '[]'


def test_a_directory_that_is_not_there_is_exit_code_3(run_dir):
    assert 'no such file or directory' in t5ckpt_cli('ls', run_dir / 'nope', code=3)


@pytest.mark.parametrize('verb', [['ls'], ['best'], ['prune', '--keep', '1'], ['rm', '1']])
def test_an_empty_path_is_a_usage_error(verb):
    assert "is empty. Write '.'" in t5ckpt_cli(verb[0], '', *verb[1:], code=2)


def test_wrong_words_are_exit_code_2(run_dir):
    assert 'No such command' in t5ckpt_cli('list', run_dir, code=2)


def test_summaries_of_verbs_are_not_cut(monkeypatch):
    monkeypatch.setenv('COLUMNS', '80')
    summaries = t5ckpt_cli('--help').partition('Commands:')[2]
    assert summaries
    assert not any(line.endswith('...') for line in summaries.splitlines())


def test_rm_of_a_step_that_is_not_there_says_what_to_name(run_dir):
    assert 'complete steps are: 0, 100, 200. Pass one of them.' in t5ckpt_cli('rm', run_dir, 7, '--yes', code=3)


def test_a_reader_that_stops_early_gets_no_traceback(run_dir):
    done = subprocess.run(
        ['bash', '-c', f'{sys.executable} -m t5ckpt ls --all {run_dir} | true; exit ${{PIPESTATUS[0]}}'],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, 'PYTHONPATH': str(ROOT)},
    )
    assert done.returncode == 141
    assert done.stderr == ''


def on_a_terminal(*words, columns):
    """What a verb prints to a terminal."""
    parent, child = pty.openpty()
    with subprocess.Popen(
        [sys.executable, '-m', 't5ckpt', *map(str, words)],
        stdout=child,
        env={**os.environ, 'PYTHONPATH': str(ROOT), 'TERM': 'xterm', 'COLUMNS': str(columns)},
    ) as process:
        os.close(child)
        text = b''
        try:
            while piece := os.read(parent, 4096):
                text += piece
        except OSError:  # Linux says EIO when the other end is closed.
            pass
        assert process.wait() == 0
    os.close(parent)
    return text.decode()


def test_on_a_terminal_the_table_is_that_of_a_pipe(run_dir):
    shown = on_a_terminal('stats', run_dir, columns=100)
    assert shown.splitlines() == t5ckpt_cli('stats', run_dir).splitlines()


def test_shell_completion_is_there():
    done = subprocess.run(
        [sys.executable, '-m', 't5ckpt'],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, 'PYTHONPATH': str(ROOT), '_T5CKPT_COMPLETE': 'bash_source'},
    )
    assert '_t5ckpt_completion' in done.stdout


def test_without_its_extra_the_command_says_what_to_install():
    done = subprocess.run(
        [sys.executable, '-c', 'import sys; sys.modules["click"] = None; from t5ckpt.cli import main; main()'],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, 'PYTHONPATH': str(ROOT)},
    )
    assert done.returncode == 5
    assert "pip install 't5ckpt[cli]'" in done.stderr


# --- looking into a checkpoint ---------------------------------------------------------------------------------------


def test_show_sums_up_groups(run_dir):
    read, *lines = t5ckpt_cli('show', run_dir).splitlines()
    assert read == f'{run_dir}/checkpoint_200/checkpoint: step 200'
    assert [line.split()[0] for line in lines] == ['name', 'target', 'scale', 'mlp', 'kernel', 'total']
    assert 'stored in chunks of (64, 128)' in lines[4]
    assert [line.split()[0] for line in t5ckpt_cli('show', run_dir, '--depth', 1).splitlines()[1:]] == [
        'name',
        'target',
        'total',
    ]


def test_show_sorts_and_greps(run_dir):
    by_size = t5ckpt_cli('show', run_dir, '--sort', 'size').splitlines()[1:]
    assert [line.split()[0] for line in by_size] == ['name', 'target/mlp/kernel', 'target/scale', 'total']
    found = json.loads(t5ckpt_cli('show', run_dir, '--step', 100, '--grep', '.*scale', '--json'))
    assert found['step'] == 100
    assert [leaf['name'] for leaf in found['leaves']] == ['target/scale']
    assert 'not a regular expression' in t5ckpt_cli('show', run_dir, '--grep', '(', code=2)


def test_cat_prints_a_leaf_or_a_slice(run_dir, tmp_path):
    assert t5ckpt_cli('cat', run_dir, 'target/mlp/kernel[0, :3]').split() == ['[0.', '1.', '2.]']
    found = json.loads(t5ckpt_cli('cat', run_dir, 'target/mlp/kernel[-1,-2:]', '--json'))
    assert found == {'name': 'target/mlp/kernel', 'dtype': 'float32', 'shape': [2], 'values': [8190.0, 8191.0]}
    done = subprocess.run(
        [sys.executable, '-m', 't5ckpt', 'cat', run_dir, 'target/mlp/kernel[::2, ...]', '--npy'],
        capture_output=True,
        check=True,
        env={**os.environ, 'PYTHONPATH': str(ROOT)},
    )
    (tmp_path / 'x.npy').write_bytes(done.stdout)
    np.testing.assert_array_equal(np.load(tmp_path / 'x.npy'), np.arange(8192).reshape(64, 128)[::2])


@pytest.mark.parametrize(
    ('leaf', 'code', 'text'),
    [
        ('target/mlp/kernal', 1, 'Near: target/mlp/kernel'),
        ('target/mlp', 1, 'is a group of 1 leaf. Name a leaf, such as target/mlp/kernel.'),
        ('target/mlp/.*', 1, 'Name a leaf, such as target/mlp/kernel.'),
        ('target/mlp/kernel[64]', 2, 'out of bounds'),
        ('target/mlp/kernel[:,:,:]', 2, 'shape (64, 128)'),
        ('target/mlp/kernel[1-2]', 2, 'in brackets, write numbers, start:stop:step'),
        ('target/mlp/kernel[:2', 2, 'does not end in a slice such as target/mlp/kernel[:2, 0]'),
    ],
)
def test_cat_refuses_what_is_not_there(run_dir, leaf, code, text):
    assert text in t5ckpt_cli('cat', run_dir, leaf, code=code)


@pytest.mark.parametrize('damage', [Path.unlink, lambda chunk: chunk.write_bytes(b'x')])
def test_cat_of_a_slice_in_a_bad_chunk_fails_like_that_of_the_leaf(tmp_path, damage):
    state = {'w': np.arange(8192.0).reshape(64, 128)}
    with t5ckpt.Checkpointer(
        state, checkpoints_dir=tmp_path, options=t5ckpt.CheckpointerOptions(chunk_bytes=2**15)
    ) as checkpointer:
        checkpointer.save(state, step=0)
    damage(tmp_path / 'checkpoint_0' / 'w' / '0.0')
    for leaf in ('w', 'w[0, :3]'):
        text = t5ckpt_cli('cat', tmp_path, leaf, code=3)
        assert re.match(r't5ckpt: w\b.*/w/0\.0\b.* [Rr]estore an older step, or copy', text)
    for index in ('64', '::0', '0,0,0', f'{10**30}'):
        assert 'w has shape (64, 128): ' in t5ckpt_cli('cat', tmp_path, f'w[{index}]', code=2)
    assert t5ckpt_cli('cat', tmp_path, 'w[1, -1:]') == '[255.]\n'


def test_stats_counts_and_fails_on_nan(run_dir, tmp_path):
    found = json.loads(t5ckpt_cli('stats', run_dir, '--json'))
    assert {leaf['name']: leaf['max'] for leaf in found['leaves']}['target/mlp/kernel'] == 8191.0
    read, _, scale = t5ckpt_cli('stats', run_dir, 'target/scale', '--step', 100).splitlines()
    assert read == f'{run_dir}/checkpoint_100/checkpoint: step 100'
    assert scale.startswith('target/scale')
    with t5ckpt.Checkpointer({'w': np.full(3, np.nan)}, checkpoints_dir=tmp_path) as checkpointer:
        checkpointer.save({'w': np.full(3, np.nan)}, step=1)
    assert json.loads(t5ckpt_cli('stats', tmp_path, '--json'))['not_finite'] == ['w']
    t5ckpt_cli('stats', tmp_path, '--fail-on-nan', code=1)


def test_diff_answers_with_its_exit_code(run_dir, tmp_path):
    assert '0 leaves differ' in t5ckpt_cli('diff', run_dir / 'checkpoint_0', run_dir / 'checkpoint_200')
    state = {'target': {'mlp': {'kernel': np.ones((64, 128), np.float32)}}}
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path) as checkpointer:
        checkpointer.save(state, step=1)
    text = t5ckpt_cli('diff', run_dir, tmp_path, code=1)
    assert 'removed' in text
    found = json.loads(t5ckpt_cli('diff', f'{run_dir}@200', tmp_path, '--json', '--top', 1, code=1))
    assert [leaf['name'] for leaf in found['leaves']] == ['target/mlp/kernel']
    assert 'no such file' in t5ckpt_cli('diff', run_dir, tmp_path / 'nope', code=3)


def test_diff_does_not_say_the_same_thing_twice(tmp_path):
    """The dtype and shape that did not change, and the empty columns of a layer."""
    state = {'layers_0': {'w': np.ones((4, 4), np.float32)}, 'bias': np.ones(2, np.float32)}
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path) as checkpointer:
        checkpointer.save(state, step=1)
        checkpointer.save({**state, 'layers_0': {'w': np.full((4, 4), 3, np.float32)}}, step=2)
    rows = t5ckpt_cli('diff', f'{tmp_path}@1', f'{tmp_path}@2', code=1).splitlines()[1:]
    assert rows[1].split() == ['layers_0/w', 'values', 'float32', '(4,', '4)', 'same', '2', '2']
    rows = t5ckpt_cli('diff', f'{tmp_path}@1', f'{tmp_path}@2', '--by-layer', code=1).splitlines()[1:]
    assert [row.split() for row in rows] == [['layer', 'leaves', 'relative', 'largest'], ['layers_0', '1', '2', '2']]


def test_diff_of_a_group_prints_names_that_cat_takes(tmp_path):
    for step in (1, 2):
        state = {'target': {'w': np.full(3, step), 'b': np.zeros(2)}, 'other': np.full(2, step)}
        with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path) as checkpointer:
            checkpointer.save(state, step=step)
    rows = t5ckpt_cli('diff', f'{tmp_path}@1', f'{tmp_path}@2', 'target', code=1).splitlines()[2:]
    assert [row.split()[0] for row in rows] == ['target/w']
    assert t5ckpt_cli('cat', f'{tmp_path}@1', rows[0].split()[0]) == '[1 1 1]\n'


def test_in_python_the_step_is_not_part_of_the_path(run_dir):
    with pytest.raises(t5ckpt.errors.CheckpointNotFoundError, match='@ belongs to the command line: pass step='):
        t5ckpt.open_checkpoint(f'{run_dir}@100')
    assert '@ belongs' not in t5ckpt_cli('show', f'{run_dir}-not@100', code=3)


def test_a_directory_of_runs_names_them(run_dir, tmp_path):
    shutil.copytree(run_dir, tmp_path / 'first')
    shutil.copytree(run_dir / 'checkpoint_100', tmp_path / 'second' / '100')
    (tmp_path / 'other').mkdir()
    for verb in ('ls', 'show', 'verify'):
        text = t5ckpt_cli(verb, tmp_path, code=3)
        assert 'it contains 3 entries: first, other, second.' in text
        assert f'Give the path of one: {tmp_path / "first"}' in text


def test_ls_of_a_run_without_steps_prints_no_empty_table(tmp_path):
    assert t5ckpt_cli('ls', tmp_path) == ''
    assert t5ckpt_cli('ls', tmp_path, '--json') == '[]\n'


def test_ls_of_a_directory_that_is_not_a_run_is_an_error(tmp_path):
    (tmp_path / 'notes.txt').write_text('')
    said = t5ckpt_cli('ls', tmp_path, code=3)
    assert f'{tmp_path}: no complete checkpoint there; it contains 1 entry: notes.txt.' in said


@pytest.mark.parametrize(
    'words', [['show', 'checkpoint_33'], ['verify', 'checkpoint_33'], ['cp', 'checkpoint_33', 'new']]
)
def test_the_path_of_a_step_that_is_not_there_is_answered_with_the_steps(run_dir, words, tmp_path):
    said = t5ckpt_cli(words[0], run_dir / words[1], *[tmp_path / 'new'] * len(words[2:]), code=3)
    assert 'checkpoint_33: step 33 does not exist, complete steps are: 0, 100, 200. Pass one of them.' in said


def test_cp_as_step_0_is_a_change(run_dir, tmp_path):
    t5ckpt_cli('cp', f'{run_dir}@100', tmp_path / 'new', '--as-step', 0)
    assert t5ckpt.all_steps(tmp_path / 'new') == [0]


@pytest.mark.parametrize(
    'facts',
    [
        {'keep': {'keep': 'KeepEveryHours', 'hours': 10**400}},
        {'keep': {'keep': 'KeepBest', 'count': 1, 'metric': '../..'}},
        {'created_unix': float('inf')},
        {'created_unix': float('nan')},
        {'bytes': 10**400},
        {'digests': {'x': 5}},
        {'metrics': {'a': 10**400, 'b': float('nan'), 'c': 'text'}},
    ],
    ids=str,
)
def test_ls_of_a_strangers_facts(tmp_path, facts):
    state = {'w': np.zeros(4, np.float32)}
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path) as checkpointer:
        checkpointer.save(state, step=1)
    step_dir = tmp_path / 'checkpoint_1'
    put_facts(step_dir, with_fields(facts_of(step_dir), **facts))
    assert t5ckpt_cli('ls', tmp_path).splitlines()[1].split()[0] == '1'
    told = json.loads(
        t5ckpt_cli('ls', tmp_path, '--json'), parse_constant=lambda text: pytest.fail(f'{text} is no JSON')
    )
    assert told[0]['step'] == 1


def test_names_do_not_reach_the_terminal_as_they_are(tmp_path):
    """A leaf's name may hold what clears a screen or sets a title."""
    evil = 'w\x1b]0;title\x07\x1b[2J'
    state = {evil: np.arange(4096, dtype=np.float32), 'b': np.ones(3, np.float32)}
    with t5ckpt.Checkpointer(
        state, checkpoints_dir=tmp_path / 'run', options=t5ckpt.CheckpointerOptions(inline_bytes=100)
    ) as checkpointer:
        checkpointer.save(state, step=1)
        checkpointer.save(state | {evil: state[evil] + 1}, step=2)
    run = tmp_path / 'run'
    one, two = run / 'checkpoint_1', run / 'checkpoint_2'
    outputs = [
        t5ckpt_cli(*words)
        for words in (('show', run), ('stats', run), ('cp', run, tmp_path / 'a', '--rename', 'b', 'c'))
    ]
    outputs.append(t5ckpt_cli('diff', one, two, code=1))
    outputs.append(t5ckpt_cli('cat', run, 'nothing', code=1))
    next(path for path in two.rglob('0') if path.is_file() and path.stat().st_size > 100).unlink()
    outputs += [t5ckpt_cli('verify', run, code=1), t5ckpt_cli('cp', run, tmp_path / 'b', code=3)]
    assert not any('\x1b' in text or '\x07' in text for text in outputs)
    assert any('\\x1b' in text for text in outputs)
