"""The verbs on a local directory find the run that its steps are uploaded to."""

import json
import shutil

import numpy as np
import pytest
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
    record.write_text(json.dumps(fields | {'format': 2, 'runs': []}), encoding='ascii')
    said = t5ckpt_cli('ls', local, code=3)
    assert 'tier.json has format 2' in said
    assert 'Update t5ckpt' in said
    assert 'is damaged' not in said


def test_other_verbs_work_on_the_tier_whose_path_they_get(local, run):
    for place in (local, run):
        assert json.loads(t5ckpt_cli('verify', place, '--full', '--json'))['path'].startswith(str(place))
    t5ckpt_cli('prune', run, '--keep', 1, '--yes')
    assert (t5ckpt.all_steps(local), t5ckpt.all_steps(run)) == ([3, 4], [4])
    t5ckpt_cli('rm', f'{local}@best:loss:min', local / 'checkpoint_4', '--yes')
    assert (t5ckpt.all_steps(local), t5ckpt.all_steps(run)) == ([], [4])


@pytest.mark.slow
def test_the_run_is_a_bucket(bucket, tmp_path):
    run, local = bucket.url(), tmp_path / 'local'
    with t5ckpt.Checkpointer(
        state(0), None, run, local=t5ckpt.LocalTier(local), options=t5ckpt.CheckpointerOptions(inline_bytes=64)
    ) as ck:
        ck.save(state(1))
    assert rows(local, '--storage-option', 'retry_seconds=9') == [(1, 'local'), (1, 'persistent')]
    bucket.proxy.choose = lambda kind, key: '503'
    said = t5ckpt_cli('ls', local, '--storage-option', 'retry_seconds=1', code=4)
    assert 'only the local steps are listed' in said
    bucket.proxy.choose = lambda kind, key: None
