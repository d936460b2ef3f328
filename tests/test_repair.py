"""`repair`: what follows from the rest is made again, what does not is never made up, the original stays as it is."""

import json
import pathlib
import random

import jax
import numpy as np
import pytest
from support import golden as cases
from support.states import leaf_print
from test_cli import t5ckpt_cli
from test_integrity import Iterator, files_of, flip, save, some_file, state_of

import t5ckpt
from t5ckpt import errors
from t5ckpt.storage import open_storage

BOOKS = ('t5ckpt.json', 'integrity.0.json')


def bytes_of(step_dir):
    return {path.relative_to(step_dir).as_posix(): path.read_bytes() for path in files_of(step_dir)}


def arrays_of(step_dir):
    """Every array, as anybody reads it: dtype, shape and bytes."""
    view = t5ckpt.open_checkpoint(step_dir)
    return {info.name: leaf_print(np.asarray(view[info.name])) for info in view.infos() if info.dtype}


def harm(path, how, rng):
    if how == 'missing':
        path.unlink()
    elif how == 'empty':
        path.write_bytes(b'')
    elif how == 'truncated':
        path.write_bytes(path.read_bytes()[:-3])
    else:
        flip(path, rng)


@pytest.mark.parametrize('how', ['missing', 'empty', 'truncated', 'flipped'])
@pytest.mark.parametrize(
    'files', [('params.w/.zarray',), BOOKS[:1], BOOKS[1:], ('integrity.0.json', 'params.edge/.zarray')]
)
def test_what_follows_from_the_rest_is_made_again(run_dir, tmp_path, how, files):
    step_dir = save(run_dir, compression='zstd')
    expected = arrays_of(step_dir)
    for name in files:
        harm(step_dir / name, how, random.Random(7))
    before = bytes_of(step_dir)
    report = t5ckpt.repair(step_dir, tmp_path / 'mended')
    assert report.changed
    assert set(files) <= set(report.rebuilt)
    assert report.dropped == ()
    assert bytes_of(step_dir) == before
    mended = tmp_path / 'mended' / 'checkpoint_1'
    assert report.path == str(mended)
    assert report.files == len(files_of(mended))
    assert t5ckpt.verify(mended, full=True).ok
    assert t5ckpt.verify(mended).has_checksums
    if BOOKS[0] in files:
        assert any('sidecar is lost' in note for note in report.notes)
        # What was stored in another dtype is known to the sidecar alone.
        del expected['params/bits']
        found = arrays_of(mended)
        assert {name: found[name] for name in expected} == expected
    else:
        assert arrays_of(mended) == expected
        sidecar = json.loads((mended / 't5ckpt.json').read_text())
        assert sidecar['repaired']['rebuilt'] == list(report.rebuilt)


def test_without_any_books_it_is_a_checkpoint_of_t5x(run_dir, tmp_path):
    """Nothing says that there were some; what is left of them says only what is certain."""
    step_dir = save(run_dir)
    for name in BOOKS:
        (step_dir / name).unlink()
    assert not t5ckpt.repair(step_dir, tmp_path / 'mended').changed
    (step_dir / 't5ckpt.json').write_bytes(b'')
    assert t5ckpt.repair(step_dir, tmp_path / 'mended').rebuilt == ('t5ckpt.json',)
    # A list that nothing vouches for accuses a file: which of the two is damaged, nobody knows.
    step_dir = save(run_dir, 2)
    (step_dir / 't5ckpt.json').unlink()
    flip(step_dir / 'params.edge' / '0.0', random.Random(1))
    with pytest.raises(errors.CorruptCheckpointError, match='params/edge'):
        t5ckpt.repair(step_dir, tmp_path / 'other')


def test_nothing_to_repair(run_dir, tmp_path):
    save(run_dir)
    report = t5ckpt.repair(run_dir, tmp_path / 'mended')
    assert not report.changed
    assert not (tmp_path / 'mended').exists()


