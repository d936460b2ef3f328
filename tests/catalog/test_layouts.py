"""Steps in the layouts of Orbax and Flax beside ours: listed, restored, never written over; and files of others stay."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import uuid

import flax
import jax.numpy as jnp
import msgpack
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore
from click.testing import CliRunner
from flax.training import checkpoints as flax_checkpoints
from jax.experimental.array_serialization import pytree_serialization
from safetensors.numpy import load_file, save_file
from support.facts import as_earlier_layout, put_facts
from support.options import with_options

import t5ckpt
from t5ckpt import errors
from t5ckpt.cli.app import app
from t5ckpt.commit.markers import Marker
from t5ckpt.convert import ConvertOptions, convert_checkpoint
from t5ckpt.storage import open_storage

STATE = {'w': np.arange(6000, dtype=np.float32), 'step': np.int32(7)}


def state(step):
    return {'w': STATE['w'] + step, 'step': np.int32(step)}


def open_ck(run, **options):
    return t5ckpt.Checkpointer(STATE, checkpoints_dir=run, **with_options(**options))


def t5x_orbax(run, step):
    """checkpoint_<step>/state, as T5X's use_orbax=True writes it."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(run / f'checkpoint_{step}' / 'state', state(step))


def manager(run, step):
    """<step>/default of an Orbax CheckpointManager."""
    with ocp.CheckpointManager(run) as each:
        each.save(step, args=ocp.args.StandardSave(state(step)))


def flax_file(run, step):
    """checkpoint_<step>, a msgpack file."""
    with flax.config.temp_flip_flag('use_orbax_checkpointing', False), pytest.warns(DeprecationWarning, match='Orbax'):
        flax_checkpoints.save_checkpoint(run, state(step), step, keep=9, overwrite=True)


def flax_orbax(run, step):
    """checkpoint_<step> of Flax through Orbax."""
    handler = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    flax_checkpoints.save_checkpoint(run, state(step), step, orbax_checkpointer=handler)


def placeholders(run, step):
    """checkpoint_<step> of the Orbax of 2023: a zarr directory for each array, and Flax msgpack that names them."""
    path = run / f'checkpoint_{step}'
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(path, state(step))
    for entry in [each for each in path.iterdir() if each.name not in STATE]:
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    (path / 'checkpoint').write_bytes(msgpack.packb({name: f'PLACEHOLDER://{name}' for name in STATE}))


def zero_padded(run, step):
    """checkpoint_0000<step> in T5X's format, as its get_checkpoint_dir names it."""
    with open_ck(run.with_name('elsewhere')) as ck:
        written = ck.save(state(step), step=step).path
    shutil.copytree(written, t5ckpt.get_checkpoint_dir(run, step, 8))
    shutil.rmtree(run.with_name('elsewhere'))


def named(**options):
    """A maker of the directory that an Orbax CheckpointManager with these options names."""

    def make(run, step):
        options_ = ocp.CheckpointManagerOptions(**options)
        with ocp.CheckpointManager(run, options=options_) as each:
            each.save(step, args=ocp.args.StandardSave(state(step)))

    return make


PREFIXED = named(step_prefix='ckpt')
PADDED = named(step_format_fixed_length=8)
BOTH = named(step_prefix='checkpoint', step_format_fixed_length=8)

MAKERS = [
    *((make, 'orbax') for make in (t5x_orbax, manager, flax_orbax, placeholders)),
    (flax_file, 'flax'),
    (zero_padded, 't5x-padded'),
]
NAMED = [PREFIXED, PADDED, BOTH]


