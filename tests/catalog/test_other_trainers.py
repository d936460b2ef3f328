"""Directories of other trainers are named, with their steps and what to do, by everything that looks for a checkpoint."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from flax.serialization import to_bytes
from support import forked

import t5ckpt
from t5ckpt import errors
from t5ckpt.convert.seqax import write_seqax

ROOT = pathlib.Path(__file__).resolve().parents[2]


def torchtitan(run: pathlib.Path) -> None:
    """checkpoint/step-N of torchtitan: a DCP directory each."""
    for step in (500, 1000):
        directory = run / f'step-{step}'
        directory.mkdir(parents=True)
        (directory / '.metadata').write_bytes(b'\x80\x04')
        (directory / '__0_0.distcp').write_bytes(b'')


def axlearn(run: pathlib.Path) -> None:
    """checkpoints/step_NNNNNNNN of axlearn: an index, and arrays under gda/."""
    for step in (100, 200):
        directory = run / f'step_{step:08}'
        (directory / 'gda' / 'learner').mkdir(parents=True)
        (directory / 'index').write_text(json.dumps([['step', step]]))


def seqax(run: pathlib.Path) -> None:
    """A run of seqax."""
    for step in (1, 2):
        write_seqax(run, step, {'w': np.ones(2)})


def elements(run: pathlib.Path) -> None:
    """ckpt/ of DreamerV3: a directory of pickles for each save."""
    directory = run / '20250101T120000F123456-000000000100'
    directory.mkdir(parents=True)
    for name in ('agent-0000.pkl', 'agent-0001.pkl', 'step.pkl', 'done'):
        (directory / name).write_bytes(b'')
    (run / 'latest').write_text(directory.name)


CASES = [
    (elements, r'20250101T120000F123456-000000000100 is a save of elements\.Checkpoint.*Load them with elements'),
    (
        torchtitan,
        r'step-1000, step-500\. .*/step-1000/\.metadata .*\(DCP\), as torchtitan.*pickle.*safetensors',
    ),
    (axlearn, r'step_00000100, step_00000200\. .*/step_00000200/gda is a directory of axlearn.*Load it with axlearn'),
    (seqax, r'0000000001, 0000000002\. .*/0000000002/\.zattrs .*seqax.* t5ckpt convert seqax'),
]


@pytest.mark.parametrize(('make', 'text'), CASES)
def test_a_run_of_another_trainer_is_named_with_its_steps(run_dir, make, text):
    make(run_dir)
    for read in (t5ckpt.load_t5x_checkpoint, t5ckpt.open_checkpoint, t5ckpt.find_checkpoint):
        with pytest.raises(errors.CheckpointNotFoundError, match=text):
            read(run_dir)
    with (
        t5ckpt.Checkpointer({'w': np.ones(2)}, checkpoints_dir=run_dir) as ck,
        pytest.raises(errors.CheckpointNotFoundError, match=text),
    ):
        ck.restore()
    assert t5ckpt.all_steps(run_dir) == []


@pytest.mark.parametrize(('make', 'name'), [(torchtitan, 'DCP'), (axlearn, 'axlearn'), (seqax, 'seqax')])
@pytest.mark.parametrize('options', [[], ['--json']])
def test_ls_names_it_and_fails(run_dir, make, name, options):
    make(run_dir)
    done = forked.run(None, 'ls', run_dir, *options)
    assert done.returncode not in (0, 1)
    assert name in done.stdout + done.stderr


def test_a_run_of_clu_is_named_and_its_files_are_read(tmp_path):
    """CLU writes the state as ckpt-N.flax, beside a TensorFlow checkpoint with the position in the data."""
    state = {'params': {'w': np.arange(3.0)}, 'step': 8}
    (tmp_path / 'ckpt-2.flax').write_bytes(to_bytes(state))
    for name in ('ckpt-2.index', 'ckpt-2.data-00000-of-00001'):
        (tmp_path / name).write_bytes(b'')
    (tmp_path / 'checkpoint').write_text('model_checkpoint_path: "ckpt-2"\nall_model_checkpoint_paths: "ckpt-2"\n')
    done = forked.run(None, 'ls', tmp_path)
    assert f'Give the path of one: {tmp_path}/ckpt-2.flax' in done.stderr
    assert set(t5ckpt.open_checkpoint(tmp_path / 'ckpt-2.flax')) == {'params/w', 'step'}
    with pytest.raises(errors.UnsupportedFormatError, match=r'In a run of CLU, pass one of its files \.flax'):
        t5ckpt.open_checkpoint(tmp_path)
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path / 'new') as ck:
        restored = t5ckpt.restore_or_init(ck, dict, initial_checkpoint=tmp_path / 'ckpt-2.flax')
    assert restored['step'] == 8
    np.testing.assert_array_equal(restored['params']['w'], np.arange(3.0))


def test_the_last_of_many_steps_is_shown(run_dir):
    for step in range(11):
        directory = run_dir / f'step-{step}'
        directory.mkdir(parents=True)
        (directory / '.metadata').write_bytes(b'')
    with pytest.raises(errors.CheckpointNotFoundError, match=r'11 entries.*/step-10/\.metadata'):
        t5ckpt.find_checkpoint(run_dir)


def test_a_run_of_ours_beside_others_is_a_run_of_ours(run_dir):
    torchtitan(run_dir)
    with t5ckpt.Checkpointer({'w': np.ones(2)}, checkpoints_dir=run_dir) as ck:
        ck.save({'w': np.ones(2)}, step=3)
        assert ck.restore()['w'].tolist() == [1, 1]


needs_torch = pytest.mark.skipif(
    importlib.util.find_spec('torch') is None and os.environ.get('CI') != 'true',
    reason='needs torch: pip install torch',
)


@pytest.mark.slow
@needs_torch
def test_torch_takes_leaves(tmp_path):
    """Through DLPack, bfloat16 too, and as whatever numpy takes."""
    state = {'w': np.arange(600, dtype=np.float32).reshape(20, 30), 'h': jnp.arange(300, dtype=jnp.bfloat16)}
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path) as ck:
        ck.save(state, step=1)
    code = (
        'import sys, torch, t5ckpt\n'
        'view = t5ckpt.open_checkpoint(sys.argv[1])\n'
        "w, h = torch.from_dlpack(view['w']), torch.from_dlpack(view['h'])\n"
        'assert torch.equal(w, torch.arange(600, dtype=torch.float32).reshape(20, 30))\n'
        'assert h.dtype == torch.bfloat16 and torch.equal(h, torch.arange(300).to(torch.bfloat16))\n'
        "assert torch.equal(torch.as_tensor(view['w'][2:4]), w[2:4])\n"
    )
    subprocess.run([sys.executable, '-c', code, str(tmp_path)], check=True)


@pytest.mark.slow
@needs_torch
def test_a_directory_that_torch_writes_is_named(tmp_path):
    """In a process of its own: torch's threads and warnings are nothing to the other tests."""
    code = (
        'import sys, torch, torch.distributed.checkpoint as dcp\n'
        "dcp.save({'w': torch.ones(3)}, checkpoint_id=sys.argv[1], no_dist=True)"
    )
    run = tmp_path / 'run'
    run.mkdir()
    subprocess.run([sys.executable, '-c', code, str(run / 'step-10')], check=True, capture_output=True)
    with pytest.raises(errors.CheckpointNotFoundError, match=r'step-10/.* \(DCP\)'):
        t5ckpt.find_checkpoint(run)
    with pytest.raises(errors.CheckpointNotFoundError, match=r'torch\.distributed\.checkpoint \(DCP\)'):
        t5ckpt.find_checkpoint(run / 'step-10')
