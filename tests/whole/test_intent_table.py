"""Every row of the table that claims a message is provoked: the parameter is given where it has no effect."""

import inspect
import pathlib
import re
import warnings

import pytest
from support import intent_cases, intent_table
from support.intent_cases import LOG, SHOWN, Scene

import t5ckpt
from t5ckpt import errors
from t5ckpt.cli.app import run as run_verb

CASES = [
    pytest.param(owner, name, said, text, call, id=f'{owner}: {name}')
    for owner, names, said, text, call in intent_cases.PYTHON
    for name in names.split()
]


def words_of(verb):
    """The options of a verb."""
    return {
        option
        for name, command in intent_table.commands()
        if name == verb
        for param in command.params
        if not getattr(param, 'hidden', False)
        for option in param.opts
    }


WORDS = [
    pytest.param(code, text, words, id=f'{owner}: {name}: {words}')
    for owner, name, code, text, words in intent_cases.COMMANDS
]


@pytest.fixture(scope='module')
def root(tmp_path_factory, tf_golden):
    place = tmp_path_factory.mktemp('intent')
    intent_cases.make(place, next(tf_golden.iterdir()))
    return place


@pytest.mark.parametrize(('owner', 'name', 'said', 'text', 'call'), CASES)
def test_the_message_of_a_row_is_given(owner, name, said, text, call, root, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    caplog.set_level('INFO', 't5ckpt')
    scene = Scene(root, tmp_path / 'out')
    if said is LOG:
        call(scene, name)
        assert re.search(text, caplog.text)
    elif said is SHOWN:
        assert re.search(text, call(scene, name))
    elif isinstance(said, type) and issubclass(said, Warning):
        with pytest.warns(t5ckpt.errors.T5CkptWarning, match=text) as told:
            call(scene, name)
        assert [warning.category for warning in told] == [said]
    else:
        with pytest.raises(said, match=f'(?s){text}'):
            call(scene, name)
        assert owner not in intent_cases.WRITERS or not scene.out.exists()


@pytest.mark.parametrize(('code', 'text', 'words'), WORDS)
def test_the_message_of_a_row_of_an_option_is_given(code, text, words, root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    scene = Scene(root, tmp_path / 'out')
    places = {'run': scene.run, 'out': scene.out, 'root': root}
    if '{broken}' in words:
        places |= {'broken': intent_cases.broken(scene)}
    if '{unsummed}' in words:
        places |= {'unsummed': intent_cases.unsummed(scene)}
    if '{memory}' in words:
        places |= {'memory': scene.memory}
    if '{noted}' in words:
        places |= {'noted': intent_cases.noted(scene)}
    if '{hf}' in words:
        places |= {'hf': intent_cases.exported_t5(scene)}
    # As at a prompt, where warnings are shown.
    warnings.simplefilter('default')
    with pytest.raises(SystemExit) as ended:
        run_verb([word.format(**places) for word in words.split()])
    shown = capsys.readouterr()
    assert re.search(text, ' '.join((shown.out + shown.err).split()))
    assert ended.value.code == code


# --- the names of COMMON, wherever they are taken ------------------------------------------------------------------------

FUNCTIONS = {
    name: function
    for name, function in intent_table.public_callables()
    if inspect.isfunction(function) and '.' not in name.replace('convert.seqax.', '')
}


# Names whose wrong values are of the function's own kind: a case for one function stands in PYTHON.
BY_FUNCTION = {'changes', 'options', 'state', 'state_dict', 'train_state'}


def common_cases():
    common = intent_table.rows(intent_table.COMMON)
    for owner, function in FUNCTIONS.items():
        own = intent_table.rows(intent_table.PYTHON.get(owner, ''))
        for name in inspect.signature(function).parameters.keys() - own.keys() - BY_FUNCTION:
            if 'error' in common.get(name, ()):
                yield owner, name


@pytest.mark.parametrize(('owner', 'name'), sorted(common_cases()))
def test_a_common_argument_without_effect_is_refused_by_each_function(owner, name, root, tmp_path):
    scene = Scene(root, tmp_path / 'out')
    spoilt = {
        'step': (7, errors.T5CkptError, '7'),
        'storage_options': ({'endpoint': 'x'}, ValueError, 'no option endpoint'),
    }
    value, said, text = spoilt.get(name, (tmp_path / 'nowhere', intent_cases.MISSING, 'nowhere'))
    function = FUNCTIONS[owner]
    if owner == 'copy_checkpoint' and name == 'target':
        value, said, text = root / 'x.safetensors', errors.T5CkptError, 'x.safetensors'
    with pytest.raises(said, match=text):
        function(**intent_cases.arguments(scene, owner, function) | {name: value})
    assert not scene.out.exists()


def places_of(scene):
    return {'run': scene.run, 'out': scene.out, 'root': scene.root, 'hf': intent_cases.exported_t5(scene)}


SPOILT = [
    pytest.param(words, spoil, code, text, id=f'{verb}: {spoil}')
    for verb, words in intent_cases.WORDS.items()
    for spoil, code, text in (
        ('nowhere', 3, 'nowhere'),
        ('--storage-option endpoint=x', 2, 'no option endpoint'),
        ('--storage-option retry_seconds=3', 2, 'no option retry_seconds'),
        *((('--step 7', 3, '7'),) if '--step' in words_of(verb) and verb not in ('rm', 'convert') else ()),
    )
]


@pytest.mark.parametrize(('words', 'spoil', 'code', 'text'), SPOILT)
def test_a_common_option_without_effect_is_refused_by_each_verb(words, spoil, code, text, root, tmp_path, capsys):
    scene = Scene(root, tmp_path / 'out')
    given = [word.format(**places_of(scene)) for word in words.split()]
    if spoil == 'nowhere':
        first = next(index for index, word in enumerate(given) if word.startswith(str(root)))
        given[first] = str(tmp_path / 'nowhere') + given[first].partition('@')[1] + given[first].partition('@')[2]
    else:
        given += spoil.split()
    with pytest.raises(SystemExit) as ended:
        run_verb(given)
    assert ended.value.code == code
    assert text in ' '.join(capsys.readouterr().err.split())
    assert not scene.out.exists()


def test_every_verb_is_spoilt():
    assert {name for name, _ in intent_table.commands()} == intent_cases.WORDS.keys()


@pytest.mark.parametrize(
    ('owner', 'names', 'call'), intent_cases.HINTS, ids=[f'{owner}-{names}' for owner, names, _ in intent_cases.HINTS]
)
def test_what_a_hint_says_is_so(owner, names, call, root, tmp_path):
    table = {'COMMON': intent_table.COMMON} | intent_table.PYTHON
    for name in names.split():
        assert (
            'hint' in (intent_table.rows(table.get(owner, '')) | intent_table.rows(intent_table.COMMON))[name]
            or 'hint' in intent_table.rows(table[owner])[name]
        )
    assert call(Scene(root, tmp_path / 'out'))


def claims(table, kinds):
    return {
        (owner, name)
        for owner, text in table.items()
        for line in text.strip().splitlines()
        for names, answer, _ in [line.split(' | ')]
        if answer in kinds
        for name in names.split()
    }


PYTHON = {'COMMON': intent_table.COMMON} | intent_table.PYTHON
OPTIONS = {'OPTIONS': intent_table.COMMON_OPTIONS} | intent_table.VERBS


def test_every_claim_of_a_parameter_is_provoked():
    kinds = {LOG: 'report', SHOWN: 'report'}
    provoked = {'error': {('COMMON', name) for _, name in common_cases()}, 'warning': set(), 'report': set()}
    for owner, names, said, _, _ in intent_cases.PYTHON:
        is_warning = isinstance(said, type) and issubclass(said, Warning)
        kind = kinds[said] if isinstance(said, str) else 'warning' if is_warning else 'error'
        provoked[kind] |= {(owner, name) for name in names.split()}
    for claim, (kind, file, test) in intent_cases.ELSEWHERE.items():
        assert f'def {test}(' in (pathlib.Path(__file__).parents[1] / file).read_text()
        provoked[kind].add(claim)
    assert provoked == {kind: claims(PYTHON, {kind}) for kind in provoked}


def test_every_claim_of_an_option_is_provoked():
    # An error has an exit code; what is only told has none.
    failed, told = ({case[:2] for case in intent_cases.COMMANDS if (case[2] == 0) is told} for told in (False, True))
    assert failed == claims(OPTIONS, {'error'})
    assert told == claims(OPTIONS, {'warning', 'report'})
    for _, name, _, text, words in intent_cases.COMMANDS:
        assert name in words + text or not name.startswith('--'), words
