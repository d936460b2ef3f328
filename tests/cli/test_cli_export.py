"""The verbs export and import, run as a user runs them."""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from support import t5
from support.cli import t5ckpt_cli

import t5ckpt


@pytest.fixture(scope='module')
def run(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Two steps of a small T5 1.1."""
    root = tmp_path_factory.mktemp('export') / 'run'
    state = {'target': t5.init(t5.Config(gated=True, tied=False)), 'state': {'step': np.int32(0)}, 'note': 'x'}
    with t5ckpt.Checkpointer(state, checkpoints_dir=root) as checkpointer:
        for step in (0, 100):
            checkpointer.save(state | {'state': {'step': np.int32(step)}})
    return root


@pytest.mark.slow
def test_to_hugging_face_and_back(run: pathlib.Path, tmp_path: pathlib.Path):
    text = t5ckpt_cli(
        'convert', 'to-hf', run, tmp_path / 'hf', '--save-dtype', 'bfloat16', '--config', '{"dropout_rate": 0.0}'
    )
    assert text.startswith(f'{tmp_path}/hf written: ')
    assert 'dropped: state/step, note' in text
    config = json.loads((tmp_path / 'hf/config.json').read_text())
    assert (config['dropout_rate'], config['torch_dtype']) == (0.0, 'bfloat16')
    report = json.loads(
        t5ckpt_cli('convert', 'hf', tmp_path / 'hf', tmp_path / 'back', '--save-dtype', 'float32', '--json')
    )
    assert report['path'] == f'{tmp_path}/back/checkpoint_100'
    assert report['mapped']['shared.weight'] == 'target/token_embedder/embedding'
    values = t5ckpt.load_t5x_checkpoint(tmp_path / 'back')['target']['token_embedder']['embedding']
    expected = t5.init(t5.Config(gated=True, tied=False))['token_embedder']['embedding']
    np.testing.assert_array_equal(values, expected.astype(jnp.bfloat16).astype(np.float32))


def test_to_one_file_and_back(run: pathlib.Path, tmp_path: pathlib.Path):
    out = tmp_path / 'out.safetensors'
    words = (
        'convert',
        'to-safetensors',
        run,
        out,
        '--step',
        '0',
        '--take',
        '.*(encoder/encoder_norm|token_embedder)/.*',
    )
    said = json.loads(t5ckpt_cli(*words, '--dry-run', '--json'))
    assert not out.exists()
    done = json.loads(t5ckpt_cli(*words, '--json'))
    assert said | {'seconds': 0, 'dry_run': 0} == done | {'seconds': 0, 'dry_run': 0}
    assert sorted(safetensors.numpy.load_file(out)) == [
        'target/encoder/encoder_norm/scale',
        'target/token_embedder/embedding',
    ]
    assert 'written' in t5ckpt_cli('convert', 'safetensors', out, tmp_path / 'back', '--as-step', '7')
    assert t5ckpt.all_steps(tmp_path / 'back') == [7]
    assert 'would be written' in t5ckpt_cli('convert', 'safetensors', out, tmp_path / 'dry', '--dry-run')
    assert not (tmp_path / 'dry').exists()


@pytest.mark.slow
def test_exit_codes(run: pathlib.Path, tmp_path: pathlib.Path):
    out = tmp_path / 'out.safetensors'
    t5ckpt_cli('convert', 'to-safetensors', run, out)
    assert 'exists. Choose' in t5ckpt_cli('convert', 'to-safetensors', run, out, code=1)
    t5ckpt_cli('convert', 'to-safetensors', run, out, '--force')
    t5ckpt_cli('convert', 'safetensors', out, tmp_path / 'back')
    assert 'exists already' in t5ckpt_cli('convert', 'safetensors', out, tmp_path / 'back', code=1)
    t5ckpt_cli('convert', 'safetensors', out, tmp_path / 'back', '--force')
    assert 'matches no leaf' in t5ckpt_cli('convert', 'to-safetensors', run, tmp_path / 'x', '--take', 'xyz', code=1)
    assert 'dtype' in t5ckpt_cli('convert', 'to-safetensors', run, tmp_path / 'x', '--save-dtype', 'int7', code=2)
    assert 'not a size' in t5ckpt_cli('convert', 'to-hf', run, tmp_path / 'x', '--max-shard-size', '5 apples', code=2)
    assert 'contradicts' in t5ckpt_cli('convert', 'to-hf', run, tmp_path / 'x', '--config', '{"d_model": 1}', code=3)
    assert 'no such file' in t5ckpt_cli('convert', 'to-hf', tmp_path / 'none', tmp_path / 'x', code=3)
    assert 'config: no effect on to-safetensors' in t5ckpt_cli(
        'convert', 'to-safetensors', run, tmp_path / 'x', '--config', '{}', code=2
    )
    assert not (tmp_path / 'x').exists()
    (tmp_path / 'file').write_text('')
    assert 'file' in t5ckpt_cli('convert', 'to-safetensors', run, tmp_path / 'file' / 'x.safetensors', code=4)


def test_the_layout_of_an_export_is_undone(tmp_path: pathlib.Path):
    """An export records that the layers were scanned, with an axis for heads; the options ask for the opposite."""
    config = t5.Config(scanned=True, split_heads=True)
    state = {'target': t5.init(config), 'state': {'step': np.int32(4)}}
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path / 'run') as checkpointer:
        checkpointer.save(state)
    t5ckpt_cli('convert', 'to-hf', tmp_path / 'run', tmp_path / 'hf')
    t5ckpt_cli('convert', 'hf', tmp_path / 'hf', tmp_path / 'as-it-was')
    t5ckpt_cli('convert', 'hf', tmp_path / 'hf', tmp_path / 'plain', '--unscanned', '--joined-heads')
    query = 'attention/query/kernel'
    assert t5ckpt.open_checkpoint(tmp_path / 'as-it-was')[f'target/encoder/encoder/{query}'].ndim == 4
    assert t5ckpt.open_checkpoint(tmp_path / 'plain')[f'target/encoder/layers_0/{query}'].ndim == 2
