"""The manifest has the metadata of each array, so a damaged ``.zarray`` costs no step, and a copy has it again."""

import contextlib
import os
import random
import shutil
import sys

import jax
import numpy as np
import pytest
from support.cli import t5ckpt_cli
from support.damage import Iterator, bytes_of, flip, save, state_of
from support.options import with_options
from support.states import leaf_print

import t5ckpt

_opened: list[str] = []


def flipped(zarray):
    flip(zarray, random.Random(1))


def replaced(make):
    def damage(zarray):
        zarray.unlink()
        make(zarray)

    return damage


DAMAGE = {
    'flipped': flipped,
    'truncated': lambda zarray: os.truncate(zarray, 30),
    'too large for the memory': lambda zarray: os.truncate(zarray, 2**40),
    'another codec': lambda zarray: zarray.write_bytes(zarray.read_bytes().replace(b'zstd', b'zsud')),
    'absent': lambda zarray: zarray.unlink(),
    'a link out': replaced(lambda zarray: zarray.symlink_to(zarray.parents[2] / 'outside')),
    'a FIFO': replaced(os.mkfifo),
    'a directory': replaced(os.mkdir),
}


@pytest.fixture(params=DAMAGE)
def damaged(run_dir, request):
    step_dir = save(run_dir, compression='zstd')
    (run_dir / 'outside').write_bytes((step_dir / 'params.w/.zarray').read_bytes())
    DAMAGE[request.param](step_dir / 'params.w/.zarray')
    return run_dir


def _audit(event, args):
    if event == 'open':
        _opened.append(str(args[0]))


sys.addaudithook(_audit)


@contextlib.contextmanager
def opens_no_zarray(run_dir):
    """For a block that opens files of a run, but no ``.zarray``."""
    _opened.clear()
    yield
    opened = [path for path in _opened if path.startswith(f'{run_dir}/')]
    assert f'{run_dir}/checkpoint_1/checkpoint' in opened
    assert not [path for path in opened if path.endswith('.zarray')]


def leaves(tree):
    return [leaf_print(leaf) for leaf in jax.tree.leaves(tree)]


def assert_restores(run_dir, **options):
    """All that read a checkpoint read the state, bit for bit."""
    state = state_of()
    with t5ckpt.Checkpointer(state, None, str(run_dir), Iterator(), **with_options(**options)) as checkpointer:
        assert leaves(checkpointer.restore()) == leaves(state)
        restored = t5ckpt.restore_or_init(checkpointer, lambda: pytest.fail('a new run'))
        assert leaves(restored) == leaves(state)
        assert checkpointer.restored_step == 1
    loaded, opened = (
        t5ckpt.load_t5x_checkpoint(run_dir, **with_options(**options)),
        t5ckpt.open_checkpoint(run_dir, **with_options(**options)),
    )
    for name, leaf in state['params'].items():
        assert leaf_print(loaded['params'][name]) == leaf_print(leaf)
        assert leaf_print(opened[f'params/{name}'][...]) == leaf_print(leaf)
        np.testing.assert_array_equal(opened[f'params/{name}'][3:5, 1], np.asarray(leaf)[3:5, 1])


@pytest.mark.slow
@pytest.mark.parametrize('options', [{}, {'mmap': True}, {'verify': 'full'}], ids=str)
def test_every_reader(damaged, options):
    """None opens the file, or renames the step."""
    with opens_no_zarray(damaged):
        assert_restores(damaged, **options)
    assert t5ckpt.all_steps(damaged) == [1]


def test_a_mapped_restore(run_dir):
    step_dir = save(run_dir)
    flip(step_dir / 'params.w/.zarray', random.Random(2))
    with opens_no_zarray(run_dir):
        assert_restores(run_dir, mmap=True)


@pytest.mark.slow
def test_a_verification_names_it_and_its_cure_works(damaged, tmp_path):
    report = t5ckpt.verify(damaged, full=True)
    (damage,) = report.damages
    assert (damage.file, damage.leaf) == ('params.w/.zarray', 'params/w')
    assert 't5ckpt cp writes it again' in str(damage)
    t5ckpt_cli('cp', damaged, tmp_path / 'copy')
    assert_intact(tmp_path / 'copy')
    assert_restores(tmp_path / 'copy')


def assert_intact(copy):
    """Each file of the copy is one of its own."""
    assert t5ckpt.verify(copy, full=True).ok
    assert not [path for path in copy.rglob('*') if path.is_symlink()]


@pytest.mark.parametrize(
    'change',
    [t5ckpt.ConvertOptions(leave=['note']), t5ckpt.ConvertOptions(rename=[('params/w', 'params/v')])],
    ids=['drop', 'rename'],
)
def test_a_copy_with_changes(damaged, tmp_path, change):
    """Its chunks are linked."""
    with opens_no_zarray(damaged):
        t5ckpt.copy_checkpoint(damaged, tmp_path / 'copy', change)
    assert_intact(tmp_path / 'copy')
    assert (damaged / 'checkpoint_1/params.w/0.0').stat().st_nlink == 2


def test_a_copy_of_all_arrays_without_metadata(run_dir, tmp_path):
    """Its arrays are those of the step before the damage, byte for byte."""
    step_dir = save(run_dir, compression='zstd')
    before = bytes_of(step_dir)
    for zarray in step_dir.glob('*/.zarray'):
        zarray.unlink()
    assert_restores(run_dir)
    with opens_no_zarray(run_dir):
        t5ckpt.copy_checkpoint(run_dir, tmp_path / 'copy')
    copied = bytes_of(tmp_path / 'copy/checkpoint_1')
    assert {name for name in before if copied[name] != before[name]} == set()


def test_a_chunk_is_not_implied(run_dir, tmp_path):
    step_dir = save(run_dir)
    shutil.rmtree(step_dir / 'params.w')
    assert 'params.w/0.0 is missing' in t5ckpt_cli('cp', run_dir, tmp_path / 'copy', code=3)
    assert t5ckpt.all_steps(tmp_path / 'copy') == []
