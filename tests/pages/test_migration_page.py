"""The tables of docs/migration.md: each column of code is a program, and runs; both sides of one do the same."""

import inspect
import pathlib
import re
import runpy
import sys

import gin
import jax.numpy as jnp
import numpy as np
import pytest
from support import partitioner

import t5ckpt

PAGE = (pathlib.Path(__file__).resolve().parents[2] / 'docs' / 'migration.md').read_text(encoding='utf-8')


def programs(section: str) -> list[str]:
    """The columns of a section's table, each as one program."""
    text = re.search(rf'^## {section}\n(.*?)(?=^## |\Z)', PAGE, re.DOTALL | re.MULTILINE).group(1)
    rows = re.findall(r'^\| `(.*?)` \| `(.*?)` \|$', text, re.MULTILINE)
    # Two lines of a table are its head.
    assert len(rows) == len(re.findall(r'^\|', text, re.MULTILINE)) - 2 > 4, 'a cell is more than one piece of code'
    # A bar within a cell is written with a backslash.
    return ['\n'.join(column).replace('\\|', '|') for column in zip(*rows, strict=True)]


def names(here: pathlib.Path) -> dict:
    kernel = np.arange(256 * 256, dtype=np.float32).reshape(256, 256)
    state = {'params': {'kernel': jnp.asarray(kernel)}, 'step': 100}
    return {'here': here, 'state': state, 'start': state, 't5ckpt': t5ckpt}


def assert_state(tree, found=100):
    assert (np.asarray(tree['params']['kernel']) == np.arange(256 * 256).reshape(256, 256)).all()
    assert tree['step'] == found


def run(program: str, space: dict) -> dict:
    pathlib.Path('program.py').write_text(program, encoding='utf-8')
    return runpy.run_path('program.py', space)


@pytest.fixture
def here(tmp_path, monkeypatch) -> pathlib.Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_t5x(here):
    state = partitioner.T5XState({'target': {'w': np.ones((256, 256), np.float32)}, 'state': {'step': np.int32(100)}})
    parts = partitioner.Partitioner(partitioner.mesh(), partitioner.t5x_rules)
    space = {'state': state, 'partitioner': parts, 't5ckpt': t5ckpt}
    space |= {'fn': lambda *both: both, 'fn2': lambda tree, _: tree, 'fallback': state.state_dict()}
    _, ours = programs('From T5X')
    space = run(ours, space)
    assert (np.asarray(space['state'].state_dict()['target']['w']) == 1).all()
    assert t5ckpt.is_pinned_checkpoint('run/checkpoint_100')


def test_blocks_that_are_not_run_name_what_is_there():
    """T5X is not installed here: of its blocks at least our names and options exist."""
    section = re.search(r'^## From T5X\n(.*?)^## ', PAGE, re.DOTALL | re.MULTILINE).group(1)
    blocks = ''.join(re.findall(r'^```(?:sh|py|gin)\n(.*?)^```', section, re.DOTALL | re.MULTILINE))
    assert {getattr(t5ckpt, name).__name__ for name in re.findall(r't5ckpt\.(\w+)', section)} >= {
        'Checkpointer',
        'SaveBestCheckpointer',
    }
    options = re.findall(r'^t5ckpt\.Checkpointer\.(\w+) =', blocks, re.MULTILINE)
    assert options
    assert set(options) <= set(inspect.signature(t5ckpt.Checkpointer).parameters)


class Positions:
    """A data iterator with a position."""

    def save(self, filename):
        pathlib.Path(filename).write_text('7', encoding='utf-8')

    def load(self, filename):
        assert pathlib.Path(filename).read_text(encoding='utf-8') == '7'


@pytest.mark.parametrize('section', ['MaxText', 'levanter'])
def test_programs_around_a_checkpointer(here, section):
    """Theirs are not installed; ours are run."""
    theirs, ours = programs(f'From {section}')
    compile(theirs, 'theirs', 'exec')
    space = run(ours, {**names(here), 'jnp': jnp, 'data_iterator': Positions()})
    assert_state(space['state'])
    assert (np.asarray(space['params']['kernel']) == np.asarray(space['start']['params']['kernel'])).all()
    assert t5ckpt.all_steps('run') == [100]
    if 'weights' in ours:
        assert set(t5ckpt.load_t5x_checkpoint('weights')) == {'params'}


def test_orbax(here):
    import orbax.checkpoint as ocp

    theirs, ours = programs('From Orbax')
    for program in (theirs, ours):
        space = {**names(here), 'ocp': ocp}
        space = run(program, space)
        assert_state(space['restored'])
        assert_state(space['tree'])


@pytest.mark.filterwarnings('ignore:Sharding info not provided')  # Orbax's, of a restore without shardings
def test_flax(here):
    from flax.training import checkpoints

    theirs, ours = programs('From flax.training.checkpoints')
    for program in (theirs, ours):
        space = {**names(here), 'checkpoints': checkpoints}
        space = run(program, space)
        assert_state(space['restored'])
        assert_state(space['tree'])
    # And what Flax wrote is read as it is, by run and by step.
    assert_state(t5ckpt.Checkpointer(names(here)['state'], checkpoints_dir='new').restore(path='flax'))
    assert_state(t5ckpt.load_t5x_checkpoint('flax/checkpoint_100'))