def tree(root: pathlib.Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob('*') if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize(('make', 'layout'), [*MAKERS, *((make, 'orbax') for make in NAMED)])
def test_every_finder_agrees_with_restore(run_dir, tmp_path, make, layout, caplog):
    run_dir.mkdir()
    make(run_dir, 7)
    before = tree(run_dir)
    with open_ck(run_dir, keep=1) as ck:
        assert ck.restore()['w'][0] == 7
        assert ck.all_steps() == t5ckpt.all_steps(run_dir) == [7]
        assert ck.latest_step() == t5ckpt.latest_step(run_dir) == 7
        assert t5ckpt.find_checkpoint(run_dir) == t5ckpt.find_checkpoint(run_dir, 7)
        assert next(t5ckpt.checkpoints_iterator(run_dir, timeout=5)) == 7
        assert next(t5ckpt.checkpoints_iterator(run_dir, timeout=5, hold_seconds=60)) == 7
        assert t5ckpt.restore_or_init(ck, lambda: pytest.fail('a fresh start'))['w'][0] == 7
        assert ck.restored_step == 7
        caplog.set_level('INFO', 't5ckpt')
        assert ck.save(state(7), step=7) is None
        assert f'already exists, in the layout of {layout})' in caplog.text
        ck.save(state(8), step=8)
        ck.save(state(9), step=9)
        assert ck.restore()['w'][0] == 9
        assert ck.all_steps() == [7, 9]
        assert ck.restore(step=7)['w'][0] == 7
    assert {key: data for key, data in tree(run_dir).items() if key in before} == before
    run = t5ckpt.open_run(run_dir)
    assert [(each.step, each.layout) for each in run.summaries()] == [(7, layout), (9, 't5x')]
    assert run[7]['w'][0] == 7
    shown = json.loads(CliRunner().invoke(app, ['ls', str(run_dir), '--json']).output)
    assert [(each['step'], each['layout']) for each in shown] == [(7, layout), (9, 't5x')]
    assert layout in CliRunner().invoke(app, ['ls', str(run_dir)]).output
    with open_ck(run_dir) as ck, pytest.raises(errors.UnsupportedFormatError, match=f'is in the layout of {layout}'):
        ck.delete(7)
    (theirs,) = {key.partition('/')[0] for key in before}
    open_ck(tmp_path / 'ours').save(state(7))
    with pytest.raises(
        errors.UnsupportedFormatError, match=f'{theirs} is in the layout of {layout}, which is not'
    ) as no:
        t5ckpt.copy_checkpoint(tmp_path / 'ours', run_dir, t5ckpt.ConvertOptions(overwrite=True))
    assert ('Rename it to checkpoint_7 first.' if layout == 't5x-padded' else 'Move it away') in str(no.value)
    with open_ck(run_dir) as ck:
        assert ck.metrics(7) == {}
        for use in (ck.delete, lambda step: ck.save(state(step), step=step, overwrite=True)):
            with pytest.raises(errors.UnsupportedFormatError, match=f'{theirs} is in the layout of {layout}'):
                use(7)
    with pytest.raises(
        errors.UnsupportedFormatError, match=f'{theirs} is in the layout of {layout}, to which'
    ) as refused:
        t5ckpt.pin_checkpoint(run_dir / theirs)
    # The cure that it names.
    if layout == 't5x-padded':
        assert 'Rename it to checkpoint_7 first.' in str(refused.value)
        shutil.copytree(run_dir / theirs, tmp_path / 'pinned' / 'checkpoint_7')
    else:
        assert f't5ckpt convert {layout}' in str(refused.value)
        convert_checkpoint(layout, run_dir / theirs, tmp_path / 'pinned', ConvertOptions(step=7))
    t5ckpt.pin_checkpoint(tmp_path / 'pinned' / 'checkpoint_7')
    assert t5ckpt.is_pinned_checkpoint(tmp_path / 'pinned' / 'checkpoint_7')
    assert {key: data for key, data in tree(run_dir).items() if not key.startswith('checkpoint_9')} == before
    pruned = CliRunner().invoke(app, ['prune', str(run_dir), '--keep', '1', '--yes'])
    assert f'in the layout of {layout}' in pruned.output
    listed = CliRunner().invoke(app, ['ls', str(run_dir)]).output
    assert 'no keep policy applies' in listed
    assert listed.count(layout) == 1, 'the column says it'
    assert t5ckpt.all_steps(run_dir) == [7, 9]


@pytest.mark.slow
@pytest.mark.parametrize('make', [*(make for make, _ in MAKERS), *NAMED])
def test_whatever_takes_a_run_and_a_step_finds_the_step_of_restore(run_dir, tmp_path, make):
    run_dir.mkdir()
    make(run_dir, 7)
    with open_ck(tmp_path / 'new') as ck:
        assert (
            t5ckpt.restore_or_init(ck, lambda: STATE, initial_checkpoint=t5ckpt.WarmStart(run_dir, step=7))['w'][0] == 7
        )
        with pytest.raises(errors.CheckpointNotFoundError, match='step 6 does not exist, complete steps are: 7'):
            t5ckpt.restore_or_init(ck, lambda: STATE, initial_checkpoint=t5ckpt.WarmStart(run_dir, step=6))
        assert ck.restore(path=t5ckpt.find_checkpoint(run_dir, 7))['w'][0] == 7
    assert np.asarray(t5ckpt.load_t5x_checkpoint(run_dir, step=7)['w'])[0] == 7
    assert t5ckpt.open_checkpoint(run_dir, 7)['w'][0] == t5ckpt.open_run(run_dir)[7]['w'][0] == 7
    run, export, copy = str(run_dir), str(tmp_path / 'w.safetensors'), str(tmp_path / 'copy')
    for verb in (
        ['show', run],
        ['cat', run, 'w'],
        ['stats', run],
        ['convert', 'to-safetensors', run, export],
        ['cp', run, copy, '--save-dtype', 'float32', '--cast-leaves', 'w'],
    ):
        shown = CliRunner().invoke(app, [*verb, '--step', '7'])
        assert shown.exit_code == 0, (verb, shown.output, shown.exception)
    assert load_file(export)['w'][0] == t5ckpt.open_checkpoint(copy, 7)['w'][0] == 7


def test_t5xs_own_orbax_run_goes_on(golden, tmp_path):
    source = golden / 'case10_orbax'
    run = tmp_path / 'run'
    run.mkdir()
    os.symlink(source / 'checkpoint_12', run / 'checkpoint_12')
    assert t5ckpt.all_steps(run) == [12]
    with open_ck(run) as ck:
        assert ck.save(state(12)) is None
        ck.save(state(13))
    assert t5ckpt.all_steps(run) == [12, 13]


@pytest.mark.parametrize('older', [True, False])
def test_a_run_does_not_go_on_before_a_step_of_others_that_is_not_read(tmp_path, older):
    run = tmp_path / 'run'
    with open_ck(run) as ck:
        if older:
            ck.save(state(50))
    with ocp.CheckpointManager(run) as manager:
        items = {'params': ocp.args.StandardSave(state(100)), 'opt': ocp.args.StandardSave(state(0))}
        manager.save(100, args=ocp.args.Composite(**items))
    with open_ck(run) as ck:
        with pytest.raises(errors.TreeMismatchError, match='params/step'):
            t5ckpt.restore_or_init(ck, lambda: STATE)
        assert ck.restore(path=run / '100' / 'params')['step'] == 100
    assert t5ckpt.all_steps(run) == [50, 100][not older :]


@pytest.mark.slow
def test_a_bucket_lists_steps_of_others(bucket, tmp_path):
    run = tmp_path / 'run'
    run.mkdir()
    for make, step in ((zero_padded, 3), (placeholders, 4), (t5x_orbax, 5), (flax_file, 6), (manager, 7)):
        make(run, step)
    url = bucket.url()
    for key, data in tree(run).items():
        bucket.put(f'{url}/{key}', data)
    if bucket.scheme == 'gs':
        bucket.put(f'{url}/checkpoint_4/commit_success.txt', b'')
    assert t5ckpt.all_steps(url) == [3, 4, 5, 6, 7]
    with open_ck(url, keep=1) as ck:
        assert [ck.save(state(step), step=step) for step in (3, 4, 5, 6, 7)] == [None] * 5
        for refused in (ck.delete, lambda step: ck.save(state(step), step=step, overwrite=True)):
            with pytest.raises(errors.UnsupportedFormatError, match='checkpoint_4 is in the layout of orbax'):
                refused(4)
        ck.save(state(8), step=8)
        ck.save(state(9), step=9)
        # Until what retention has hidden is gone.
        ck.close()
        bucket.proxy.clear()
        assert ck.all_steps() == [3, 4, 5, 6, 7, 9]
        kinds = [request.kind for request in bucket.proxy.clear()]
        assert kinds.count('list') == 1
        assert len(kinds) < 40
        assert [float(ck.restore(step=step)['w'][0]) for step in (3, 4, 5, 6, 7, 9)] == [3, 4, 5, 6, 7, 9]


@pytest.mark.parametrize('make', [*(make for make, _ in MAKERS), *NAMED])
def test_rm_says_the_same_however_a_step_is_named(run_dir, make):
    run_dir.mkdir()
    make(run_dir, 7)
    (name,) = {path.name for path in run_dir.iterdir()}
    before = tree(run_dir)
    said = []
    for words in (
        [run_dir, '7'],
        [f'{run_dir}@7'],
        [run_dir / name],
        [run_dir, run_dir / name],
    ):
        done = CliRunner().invoke(app, ['rm', *map(str, words), '--dry-run'])
        said.append(done.output)
    assert set(said) == {said[0]}
    assert 'deleted with all files' in said[0]
    assert tree(run_dir) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ('bucket', 'make', 'layout'),
    [*(('gs', *each) for each in [*MAKERS, (BOTH, 'orbax')]), ('az', BOTH, 'orbax'), ('s3', BOTH, 'orbax')],
    indirect=['bucket'],
)
def test_every_finder_agrees_with_restore_on_a_bucket(bucket, tmp_path, make, layout, caplog):
    """Before the run has an index of its steps, and after the first save, which makes one."""
    run, url = tmp_path / 'run', bucket.url()
    run.mkdir()
    make(run, 7)
    for key, data in tree(run).items():
        bucket.put(f'{url}/{key}', data)
    (theirs,) = {key.partition('/')[0] for key in tree(run)}
    if make == placeholders and bucket.scheme == 'gs':
        bucket.put(f'{url}/{theirs}/commit_success.txt', b'')
    ours = tmp_path / 'ours'
    open_ck(ours).save(state(7))
    save_file({'w': np.ones(3)}, tmp_path / 'w.safetensors')
    with open_ck(url, keep=1) as ck:
        for steps in ([7], [7, 9]):
            newest = steps[-1]
            assert ck.restore()['w'][0] == newest
            assert ck.all_steps() == t5ckpt.all_steps(url) == steps
            assert ck.latest_step() == t5ckpt.latest_step(url) == newest
            assert t5ckpt.find_checkpoint(url) == t5ckpt.find_checkpoint(url, newest)
            assert t5ckpt.find_checkpoint(url, 7).startswith(f'{url}/{theirs}')
            assert list(t5ckpt.checkpoints_iterator(url, timeout=0, every=True)) == steps
            assert t5ckpt.restore_or_init(ck, lambda: pytest.fail('a fresh start'))['w'][0] == newest
            assert ck.restored_step == newest
            listed = [(7, layout), (9, 't5x')][: len(steps)]
            run_ = t5ckpt.open_run(url)
            assert [(each.step, each.layout) for each in run_.summaries()] == listed
            shown = json.loads(CliRunner().invoke(app, ['ls', url, '--json']).output)
            assert [(each['step'], each['layout']) for each in shown] == listed
            assert run_[7]['w'][0] == ck.restore(7)['w'][0] == t5ckpt.load_t5x_checkpoint(url, 7)['w'][0] == 7
            caplog.set_level('INFO', 't5ckpt')
            assert ck.save(state(7), step=7) is None
            assert f'already exists, in the layout of {layout})' in caplog.text
            assert ck.metrics(7) == {}
            for refused in (
                ck.delete,
                lambda step: ck.save(state(step), step=step, overwrite=True),
                lambda _: t5ckpt.pin_checkpoint(f'{url}/{theirs}'),
                lambda step: t5ckpt.copy_checkpoint(f'{ours}/checkpoint_{step}', url),
                lambda step: t5ckpt.convert_checkpoint(
                    'safetensors', tmp_path / 'w.safetensors', url, ConvertOptions(step=step)
                ),
            ):
                with pytest.raises(errors.UnsupportedFormatError, match=f'{theirs} is in the layout of {layout}'):
                    refused(7)
            if newest == 7:
                ck.save(state(8), step=8)
                ck.save(state(9), step=9)
    assert all(bucket.raw(f'{url}/{key}') == data for key, data in tree(run).items())


