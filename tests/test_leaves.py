"""Every leaf of a state is saved exactly, or refused at once by its name."""

import enum

import jax.numpy as jnp
import numpy as np
import pytest

import t5ckpt
from t5ckpt import _commit, errors
from t5ckpt._manifest import encode_manifest
from t5ckpt._sidecar import Sidecar, TreeFacts, encode_sidecar
from t5ckpt._specs import SpecDict
from t5ckpt.storage import open_storage


class Phase(enum.IntEnum):
    WARM = 1
    COLD = 2


class Flags(enum.IntFlag):
    A = 1
    B = 2


class Mode(enum.StrEnum):
    TRAIN = 'train'


class Old(str, enum.Enum):  # noqa: UP042 - the way before StrEnum
    TRAIN = 'train'


class Metres(float):
    def __repr__(self):
        return f'{float(self)} m'


class Text(str):
    __slots__ = ()


class Count(int):
    pass


class Wave(complex):
    pass


SUBCLASSES = {
    'enum': (Phase.COLD, 2, Phase.WARM),
    'flag': (Flags.A | Flags.B, 3, Flags.A),
    'text enum': (Mode.TRAIN, 'train', Mode.TRAIN),
    'old text enum': (Old.TRAIN, 'train', Old.TRAIN),
    'text': (Text('a'), 'a', Text('b')),
    'numpy text': (np.str_('a'), 'a', np.str_('b')),
    'float': (Metres(2.5), 2.5, Metres(0)),
    'nan': (Metres('nan'), float('nan'), Metres(0)),
    'int': (Count(2**63), 2**63, Count(0)),
    'complex': (Wave(1 + 2j), 1 + 2j, Wave(0)),
    'bool': (True, True, False),
}


@pytest.mark.parametrize('case', SUBCLASSES)
def test_a_subclass_of_a_number_or_of_text(tmp_path, case):
    """Stored as its base type, which every reader knows; back as the template's, where that holds the value."""
    value, plain, template = SUBCLASSES[case]
    with t5ckpt.Checkpointer({'x': template, 'w': jnp.ones(2)}, checkpoints_dir=tmp_path) as ck:
        ck.save({'x': value, 'w': jnp.ones(2)}, step=1)
        restored = ck.restore()['x']
    loaded = t5ckpt.load_t5x_checkpoint(tmp_path)['x']
    assert type(restored) is type(template)
    assert type(loaded) is type(plain)
    np.testing.assert_equal(restored, value)
    np.testing.assert_equal(loaded, plain)


def test_a_value_that_the_templates_enum_no_longer_has(tmp_path):
    with t5ckpt.Checkpointer({'x': Phase.WARM, 's': Mode.TRAIN}, checkpoints_dir=tmp_path) as ck:
        ck.save({'x': 7, 's': 'other'}, step=1)
        restored = ck.restore()
    assert (type(restored['x']), restored['x'], type(restored['s']), restored['s']) == (int, 7, str, 'other')


# --- what is committed opens ------------------------------------------------------------------------------------------

GOOD = encode_manifest({'w': np.ones(2, np.float32)})
UNREADABLE = {
    'a Python type that no reader knows': (GOOD, Sidecar(TreeFacts(python={('w',): 'IntEnum'}))),
    'text that is no string': (GOOD, Sidecar(TreeFacts(text={('w',): 3}))),
    'a dtype that nothing is stored as': (
        encode_manifest(
            {
                'w': SpecDict(
                    driver='zarr',
                    dtype='uint8',
                    kvstore={'driver': 'file', 'path': 'w/'},
                    metadata={'shape': [2], 'chunks': [2], 'compressor': None},
                )
            }
        ),
        Sidecar(TreeFacts(stored={'w': 'float64'})),
    ),
    'a spec that leads elsewhere': (
        encode_manifest(
            {
                'w': SpecDict(
                    driver='zarr',
                    dtype='uint8',
                    kvstore={'driver': 'file', 'path': '../w/'},
                    metadata={'shape': [2], 'chunks': [2], 'compressor': None},
                )
            }
        ),
        None,
    ),
    'a truncated manifest': (GOOD[:-1], None),
    'another checksum of the manifest': (GOOD, Sidecar(extra={'digests': {'checkpoint': [1, '0' * 16]}})),
}


@pytest.mark.parametrize('where', ['file', 'memory'])
@pytest.mark.parametrize('case', UNREADABLE)
def test_what_no_reader_could_open_is_not_committed(tmp_path, case, where):
    """All writers (saves, conversions, copies, repairs) commit through the one function that decodes it first."""
    manifest, sidecar = UNREADABLE[case]
    storage = open_storage(tmp_path if where == 'file' else f'memory://{tmp_path.name}')
    work = _commit.begin(storage, 3, lambda: 1e9, _commit.writer_facts('1'))
    try:
        with pytest.raises(errors.SaveFailedError, match='nothing is committed'):
            _commit.commit(work, manifest, None if sidecar is None else encode_sidecar(sidecar), (), lambda: 1e9)
    finally:
        _commit.abandon(work)
    assert t5ckpt.all_steps(storage) == []
