"""What is believed of a damaged checkpoint: lists that contradict each other, are foreign, or are gone without a trace."""

import json
import random
import shutil

import jax
import numpy as np
import pytest
from support.cli import t5ckpt_cli
from support.damage import Iterator, Meanwhile, bytes_of, flip, of_two_processes, save, state_of
from support.facts import as_t5x_writes, put_facts

import t5ckpt
from t5ckpt import errors
from t5ckpt.convert.rewrite import Changes, rewrite_checkpoint
from t5ckpt.format.checksum import digest
from t5ckpt.format.file_checksums import FileChecksums
from t5ckpt.format.manifest import split_facts

OWN_FILES = ('checkpoint', 'integrity.0.json')


def entry_of(path):
    return path.stat().st_size, digest(path.read_bytes())


def iterator_file(step_dir):
    return next(step_dir.glob('train_ds*'))


def listed_apart(step_dir, belongs):
    """Splits the list as two processes might; that of the second is what ``belongs`` says of a name."""
    files = FileChecksums.decode((step_dir / 'integrity.0.json').read_bytes(), '')
    for number in (0, 1):
        part = {name: entry for name, entry in files.items() if belongs(name) == bool(number)}
        (step_dir / f'integrity.{number}.json').write_bytes(FileChecksums(part).encode())


def without_checksums(run_dir, seed=0):
    """A checkpoint as T5X leaves it."""
    step_dir = save(run_dir, seed=seed)
    as_t5x_writes(step_dir)
    iterator_file(step_dir).unlink()
    return step_dir


# --- lists -------------------------------------------------------------------------------------------------------------


def test_a_list_that_the_facts_do_not_know(run_dir, tmp_path):
    """It may say of a damaged chunk what it likes."""
    step_dir = save(run_dir)
    chunk = step_dir / 'params.w' / '0.0'
    flip(chunk, random.Random(1))
    (step_dir / 'integrity.1.json').write_bytes(FileChecksums({'params.w/0.0': entry_of(chunk)}).encode())
    for full in (False, True):
        report = t5ckpt.verify(step_dir, full=full)
        assert [damage.kind for damage in report.damages if damage.file == 'integrity.1.json'] == ['contradiction']
        assert ('params.w/0.0' in {damage.file for damage in report.damages}) == full
    (step_dir / 'params.edge' / '.zarray').unlink()
    before = bytes_of(step_dir)
    with pytest.raises(errors.CorruptCheckpointError, match='does not record it'):
        t5ckpt.repair(step_dir, in_place=True)
    assert bytes_of(step_dir) == before
    with pytest.raises(errors.CorruptCheckpointError, match=r'params.w/0\.0'):
        rewrite_checkpoint(step_dir, tmp_path / 'copy', Changes(drop=('bias', 'params/edge')))
    assert t5ckpt.all_steps(tmp_path / 'copy') == []


def test_lists_that_contradict_each_other(run_dir, tmp_path):
    step_dir = save(run_dir)
    put_facts(step_dir, None)
    (step_dir / 'integrity.1.json').write_bytes(FileChecksums({'params.w/0.0': (4096, '0' * 16)}).encode())
    report = t5ckpt.verify(step_dir)
    assert any(damage.kind == 'contradiction' and 'params.w/0.0' in damage.text for damage in report.damages)
    with pytest.raises(errors.CorruptCheckpointError, match='another checksum of'):
        t5ckpt.repair(step_dir, tmp_path / 'mended')


def test_without_the_facts_nothing_verifies_the_manifest(run_dir, tmp_path):
    """Nor the lists, whatever is trusted; without these it is a checkpoint of T5X."""
    step_dir = save(run_dir)
    put_facts(step_dir, None)
    trust = t5ckpt.RepairOptions(trust_files=True)
    with pytest.raises(errors.CorruptCheckpointError, match='without these it is read as T5X reads it'):
        t5ckpt.repair(step_dir, tmp_path / 'mended', options=trust)
    as_t5x_writes(step_dir)
    assert not t5ckpt.repair(step_dir, tmp_path / 'mended', options=trust).changed


# --- files without checksums -------------------------------------------------------------------------------------------