@pytest.mark.slow
@pytest.mark.parametrize(('make', 'step'), [(t5x_orbax, 'checkpoint_5'), (manager, '5')])
def test_a_step_that_orbax_still_writes_is_not_listed(bucket, tmp_path, make, step):
    make(tmp_path, 5)
    url = bucket.url()
    files = tree(tmp_path)
    commits = {key: data for key, data in files.items() if key.endswith('commit_success.txt')}
    for key in files.keys() - commits.keys():
        bucket.put(f'{url}/{key}', files[key])
        # While it is written under another name.
        bucket.put(f'{url}/{key.replace(step, f"{step}.orbax-checkpoint-tmp-9", 1)}', files[key])
    # Orbax renames on S3 and Azure, and writes in place on Google's storage alone.
    expected = [] if bucket.scheme == 'gs' else [5]
    assert t5ckpt.all_steps(url) == expected
    if bucket.scheme == 'gs':
        # A copy from a disk does not have the mark, and no run begins anew beside its steps.
        with (
            open_ck(url) as ck,
            pytest.raises(
                errors.CheckpointNotFoundError, match=rf'contains .*{step}.*\. Steps of Orbax lack commit_success'
            ),
        ):
            t5ckpt.restore_or_init(ck, lambda: pytest.fail('a new run'))
    with open_ck(url) as ck:
        if step == 'checkpoint_5':
            assert ck.save(state(5), step=5) is None
    for key, data in commits.items():
        bucket.put(f'{url}/{key}', data)
    assert t5ckpt.all_steps(url) == [5]


@pytest.mark.parametrize('make', [t5x_orbax, manager, PREFIXED])
def test_a_temporary_directory_of_orbax_is_not_a_step(run_dir, make):
    run_dir.mkdir()
    make(run_dir, 7)
    (final,) = (path for path in run_dir.iterdir() if path.is_dir())
    final.rename(f'{final}.orbax-checkpoint-tmp-1700000000')
    assert t5ckpt.all_steps(run_dir) == []
    assert t5ckpt.open_run(run_dir).summaries() == []
    with open_ck(run_dir) as ck:
        ck.save(state(7))
    assert t5ckpt.all_steps(run_dir) == [7]


