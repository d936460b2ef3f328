"""docs/json.md is what --json prints: on success, with nothing to do and where the answer is no; text says what was not done."""

import json
import pathlib
import re
import shutil

import flax.serialization
import numpy as np
import pytest
from safetensors.numpy import save_file
from support import t5
from support.hf_models import write_t5

import t5ckpt
from t5ckpt.cli import VERBS
from t5ckpt.cli.app import run as run_verb

PAGE = (pathlib.Path(__file__).resolve().parents[2] / 'docs' / 'json.md').read_text(encoding='utf-8')
KINDS = {
    key: kind
    for keys, kind in re.findall(r'^\| (`[^|]*`) \| ([a-z ]+) \|$', PAGE.partition('## Meaning')[2], re.MULTILINE)
    for key in re.findall('`(.*?)`', keys)
}
TABLES: dict[str, list[tuple[str, str]]] = {}
for names, places, keys in re.findall(r'^\| (`.*) \| (.*)\| `(.*)` \|$', PAGE.partition('## Meaning')[0], re.MULTILINE):
    for name in re.findall('`(.*?)`', names):
        for place in re.findall('`(.*?)`', places) or ['']:
            TABLES.setdefault(name, [])
            TABLES[name] += [(f'{place}.{key}', KINDS[key.removesuffix('.*')]) for key in keys.split()]
# (verb of the page, words, exit code); '/' begins a path below the scene. What was not done comes in both forms.
CASES = [
    ('best', 'best /run loss --mode min', 0),
    ('best', 'best /bare loss --mode min', 1),
    ('cat', 'cat /run params/w[0]', 0),
    ('cat', 'cat /run note', 0),
    ('convert', 'convert flax /flax /new', 0),
    ('convert', 'convert flax /flax /new --leave OPTIMIZER --dry-run', 0),
    ('convert', 'convert flax /plain /new', 0),
    ('cp', 'cp /run /new --leave OPTIMIZER', 0),
    ('cp', 'cp /run /new --leave params/.* --dry-run', 0),
    ('cp', 'cp /run@1 /new', 0),
    ('cp', 'cp /run /new --dry-run', 0),
    ('diff', 'diff /run@1 /run@3', 1),
    ('diff', 'diff /run@1 /run@1', 0),
    ('diff', 'diff /run@1 /run@3 --by-layer --no-values', 2),
    ('diff', 'diff /run@1 /hf_run --no-values', 1),
    ('convert', 'convert to-safetensors /run /a.safetensors', 0),
    ('convert', 'convert to-safetensors /run /a.safetensors --dry-run', 0),
    ('convert', 'convert to-hf /hf_run /hf', 0),
    ('convert', 'convert safetensors /in.safetensors /new', 0),
    ('convert', 'convert safetensors /in.safetensors /new --dry-run', 0),
    ('ls', 'ls /run', 0),
    ('ls', 'ls /run --all', 0),
    ('ls', 'ls /empty', 0),
    ('pin', 'pin /run@2 --why because', 0),
    ('pin', 'pin /run@2', 0),
    ('prune', 'prune /run --keep 1 --yes', 0),
    ('prune', 'prune /run --keep 9 --dry-run', 0),
    ('prune', 'prune /run --keep 1 --best loss --mode min --dry-run', 0),
    ('prune', 'prune /mixed --keep 1 --yes', 0),
    ('report', 'report /run -o /page.html', 0),
    ('rm', 'rm /run 2 --yes', 0),
    ('rm', 'rm /run 1 2 --yes', 1),
    ('rm', 'rm /run 2 --dry-run', 0),
    ('show', 'show /run', 0),
    ('show', 'show /run --grep kernl', 1),
    ('stats', 'stats /run', 0),
    ('stats', 'stats /bare --fail-on-nan', 1),
    ('unpin', 'unpin /run@1', 0),
    ('unpin', 'unpin /run@2', 1),
    ('verify', 'verify /run', 0),
    ('verify', 'verify /damaged --full', 1),
]
NOT_DONE = (
    'dropped',
    'left_out',
    'failed',
    'not_pinned',
    'unmatched',
    'not_finite',
)
TYPES = {
    'any': lambda value: True,
    'boolean': lambda value: isinstance(value, bool),
    'integer': lambda value: type(value) is int,
    'number': lambda value: type(value) in (int, float) or value in ('nan', 'inf', '-inf'),
    'text': lambda value: isinstance(value, str),
    'object': lambda value: isinstance(value, dict),
    'list of integers': lambda value: isinstance(value, list) and all(type(each) is int for each in value),
    'list of text': lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value),
}


