"""Hugging Face exports and imports: names, bits, refusals. What transformers computes with them: test_hf_logits.py."""

import dataclasses
import json
import pathlib
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import tensorstore as ts
from support import t5
from support.hf_models import VARIANTS, long_t5, write, write_t5

import t5ckpt
from t5ckpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    OutputExistsError,
    TreeMismatchError,
    UnsupportedFormatError,
    UnsupportedLeafError,
)

KINDS = {
    'umt5': 'umt5',
    'umt5_unscanned': 'umt5',
    'switch': 'switch_transformers',
    'switch_untied': 'switch_transformers',
}


def flat(tree: Any) -> dict[str, np.ndarray]:
    """By name."""
    return {
        '/'.join(str(key.key) for key in path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def tensors_in(directory: pathlib.Path) -> dict[str, np.ndarray]:
    """All tensors, read by the safetensors package; through the index where there is one."""
    index = directory / 'model.safetensors.index.json'
    if not index.exists():
        return safetensors.numpy.load_file(directory / 'model.safetensors')
    places = json.loads(index.read_text())['weight_map']
    files = {name: safetensors.numpy.load_file(directory / name) for name in set(places.values())}
    assert sorted(places) == sorted(name for file in files.values() for name in file)
    return {name: files[place][name] for name, place in places.items()}


def model_type(directory: pathlib.Path) -> str:
    """In the configuration."""
    return json.loads((directory / 'config.json').read_text())['model_type']


def same(one: Any, other: Any) -> bool:
    """Names, dtypes and bits."""
    a, b = flat(one), flat(other)
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and a[k].shape == b[k].shape and a[k].tobytes() == b[k].tobytes() for k in a
    )


@pytest.mark.slow
@pytest.mark.parametrize('name', VARIANTS)
def test_there_and_back_is_the_same_to_the_bit(tmp_path: pathlib.Path, name: str):
    run = write_t5(tmp_path / 'run', VARIANTS[name])
    report = t5ckpt.convert_checkpoint('to-hf', run, tmp_path / 'hf')
    assert model_type(tmp_path / 'hf') == KINDS.get(name, 't5')
    assert sorted(report.dropped) == ['state/param_states/decoder/v', 'state/step']
    assert sorted(path.name for path in (tmp_path / 'hf').iterdir()) == sorted(report.files)
    t5ckpt.convert_checkpoint('hf', tmp_path / 'hf', tmp_path / 'back')
    assert t5ckpt.all_steps(tmp_path / 'back') == [7]
    before, after = t5ckpt.load_t5x_checkpoint(run), t5ckpt.load_t5x_checkpoint(tmp_path / 'back')
    assert same(before['target'], after['target'])
    assert after['state'] == {'step': 7}


@pytest.mark.slow
@pytest.mark.parametrize('name', ['t5', 'umt5', 'switch_untied'])
def test_from_hugging_face_and_back_gives_the_same_files(tmp_path: pathlib.Path, name: str):
    run = write_t5(tmp_path / 'run', VARIANTS[name])
    for source, target in ((run, 'hf'), (str(tmp_path / 'back'), 'again')):
        t5ckpt.convert_checkpoint('to-hf', source, tmp_path / target)
        if target == 'hf':
            t5ckpt.convert_checkpoint('hf', tmp_path / 'hf', tmp_path / 'back')
    for path in (tmp_path / 'hf').iterdir():
        assert path.read_bytes() == (tmp_path / 'again' / path.name).read_bytes(), path.name


def test_the_names_and_axes_are_those_of_the_issue(tmp_path: pathlib.Path):
    config = VARIANTS['t5_1_1']
    old = flat(t5.init(config))
    t5ckpt.convert_checkpoint('to-hf', write_t5(tmp_path / 'run', config), tmp_path / 'hf')
    new = tensors_in(tmp_path / 'hf')
    expected = {
        'shared.weight': old['token_embedder/embedding'],
        'lm_head.weight': old['decoder/logits_dense/kernel'].T,
        'encoder.final_layer_norm.weight': old['encoder/encoder_norm/scale'],
        'encoder.block.1.layer.0.layer_norm.weight': old['encoder/layers_1/pre_attention_layer_norm/scale'],
        'encoder.block.1.layer.0.SelfAttention.q.weight': old['encoder/layers_1/attention/query/kernel'].T,
        'encoder.block.2.layer.0.SelfAttention.o.weight': old['encoder/layers_2/attention/out/kernel'].T,
        'encoder.block.0.layer.1.DenseReluDense.wi_1.weight': old['encoder/layers_0/mlp/wi_1/kernel'].T,
        'encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight': old[
            'encoder/relpos_bias/rel_embedding'
        ].T,
        'decoder.block.1.layer.1.EncDecAttention.v.weight': old[
            'decoder/layers_1/encoder_decoder_attention/value/kernel'
        ].T,
        'decoder.block.1.layer.2.layer_norm.weight': old['decoder/layers_1/pre_mlp_layer_norm/scale'],
        'decoder.block.0.layer.2.DenseReluDense.wo.weight': old['decoder/layers_0/mlp/wo/kernel'].T,
    }
    for name, values in expected.items():
        np.testing.assert_array_equal(new[name], values, err_msg=name)
    assert sum(values.size for values in new.values()) == sum(values.size for values in old.values())


def test_a_second_norm_is_written_for_versions_before_5_24_which_scale_umt5(tmp_path: pathlib.Path):
    t5ckpt.convert_checkpoint('to-hf', write_t5(tmp_path / 'run', VARIANTS['umt5']), tmp_path / 'hf')
    config = json.loads((tmp_path / 'hf/config.json').read_text())
    newer, newest = (json.loads((tmp_path / 'hf' / name).read_text()) for name in config.pop('configuration_files'))
    assert newest == config, '5.24 scales no untied logits, like version 4'
    places = json.loads((tmp_path / 'hf' / newer['transformers_weights']).read_text())['weight_map']
    name = 'decoder.final_layer_norm.weight'
    larger = safetensors.numpy.load_file(tmp_path / 'hf' / places[name])
    assert list(larger) == [name]
    plain = tensors_in(tmp_path / 'hf')
    assert set(places) == set(plain)
    np.testing.assert_allclose(larger[name], plain[name] * np.sqrt(VARIANTS['umt5'].width), rtol=1e-7)


def test_long_t5_with_transient_global_attention(tmp_path: pathlib.Path):
    tree = long_t5(transient_global=True)
    t5ckpt.convert_checkpoint('to-hf', write(tmp_path / 'run', tree), tmp_path / 'hf')
    assert model_type(tmp_path / 'hf') == 'longt5'
    assert json.loads((tmp_path / 'hf/config.json').read_text())['encoder_attention_type'] == 'transient-global'
    new, first = tensors_in(tmp_path / 'hf'), 'encoder.block.0.layer.0.TransientGlobalSelfAttention'
    old = tree['target']['encoder']['side_relpos_bias']['rel_embedding']
    np.testing.assert_array_equal(new[f'{first}.global_relative_attention_bias.weight'], old.T)
    assert f'{first.replace("0", "2", 1)}.global_input_layer_norm.weight' in new
    t5ckpt.convert_checkpoint('hf', tmp_path / 'hf', tmp_path / 'back')
    assert same(tree['target'], t5ckpt.load_t5x_checkpoint(tmp_path / 'back')['target'])


def test_long_t5_with_local_attention_is_distinguished_from_t5_by_its_configuration(tmp_path: pathlib.Path):
    tree = long_t5(transient_global=False)
    run = write(tmp_path / 'run', tree)
    given = {'model_type': 'longt5', 'encoder_attention_type': 'local', 'local_radius': 63}
    t5ckpt.convert_checkpoint('to-hf', run, tmp_path / 'hf', t5ckpt.ConvertOptions(config=given))
    assert model_type(tmp_path / 'hf') == 'longt5'
    assert json.loads((tmp_path / 'hf/config.json').read_text()).items() >= given.items()
    assert 'encoder.block.0.layer.0.LocalSelfAttention.q.weight' in tensors_in(tmp_path / 'hf')
    t5ckpt.convert_checkpoint('hf', tmp_path / 'hf', tmp_path / 'back')
    assert same(tree['target'], t5ckpt.load_t5x_checkpoint(tmp_path / 'back')['target'])


@pytest.mark.parametrize('inside', [True, False])
def test_an_encoder_alone(tmp_path: pathlib.Path, inside: bool):
    params = t5.init(t5.Config())
    del params['decoder']
    if inside:
        params['encoder']['token_embedder'] = params.pop('token_embedder')
    t5ckpt.convert_checkpoint('to-hf', write(tmp_path / 'run', {'params': params}), tmp_path / 'hf')
    config = json.loads((tmp_path / 'hf/config.json').read_text())
    assert config['architectures'] == ['T5EncoderModel']
    assert 'num_decoder_layers' not in config
    t5ckpt.convert_checkpoint('hf', tmp_path / 'hf', tmp_path / 'back')
    assert same(params, t5ckpt.load_t5x_checkpoint(tmp_path / 'back')['params'])


def test_bfloat16_weights_and_casts(tmp_path: pathlib.Path):
    params = jax.tree.map(lambda leaf: leaf.astype(ml_dtypes.bfloat16), t5.init(VARIANTS['t5_1_1']))
    run = write(tmp_path / 'run', {'target': params})
    t5ckpt.convert_checkpoint('to-hf', run, tmp_path / 'hf')
    assert json.loads((tmp_path / 'hf/config.json').read_text())['torch_dtype'] == 'bfloat16'
    t5ckpt.convert_checkpoint('hf', tmp_path / 'hf', tmp_path / 'back')
    assert same(params, t5ckpt.load_t5x_checkpoint(tmp_path / 'back')['target'])
    t5ckpt.convert_checkpoint('to-hf', run, tmp_path / 'wide', t5ckpt.ConvertOptions(save_dtype=np.float32))
    wide = tensors_in(tmp_path / 'wide')
    assert {values.dtype.name for values in wide.values()} == {'float32'}
    np.testing.assert_array_equal(wide['shared.weight'], params['token_embedder']['embedding'].astype(np.float32))
    t5ckpt.convert_checkpoint(
        'hf', tmp_path / 'wide', tmp_path / 'narrow', t5ckpt.ConvertOptions(save_dtype=ml_dtypes.bfloat16)
    )
    assert same(params, t5ckpt.load_t5x_checkpoint(tmp_path / 'narrow')['target'])


def test_a_cast_that_would_overflow_is_refused(tmp_path: pathlib.Path):
    params = t5.init(t5.Config())
    params['encoder']['layers_1']['mlp']['wo']['kernel'][3, 4] = 7e4
    run = write(tmp_path / 'run', {'target': params})
    with pytest.raises(UnsupportedLeafError, match=r'layers_1/mlp/wo/kernel.*float16'):
        t5ckpt.convert_checkpoint('to-hf', run, tmp_path / 'hf', t5ckpt.ConvertOptions(save_dtype=np.float16))
    assert [path.name for path in tmp_path.iterdir()] == ['run'], 'nothing is left of the attempt'


def test_shards_are_filled_up_to_the_limit_and_indexed(tmp_path: pathlib.Path):
    run = write_t5(tmp_path / 'run', VARIANTS['byt5'])
    report = t5ckpt.convert_checkpoint('to-hf', run, tmp_path / 'hf', t5ckpt.ConvertOptions(max_shard_bytes=20_000))
    shards = [name for name in report.files if name.endswith('.safetensors')]
    assert len(shards) > 2
    sizes = [
        sum(values.nbytes for values in safetensors.numpy.load_file(tmp_path / 'hf' / name).values()) for name in shards
    ]
    assert max(sizes) <= 20_000
    index = json.loads((tmp_path / 'hf/model.safetensors.index.json').read_text())
    assert index['metadata'] == {'total_size': sum(sizes)}
    t5ckpt.convert_checkpoint('to-hf', run, tmp_path / 'whole')
    whole, parts = tensors_in(tmp_path / 'whole'), tensors_in(tmp_path / 'hf')
    assert whole.keys() == parts.keys()
    assert all(np.array_equal(whole[name], parts[name]) for name in whole)
    t5ckpt.convert_checkpoint('hf', tmp_path / 'hf', tmp_path / 'back')
    assert same(t5.init(VARIANTS['byt5']), t5ckpt.load_t5x_checkpoint(tmp_path / 'back')['target'])


# --- what is refused -------------------------------------------------------------------------------------------------


def test_a_fused_decoder_is_refused_with_its_names(tmp_path: pathlib.Path):
    params = t5.init(t5.Config())
    layer = params['decoder']['layers_1']
    layer['q_wi_fused'] = {'kernel': np.ones((20, 3, 12), np.float32)}
    layer['kv_fused'] = {'kernel': np.ones((20, 1, 10), np.float32)}
    del layer['self_attention'], layer['mlp']
    with pytest.raises(TreeMismatchError, match=r'(?s)layers_1/kv_fused/kernel: .*layers_1/q_wi_fused/kernel: '):
        t5ckpt.convert_checkpoint('to-hf', write(tmp_path / 'run', {'target': params}), tmp_path / 'hf')
    assert not (tmp_path / 'hf').exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ('change', 'error', 'words'),
    [
        (lambda p: p.pop('encoder'), UnsupportedFormatError, 'decoder without an encoder'),
        (lambda p: p['encoder'].pop('relpos_bias'), TreeMismatchError, 'encoder/relpos_bias/rel_embedding: not in'),
        (lambda p: p['encoder']['layers_2'].pop('mlp'), TreeMismatchError, 'encoder/layers_2/mlp/wi/kernel: not in'),
        (lambda p: p['encoder'].pop('layers_1'), TreeMismatchError, 'encoder/layers_1/attention/key/kernel: not in'),
        (
            lambda p: p['decoder'].update(token_embedder={'embedding': np.ones((61, 20), np.float32)}),
            TreeMismatchError,
            'decoder/token_embedder/embedding: .*not in',
        ),
        (
            lambda p: p['decoder']['layers_0'].update(mlp={'wi': {'kernel': np.ones((20, 9), np.float32)}}),
            TreeMismatchError,
            r'layers_0/mlp/wi/kernel: checkpoint \(20, 9\), template \(20, 22\)',
        ),
        (
            lambda p: p['encoder']['layers_0']['attention']['query'].update(bias=np.ones(15, np.float32)),
            TreeMismatchError,
            'attention/query/bias: .*not in',
        ),
    ],
)
def test_an_unsupported_t5_is_refused(tmp_path: pathlib.Path, change: Any, error: Any, words: str):
    params = t5.init(t5.Config())
    change(params)
    with pytest.raises(error, match=words):
        t5ckpt.convert_checkpoint('to-hf', write(tmp_path / 'run', {'target': params}), tmp_path / 'hf')
    assert not (tmp_path / 'hf').exists()