@pytest.mark.parametrize('compression', [None, 'zstd'])
@pytest.mark.parametrize('count', [30, pytest.param(300, marks=pytest.mark.slow)])
def test_a_flipped_bit_is_mended_or_the_repair_refuses(run_dir, tmp_path, compression, count):
    """Never a value that was not saved, whichever bit it is."""
    step_dir = save(run_dir, compression=compression)
    expected = arrays_of(step_dir)
    rng = random.Random(count)
    outcomes = set()
    for number in range(count):
        path = some_file(step_dir, rng)
        undo = flip(path, rng)
        before = bytes_of(step_dir)
        output = tmp_path / f'mended{number}'
        outcome = 'mended'
        try:
            t5ckpt.repair(step_dir, output)
        except errors.CorruptCheckpointError as error:
            outcome = str(error)
        if outcome != 'mended':
            assert path.name in outcome
            assert not list(output.glob('*'))
            outcomes.add('refused')
        else:
            found = arrays_of(output / 'checkpoint_1')
            lost = {'params/bits'} if path.name == 't5ckpt.json' else set()
            assert found.keys() == expected.keys()
            assert all(found[name] == expected[name] for name in expected.keys() - lost)
            outcomes.add('mended')
        assert bytes_of(step_dir) == before
        path.write_bytes(undo)
    assert outcomes == {'refused', 'mended'}


def test_a_list_that_is_damaged_accuses_nobody(run_dir, tmp_path):
    """One digit of a checksum was flipped: the chunk that it speaks of is whole."""
    step_dir = save(run_dir)
    expected = arrays_of(step_dir)
    listed = step_dir / 'integrity.0.json'
    contents = json.loads(listed.read_text())
    digits = contents['files']['params.w/0.0'][1]
    contents['files']['params.w/0.0'][1] = ('1' if digits[0] == '0' else '0') + digits[1:]
    listed.write_text(json.dumps(contents, separators=(',', ':')))
    assert {damage.file for damage in t5ckpt.verify(step_dir, full=True).damages} == {
        'integrity.0.json',
        'params.w/0.0',
    }
    report = t5ckpt.repair(step_dir, tmp_path / 'mended')
    assert report.rebuilt == ('integrity.0.json',)
    assert arrays_of(tmp_path / 'mended' / 'checkpoint_1') == expected
    # With a chunk that really is damaged beside it, nothing tells the two apart.
    flip(step_dir / 'params.edge' / '0.0', random.Random(1))
    with pytest.raises(errors.CorruptCheckpointError, match='params/w'):
        t5ckpt.repair(step_dir, tmp_path / 'other')


def test_lost_leaves_are_left_out_on_request(run_dir, tmp_path):
    step_dir = save(run_dir)
    (step_dir / 'params.w' / '0.0').unlink()
    flip(step_dir / 'params.edge' / '0.0', random.Random(1))
    with pytest.raises(errors.CorruptCheckpointError, match='params/edge') as caught:
        t5ckpt.repair(step_dir, tmp_path / 'mended', options=t5ckpt.RepairOptions(drop=['params/w']))
    assert 'drop=' in str(caught.value)
    with pytest.raises(errors.CorruptCheckpointError, match='names nothing that is damaged'):
        t5ckpt.repair(step_dir, tmp_path / 'mended', options=t5ckpt.RepairOptions(drop=['params/.*', 'bias']))
    assert not (tmp_path / 'mended').exists()
    report = t5ckpt.repair(step_dir, tmp_path / 'mended', options=t5ckpt.RepairOptions(drop=['params/.*']))
    assert report.dropped == ('params/edge', 'params/w')
    mended = tmp_path / 'mended'
    assert t5ckpt.verify(mended, full=True).ok
    assert not (mended / 'checkpoint_1' / 'params.w').exists()
    state = state_of()
    with t5ckpt.Checkpointer(state, None, str(mended), Iterator()) as ck:
        with pytest.raises(errors.T5CkptError, match='params/w'):
            ck.restore()
        restored = ck.restore(
            fallback_state={'params': {'w': np.zeros((96, 64), np.float32), 'edge': state['params']['edge']}}
        )
    assert not np.asarray(restored['params']['w']).any()
    np.testing.assert_array_equal(restored['params']['embed'], state['params']['embed'])
    assert restored['count'] == 0
    assert restored['note'] == 'text'