def test_directories_named_like_steps_of_a_prefix_are_no_steps(run_dir):
    with open_ck(run_dir) as ck:
        ck.save(state(1))
    for name in ('logs_7', 'model_8'):
        (run_dir / name).mkdir()
        (run_dir / name / 'checkpoint').write_bytes(b'\x80')
    os.symlink('ckpt_9', run_dir / 'ckpt_9')
    assert t5ckpt.all_steps(run_dir) == [1]
    with open_ck(run_dir) as ck:
        ck.save(state(9))
    assert t5ckpt.all_steps(run_dir) == [1, 9]
    open_ck(run_dir / 'model_8').save(state(2))
    assert t5ckpt.all_steps(run_dir / 'model_8') == [2]


def test_nothing_is_begun_over_an_unreadable_layout(run_dir):
    step = run_dir / 'step-100'
    step.mkdir(parents=True)
    (step / '.metadata').write_bytes(b'')
    with (
        open_ck(run_dir) as ck,
        pytest.raises(errors.CheckpointNotFoundError, match=r'step-100/\.metadata .*torchtitan'),
    ):
        t5ckpt.restore_or_init(ck, lambda: 'new')


@pytest.mark.parametrize(
    'name', ['model.safetensors', 'pytorch_model.bin', 'global_step500/mp_rank_00.pt', 'w/notes.txt']
)
def test_nothing_is_begun_over_an_unreadable_step(run_dir, name):
    put(run_dir / 'checkpoint_500' / name)
    with open_ck(run_dir) as ck, pytest.raises(errors.CheckpointNotFoundError, match='checkpoint_500'):
        t5ckpt.restore_or_init(ck, lambda: 'new')


def test_metrics_of_the_latest_step_are_not_those_of_an_older_one(run_dir):
    with open_ck(run_dir) as ck:
        ck.save(state(5), metrics={'loss': 1.0})
        manager(run_dir, 7)
        assert ck.metrics() == {}
        assert ck.metrics(5) == {'loss': 1.0}
        assert ck.best_step('loss', 'min') == 5


def test_a_run_that_holds_an_export_is_still_the_run(run_dir):
    with open_ck(run_dir) as ck:
        ck.save(state(1))
        t5ckpt.convert_checkpoint('to-safetensors', run_dir, run_dir / 'model.safetensors')
        ck.save(state(2))
        assert ck.restore(path=run_dir)['w'][0] == 2
        assert ck.restore(path=run_dir / 'model.safetensors')['w'][0] == 1
    assert t5ckpt.open_checkpoint(run_dir)['w'][0] == t5ckpt.load_t5x_checkpoint(run_dir)['w'][0] == 2
    assert json.loads(CliRunner().invoke(app, ['cat', str(run_dir), 'w[0]', '--json']).output)['values'] == 2
    with open_ck(run_dir.parent / 'next') as ck:
        assert t5ckpt.restore_or_init(ck, lambda: state(0), initial_checkpoint=run_dir)['w'][0] == 2
    # A step that is damaged is damage, and no reason to read older values in silence.
    (run_dir / 'checkpoint_1').rename(run_dir / 'gone')
    (run_dir / 'checkpoint_2' / 'checkpoint').write_bytes(b'\x82\xa7ver')
    with pytest.raises(errors.CorruptCheckpointError, match='checkpoint_2'):
        t5ckpt.open_checkpoint(run_dir)


@pytest.mark.parametrize('on_bucket', [False, True])
def test_a_run_that_goes_on_from_a_tensorflow_checkpoint_is_a_run(run_dir, on_bucket):
    """T5X's find_checkpoint takes the latest step, whatever the directory's own file holds."""
    run = f'memory://{run_dir.name}/{on_bucket}' if on_bucket else run_dir
    with open_ck(run) as ck:
        ck.save(state(2))
        open_storage(run).write('checkpoint', b'model_checkpoint_path: "model.ckpt-1"\n')
        assert ck.restore(path=run)['w'][0] == ck.restore()['w'][0] == 2
    assert t5ckpt.open_checkpoint(run)['w'][0] == t5ckpt.load_t5x_checkpoint(run)['w'][0] == 2
    assert t5ckpt.find_checkpoint(run) == t5ckpt.find_checkpoint(run, 2)


def test_a_file_where_a_run_is_expected_is_named(tmp_path):
    tensors, text = tmp_path / 'w.safetensors', tmp_path / 't9.py'
    open_ck(tmp_path / 'run').save(state(1))
    t5ckpt.convert_checkpoint('to-safetensors', tmp_path / 'run', tensors)
    text.write_text('import numpy as np\n')
    wanted = {
        tensors: 'w.safetensors is a safetensors file, not a checkpoint: restore(path=...) and open_checkpoint read it, '
        't5ckpt show lists it',
        text: 't9.py is a file, not the directory of a run',
    }
    for path, said in wanted.items():
        for step in (None, 5):
            with open_ck(path) as ck, pytest.raises(errors.T5CkptError, match=re.escape(said)):
                ck.restore(step=step)
        with pytest.raises(errors.T5CkptError, match=re.escape(said)):
            t5ckpt.open_run(path)
        for words in (['ls', str(path)], ['prune', str(path), '--keep', '1']):
            assert said in str(CliRunner().invoke(app, words).exception)
    for data in (b'import numpy as np\n', b'', b'\x80\x04 a pickle', b'\x82'):
        text.write_bytes(data)
        with pytest.raises(errors.UnsupportedFormatError, match=r't9\.py is not a checkpoint\. Check the path'):
            t5ckpt.open_checkpoint(text)


# --- only what we wrote is removed -------------------------------------------------------------------------------------


def put(path: pathlib.Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b'somebody else')


THEIRS = [
    'model.safetensors',
    'pytorch_model.bin',
    'global_step500/mp_rank_00.pt',
    'latest',
    'a/b/c',
    '.zgroup',
    'w/.zattrs',
]


@pytest.mark.parametrize('name', THEIRS)
def test_a_save_moves_files_of_others_aside(run_dir, name, caplog):
    put(run_dir / 'checkpoint_500' / name)
    put(run_dir / 'checkpoint_500' / 'w' / '0')
    with open_ck(run_dir) as ck:
        assert ck.save(state(500)).step == 500
        assert name in caplog.text
        (aside,) = run_dir.glob('checkpoint_500.foreign-*')
        assert (aside / name).read_bytes() == (aside / 'w' / '0').read_bytes() == b'somebody else'
        ck.save(state(501))
    assert (aside / name).is_file()
    assert t5ckpt.all_steps(run_dir) == [500, 501]


