"""The golden cases: where they lie after unpacking, and what they must read back as."""

import dataclasses
import json
import pathlib
import re
import tarfile
from typing import Any

import ml_dtypes
import numpy as np

TESTDATA = pathlib.Path(__file__).resolve().parents[2] / 'testdata'


def unpack(destination: pathlib.Path, kind: str = 'case') -> None:
    """Unpacks every archive of testdata/ whose name begins with `kind` into `destination`."""
    archives = sorted(TESTDATA.glob(f'{kind}*.tar.gz'))
    assert archives, f'no golden cases in {TESTDATA}'
    for archive in archives:
        with tarfile.open(archive) as tar:
            tar.extractall(destination, filter='data')


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a case holds: 'a/b/c' -> array, the keys that are None, and those that are {}."""

    arrays: dict[str, np.ndarray]
    none_keys: tuple[str, ...] = ()
    empty_keys: tuple[str, ...] = ()

    def tree(self) -> dict[str, Any]:
        """The nested state dict."""
        flat: dict[str, Any] = dict(self.arrays)
        flat.update(dict.fromkeys(self.none_keys))
        out = nest(flat)
        for key in self.empty_keys:
            node = out
            for part in key.split('/'):
                node = node.setdefault(part, {})
        return out


def nest(flat: dict[str, Any]) -> dict[str, Any]:
    """'a/b/c' -> nested dicts."""
    out: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, last = key.split('/')
        node = out
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = value
    return out


def flatten(tree: Any, prefix: str = '') -> dict[str, Any]:
    """Nested dicts -> 'a/b/c'; None and {} are leaves."""
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    out = {}
    for key, value in tree.items():
        out.update(flatten(value, f'{prefix}/{key}' if prefix else str(key)))
    return out


@dataclasses.dataclass(frozen=True)
class Case:
    """One golden checkpoint."""

    name: str
    step: int
    #: Leaves wider than 32 bits: jax (without x64) cannot hold them.
    wide: bool = False
    #: Written by Orbax, not by T5X.
    orbax: bool = False

    def run_dir(self, root: pathlib.Path) -> pathlib.Path:
        """The directory that holds checkpoint_<step>."""
        return root / self.name

    def step_dir(self, root: pathlib.Path) -> pathlib.Path:
        """The checkpoint itself."""
        return self.run_dir(root) / f'checkpoint_{self.step}'

    def expected(self, root: pathlib.Path) -> Expected:
        """What every reader must find in it."""
        base = root / self.name.split('/')[0]
        arrays = load_npz(base / 'expected.npz')
        facts = {'none_keys': [], 'empty_dict_keys': []}
        if (base / 'expected.json').exists():
            facts = json.loads((base / 'expected.json').read_text())
        expected = Expected(arrays, tuple(facts['none_keys']), tuple(facts['empty_dict_keys']))
        return _edited(expected, self.name)


def load_npz(path: pathlib.Path) -> dict[str, np.ndarray]:
    """The arrays of an expected.npz, under their names and in their dtypes."""
    out = {}
    with np.load(path) as archive:
        for key in archive.files:
            name, _, dtype = key.partition('::')
            array = archive[key]
            out[name] = array.view(np.dtype(dtype)) if dtype else array
    return out


def _edited(expected: Expected, name: str) -> Expected:
    """case13 says in words what was edited; these are those edits."""
    embedding = 'target/token_embedder/embedding'
    if name == 'case13_legacy_variants/v2_uint16_bfloat16':
        arrays = dict(expected.arrays)
        arrays[embedding] = arrays[embedding].astype(ml_dtypes.bfloat16)
        return dataclasses.replace(expected, arrays=arrays)
    if name == 'case13_legacy_variants/none_subtree':
        gone = 'state/param_states/decoder'
        arrays = {k: v for k, v in expected.arrays.items() if not k.startswith(gone + '/')}
        return dataclasses.replace(expected, arrays=arrays, none_keys=(gone,))
    if name == 'case13_legacy_variants/empty_dict':
        return dataclasses.replace(expected, empty_keys=('state/empty',))
    return expected


_LEGACY = [
    'plain',
    'old_top_level_path',
    'gfile_driver',
    'gcs_driver',
    'gfile_top_level_path',
    'with_transform',
    'version1',
    'version_absent',
    'v2_uint16_bfloat16',
    'npscalar_step',
    'none_subtree',
    'empty_dict',
]
_CODECS = ['none', 'blosc', 'zstd19', 'orderF', 'big_endian']

CASES = (
    Case('case01_adafactor', 42),
    Case('case02_save_dtype_bfloat16', 7),
    Case('case03_multioptimizer_none', 3),
    Case('case05b_flax_mutables_noaxes_empty', 6, wide=True),
    Case('case06_numpy_gzip_chunks', 1),
    Case('case07_dataset_iterator', 6),
    Case('case08a_transform_rename_keys_only', 8),
    Case('case10_orbax', 12, orbax=True),
    Case('case11_dtypes_numpy', 1, wide=True),
    *(Case(f'case13_legacy_variants/{v}', 42) for v in _LEGACY),
    *(Case(f'case14_codecs_written_by_others/{v}', 42) for v in _CODECS),
    Case('case15_two_processes', 33),
)


def by_name(name: str) -> Case:
    """The case whose name starts with `name`."""
    (found,) = [case for case in CASES if re.match(re.escape(name) + r'(_|$)', case.name)]
    return found