def test_a_tree_of_another_model_is_refused(tmp_path: pathlib.Path):
    with pytest.raises(UnsupportedFormatError, match='not a T5: no leaf is named target/encoder'):
        t5ckpt.convert_checkpoint('to-hf', write(tmp_path / 'run', {'w': np.ones(3)}), tmp_path / 'hf')


def test_experts_where_transformers_would_not_put_them_are_refused(tmp_path: pathlib.Path):
    params = t5.init(VARIANTS['switch'])
    layers = params['encoder']
    layers['layers_0'], layers['layers_1'] = layers['layers_1'], layers['layers_0']
    with pytest.raises(UnsupportedFormatError, match=r'encoder: the layers \[0, 3\] of 4 have experts'):
        t5ckpt.convert_checkpoint('to-hf', write(tmp_path / 'run', {'target': params}), tmp_path / 'hf')
    with pytest.raises(UnsupportedFormatError, match='gated experts'):
        t5ckpt.convert_checkpoint(
            'to-hf', write_t5(tmp_path / 'gated', dataclasses.replace(VARIANTS['switch'], gated=True)), tmp_path / 'hf'
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ('config', 'words'),
    [
        ({'d_model': 512}, 'd_model: configuration 512, weights 20'),
        ({'model_type': 'umt5'}, "model_type: configuration 'umt5', weights 't5'"),
        ({'feed_forward_proj': 'relu'}, "feed_forward_proj: configuration 'relu', weights gated: True"),
        ({'tie_word_embeddings': True}, 'tie_word_embeddings: configuration True, weights False'),
        ('{"d_ff": 1, "d_kv": 2}', r'd_ff: configuration 1, weights 22\n.*d_kv: configuration 2, weights 5'),
        ({'model_type': 'longt5', 'encoder_attention_type': 'none'}, "encoder_attention_type must be one of .*'none'"),
    ],
)
def test_a_configuration_that_contradicts_the_weights_is_refused(tmp_path: pathlib.Path, config: Any, words: str):
    run = write_t5(tmp_path / 'run', VARIANTS['t5_1_1'])
    with pytest.raises(UnsupportedFormatError, match=words):
        t5ckpt.convert_checkpoint('to-hf', run, tmp_path / 'hf', t5ckpt.ConvertOptions(config=config))