@pytest.mark.parametrize('way', ['copy', 'import'])
def test_copies_and_imports_move_files_of_others_aside(tmp_path, way):
    put(tmp_path / 'target' / 'checkpoint_500' / THEIRS[2])
    if way == 'copy':
        open_ck(tmp_path / 'source').save(state(500))
        t5ckpt.copy_checkpoint(tmp_path / 'source', tmp_path / 'target')
    else:
        save_file({'w': np.ones(3)}, tmp_path / 'a.safetensors')
        t5ckpt.convert_checkpoint(
            'safetensors', tmp_path / 'a.safetensors', tmp_path / 'target', ConvertOptions(step=500)
        )
    assert t5ckpt.all_steps(tmp_path / 'target') == [500]
    (aside,) = (tmp_path / 'target').glob('checkpoint_500.foreign-*')
    assert list(tree(aside)) == [THEIRS[2]]


def test_retention_and_overwrites_leave_what_others_put_into_a_step(run_dir):
    with open_ck(run_dir, keep=1) as ck:
        ck.save(state(1))
        put(run_dir / 'checkpoint_1' / 'eval' / 'scores.json')
        ck.save(state(2))
        ck.save(state(3))
    (aside,) = run_dir.glob('checkpoint_1.foreign-*')
    assert list(tree(aside)) == ['eval/scores.json']
    put(run_dir / 'checkpoint_3' / 'eval.json')
    open_ck(run_dir.parent / 'other').save(state(3), step=3)
    t5ckpt.copy_checkpoint(run_dir.parent / 'other', run_dir, t5ckpt.ConvertOptions(overwrite=True))
    (aside,) = run_dir.glob('checkpoint_3.foreign-*')
    assert list(tree(aside)) == ['eval.json']
    assert open_ck(run_dir).restore()['w'][0] == 3


def test_garbage_collection_leaves_files_of_others(run_dir):
    run_dir.mkdir()
    for step, name in ((5, 'w/0'), (6, 'model.pt')):
        marker = Marker(open_storage(run_dir), step, time.time)
        put(run_dir / marker.directory / name)
        marker.release()
    open_ck(run_dir).save(state(9))
    names = sorted(path.name.partition('-')[0] for path in run_dir.iterdir())
    assert names == ['checkpoint_6.foreign', 'checkpoint_9']


def test_on_a_bucket_files_of_others_are_refused_and_stay(bucket):
    url = bucket.url()
    bucket.put(f'{url}/checkpoint_500/model.safetensors', b'somebody else')
    with open_ck(url, keep=1) as ck:
        with pytest.raises(errors.UnsupportedFormatError, match=r'model\.safetensors'):
            ck.save(state(500))
        ck.save(state(501))
        bucket.put(f'{url}/checkpoint_501/scores.json', b'somebody else')
        ck.save(state(502))
    assert bucket.raw(f'{url}/checkpoint_500/model.safetensors') == b'somebody else'
    assert [key for key, _ in open_storage(url).walk('checkpoint_501')] == ['checkpoint_501/scores.json']


@pytest.mark.parametrize('data', [b'', b'\x01', b'\x82', b'\x90', b'\xa1x', b'\xc0\xc0', b'\x81\xa1'])
def test_one_or_two_bytes_of_rubbish_are_replaced(run_dir, data):
    (run_dir / 'checkpoint_3').mkdir(parents=True)
    (run_dir / 'checkpoint_3' / 'checkpoint').write_bytes(data)
    with open_ck(run_dir) as ck:
        assert ck.all_steps() == ([3] if data == b'\x81\xa1' else []), 'a state that is cut off is a damaged step'
        assert ck.save(state(3)).step == 3
        assert ck.restore()['w'][1] == 4
    assert [path.name for path in run_dir.iterdir()] == ['checkpoint_3']


def test_what_is_whole_for_another_program_is_moved_aside(run_dir):
    (run_dir / 'checkpoint_3').mkdir(parents=True)
    (run_dir / 'checkpoint_3' / 'checkpoint').write_bytes(b'model_checkpoint_path: "model.ckpt-3"\n')
    open_ck(run_dir).save(state(3))
    (aside,) = run_dir.glob('checkpoint_3.foreign-*')
    assert (aside / 'checkpoint').read_bytes().startswith(b'model_checkpoint_path')


# --- one unreadable step -----------------------------------------------------------------------------------------------


def spoil_facts(step):
    put_facts(step, b'{' * 40)


def spoil_facts_file(step):
    as_earlier_layout(step)
    (step / 't5ckpt.json').write_text('{')


def facts_file_is_a_directory(step):
    as_earlier_layout(step)
    (step / 't5ckpt.json').unlink()
    (step / 't5ckpt.json').mkdir()


def manifest_loops(step):
    (step / 'checkpoint').unlink()
    os.symlink('checkpoint', step / 'checkpoint')