def test_files_of_other_programs_are_copied_and_stay_unlisted(run_dir, tmp_path):
    step_dir = save(run_dir)
    (step_dir / 'params.w' / '.zarray').unlink()
    (step_dir / 'params.w' / 'readme').write_text('mine')
    (step_dir / 'notes').mkdir()
    (step_dir / 'notes' / 'today').write_text('mine')
    (step_dir / 'train_ds-009-of-010').write_text('not listed')
    (note,) = t5ckpt.verify(step_dir).notes
    assert all(name in note for name in ('params.w/readme', 'notes/', 'train_ds-009-of-010'))
    t5ckpt.repair(step_dir, tmp_path / 'mended')
    mended = tmp_path / 'mended' / 'checkpoint_1'
    assert (mended / 'notes' / 'today').read_text() == 'mine'
    assert t5ckpt.verify(mended, full=True).notes == (note,)


def test_no_checksums_unless_they_are_asked_for(run_dir, tmp_path):
    """Nobody knows whether the values of T5X's checkpoint are right: new checksums would say that they are."""
    step_dir = without_checksums(run_dir)
    (step_dir / 'params.edge' / '.zarray').unlink()
    t5ckpt.repair(step_dir, tmp_path / 'mended', options=t5ckpt.RepairOptions(trust_files=True))
    assert not t5ckpt.verify(tmp_path / 'mended', full=True).has_checksums
    asked = t5ckpt.RepairOptions(trust_files=True, add_checksums=True)
    report = t5ckpt.repair(step_dir, tmp_path / 'listed', options=asked)
    assert set(OWN_FILES) <= set(report.rebuilt)
    assert t5ckpt.verify(tmp_path / 'listed', full=True).has_checksums


def test_a_leaf_that_is_left_out_leaves_nothing(run_dir, tmp_path):
    """A ``.zarray`` alone reads as zeros."""
    step_dir = save(run_dir)
    (step_dir / 'params.w' / '.zarray').unlink()
    (step_dir / 'params.w' / '0.0').unlink()
    report = t5ckpt.repair(step_dir, tmp_path / 'mended', options=t5ckpt.RepairOptions(drop=['params/w']))
    assert (report.rebuilt, report.dropped) == ((), ('params/w',))
    assert not (tmp_path / 'mended' / 'checkpoint_1' / 'params.w').exists()


@pytest.mark.parametrize('separator', ['.', '/'])
def test_checksums_for_arrays_of_another_writer(run_dir, separator):
    """zarr-python spells ``.zarray`` otherwise, and may name chunks with slashes."""
    step_dir = without_checksums(run_dir)
    values = np.asarray(t5ckpt.load_t5x_checkpoint(step_dir)['params']['w'])
    metadata = json.loads((step_dir / 'params.w' / '.zarray').read_text()) | {'dimension_separator': separator}
    for path in (step_dir / 'params.w').iterdir():
        if path.name != '.zarray' and separator == '/':
            row, column = path.name.split('.')
            (path.parent / f'{row}-').mkdir(exist_ok=True)
            path.rename(path.parent / f'{row}-' / column)
    for path in list((step_dir / 'params.w').glob('*-')):
        path.rename(path.with_name(path.name.removesuffix('-')))
    (step_dir / 'params.w' / '.zarray').write_text(json.dumps(metadata, indent=4))
    t5ckpt.repair(step_dir, in_place=True, options=t5ckpt.RepairOptions(add_checksums=True))
    np.testing.assert_array_equal(t5ckpt.load_t5x_checkpoint(step_dir, verify='full')['params']['w'], values)
    report = t5ckpt.verify(step_dir, full=True)
    assert (report.ok, report.notes) == (True, ())
    (step_dir / 'integrity.0.json').unlink()
    assert t5ckpt.repair(step_dir, in_place=True).rebuilt == ('integrity.0.json',)
    np.testing.assert_array_equal(t5ckpt.load_t5x_checkpoint(step_dir, verify='full')['params']['w'], values)
    chunk = next(
        path for path in sorted((step_dir / 'params.w').rglob('*')) if path.is_file() and path.name != '.zarray'
    )
    flip(chunk, random.Random(1))
    assert not t5ckpt.verify(step_dir, full=True).ok


