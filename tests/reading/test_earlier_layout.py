"""Steps of the earlier layout of a bucket: facts in a file beside the manifest, all names with the directory of the save."""

import json

import jax
import numpy as np
import pytest
from support.damage import save, state_of, with_fields
from support.states import leaf_print

import t5ckpt
from t5ckpt.format.checksum import digest
from t5ckpt.format.file_checksums import entry_of
from t5ckpt.format.manifest import split_facts
from t5ckpt.format.relocation import relocated_manifest

DIRECTORY = 't5ckpt-074e217ae24b59a5'


def in_earlier_layout(step_dir):
    """Moves all files but the manifest into the directory of the save, and the facts into a file."""
    manifest, facts = split_facts((step_dir / 'checkpoint').read_bytes())
    others = [path for path in step_dir.iterdir() if path.name not in ('checkpoint', 'train_ds-000-of-001.txt')]
    (step_dir / DIRECTORY).mkdir()
    for path in others:
        path.rename(step_dir / DIRECTORY / path.name)
    checksums = step_dir / DIRECTORY / 'integrity.0.json'
    contents = json.loads(checksums.read_bytes())
    files = {f'{DIRECTORY}/{name}': entry for name, entry in contents['files'].items() if '/' in name}
    checksums.write_text(json.dumps({**contents, 'files': files}))
    manifest = relocated_manifest(manifest, DIRECTORY, 'checkpoint')
    (step_dir / 'checkpoint').write_bytes(manifest)
    digests = {
        'checkpoint': [*entry_of(manifest)],
        f'{DIRECTORY}/integrity.0.json': [*entry_of(checksums.read_bytes())],
    }
    tree = json.loads(facts)['tree']
    tree['stored'] = [[f'{DIRECTORY}/{name}', dtype] for name, dtype in tree['stored']]
    facts = with_fields(facts, digests=digests, tree=tree)
    (step_dir / f't5ckpt.{digest(manifest)}.json').write_bytes(facts)


@pytest.fixture
def step_dir(tmp_path):
    step_dir = save(tmp_path / 'run')
    in_earlier_layout(step_dir)
    return step_dir


def test_arrays_have_the_dtypes_in_the_facts(step_dir):
    assert jax.tree.map(leaf_print, t5ckpt.load_t5x_checkpoint(str(step_dir))) == jax.tree.map(leaf_print, state_of())
    bits = t5ckpt.open_checkpoint(step_dir)['params/bits']
    assert bits.dtype == jax.numpy.float8_e4m3
    assert bits[...].tobytes() == state_of()['params']['bits'].tobytes()
    assert t5ckpt.verify(step_dir).damages == ()


def test_a_copy_of_inline_leaves_has_other_names_of_its_checksums(tmp_path):
    step_dir = save(tmp_path / 'run', inline_bytes=2**20)
    in_earlier_layout(step_dir)
    t5ckpt.copy_checkpoint(step_dir, tmp_path / 'copy')
    assert t5ckpt.verify(tmp_path / 'copy/checkpoint_1').damages == ()


def test_a_copy_has_them_too(step_dir, tmp_path):
    t5ckpt.copy_checkpoint(step_dir, tmp_path / 'copy')
    copy = tmp_path / 'copy/checkpoint_1'
    assert not (copy / DIRECTORY).exists()
    assert t5ckpt.verify(copy).damages == ()
    bits = t5ckpt.load_t5x_checkpoint(str(copy))['params']['bits']
    assert np.asarray(bits).tobytes() == state_of()['params']['bits'].tobytes()
    assert bits.dtype == state_of()['params']['bits'].dtype