@pytest.mark.parametrize('spoil', [spoil_facts, spoil_facts_file, facts_file_is_a_directory, manifest_loops])
def test_one_unreadable_step_does_not_hide_the_others(run_dir, spoil):
    with open_ck(run_dir) as ck:
        for step in (1, 2, 3):
            ck.save(state(step))
    spoil(run_dir / 'checkpoint_2')
    found = t5ckpt.open_run(run_dir).summaries()
    assert [each.step for each in found] == [1, 2, 3]
    assert [each.state for each in found] == ['complete', 'unreadable', 'complete']
    assert 'checkpoint_2' in found[1].reason
    assert 'unreadable' in repr(t5ckpt.open_run(run_dir))
    shown = CliRunner().invoke(app, ['ls', str(run_dir), '--json'])
    assert shown.exit_code == 0
    assert [(each['step'], each['state'], bool(each['reason'])) for each in json.loads(shown.output)] == [
        (1, 'complete', False),
        (2, 'unreadable', True),
        (3, 'complete', False),
    ]
    assert 'unreadable' in CliRunner().invoke(app, ['ls', str(run_dir)]).output
    assert t5ckpt.latest_step(run_dir) == 3
    with open_ck(run_dir, keep=1) as ck:
        ck.save(state(4))
    assert not (run_dir / 'checkpoint_1').exists()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_ls_names_a_step_that_may_not_be_read(run_dir):
    with open_ck(run_dir) as ck:
        for step in (1, 2):
            ck.save(state(step))
    denied, others = run_dir / 'checkpoint_2', run_dir / 'logs_7'
    others.mkdir()
    denied.chmod(0)
    others.chmod(0)
    code = """
import os, sys, json
from click.testing import CliRunner
import t5ckpt
from t5ckpt.cli.app import app
from t5ckpt.commit.markers import Marker
CliRunner().invoke(app, ['ls', sys.argv[1], '--json'])  # Imports what it needs, which may lie where others cannot read.
os.chdir(sys.argv[1])
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
shown = CliRunner().invoke(app, ['ls', '.', '--json'])
assert shown.exit_code == 0, (shown.output, shown.exception)
print(json.dumps([(each['step'], each['state'], each['reason']) for each in json.loads(shown.output)]))
try:
    t5ckpt.find_checkpoint('.')
except t5ckpt.errors.StorageError as error:
    print(error)
try:
    t5ckpt.find_checkpoint('.', 7)
except t5ckpt.errors.CheckpointNotFoundError as error:
    print(error)
"""
    # Whoever it is to be read by must reach the run.
    opened = [above for above in run_dir.parents if above.stat().st_uid == os.getuid() and not above.stat().st_mode & 1]
    modes = {above: above.stat().st_mode for above in opened}
    try:
        for above in opened:
            above.chmod(0o755)
        done = subprocess.run(
            [sys.executable, '-c', code, str(run_dir)], check=False, capture_output=True, text=True, timeout=120
        )
    finally:
        denied.chmod(0o755)
        others.chmod(0o755)
        for above, mode in modes.items():
            above.chmod(mode)
    assert done.returncode == 0, done.stderr
    rows, error, absent = done.stdout.splitlines()
    (first, second) = json.loads(rows)
    assert first == [1, 'complete', '']
    assert second[:2] == [2, 'unreadable']
    assert 'checkpoint_2' in second[2]
    assert 'checkpoint_2' in error
    assert 'step 7 does not exist' in absent


# --- a run within a step -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize('below', ['', 'eval', 'eval/deep/run', 'w'])
def test_a_run_below_a_step_is_refused(run_dir, below):
    open_ck(run_dir).save(state(5))
    inner = run_dir / 'checkpoint_5' / below
    for use in (open_ck, t5ckpt.open_run, lambda path: t5ckpt.copy_checkpoint(run_dir, path)):
        with pytest.raises((errors.CheckpointNotFoundError, ValueError), match='checkpoint_5'):
            use(inner)
    manager(run_dir, 7)
    with pytest.raises(errors.CheckpointNotFoundError, match=r'in the checkpoint .*/7, not a run'):
        open_ck(run_dir / '7' / 'default')


def renamed_to_base_7(run, step):
    with open_ck(run) as ck:
        ck.save(state(step))
    (run / f'checkpoint_{step}').rename(run / 'base_7')


@pytest.mark.parametrize(
    ('make', 'step'),
    [(PREFIXED, 'ckpt_7'), (BOTH, 'checkpoint_00000007'), (PADDED, '00000007'), (renamed_to_base_7, 'base_7')],
)
def test_a_run_below_a_step_with_another_name_is_refused(run_dir, make, step):
    make(run_dir, 7)
    for below in ('', 'eval', 'eval/deep/run'):
        with pytest.raises(errors.CheckpointNotFoundError, match=rf'checkpoint .*{step}, not a run|{step} is a chec'):
            open_ck(run_dir / step / below)


@pytest.mark.parametrize('name', ['run_7', '7', 'step-7'])
def test_a_run_with_a_number_in_its_name_is_no_step(tmp_path, name):
    """Also with a file beside its steps that begins like a manifest."""
    run = tmp_path / name
    with open_ck(run) as ck:
        ck.save(state(1))
    shutil.copy(run / 'checkpoint_1' / 'checkpoint', run / 'checkpoint')
    for directory in (run, run / 'eval'):
        with open_ck(directory) as ck:
            ck.save(state(2))
        assert t5ckpt.latest_step(directory) == 2


# --- a path of the wrong level ------------------------------------------------------------------------------------------


def renamed(root, _):
    (root / 'run' / 'checkpoint_5').rename(root / 'base')
    return root / 'base'


def linked(root, _):
    os.symlink('run/checkpoint_5', root / 'latest')
    return root / 'latest'


def parent_of_a_renamed_step(root, _):
    (root / 'models').mkdir()
    (root / 'run' / 'checkpoint_5').rename(root / 'models' / 'base')
    return root / 'models'


def one_of_orbax(root, path):
    manager(root / 'orbax', 7)
    return root / 'orbax' / '7' / path


def named_by_flax(root, name):
    directory = root / 'flax'
    directory.mkdir()
    (directory / name).write_bytes(flax.serialization.to_bytes(state(7)))
    return directory


def of_zarr(root, path):
    for name in ('w', 'b'):
        spec = {'driver': 'zarr', 'kvstore': {'driver': 'file', 'path': str(root / 'tree' / path / name)}}
        tensorstore.open(spec, create=True, dtype=np.float32, shape=[3]).result()[...] = 1
    return root / 'tree'


def dangling(root, _):
    os.symlink('nowhere', root / 'dangling')
    return root / 'dangling'


def half_copied(root, _):
    path = renamed(root, _) / 'checkpoint'
    path.write_bytes(path.read_bytes()[:40])
    return root / 'base'