@pytest.mark.parametrize('how', ['add', 'rewritten'])
def test_typed_keys_come_back_without_a_record_of_them(run_dir, tmp_path, how):
    step_dir = save(run_dir)
    as_t5x_writes(step_dir)
    if how == 'rewritten':
        rewrite_checkpoint(step_dir, tmp_path / 'copy', Changes(drop=('bias',)))
        run_dir = tmp_path / 'copy'
    else:
        options = t5ckpt.RepairOptions(add_checksums=True)
        t5ckpt.repair(step_dir, in_place=True, options=options)
    key = state_of(3)['key']
    with t5ckpt.Checkpointer({'key': key}, checkpoints_dir=str(run_dir)) as ck:
        found = ck.restore(strict='contains')['key']
    assert (jax.random.key_data(found) == jax.random.key_data(state_of(0)['key'])).all()


@pytest.mark.parametrize('how', ['missing', 'empty'])
def test_a_zarray_that_no_checksum_verifies_is_rebuilt_on_request(run_dir, tmp_path, how):
    """Another program may have written the array, with another order of bytes or elements."""
    step_dir = without_checksums(run_dir)
    zarray = step_dir / 'params.w' / '.zarray'
    written = zarray.read_bytes()
    zarray.unlink() if how == 'missing' else zarray.write_bytes(b'')
    with pytest.raises(errors.CorruptCheckpointError, match=r'(?s)params.w.*No checksum verifies.*trust_files=True'):
        t5ckpt.repair(step_dir, tmp_path / 'mended')
    assert '--trust-files' in t5ckpt_cli('repair', step_dir, tmp_path / 'mended', code=3)
    assert not (tmp_path / 'mended').exists()
    report = t5ckpt.repair(step_dir, tmp_path / 'mended', options=t5ckpt.RepairOptions(trust_files=True))
    (note,) = report.notes
    assert 'params.w/.zarray: rebuilt as T5X' in note
    assert (tmp_path / 'mended' / 'checkpoint_1' / 'params.w' / '.zarray').read_bytes() == written


def test_a_list_of_several_that_is_proven_leaves_no_note(run_dir, tmp_path):
    step_dir = save(run_dir)
    of_two_processes(step_dir)
    (step_dir / 'integrity.1.json').unlink()
    assert t5ckpt.repair(step_dir, tmp_path / 'mended').notes == ()


# --- in place ----------------------------------------------------------------------------------------------------------


def test_a_step_that_is_replaced_by_one_with_the_same_manifest(run_dir, tmp_path):
    """The shapes and the inline values are the same: only the facts differ."""
    other = tmp_path / 'other'
    step_dir, newer = save(run_dir), save(other, 1)
    values = np.full((96, 64), 7, np.float32)
    state = state_of()
    state['params']['w'] = values
    shutil.rmtree(newer)
    with t5ckpt.Checkpointer(state, None, str(other), Iterator(1), chunk_bytes=4096, inline_bytes=1024) as ck:
        ck.save(state, step=1)
    assert split_facts((newer / 'checkpoint').read_bytes())[0] == split_facts((step_dir / 'checkpoint').read_bytes())[0]
    (step_dir / 'params.w' / '.zarray').unlink()

    def replace():
        t5ckpt.copy_checkpoint(other, run_dir, options=t5ckpt.CopyOptions(overwrite=True))

    with pytest.raises(errors.CorruptCheckpointError, match='has changed since it was verified'):
        t5ckpt.repair(step_dir, in_place=True, options=t5ckpt.RepairOptions(clock=Meanwhile(replace)))
    np.testing.assert_array_equal(t5ckpt.load_t5x_checkpoint(step_dir)['params']['w'], values)


def test_a_pin_that_is_set_meanwhile_stays(run_dir):
    step_dir = save(run_dir)
    (step_dir / 'params.w' / '.zarray').unlink()
    pin = Meanwhile(lambda: t5ckpt.pin_checkpoint(step_dir))
    t5ckpt.repair(step_dir, in_place=True, options=t5ckpt.RepairOptions(clock=pin))
    assert t5ckpt.is_pinned_checkpoint(step_dir)


def test_a_directory_of_another_name_is_not_repaired_in_place(run_dir, tmp_path):
    """Orbax names steps by their number; ours would get another directory beside it."""
    step_dir = save(run_dir, 100)
    (step_dir / 'params.w' / '.zarray').unlink()
    step_dir.rename(run_dir / '100')
    with pytest.raises(errors.UnsupportedFormatError, match='checkpoint_100'):
        t5ckpt.repair(run_dir, step=100, in_place=True)
    assert [path.name for path in run_dir.iterdir()] == ['100']
    assert t5ckpt.repair(run_dir, tmp_path / 'mended', step=100).step == 100
