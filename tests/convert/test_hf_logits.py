"""What transformers computes with an export is what the T5 in Flax computes, and the other way round.

Names and shapes prove little: a transposition that is missing in a square matrix, a scale that one side has and the other
has not, a table that is read by the wrong axis go through all of that. So the same tokens go through both.

The newest transformers, the last that scales all logits of UMT5, and the last version 4 are each in a directory of its own
(`make versions`) and run in a process of its own, once for all models, on the torch of this environment.
"""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from support import libraries, t5
from support.hf_models import VARIANTS, long_t5, write, write_t5

import t5ckpt

pytestmark = [pytest.mark.slow, libraries.needs('torch', 'PyTorch')]

SCRIPT = pathlib.Path(__file__).parents[1] / 'support/with_transformers.py'
VERSIONS = ('5', '5.23', '4')
LOCAL = {'model_type': 'longt5', 'encoder_attention_type': 'local'}

EXPORTS = ('t5', 't5_1_1', 'byt5', 'scanned_split', 'umt5', 'umt5_unscanned', 'switch', 'switch_untied')
CLASSES = {
    'umt5': 'UMT5',
    'umt5_unscanned': 'UMT5',
    'switch': 'SwitchTransformers',
    'switch_untied': 'SwitchTransformers',
}

SIZES = {
    'vocab_size': 61,
    'd_model': 20,
    'd_kv': 5,
    'd_ff': 22,
    'num_layers': 3,
    'num_heads': 3,
    'relative_attention_num_buckets': 8,
}
# Models that transformers makes: their class, what their configuration adds, whether the logits are their own.
MADE: dict[str, tuple[str, dict[str, Any], bool]] = {
    't5': ('T5', {'num_decoder_layers': 2}, False),
    't5_1_1': ('T5', {'feed_forward_proj': 'gated-gelu', 'tie_word_embeddings': False}, True),
    'byt5': ('T5', {'feed_forward_proj': 'gated-gelu', 'tie_word_embeddings': False, 'num_decoder_layers': 1}, True),
    'umt5': ('UMT5', {'feed_forward_proj': 'gated-gelu', 'tie_word_embeddings': False}, True),
    'umt5_tied': ('UMT5', {'feed_forward_proj': 'gated-gelu'}, False),
}


@pytest.fixture(scope='module')
def exports(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A directory for each model, and the tokens."""
    root = tmp_path_factory.mktemp('exports')
    for name in EXPORTS:
        t5ckpt.convert_checkpoint('to-hf', write_t5(root / f'run_{name}', VARIANTS[name]), root / name)
    t5ckpt.convert_checkpoint(
        'to-hf',
        write(root / 'run_local', long_t5(transient_global=False)),
        root / 'local',
        t5ckpt.ConvertOptions(config=LOCAL),
    )
    t5ckpt.convert_checkpoint('to-hf', write(root / 'run_global', long_t5(transient_global=True)), root / 'global')
    params = t5.init(VARIANTS['t5'])
    del params['decoder']
    t5ckpt.convert_checkpoint('to-hf', write(root / 'run_encoder', {'target': params}), root / 'encoder')
    inputs, targets = t5.tokens(VARIANTS['t5'])
    np.savez(root / 'tokens.npz', inputs=inputs, targets=targets)
    return root


@pytest.fixture(scope='module', params=VERSIONS)
def results(request: pytest.FixtureRequest, exports: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The version, and where what it computed lies, after one process has done everything."""
    path, root = (
        libraries.path_of(f'transformers-{request.param}'),
        tmp_path_factory.mktemp(f'transformers_{request.param}'),
    )
    classes = {name: CLASSES.get(name, 'T5') + 'ForConditionalGeneration' for name in EXPORTS}
    classes |= dict.fromkeys(('local', 'global'), 'LongT5ForConditionalGeneration') | {'encoder': 'T5EncoderModel'}
    common = {'tokens': str(exports / 'tokens.npz')}
    jobs = [
        {**common, 'class': kind, 'directory': str(exports / name), 'out': str(root / f'{name}.npz')}
        for name, kind in classes.items()
    ]
    for name, (kind, extra, own_head) in MADE.items():
        made = {'config': SIZES | extra, 'own_head': own_head, 'directory': str(root / name)}
        jobs.append(
            {**common, **made, 'class': f'{kind}ForConditionalGeneration', 'out': str(root / f'made_{name}.npz')}
        )
    (root / 'jobs.json').write_text(json.dumps(jobs))
    env = {**os.environ, 'PYTHONPATH': path, 'HF_HUB_OFFLINE': '1'}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(root / 'jobs.json')], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return request.param, root


def computed(results: Any, name: str) -> np.ndarray:
    """What a version computed, once it is sure that it was that version and that every tensor found its place."""
    version, root = results
    with np.load(root / f'{name}.npz') as file:
        facts = json.loads(str(file['facts']))
        assert facts.pop('version').startswith(f'{version}.')
        assert all(names == [] for names in facts.values()), facts
        return file['result']


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    """Within 1e-4, for logits that are some units large and far from each other."""
    assert np.abs(expected).max() > 1
    assert np.ptp(expected, axis=-1).min() > 1
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize('name', EXPORTS)
def test_an_export_computes_the_same(results: Any, name: str):
    config = VARIANTS[name]
    assert_close(computed(results, name), t5.logits(config, t5.init(config)))


@pytest.mark.parametrize('name', ['local', 'global'])
def test_long_t5_computes_what_t5_does_where_the_text_is_short(results: Any, name: str):
    # Twelve tokens are within the radius of local attention, and too few for a global one.
    config = VARIANTS['t5_1_1']
    assert_close(computed(results, name), t5.logits(config, t5.init(config)))


def test_an_encoder_alone_computes_the_same(results: Any):
    config = VARIANTS['t5']
    assert_close(computed(results, 'encoder'), t5.encoded(config, t5.init(config)))


@pytest.mark.parametrize('name', MADE)
def test_an_import_computes_the_same(results: Any, name: str, tmp_path: pathlib.Path):
    version, root = results
    expected = computed(results, f'made_{name}')
    given = None
    if name == 'umt5' and version == '5.23':
        # This version scales them, T5X does not: the import wants to be told, and keeps the weights as they are.
        with pytest.raises(t5ckpt.errors.UnsupportedFormatError, match='depend on the version'):
            t5ckpt.convert_checkpoint('hf', root / name, tmp_path / 'run')
        given, expected = {'tie_word_embeddings': False}, expected * np.sqrt(20, dtype=np.float32)
    t5ckpt.convert_checkpoint('hf', root / name, tmp_path / 'run', t5ckpt.ConvertOptions(config=given))
    _, extra, own_head = MADE[name]
    per_layer = name.startswith('umt5')
    config = t5.Config(
        gated='feed_forward_proj' in extra,
        tied=not own_head,
        relpos_per_layer=per_layer,
        scanned=per_layer,
        split_heads=per_layer,
        decoder_layers=extra.get('num_decoder_layers', 3),
    )
    params = t5ckpt.load_t5x_checkpoint(tmp_path / 'run', options=t5ckpt.CheckpointerOptions(mmap=False))['target']
    assert_close(t5.logits(config, params), expected)