@pytest.mark.parametrize(
    ('make', 'argument', 'named'),
    [
        (renamed, '', 'base is a checkpoint, not a run'),
        (half_copied, '', 'base is a checkpoint, not a run'),
        (linked, '', 'in the checkpoint .*run/checkpoint_5, not a run. Pass the directory of the run, such as .*/run,'),
        (
            lambda root, name: root / 'run' / name,
            'checkpoint_7',
            'path of a step.*Pass the directory of the run, .*/run',
        ),
        (
            lambda root, name: root / 'run' / name,
            'checkpoint_7.tmp-12/',
            'path of a step.*directory of the run, .*/run',
        ),
        (
            lambda root, name: root / 'run' / name,
            'checkpoint_5/target/w',
            'in the checkpoint .*/checkpoint_5, not a run',
        ),
        (
            lambda root, name: root / 'run' / name,
            'checkpoint_5/checkpoint',
            'in the checkpoint .*/checkpoint_5, not a run',
        ),
        (lambda root, _: root, '', 'contains 1 entry: run.*Give the path of one: .*/run'),
        (parent_of_a_renamed_step, '', 'Give the path of one: .*models/base'),
        (one_of_orbax, '', '/7 is a checkpoint, not a run'),
        (one_of_orbax, 'default', 'in the checkpoint .*/7, not a run'),
        (one_of_orbax, 'default/d', 'in the checkpoint .*/7, not a run'),
        (named_by_flax, 'checkpoint_-0.196', 'Give the path of one: .*checkpoint_-0.196'),
        (named_by_flax, 'checkpoint_1e-05', 'Give the path of one: .*checkpoint_1e-05'),
        (named_by_flax, 'model_7', 'Give the path of one: .*model_7'),
        (named_by_flax, '7', 'Give the path of one: .*flax/7'),
        (lambda root, name: root / name, 'run ', '/run : there is no such .*white space .*Pass .*/run[.]'),
        (dangling, '', 'is a symbolic link to nowhere, which does not exist'),
    ],
)
def test_no_run_is_begun_at_a_path_of_the_wrong_level(tmp_path, make, argument, named):
    with open_ck(tmp_path / 'run') as ck:
        ck.save(state(5))
    path = make(tmp_path, argument)
    before = tree(tmp_path)
    for use in (
        lambda: t5ckpt.restore_or_init(open_ck(path), lambda: pytest.fail('a new run')),
        *([] if 'Give the path of one' in named else [lambda: open_ck(path).save(state(6))]),
        lambda: open_ck(path).restore(),
        lambda: next(t5ckpt.checkpoints_iterator(path, timeout=0)),
    ):
        with pytest.raises((errors.CheckpointNotFoundError, errors.StorageError), match=named):
            use()
    listed = CliRunner().invoke(app, ['ls', str(path)])
    assert listed.exit_code != 0
    assert tree(tmp_path) == before


def model_of_hf(root, name):
    (root / 'hf').mkdir()
    if name.endswith('.index.json'):
        (root / 'hf' / name).write_text(json.dumps({'weight_map': {'w': 'flax_model-00001-of-00001.msgpack'}}))
    else:
        save_file({'w': np.ones(3, np.float32)}, root / 'hf' / name)
    return root / 'hf'


@pytest.mark.parametrize(
    ('make', 'argument', 'named'),
    [
        (model_of_hf, 'model.safetensors', 'model.safetensors is a safetensors file, not a checkpoint'),
        (model_of_hf, 'flax_model.msgpack.index.json', 'flax_model.msgpack.index.json is an index of Flax weights'),
    ],
)
def test_no_run_is_begun_where_a_model_is(tmp_path, make, argument, named):
    path = make(tmp_path, argument)
    before = tree(tmp_path)
    with pytest.raises(errors.CheckpointNotFoundError, match=f'To start a run, pass another directory.*{named}'):
        t5ckpt.restore_or_init(open_ck(path), lambda: pytest.fail('a new run'))
    assert tree(tmp_path) == before


@pytest.mark.parametrize('what', ['best', 'export', 'flax'])
def test_a_trainer_may_save_above_other_checkpoints(tmp_path, caplog, what):
    """Its best steps, or the weights that it began with. A restart before its first own step is refused."""
    with open_ck(tmp_path / 'run') as ck:
        t5ckpt.restore_or_init(ck, lambda: state(0))
        if what == 'best':
            open_ck(tmp_path / 'run' / 'best').save(state(3))
        elif what == 'export':
            open_ck(tmp_path / 'run' / 'init').save(state(0), step=0)
        else:
            (tmp_path / 'run').mkdir()
            (tmp_path / 'run' / 'pretrained.msgpack').write_bytes(flax.serialization.msgpack_serialize(state(0)))
        ck.save(state(5))
        ck.save(state(6))
    assert caplog.text.count(f'a new run begins in {tmp_path}/run, which contains') == 1
    assert t5ckpt.all_steps(tmp_path / 'run') == [5, 6]


def test_an_import_of_flax_weights_names_the_verb_that_reads_them(tmp_path):
    path = model_of_hf(tmp_path, 'other.safetensors')
    (path / 'flax_model.msgpack').write_bytes(flax.serialization.to_bytes({'w': np.ones(3)}))
    with pytest.raises(errors.UnsupportedFormatError, match=r't5ckpt convert flax reads Flax weights'):
        t5ckpt.convert_checkpoint('hf', path, tmp_path / 'out')
    assert convert_checkpoint('flax', path / 'flax_model.msgpack', tmp_path / 'out', ConvertOptions(step=0)).step == 0


def test_a_directory_of_jax_is_described(tmp_path):
    (tmp_path / 'run').mkdir()
    pytree_serialization.save({'w': jnp.ones((3, 4))}, tmp_path / 'run' / 'step_5')
    with pytest.raises(errors.CheckpointNotFoundError, match=r'pytreedef.json is a file of JAX.*load its directory'):
        t5ckpt.open_checkpoint(tmp_path / 'run/step_5')


@pytest.mark.parametrize('path', ['params', '7/params', 'step/0'])
def test_a_tree_of_zarr_arrays_is_no_place_for_a_new_run(tmp_path, path):
    tree_of_zarr = of_zarr(tmp_path, path)
    with pytest.raises(
        errors.CheckpointNotFoundError, match=r'tree of zarr arrays, not a run.* pass another directory'
    ):
        t5ckpt.restore_or_init(open_ck(tree_of_zarr), lambda: pytest.fail('a new run'))
    assert 'tree of zarr arrays' in str(CliRunner().invoke(app, ['ls', str(tree_of_zarr)]).exception)
    assert sorted(t5ckpt.open_checkpoint(tree_of_zarr)) == [f'{path}/b', f'{path}/w']