def test_an_iterator_that_is_lost(run_dir, tmp_path):
    step_dir = save(run_dir)
    (file,) = [path for path in files_of(step_dir) if path.name.startswith('train_ds')]
    file.write_bytes(b'x')
    with pytest.raises(errors.CorruptCheckpointError, match='train_ds'):
        t5ckpt.repair(step_dir, tmp_path / 'mended')
    report = t5ckpt.repair(step_dir, tmp_path / 'mended', options=t5ckpt.RepairOptions(drop=['train_ds.*']))
    assert report.dropped == (file.name,)
    assert t5ckpt.verify(tmp_path / 'mended', full=True).ok


def test_in_place(run_dir):
    step_dir = save(run_dir)
    t5ckpt.pin_checkpoint(step_dir)
    expected = arrays_of(step_dir)
    (step_dir / 'params.w' / '.zarray').unlink()
    (step_dir / 'integrity.0.json').unlink()
    report = t5ckpt.repair(run_dir, in_place=True)
    assert report.rebuilt == ('integrity.0.json', 'params.w/.zarray')
    assert t5ckpt.verify(step_dir, full=True).ok
    assert t5ckpt.is_pinned_checkpoint(step_dir)
    assert arrays_of(step_dir) == expected
    assert [path.name for path in run_dir.iterdir()] == ['checkpoint_1']
    with t5ckpt.Checkpointer(state_of(), None, str(run_dir), iterator := Iterator(0)) as ck:
        assert ck.restore()['note'] == 'text'
    assert iterator.position == 1


@pytest.mark.parametrize('how', ['flipped', 'truncated', 'missing'])
def test_a_damaged_manifest_is_lost(run_dir, tmp_path, how):
    step_dir = save(run_dir)
    harm(step_dir / 'checkpoint', how, random.Random(1))
    before = bytes_of(step_dir)
    with pytest.raises((errors.CorruptCheckpointError, errors.UnsupportedFormatError)):
        t5ckpt.repair(step_dir, tmp_path / 'mended')
    assert bytes_of(step_dir) == before
    assert not (tmp_path / 'mended').exists()


def test_files_of_another_step_are_not_mended(run_dir, tmp_path):
    step_dir = save(run_dir)
    (step_dir / 't5ckpt.json').write_bytes((save(run_dir, 2, 1) / 't5ckpt.json').read_bytes())
    with pytest.raises(errors.CorruptCheckpointError, match='is of step 2'):
        t5ckpt.repair(step_dir, tmp_path / 'mended')


def test_wrong_calls(run_dir, tmp_path):
    step_dir = save(run_dir)
    (step_dir / 'params.w' / '.zarray').unlink()
    for where in [{}, {'output': tmp_path / 'x', 'in_place': True}]:
        with pytest.raises(ValueError, match='say where'):
            t5ckpt.repair(run_dir, **where)
    with pytest.raises(errors.CheckpointExistsError, match='already'):
        t5ckpt.repair(run_dir, save(tmp_path / 'other').parent)
    with pytest.raises(ValueError, match='is a directory of a step'):
        t5ckpt.repair(run_dir, tmp_path / 'checkpoint_3')
    with pytest.raises(ValueError, match='no regular expression'):
        t5ckpt.RepairOptions(drop=['('])
    with pytest.raises(errors.CheckpointNotFoundError):
        t5ckpt.repair(tmp_path / 'nothing', tmp_path / 'x')


def test_to_memory(run_dir):
    step_dir = save(run_dir)
    (step_dir / 'params.w' / '.zarray').unlink()
    report = t5ckpt.repair(run_dir, 'memory://mended/')
    assert report.rebuilt == ('params.w/.zarray',)
    assert t5ckpt.verify('memory://mended/', full=True).ok
    open_storage('memory://mended/').delete_file('checkpoint_1/params.w/.zarray')
    with pytest.raises(errors.UnsupportedFormatError, match='another run'):
        t5ckpt.repair('memory://mended/', in_place=True)


