"""The verbs on a local directory find the run that its steps are uploaded to."""

import json
import os
import pty
import shutil
import subprocess

import numpy as np
import pytest
from support import forked
from support.cli import t5ckpt_cli
from support.options import with_options

import t5ckpt

SMALL = {'inline_bytes': 64}


def state(step):
    return {'w': np.full((32, 64), step, np.float32), 'step': np.int32(step)}


@pytest.fixture
def local(tmp_path):
    """A local directory with the steps 3 and 4; the run has 1 and 4."""
    local, policy = tmp_path / 'local', t5ckpt.SaveAt([1, 4])
    with t5ckpt.Checkpointer(
        state(0), None, tmp_path / 'run', local=t5ckpt.LocalTier(local, persist=policy), keep=2, **with_options(**SMALL)
    ) as ck:
        for step in (1, 2, 3, 4):
            ck.save(state(step), metrics={'loss': step})
            ck.wait_until_persisted()
    return local


@pytest.fixture
def run(local):
    return local.parent / 'run'


def damage(file):
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def rows(*words, code=0):
    return [(each['step'], each['tier']) for each in json.loads(t5ckpt_cli('ls', *words, '--json', code=code))]


def test_ls_lists_both(local, run):
    assert rows(local) == [(1, 'persistent'), (3, 'local'), (4, 'local'), (4, 'persistent')]
    assert rows(local, '--tier', 'local') == [(3, 'local'), (4, 'local')]
    assert rows(local, '--tier', 'persistent') == [(1, 'persistent'), (4, 'persistent')]
    assert rows(local, '--tier', 'all') == rows(local)
    table = t5ckpt_cli('ls', local).splitlines()
    assert table[0].split()[:2] == ['step', 'tier']
    assert [line.split()[:2] for line in table[1:]] == [[str(step), tier] for step, tier in rows(local)]
    kept = {(each['step'], each['tier']): each['kept'] for each in json.loads(t5ckpt_cli('ls', local, '--json'))}
    assert kept[3, 'local'] == 'one of the latest 2', 'LocalTier(keep=), not the policy of the run'
    assert 'tier' not in t5ckpt_cli('ls', run), 'a run knows nothing of local directories'
    assert json.loads(t5ckpt_cli('ls', run, '--json'))[0]['tier'] is None


def test_ls_of_a_local_directory_whose_run_is_away(local, run):
    shutil.rmtree(run)
    said = t5ckpt_cli('ls', local)
    assert [line.split()[0] for line in said.splitlines() if ' complete ' in line] == ['3', '4']
    record = f'{local}/.t5ckpt/tier.json names this run: the local steps are uploaded to it.'
    for words in (['ls', local], ['verify', local], ['verify', f'{local}@4'], ['verify', local / 'checkpoint_4']):
        assert record in t5ckpt_cli(*words, '--tier', 'persistent', code=3), words


def test_ls_before_the_first_upload(run_dir, tmp_path):
    local = tmp_path / 'local'
    with t5ckpt.Checkpointer(state(0), None, run_dir, local=t5ckpt.LocalTier(local, persist=t5ckpt.SaveAt([9]))) as ck:
        ck.save(state(1))
    assert rows(local) == [(1, 'local')]


def test_a_damaged_record(local):
    record = local / '.t5ckpt/tier.json'
    fields = json.loads(record.read_text('utf-8'))
    record.write_text('{', encoding='ascii')
    assert 'tier.json is damaged' in t5ckpt_cli('ls', local, code=3)
    assert 'tier.json is damaged' in t5ckpt_cli('verify', local, code=3)
    record.write_text(json.dumps(fields | {'format': 2, 'runs': []}), encoding='ascii')
    said = t5ckpt_cli('ls', local, code=3)
    assert 'tier.json has format 2' in said
    assert 'Update t5ckpt' in said
    assert 'is damaged' not in said


@pytest.mark.parametrize('damaged', [None, 'local', 'run'])
def test_verify(local, run, damaged):
    if damaged is not None:
        damage(local.parent / damaged / 'checkpoint_4/w/0.0')
    for tier, place in (('local', local), ('persistent', run)):
        code = int(damaged == place.name)
        assert str(place) in t5ckpt_cli('verify', local, '--full', '--tier', tier, code=code)
    code = int(damaged is not None)
    said = t5ckpt_cli('verify', local, '--full', '--tier', 'all', '--json', code=code)
    found = json.loads(said)
    assert [each['tier'] for each in found] == ['local', 'persistent']
    assert [each['ok'] for each in found] == [damaged != 'local', damaged != 'run']
    text = t5ckpt_cli('verify', local, '--full', '--tier', 'all', code=code)
    assert str(local) in text
    assert str(run) in text