def said(words, capsys):
    """The exit code, standard output and standard error of a verb."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        run_verb([str(word) for word in words])
    return ended.value.code, *capsys.readouterr()


def nested(rows):
    """The keys of a table as a tree, whose leaves are types."""
    tree = {}
    for key, kind in rows:
        *parents, last = key.replace('[]', '.[]').lstrip('.').split('.')
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = kind
    return tree


def check(value, node, where):
    """Asserts that a value has exactly the keys of a tree, with their types."""
    if isinstance(node, str):
        kind = node.removesuffix(' or null')
        assert TYPES[kind](value) or (value is None and kind != node), (where, node, value)
    elif '[]' in node:
        assert isinstance(value, list), (where, value)
        for each in value:
            check(each, node['[]'], f'{where}[]')
    elif '*' in node:
        assert isinstance(value, dict), (where, value)
        for each in value.values():
            check(each, node['*'], f'{where}.*')
    else:
        assert set(value) == set(node), where
        for key, each in value.items():
            check(each, node[key], f'{where}.{key}')


def paths(node, where=''):
    """The keys of a tree, and with them those of a value of that form."""
    if isinstance(node, str):
        return {where}
    return set().union(*(paths(child, f'{where}.{key}') for key, child in node.items()))


def came_in(value, node, where=''):
    """The keys of a tree for which a value came."""
    if isinstance(node, str):
        return {where}
    if '[]' in node:
        return set().union(*(came_in(each, node['[]'], f'{where}.[]') for each in value))
    if '*' in node:
        return set().union(*(came_in(each, node['*'], f'{where}.*') for each in value.values()))
    return set().union(*(came_in(value[key], child, f'{where}.{key}') for key, child in node.items()))


@pytest.fixture(scope='module')
def came():
    """By verb, the keys that came; after all cases, these are all keys of the page."""
    found = {verb: set() for verb in TABLES}
    ran = []
    yield found, ran
    if len(ran) == len(CASES):
        # Only a storage that refuses to delete, or a pin that comes meanwhile, makes a deletion fail.
        documented = {verb: paths(nested(rows)) - {'.failed.*'} for verb, rows in TABLES.items()}
        assert found == documented


@pytest.fixture(scope='module')
def original(tmp_path_factory):
    root = tmp_path_factory.mktemp('json') / 'scene'
    weights = np.arange(65536, dtype=np.float32).reshape(256, 256)
    state = {'params': {'w': weights}, 'opt_state': {'m': np.ones(2)}, 'note': 'x'}
    with t5ckpt.Checkpointer(state, checkpoints_dir=root / 'run') as checkpointer:
        for step in (1, 2, 3):
            moved = {**state, 'params': {'w': weights + step}}
            checkpointer.save(moved, step=step, metrics={'loss': 3.0 - step})
    t5ckpt.pin_checkpoint(root / 'run/checkpoint_1', 'in the paper')
    (root / 'run/checkpoint_4').mkdir()
    (root / 'run/checkpoint_4/checkpoint').write_bytes(b'\x82')
    bare = {'params': {'w': np.array([np.nan, 1.0])}}
    with t5ckpt.Checkpointer(bare, checkpoints_dir=root / 'bare') as checkpointer:
        checkpointer.save(bare, step=1)
    shutil.copytree(root / 'run', root / 'damaged')
    shutil.rmtree(root / 'damaged/checkpoint_4')
    (root / 'damaged/checkpoint_3/params.w/.zarray').unlink()
    (root / 'empty').mkdir()
    for place, tree in (('flax', state), ('plain', {'params': bare['params']})):
        (root / place).mkdir()
        for step in (1, 2):
            (root / place / f'checkpoint_{step}').write_bytes(flax.serialization.to_bytes(tree))
    shutil.copytree(root / 'run', root / 'mixed')
    shutil.copy(root / 'flax/checkpoint_2', root / 'mixed/checkpoint_8')
    save_file({'w': np.ones(3)}, root / 'in.safetensors')
    shutil.move(write_t5(root / 'made', t5.Config(gated=True, tied=False)), root / 'hf_run')
    return root


@pytest.fixture
def scene(original, tmp_path, capsys):
    """Runs a verb in a copy of the scene: the exit code, standard output and standard error."""

    def run(name, words, *more):
        root = tmp_path / name
        shutil.copytree(original, root)
        return said([*(f'{root}{word}' if word.startswith('/') else word for word in words.split()), *more], capsys)

    return run


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore::t5ckpt.errors.T5CkptWarning')
@pytest.mark.parametrize(('verb', 'words', 'code'), CASES, ids=[words for _, words, _ in CASES])
def test_a_verb_prints_the_keys_of_its_table_and_text_says_what_was_not_done(scene, came, verb, words, code):
    keys, ran = came
    ran.append(words)
    ended, out, err = scene('a', words, '--json')
    assert ended == code, err
    if code > 1:
        assert out == ''
        return
    found = json.loads(out)
    check(found, nested(TABLES[verb]), verb)
    keys[verb] |= came_in(found, nested(TABLES[verb]))
    ended, out, err = scene('b', words)
    assert ended == code
    objects = [found] if isinstance(found, dict) else found
    for item in filter(lambda each: isinstance(each, dict), objects):
        for key in NOT_DONE:
            value = item.get(key, [])
            for name in [value] if isinstance(value, str) else value:
                text = str(name).replace('/a/', '/b/')
                assert text in out + err, (key, name)


def test_every_verb_has_a_table_and_a_case():
    assert {name.split()[0] for name in TABLES} == set(VERBS)
    assert {verb for verb, _, _ in CASES} == set(TABLES)


def test_the_page_explains_every_key_and_no_other():
    used = {part.removesuffix('[]') for rows in TABLES.values() for key, _ in rows for part in key.split('.')}
    containers = {'', '*', 'steps', 'layers', 'plan', 'damages'}
    assert used - containers == set(KINDS)


@pytest.mark.parametrize('verb', [*VERBS, 'convert safetensors', 'convert to-safetensors'])
def test_an_error_prints_no_json(tmp_path, capsys, verb):
    more = {'convert': ['flax']}.get(verb, [])
    after = {
        'cat': ['w'],
        'convert': [tmp_path / 'new'],
        'cp': [tmp_path / 'new'],
        'diff': [tmp_path / 'other'],
        'rm': ['1', '--yes'],
        'convert to-safetensors': [tmp_path / 'x'],
        'convert safetensors': [tmp_path / 'new'],
        'prune': ['--keep', '1'],
        'report': ['-o', tmp_path / 'x.html'],
        'best': ['loss', '--mode', 'min'],
    }.get(verb, [])
    words = [*verb.split(), *more, tmp_path / 'none', *after, '--json']
    code, out, err = said(words, capsys)
    assert (code, out) == (3, ''), err
    assert 'none' in err