@pytest.mark.parametrize(
    'name', ['checkpoint_5.tmp-1764000000', 'checkpoint_5.deleted-1764000000', '5.orbax-checkpoint-tmp-3']
)
def test_a_step_that_is_being_written_is_not_a_tree_of_zarr_arrays(tmp_path, name):
    with t5ckpt.Checkpointer(
        STATE, checkpoints_dir=tmp_path / 'run', options=t5ckpt.CheckpointerOptions(inline_bytes=0)
    ) as ck:
        ck.save(state(5))
    unfinished = (tmp_path / 'run' / 'checkpoint_5').rename(tmp_path / 'run' / name)
    for file in [path for path in unfinished.iterdir() if path.is_file()]:
        file.unlink()
    assert list(unfinished.rglob('.zarray'))
    for read in (t5ckpt.open_checkpoint, t5ckpt.load_t5x_checkpoint, lambda path: open_ck('').restore(path=path)):
        with pytest.raises(errors.CheckpointNotFoundError, match='no complete checkpoint'):
            read(tmp_path / 'run')


@pytest.mark.parametrize('path', ['new', 'new/', 'a/b/c', 'run/../new', 'empty', 'logs', 'run/finetuned', 'link'])
def test_a_new_run_begins_where_nothing_is(tmp_path, path):
    with open_ck(tmp_path / 'run') as ck:
        ck.save(state(5))
    for name in ('empty', 'logs/tb/0', 'elsewhere'):
        (tmp_path / name).mkdir(parents=True)
    os.symlink('elsewhere', tmp_path / 'link')
    (tmp_path / 'logs' / 'plot.png').write_bytes(bytes.fromhex('89504e470d0a1a0a') + bytes(40))
    (tmp_path / 'logs' / 'config.json').write_text('{}')
    # Files of the user, which only a name connects with another program
    for name in ('faiss.index', 'search.index.json', 'vocab.pt', 'start.safetensors'):
        (tmp_path / 'logs' / name).write_bytes(b'data')
    # What a crash of the first save leaves
    shutil.copytree(tmp_path / 'run/checkpoint_5', tmp_path / 'logs' / 'checkpoint_1.tmp-12')
    with open_ck(f'{tmp_path}/{path}') as ck:
        assert t5ckpt.restore_or_init(ck, lambda: 'new') == 'new'
        ck.save(state(1))
    assert t5ckpt.all_steps(f'{tmp_path}/{path}') == [1]


def test_a_run_names_the_checkpoints_that_are_not_among_its_steps(tmp_path, caplog):
    directory = named_by_flax(tmp_path, 'checkpoint_2')
    named_by_flax_too = directory / 'checkpoint_10.5'
    named_by_flax_too.write_bytes((directory / 'checkpoint_2').read_bytes())
    assert 'not listed: checkpoint_10.5' in CliRunner().invoke(app, ['ls', str(directory)]).stderr
    for restore in (
        lambda: t5ckpt.restore_or_init(open_ck(directory), None),
        open_ck(directory).restore,
        lambda: t5ckpt.open_checkpoint(directory),
        lambda: convert_checkpoint('flax', directory, tmp_path / 'one'),
    ):
        caplog.clear()
        restore()
        assert 'step 2 is the newest with an integer' in caplog.text
        assert 'checkpoint_10.5. Give the path' in caplog.text
    caplog.clear()
    flax_file(directory, 11)
    open_ck(directory).restore()
    assert 'integer' not in caplog.text
    for name in ('checkpoint_2', 'checkpoint_11'):
        (directory / name).unlink()
    (directory / 'checkpoint_tmp').write_bytes(b'x')
    assert convert_checkpoint('flax', directory, tmp_path / 'fraction', ConvertOptions(step=3)).step == 3
    (directory / 'checkpoint_1e-05').write_bytes(named_by_flax_too.read_bytes())
    with pytest.raises(
        errors.CheckpointNotFoundError, match=r'checkpoint_10\.5, checkpoint_1e-05, .*Give the path of one'
    ):
        convert_checkpoint('flax', directory, tmp_path / 'two')


@pytest.mark.parametrize('latest', [t5ckpt.latest_step, lambda path: open_ck(path).latest_step()])
def test_the_latest_step_of_a_directory_with_other_checkpoints_is_none_and_names_them(tmp_path, caplog, latest):
    directory = named_by_flax(tmp_path, 'checkpoint_0.5')
    assert latest(directory) is None
    assert f'Give the path of one: {directory}/checkpoint_0.5' in caplog.text
    caplog.clear()
    assert latest(tmp_path) is None
    assert f'Give the path of one: {directory}' in caplog.text
    caplog.clear()
    (tmp_path / 'empty').mkdir()
    shutil.copytree(tmp_path / 'empty', tmp_path / 'begun' / 'checkpoint_1.tmp-12')
    for name in ('empty', 'begun', 'absent'):
        assert latest(tmp_path / name) is None
    assert not caplog.text


def test_a_step_that_is_a_link_keeps_its_target(run_dir, caplog):
    caplog.set_level('INFO', 't5ckpt')
    with open_ck(run_dir) as ck:
        ck.save(state(5))
    os.symlink('checkpoint_5', run_dir / 'checkpoint_10')
    with open_ck(run_dir, keep=2) as ck:
        for step in (11, 12):
            ck.save(state(step))
    assert t5ckpt.all_steps(run_dir) == [5, 11, 12]
    assert 'step 5 is kept regardless of the keep policy: another step is a link to it' in caplog.text


@pytest.mark.parametrize('kind', ['disk', 'bucket'])
def test_a_newer_step_without_its_manifest_is_named(tmp_path, kind, caplog):
    """Its manifest is lost on a disk; in a bucket a save may be under way."""
    run = tmp_path / 'run' if kind == 'disk' else f'memory://{uuid.uuid4().hex}/run'
    storage = open_storage(run)
    with t5ckpt.Checkpointer(STATE, checkpoints_dir=run) as ck:
        for step in (100, 200, 300):
            ck.save(state(step), step=step)
    storage.delete_file('checkpoint_300/checkpoint')
    caplog.clear()
    with caplog.at_level('INFO', 't5ckpt'):
        assert t5ckpt.open_checkpoint(run).step == 200
    (line,) = [each for each in caplog.records if 'checkpoint_300' in each.getMessage()]
    assert re.search('checkpoint_300.* no file "checkpoint".* step 200', line.getMessage())
    assert line.levelname == ('WARNING' if kind == 'disk' else 'INFO')
    caplog.clear()
    t5ckpt.open_checkpoint(run, 200)
    assert 'checkpoint_300' not in caplog.text