def test_prune(local, run):
    t5ckpt_cli('prune', local, '--keep', 1, '--yes', '--tier', 'persistent')
    assert (t5ckpt.all_steps(local), t5ckpt.all_steps(run)) == ([3, 4], [4])
    t5ckpt_cli('prune', local, '--keep', 1, '--yes')
    assert (t5ckpt.all_steps(local), t5ckpt.all_steps(run)) == ([4], [4])


def test_prune_of_both(local, run):
    words = ['prune', local, '--keep', 1, '--tier', 'all']
    table = t5ckpt_cli(*words, '--dry-run').splitlines()
    assert [line.split()[:3] for line in table[1:5]] == [
        ['1', 'persistent', 'delete'],
        ['3', 'local', 'delete'],
        ['4', 'local', 'keep'],
        ['4', 'persistent', 'keep'],
    ]
    assert table[-1] == '2 of 4 steps would be deleted'
    t5ckpt.pin_checkpoint(local / 'checkpoint_3')
    found = json.loads(t5ckpt_cli(*words, '--yes', '--json'))
    assert [(each['step'], each['tier'], each['keep']) for each in found['plan']] == [
        (1, 'persistent', False),
        (3, 'local', True),
        (4, 'local', True),
        (4, 'persistent', True),
    ]
    assert (found['deleted'], t5ckpt.all_steps(local), t5ckpt.all_steps(run)) == ([1], [3, 4], [4])
    assert [each['step'] for each in found['plan'] if each['was_deleted']] == [1]
    assert 'no step 9; it has 3, 4' in t5ckpt_cli(*words, '--keep-step', 9, '--yes', code=2)
    # A step to keep of one tier.
    t5ckpt_cli(*words, '--keep-step', 3, '--yes')


@pytest.mark.parametrize(
    ('tier', 'left'),
    [(None, ([3], [1, 4])), ('local', ([3], [1, 4])), ('persistent', ([3, 4], [1])), ('all', ([3], [1]))],
)
def test_rm(local, run, tier, left):
    words = ['rm', local, 4, '--yes', '--json', *(['--tier', tier] if tier else [])]
    found = json.loads(t5ckpt_cli(*words))
    assert (t5ckpt.all_steps(local), t5ckpt.all_steps(run)) == left
    assert found['deleted'] == [4]
    tiers = {None: ['local'], 'all': ['persistent', 'local']}.get(tier, [tier])
    assert [(each['tier'], each['was_deleted']) for each in found['plan']] == [(each, True) for each in tiers]


def test_rm_names_the_tier_of_each_deleted_step(local):
    words = ['rm', local, 3, 4, '--tier', 'all', '--yes']
    found = json.loads(t5ckpt_cli(*words, '--dry-run', '--json'))
    assert [each['was_deleted'] for each in found['plan']] == [False] * 3
    lines = t5ckpt_cli(*words).splitlines()
    assert lines[-1] == 'deleted: 4 (persistent), 3 (local), 4 (local)'


def test_rm_of_both_deletes_nothing_if_one_is_pinned(local, run):
    t5ckpt.pin_checkpoint(run / 'checkpoint_4')
    assert 'pinned' in t5ckpt_cli('rm', local, 3, 4, '--yes', '--tier', 'all', code=1)
    assert (t5ckpt.all_steps(local), t5ckpt.all_steps(run)) == ([3, 4], [1, 4])
    t5ckpt_cli('rm', local, 1, 3, 4, '--yes', '--tier', 'all', '--pinned')
    assert (t5ckpt.all_steps(local), t5ckpt.all_steps(run)) == ([], [])
    assert f'step 9 is in neither {local} nor {run}' in t5ckpt_cli('rm', local, 9, '--yes', '--tier', 'all', code=3)


@pytest.mark.parametrize('verb', ['ls', 'verify', 'prune', 'rm'])
def test_tier_of_another_run_is_an_error(run, local, verb):
    more = {'prune': ['--keep', 1, '--yes'], 'rm': [4, '--yes']}.get(verb, [])
    said = t5ckpt_cli(verb, run, *more, '--tier', 'local', code=2)
    assert '--tier is for local directories' in said
    assert t5ckpt.all_steps(run) == [1, 4]


@pytest.mark.slow
def test_the_run_is_a_bucket(bucket, tmp_path):
    run, local = bucket.url(), tmp_path / 'local'
    with t5ckpt.Checkpointer(
        state(0), None, run, local=t5ckpt.LocalTier(local), options=t5ckpt.CheckpointerOptions(inline_bytes=64)
    ) as ck:
        ck.save(state(1))
    assert rows(local, '--storage-option', 'retry_seconds=9') == [(1, 'local'), (1, 'persistent')]
    assert t5ckpt_cli('verify', local, '--tier', 'all', '--full').count('checkpoint_1') >= 2
    bucket.proxy.choose = lambda kind, key: '503'
    said = t5ckpt_cli('ls', local, '--storage-option', 'retry_seconds=1', code=4)
    assert 'only the local steps are listed' in said
    bucket.proxy.choose = lambda kind, key: None
    words = ['verify', f'{local}@1', '--tier', 'persistent', '--json', '--storage-option', 'retry_seconds=9']
    assert json.loads(t5ckpt_cli(*words))['path'].startswith(run)
    t5ckpt_cli('rm', local, 1, '--tier', 'all', '--yes')
    assert (t5ckpt.all_steps(local), t5ckpt.all_steps(run)) == ([], [])