@pytest.mark.filterwarnings('ignore:Flax Checkpointing will soon be deprecated:DeprecationWarning')
def test_flax_without_orbax(here):
    """Its older layout: each step is one file."""
    import flax
    from flax.training import checkpoints

    before = flax.config.flax_use_orbax_checkpointing
    flax.config.update('flax_use_orbax_checkpointing', False)
    try:
        checkpoints.save_checkpoint(here / 'flax', names(here)['state'], step=100)
    finally:
        flax.config.update('flax_use_orbax_checkpointing', before)
    assert (here / 'flax' / 'checkpoint_100').is_file()
    assert_state(t5ckpt.load_t5x_checkpoint('flax/checkpoint_100'))
    checkpointer = t5ckpt.Checkpointer(names(here)['state'], checkpoints_dir='new')
    assert_state(checkpointer.restore(path='flax/checkpoint_100'))


def test_dcp(here):
    space = names(here)
    space = run(programs('From torch.distributed.checkpoint')[1], space)
    assert_state(space['state'])
    assert t5ckpt.all_steps('run') == [100, 200]


# ---- T5X's configuration ----

T5X = {
    'utils': """
import dataclasses
from typing import Any


@dataclasses.dataclass
class SaveCheckpointConfig:
    checkpointer_cls: Any = None
    period: int = 1
    keep: Any = None


@dataclasses.dataclass
class RestoreCheckpointConfig:
    path: str = ''
    mode: str = 'latest'
    checkpointer_cls: Any = None
    fallback_to_scratch: bool = False
    state_transformation_fns: Any = ()
""",
    'train': 'def train(use_orbax=True):\n    return use_orbax\n\n\ndef evaluate(use_orbax=True):\n    return use_orbax\n',
}


@pytest.fixture(scope='module')
def modules(tmp_path_factory):
    """T5X's modules, with the fields and arguments that T5X's have (t5x/utils.py, t5x/train.py)."""
    directory = tmp_path_factory.mktemp('modules')
    (directory / 't5x').mkdir()
    for name, code in T5X.items():
        (directory / 't5x' / f'{name}.py').write_text(code, encoding='utf-8')
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(directory)
        yield
    for name in ('t5x', 't5x.utils', 't5x.train'):
        sys.modules.pop(name, None)


@pytest.fixture
def configured(modules, here):
    """Parses a file of the page, by its number; the call that makes an object, and T5X's modules."""
    files = re.findall(r'^```gin\n(.*?)^```', PAGE, re.DOTALL | re.MULTILINE)
    # In T5X, the programs are train.py and eval.py.
    files = [re.sub(r'import __main__ as (\w+)', r'from t5x import train as \1', text) for text in files]
    assert len(files) == len(PROGRAMS)

    def parse(number: int):
        gin.clear_config()
        # The second block is added to the first.
        gin.parse_config('\n'.join(files[:2]) if number == 1 else files[number])
        from t5x import train, utils

        return gin.get_configurable, utils, train

    yield parse
    gin.clear_config()


PROGRAMS = ('train', 'train', 'train', 'evaluate')


@pytest.mark.parametrize(('number', 'program'), list(enumerate(PROGRAMS)))
def test_each_gin_file_turns_orbax_off(configured, number, program):
    """With Orbax, T5X ignores checkpointer_cls without a message."""
    get, utils, train = configured(number)
    assert get(getattr(train, program))() is False
    assert issubclass(get(utils.RestoreCheckpointConfig)().checkpointer_cls, t5ckpt.Checkpointer)


def test_gin_takes_the_class(configured, here):
    get, utils, _ = configured(0)
    save = get(utils.SaveCheckpointConfig)
    with save().checkpointer_cls({'w': np.ones(2)}, None, here / 'run', keep=save().keep) as checkpointer:
        assert isinstance(checkpointer, t5ckpt.Checkpointer)
        assert checkpointer.keep == 3


def test_gin_keeps_the_best(configured, here):
    get, utils, _ = configured(1)
    save = get(utils.SaveCheckpointConfig)
    state = {'w': np.ones(2)}
    with save().checkpointer_cls(state, None, here / 'run', keep=save().keep) as checkpointer:
        for step, loss in enumerate([4.0, 1.0, 2.0, 3.0, 5.0, 6.0], 1):
            checkpointer.save(state, step=step, metrics={'training_eval/mixture/loss': loss})
    assert t5ckpt.all_steps(here / 'run') == [2, 3, 4, 6]


def test_gin_restores_with_rules_and_new_leaves(configured, here):
    """As TrainStateInitializer.from_checkpoints of T5X calls the restorer."""
    get, utils, _ = configured(2)
    saved = partitioner.T5XState({'target': {'decoder': {'mlp': {'wi': {'kernel': np.ones((2, 2))}}}}})
    with t5ckpt.Checkpointer(saved, None, 'pretrained') as checkpointer:
        checkpointer.save(saved, step=1_000_000)
    config = get(utils.RestoreCheckpointConfig)()
    assert config.fallback_to_scratch
    model = {'mlp': {'up': {'kernel': np.zeros((2, 2))}}, 'head': {'kernel': np.full((2, 3), 7.0)}}
    template = partitioner.T5XState({'target': {'decoder': model}})
    with config.checkpointer_cls(template, None, '') as restorer:
        restored = restorer.restore(
            path=config.path,
            state_transformation_fns=config.state_transformation_fns,
            fallback_state=template.state_dict(),
        )
    decoder = restored.state_dict()['target']['decoder']
    assert (np.asarray(decoder['mlp']['up']['kernel']) == 1).all()
    assert (np.asarray(decoder['head']['kernel']) == 7).all()