@pytest.mark.parametrize('name', ['case01', 'case03', 'case06', 'case15'])
def test_a_checkpoint_of_t5x(golden, tmp_path, name):
    case = cases.by_name(name)
    step_dir = case.step_dir(golden)
    expected = arrays_of(step_dir)
    copy = tmp_path / 'run' / step_dir.name
    for path in files_of(step_dir):
        target = copy / path.relative_to(step_dir)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    zarrays = sorted(copy.rglob('.zarray'))
    assert zarrays
    before = {path: json.loads(path.read_text()) for path in zarrays}
    for path in zarrays:
        path.unlink()
    assert not t5ckpt.repair(step_dir, dry := tmp_path / 'dry', options=t5ckpt.RepairOptions(dry_run=True)).changed
    report = t5ckpt.repair(copy, in_place=True)
    assert len(report.rebuilt) == len(zarrays)
    assert {path: json.loads(path.read_text()) for path in zarrays} == before
    assert arrays_of(copy) == expected
    assert t5ckpt.verify(copy, full=True).has_checksums
    # A chunk that is cut off is no chunk, whatever the new lists would say of it.
    zarrays[0].unlink()
    (copy / 't5ckpt.json').unlink()
    (copy / 'integrity.0.json').unlink()
    chunk = next(path for path in sorted(zarrays[0].parent.iterdir()) if path.name != '.zarray')
    chunk.write_bytes(chunk.read_bytes()[: chunk.stat().st_size // 2])
    before = bytes_of(copy)
    with pytest.raises(errors.CorruptCheckpointError, match=chunk.name):
        t5ckpt.repair(copy, in_place=True)
    assert bytes_of(copy) == before
    assert not dry.exists()


def test_checksums_for_a_checkpoint_that_has_none(golden, tmp_path):
    case = cases.by_name('case01')
    options = t5ckpt.RepairOptions(add_checksums=True)
    report = t5ckpt.repair(case.step_dir(golden), tmp_path / 'run', options=options)
    assert report.rebuilt == ('integrity.0.json', 't5ckpt.json')
    mended = t5ckpt.verify(tmp_path / 'run', full=True)
    assert mended.ok
    assert mended.has_checksums
    flip(next((tmp_path / 'run').rglob('0.0')), random.Random(1))
    assert not t5ckpt.verify(tmp_path / 'run', full=True).ok


def test_the_verb(run_dir, tmp_path):
    step_dir = save(run_dir)
    assert 'nothing to repair' in t5ckpt_cli('repair', run_dir, '--dry-run')
    (step_dir / 'params.w' / '.zarray').unlink()
    out = t5ckpt_cli('repair', run_dir, '--dry-run')
    assert 'can be repaired; nothing was written' in out
    assert 'rebuilt: params.w/.zarray' in out
    assert 'say where' in t5ckpt_cli('repair', run_dir, code=2)
    assert '--yes' in t5ckpt_cli('repair', run_dir, '--in-place', code=2)
    done = json.loads(t5ckpt_cli('repair', run_dir, tmp_path / 'mended', '--json'))
    assert done['rebuilt'] == ['params.w/.zarray']
    assert not done['dry_run']
    assert not t5ckpt.verify(step_dir).ok
    t5ckpt_cli('repair', run_dir, '--in-place', '--yes')
    assert t5ckpt.verify(step_dir, full=True).ok
    (step_dir / 'params.edge' / '0.0').unlink()
    assert "drop=['params/edge']" in t5ckpt_cli('repair', run_dir, '--in-place', '--yes', code=3)
    t5ckpt_cli('repair', run_dir, '--in-place', '--yes', '--drop', 'params/edge')
    assert jax.tree.leaves(t5ckpt.load_t5x_checkpoint(run_dir))
    assert pathlib.Path(run_dir, 'checkpoint_1').is_dir()