def test_the_tier_is_chosen_before_the_step(local, run):
    """Step 1 is only in the run, step 3 only in the local directory; the least loss of the tiers is that of 1 and of 3."""
    for name, tier, step in [
        ('1', 'persistent', 1),
        ('best:loss:min', 'persistent', 1),
        ('best:loss:min', 'local', 3),
        ('best:loss:min', None, 3),
        ('latest', 'persistent', 4),
    ]:
        words = ['verify', f'{local}@{name}', '--json', *(['--tier', tier] if tier else [])]
        place = run if tier == 'persistent' else local
        assert json.loads(t5ckpt_cli(*words))['path'] == str(place / f'checkpoint_{step}/checkpoint'), words
    said = t5ckpt_cli('verify', f'{local}@9', '--tier', 'persistent', code=3)
    assert f'{run}/checkpoint_9: step 9 does not exist, complete steps are: 1, 4.' in said
    assert '--step cannot name another' in t5ckpt_cli('verify', f'{local}@1', '--step', 1, '--tier', 'local', code=2)
    assert '--tier is for local directories' in t5ckpt_cli('verify', f'{run}@1', '--tier', 'local', code=2)
    assert 'names no step' in t5ckpt_cli('verify', f'{local}@lates', '--tier', 'local', code=2)


def test_verify_of_a_named_step_of_one_tier(local, run):
    for words in ([f'{local}@1'], [local, '--step', 1]):
        found = json.loads(t5ckpt_cli('verify', *words, '--tier', 'all', '--json'))
        assert [each['path'] for each in found] == [str(run / 'checkpoint_1/checkpoint')]


@pytest.mark.parametrize('words', [['@9'], ['', '--step', 9]])
def test_verify_of_a_step_of_neither_tier_lists_the_steps_of_both(local, run, words):
    said = t5ckpt_cli('verify', f'{local}{words[0]}', *words[1:], '--tier', 'all', code=3)
    assert f'{local}/checkpoint_9: step 9 does not exist, complete steps are: 3, 4.' in said
    assert f'{run}/checkpoint_9: step 9 does not exist, complete steps are: 1, 4.' in said
    assert '4. Pass one of them.' in said


@pytest.mark.parametrize(
    ('name', 'tier', 'left'),
    [
        ('@1', 'persistent', ([3, 4], [4])),
        ('@1', 'all', ([3, 4], [4])),
        ('@best:loss:min', 'persistent', ([3, 4], [4])),
        ('@best:loss:min', None, ([4], [1, 4])),
        ('@latest', 'all', ([3], [1])),
        ('/checkpoint_4', 'all', ([3], [1])),
    ],
)
def test_rm_of_a_named_step(local, run, name, tier, left):
    t5ckpt_cli('rm', f'{local}{name}', '--yes', *(['--tier', tier] if tier else []))
    assert (t5ckpt.all_steps(local), t5ckpt.all_steps(run)) == left


def test_rm_of_a_name_that_differs_between_the_tiers(local, run):
    said = t5ckpt_cli('rm', f'{local}@best:loss:min', '--yes', '--tier', 'all', code=2)
    assert 'is step 3 in the tier local and step 1 in the tier persistent. Pass the number of the step' in said
    assert (t5ckpt.all_steps(local), t5ckpt.all_steps(run)) == ([3, 4], [1, 4])
    said = t5ckpt_cli('rm', f'{local}@9', '--yes', '--tier', 'all', code=3)
    assert f'step 9 is in neither {local} nor {run}' in said
    assert 'complete steps are: 1, 4' in t5ckpt_cli('rm', f'{local}@9', '--yes', '--tier', 'persistent', code=3)


def test_rm_says_in_which_tier_a_step_was_not_deleted(local, run):
    """The step of the bucket is pinned while the question waits for its answer."""
    terminal, other = pty.openpty()
    words = ['rm', local, 4, '--tier', 'all']
    process = forked.start(None, *words, stdin=other, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    asked = ''
    while '?' not in asked:
        asked += process.stderr.read(1)
    t5ckpt.pin_checkpoint(run / 'checkpoint_4')
    os.write(terminal, b'y\n')
    printed, errors = process.communicate(timeout=60)
    os.close(terminal)
    os.close(other)
    assert process.returncode == 1
    assert 'deleted: 4 (local)\n' in printed
    assert 'step 4 (persistent) was not deleted: ' in errors
    assert (t5ckpt.all_steps(local), t5ckpt.all_steps(run)) == ([3], [1, 4])