def test_a_given_configuration_is_kept(tmp_path: pathlib.Path):
    run = write_t5(tmp_path / 'run', VARIANTS['t5_1_1'])
    given = {
        'feed_forward_proj': 'gated-silu',
        'd_model': 20,
        'task_specific_params': {'a': 1},
        'transformers_version': '4',
    }
    (tmp_path / 'given.json').write_text(json.dumps(given))
    t5ckpt.convert_checkpoint('to-hf', run, tmp_path / 'hf', t5ckpt.ConvertOptions(config=tmp_path / 'given.json'))
    config = json.loads((tmp_path / 'hf/config.json').read_text())
    assert config['feed_forward_proj'] == 'gated-silu'
    assert config['task_specific_params'] == {'a': 1}
    assert 'transformers_version' not in config, 'it was true of other files'


def test_nothing_is_overwritten_unless_asked_and_never_what_is_not_ours(tmp_path: pathlib.Path):
    run, other = write_t5(tmp_path / 'run', VARIANTS['t5']), write_t5(tmp_path / 'other', VARIANTS['t5_1_1'])
    t5ckpt.convert_checkpoint('to-hf', run, tmp_path / 'hf')
    before = (tmp_path / 'hf/model.safetensors').read_bytes()
    with pytest.raises(OutputExistsError, match=r'exists\. Choose'):
        t5ckpt.convert_checkpoint('to-hf', other, tmp_path / 'hf')
    assert (tmp_path / 'hf/model.safetensors').read_bytes() == before
    t5ckpt.convert_checkpoint('to-hf', other, tmp_path / 'hf', t5ckpt.ConvertOptions(overwrite=True))
    assert 'lm_head.weight' in tensors_in(tmp_path / 'hf')
    (tmp_path / 'hf/notes.txt').write_text('mine')
    with pytest.raises(OutputExistsError, match=r'notes\.txt, which no export wrote'):
        t5ckpt.convert_checkpoint('to-hf', run, tmp_path / 'hf', t5ckpt.ConvertOptions(overwrite=True))
    for inside in (run, tmp_path):
        with pytest.raises(OutputExistsError):
            t5ckpt.convert_checkpoint('to-hf', run, inside, t5ckpt.ConvertOptions(overwrite=True))
    assert t5ckpt.all_steps(run) == [7]
    (tmp_path / 'hf/notes.txt').unlink()
    t5ckpt.convert_checkpoint('hf', tmp_path / 'hf', tmp_path / 'back')
    with pytest.raises(CheckpointExistsError):
        t5ckpt.convert_checkpoint('hf', tmp_path / 'hf', tmp_path / 'back')
    t5ckpt.convert_checkpoint('hf', tmp_path / 'hf', tmp_path / 'back', t5ckpt.ConvertOptions(overwrite=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ['back', 'hf', 'other', 'run']


def test_an_import_into_a_step_is_refused(tmp_path: pathlib.Path):
    t5ckpt.convert_checkpoint('to-hf', write_t5(tmp_path / 'run', VARIANTS['umt5']), tmp_path / 'model')
    (step,) = (tmp_path / 'run').iterdir()
    before = sorted(step.rglob('*'))
    with pytest.raises(CheckpointNotFoundError, match='is a checkpoint, not a run'):
        t5ckpt.convert_checkpoint('hf', tmp_path / 'model', step)
    assert sorted(step.rglob('*')) == before


def test_a_dry_run_says_all_and_writes_nothing(tmp_path: pathlib.Path):
    run = write_t5(tmp_path / 'run', VARIANTS['umt5'])
    said = t5ckpt.convert_checkpoint('to-hf', run, tmp_path / 'hf', t5ckpt.ConvertOptions(dry_run=True))
    assert not (tmp_path / 'hf').exists()
    done = t5ckpt.convert_checkpoint('to-hf', run, tmp_path / 'hf')
    assert dataclasses.replace(said, seconds=0.0) == dataclasses.replace(done, seconds=0.0)
    said = t5ckpt.convert_checkpoint('hf', tmp_path / 'hf', tmp_path / 'back', t5ckpt.ConvertOptions(dry_run=True))
    assert not (tmp_path / 'back').exists()
    done = t5ckpt.convert_checkpoint('hf', tmp_path / 'hf', tmp_path / 'back')
    assert said == dataclasses.replace(done, seconds=0.0, nbytes=0)


# --- what others wrote -----------------------------------------------------------------------------------------------


def rewrite(directory: pathlib.Path, change: Any, config: Any = None) -> None:
    """Changes the tensors of a directory, and entries of its configuration; the metadata is gone then."""
    tensors = tensors_in(directory)
    change(tensors)
    safetensors.numpy.save_file(tensors, directory / 'model.safetensors', {'format': 'pt'})
    path = directory / 'config.json'
    path.write_text(
        json.dumps({k: v for k, v in (json.loads(path.read_text()) | (config or {})).items() if v is not None})
    )


def exported(tmp_path: pathlib.Path, name: str) -> pathlib.Path:
    """A directory to change."""
    t5ckpt.convert_checkpoint('to-hf', write_t5(tmp_path / 'run', VARIANTS[name]), tmp_path / 'hf')
    return tmp_path / 'hf'


def test_doubles_of_the_embedding_are_left_out(tmp_path: pathlib.Path):
    hf = exported(tmp_path, 't5')

    def add(tensors: dict[str, np.ndarray]) -> None:
        for name in ('encoder.embed_tokens.weight', 'decoder.embed_tokens.weight', 'lm_head.weight'):
            tensors[name] = tensors['shared.weight'].copy()
        tensors['decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight'] = np.ones((8, 3), np.float32)

    rewrite(hf, add)
    report = t5ckpt.convert_checkpoint('hf', hf, tmp_path / 'back')
    assert len(report.dropped) == 4
    assert same(t5.init(VARIANTS['t5']), t5ckpt.load_t5x_checkpoint(tmp_path / 'back')['target'])


@pytest.mark.slow
@pytest.mark.parametrize(
    ('variant', 'name', 'aliases'),
    [
        ('t5_1_1', 'decoder.embed_tokens.weight', ()),  # MADLAD-400
        ('t5_1_1', 'encoder.embed_tokens.weight', ()),
        ('t5', 'decoder.embed_tokens.weight', ('shared.weight', 'lm_head.weight')),
        # safetensors.torch.save_model writes one of the names of tied weights, and the others into the metadata.
        ('t5', 'lm_head.weight', ('shared.weight', 'decoder.embed_tokens.weight', 'encoder.embed_tokens.weight')),
    ],
)
def test_the_only_embedding_may_have_another_name(tmp_path: pathlib.Path, variant: str, name: str, aliases: Any):
    hf = exported(tmp_path, variant)
    tensors = tensors_in(hf)
    tensors[name] = tensors.pop('shared.weight')
    safetensors.numpy.save_file(tensors, hf / 'model.safetensors', {'format': 'pt', **dict.fromkeys(aliases, name)})
    t5ckpt.convert_checkpoint('hf', hf, tmp_path / 'back')
    assert same(t5.init(VARIANTS[variant]), t5ckpt.load_t5x_checkpoint(tmp_path / 'back')['target'])


def test_an_embedding_of_its_own_is_refused(tmp_path: pathlib.Path):
    hf = exported(tmp_path, 't5')
    rewrite(hf, lambda tensors: tensors.update({'decoder.embed_tokens.weight': tensors['shared.weight'] + 1}))
    with pytest.raises(UnsupportedFormatError, match=r'decoder\.embed_tokens\.weight differs from shared'):
        t5ckpt.convert_checkpoint('hf', hf, tmp_path / 'back')


def test_logits_that_depend_on_the_version_are_refused_until_the_caller_says(tmp_path: pathlib.Path):
    hf = exported(tmp_path, 't5_1_1')
    rewrite(hf, lambda tensors: None, {'tie_word_embeddings': None})
    with pytest.raises(UnsupportedFormatError, match=r'lm_head\.weight.*no tie_word_embeddings=false'):
        t5ckpt.convert_checkpoint('hf', hf, tmp_path / 'back')
    t5ckpt.convert_checkpoint(
        'hf', hf, tmp_path / 'back', t5ckpt.ConvertOptions(config='{"tie_word_embeddings": false}')
    )
    assert same(t5.init(VARIANTS['t5_1_1']), t5ckpt.load_t5x_checkpoint(tmp_path / 'back')['target'])


def test_an_mt5_with_tied_logits_is_refused_until_the_caller_says(tmp_path: pathlib.Path):
    hf = exported(tmp_path, 't5')
    rewrite(hf, lambda tensors: None, {'model_type': 'mt5'})
    with pytest.raises(UnsupportedFormatError, match='mt5 with tied logits'):
        t5ckpt.convert_checkpoint('hf', hf, tmp_path / 'back')
    t5ckpt.convert_checkpoint('hf', hf, tmp_path / 'back', t5ckpt.ConvertOptions(config={'model_type': 't5'}))
    assert same(t5.init(VARIANTS['t5']), t5ckpt.load_t5x_checkpoint(tmp_path / 'back')['target'])
    with pytest.raises(UnsupportedFormatError, match='tied logits in an mt5'):
        t5ckpt.convert_checkpoint(
            'to-hf', tmp_path / 'run', tmp_path / 'again', t5ckpt.ConvertOptions(config={'model_type': 'mt5'})
        )


def test_logits_of_the_embedding_that_are_not_scaled_become_a_kernel(tmp_path: pathlib.Path):
    # What version 5 saves of a T5 1.1 or mT5 whose logits are the embedding's: it looks at another flag.
    hf = exported(tmp_path, 't5')
    rewrite(hf, lambda tensors: None, {'tie_word_embeddings': True, 'scale_decoder_outputs': False})
    t5ckpt.convert_checkpoint('hf', hf, tmp_path / 'back')
    target = t5ckpt.load_t5x_checkpoint(tmp_path / 'back')['target']
    np.testing.assert_array_equal(target['decoder']['logits_dense']['kernel'], target['token_embedder']['embedding'].T)


def test_the_layout_without_an_export_is_the_one_of_the_public_checkpoints(tmp_path: pathlib.Path):
    hf = exported(tmp_path, 'umt5_unscanned')
    rewrite(hf, lambda tensors: None)
    t5ckpt.convert_checkpoint('hf', hf, tmp_path / 'back')
    leaves = flat(t5ckpt.load_t5x_checkpoint(tmp_path / 'back')['target'])
    assert leaves['encoder/encoder/attention/query/kernel'].shape == (20, 3, 3, 5)
    t5ckpt.convert_checkpoint(
        'hf', hf, tmp_path / 'plain', t5ckpt.ConvertOptions(scanned=False, split_heads=False, step=9)
    )
    assert same(t5.init(VARIANTS['umt5_unscanned']), t5ckpt.load_t5x_checkpoint(tmp_path / 'plain', step=9)['target'])


@pytest.mark.slow
@pytest.mark.parametrize(
    ('break_it', 'error', 'words'),
    [
        (
            lambda d: (d / 'model.safetensors').unlink(),
            CheckpointNotFoundError,
            'no complete checkpoint there; it contains',
        ),
        (
            lambda d: (d / 'model.safetensors').rename(d / 'pytorch_model.bin'),
            CheckpointNotFoundError,
            'pytorch_model.bin is a PyTorch file, .* save safetensors',
        ),
        (
            lambda d: (d / 'model.safetensors').write_bytes((d / 'model.safetensors').read_bytes()[:-4]),
            CorruptCheckpointError,
            'model.safetensors',
        ),
        (lambda d: (d / 'model.safetensors').write_bytes(b'\xff' * 100), CorruptCheckpointError, 'truncated'),
        (lambda d: (d / 'model.safetensors').write_bytes(b''), CorruptCheckpointError, '0 bytes'),
        (lambda d: (d / 'config.json').write_text('{'), t5ckpt.errors.FormatError, 'is not JSON'),
        (lambda d: (d / 'config.json').unlink(), t5ckpt.errors.FormatError, 'config.json'),
        (
            lambda d: rewrite(d, lambda t: t.pop('encoder.block.1.layer.0.SelfAttention.k.weight')),
            TreeMismatchError,
            r'encoder\.block\.1\.layer\.0\.SelfAttention\.k\.weight: not in the checkpoint',
        ),
        (
            lambda d: rewrite(d, lambda t: t.update({'encoder.block.1.adapter.weight': np.ones(2)})),
            TreeMismatchError,
            r'encoder\.block\.1\.adapter\.weight: checkpoint \(2,\)',
        ),
        (lambda d: rewrite(d, lambda t: None, {'num_layers': 12}), UnsupportedFormatError, 'num_layers'),
    ],
)
def test_a_broken_directory_is_refused(tmp_path: pathlib.Path, break_it: Any, error: Any, words: str):
    hf = exported(tmp_path, 't5')
    break_it(hf)
    with pytest.raises(error, match=words):
        t5ckpt.convert_checkpoint('hf', hf, tmp_path / 'back')
    assert not (tmp_path / 'back').exists()


def test_an_index_leads_nowhere_else(tmp_path: pathlib.Path):
    hf = exported(tmp_path, 't5')
    outside = tmp_path / 'outside.safetensors'
    (hf / 'model.safetensors').rename(outside)
    index = {'weight_map': {'shared.weight': '../outside.safetensors'}}
    (hf / 'model.safetensors.index.json').write_text(json.dumps(index))
    with pytest.raises(CorruptCheckpointError, match='not below its directory'):
        t5ckpt.convert_checkpoint('hf', hf, tmp_path / 'back')


# --- pieces ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', ['umt5', 't5_1_1', 'switch'])
def test_pieces_make_the_same_file_as_the_whole(tmp_path: pathlib.Path, name: str):
    run = write_t5(tmp_path / 'run', VARIANTS[name])
    t5ckpt.convert_checkpoint('to-hf', run, tmp_path / 'whole')
    small = t5ckpt.ConvertOptions(concurrent_gb=1e-6)
    t5ckpt.convert_checkpoint('to-hf', run, tmp_path / 'pieces', small)
    for path in (tmp_path / 'whole').iterdir():
        assert path.read_bytes() == (tmp_path / 'pieces' / path.name).read_bytes(), path.name


def test_arrays_in_chunks_and_codecs_of_others(tmp_path: pathlib.Path):
    params = t5.init(VARIANTS['umt5'])
    root = tmp_path / 'run/checkpoint_3'
    specs: dict[str, Any] = {}
    for i, (name, values) in enumerate(flat(params).items()):
        spec = {
            'driver': 'zarr',
            'kvstore': {'driver': 'file', 'path': f'{root}/{i}/'},
            'metadata': {
                'chunks': [max(1, size // 2) for size in values.shape],
                'compressor': {'id': 'gzip', 'level': 1},
            },
        }
        store = ts.open(spec, create=True, dtype=ts.float32, shape=values.shape).result()
        store[...] = values
        relative = {**spec, 'dtype': 'float32', 'kvstore': {'driver': 'file', 'path': f'{i}/'}}
        relative['metadata'] = {**spec['metadata'], 'shape': list(values.shape)}
        node = specs
        *above, last = ('target', *name.split('/'))
        for key in above:
            node = node.setdefault(key, {})
        node[last] = relative
    import flax.serialization

    (root / 'checkpoint').write_bytes(flax.serialization.msgpack_serialize({'version': 3, 'optimizer': specs}))
    t5ckpt.convert_checkpoint('to-hf', tmp_path / 'run', tmp_path / 'hf', t5ckpt.ConvertOptions(concurrent_gb=1.2e-6))
    t5ckpt.convert_checkpoint('hf', tmp_path / 'hf', tmp_path / 'back')
    assert same(params, t5ckpt.load_t5x_checkpoint(tmp_path / 'back')['target'])
