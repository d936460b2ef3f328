"""Every row of the table that claims a message is provoked: the parameter is given where it has no effect."""

import pathlib
import re
import warnings

import pytest
from support import intent_cases, intent_table
from support.intent_cases import LOG, SHOWN, Scene

import t5ckpt
from t5ckpt.cli.app import run as run_verb

CASES = [
    pytest.param(owner, name, said, text, call, id=f'{owner}: {name}')
    for owner, names, said, text, call in intent_cases.PYTHON
    for name in names.split()
]
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
def test_what_a_row_claims_is_said(owner, name, said, text, call, root, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    caplog.set_level('INFO', 't5ckpt')
    scene = Scene(root, tmp_path / 'out')
    if said is LOG:
        call(scene, name)
        assert re.search(text, caplog.text)
    elif said is SHOWN:
        assert re.search(text, call(scene, name))
    elif isinstance(said, type) and issubclass(said, Warning):
        with pytest.warns(t5ckpt.T5CkptWarning, match=text) as told:
            call(scene, name)
        assert [warning.category for warning in told] == [said]
    else:
        with pytest.raises(said, match=f'(?s){text}'):
            call(scene, name)
        assert owner not in intent_cases.WRITERS or not scene.out.exists()


@pytest.mark.parametrize(('code', 'text', 'words'), WORDS)
def test_what_a_row_of_an_option_claims_is_said(code, text, words, root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    scene = Scene(root, tmp_path / 'out')
    places = {'run': scene.run, 'out': scene.out, 'root': root}
    if '{broken}' in words:
        places |= {'broken': intent_cases.broken(scene)}
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
    provoked = {'error': set(), 'warning': set(), 'report': set()}
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
