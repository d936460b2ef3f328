"""Four real processes save to and restore from a bucket together."""

import shutil
import time

import numpy as np
import pytest
import scenarios
from job import Job

import t5ckpt
from t5ckpt.storage import open_storage

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


@pytest.fixture(scope='module', params=['gs', 's3'])
def job_and_bucket(request):
    """The processes see the variables that this one has when they start."""
    bucket = request.getfixturevalue(f'_{request.param}')
    with pytest.MonkeyPatch.context() as patch:
        for name, value in bucket.environment().items():
            patch.setenv(name, value)
        bucket.proxy.reset()
        job = Job(4, 2)
        yield job, bucket
        job.close()


def test_four_writers_and_any_mesh(job_and_bucket):
    job, bucket = job_and_bucket
    url = bucket.url()
    answers = job.run('save', url)
    assert [barriers for barriers, _ in answers] == [1 + 2] * 4
    written = [
        request.key for request in bucket.proxy.clear() if request.kind == 'write' and '/checkpoint_1/' in request.key
    ]
    assert len(written) == len(set(written))
    assert written[-1].endswith('/checkpoint_1/checkpoint')
    assert sum('integrity.' in key for key in written) == 4
    for shape, swap in (((2, 4), True), ((8, 1), False)):
        job.run('restore', url, shape, swap)
    loaded = t5ckpt.load_t5x_checkpoint(url)
    for name, values in scenarios.expected().items():
        group, leaf = name.split('/')
        assert np.asarray(loaded[group][leaf]).tobytes() == values.tobytes()
    assert t5ckpt.verify(url, full=True).ok


def test_retention_and_a_step_that_is_there(job_and_bucket):
    job, bucket = job_and_bucket
    url = bucket.url()
    assert job.run('many_saves', url, 2) == [[2, 3]] * 4
    assert job.run('save', url, 3, 5) == [[1 + 1, None]] * 4
    # The marker of the deletion stays for two horizons.
    names = {key.partition('/')[0] for key, _ in open_storage(url).walk('')}
    assert names == {'.t5ckpt', 'checkpoint_2', 'checkpoint_3'}


def test_replace_and_delete(job_and_bucket):
    """All processes write below the one name that process 0 has chosen for the new arrays."""
    job, bucket = job_and_bucket
    url = bucket.url()
    answers = job.run('replace_and_delete', url)
    assert [answer[-2:] for answer in answers] == [[[1, 4], {'by': 0}]] * 4
    report = t5ckpt.verify(url, 1, full=True)
    assert (report.ok, report.notes) == (True, ())
    storage = open_storage(url)
    assert [len(storage.names(f'checkpoint_{step}', 't5ckpt-')) for step in (1, 4)] == [1, 1]
    assert storage.names('', 'checkpoint_') == ['checkpoint_1', 'checkpoint_4']


def test_local_directories_of_four_and_their_bucket(job_and_bucket, tmp_path):
    """Each chunk is uploaded once, the manifest last; a restart reads no chunk of the bucket, and one without disks reads all."""
    job, bucket = job_and_bucket
    url, options = bucket.url(), {'persist': [1, 2]}
    disks = [str(tmp_path / f'disk{index}') for index in range(4)]
    leaves = list(scenarios.LEAVES)
    job.run('tiers', url, leaves, options, each=disks)
    bucket.proxy.clear()
    for step in (1, 2):
        assert job.run('tiers_save', step) == [step] * 4
        assert job.run('tiers_wait', step) == [None] * 4
    written = [
        request.key for request in bucket.proxy.clear() if request.kind == 'write' and '/checkpoint_1/' in request.key
    ]
    assert len(written) == len(set(written))
    at = next(index for index, key in enumerate(written) if key.endswith('/checkpoint_1/checkpoint'))
    assert len(written[at + 1 :]) == 4, "the positions of data iterators, under T5X's names"
    assert all('/checkpoint_1/train_ds-' in key for key in written[at + 1 :])
    assert sum('integrity.' in key for key in written) == 4
    job.run('tiers_close')
    assert t5ckpt.verify(url, full=True).ok
    job.run('tiers', url, leaves, options, each=disks)
    bucket.proxy.clear()
    answers = job.run('tiers_restore')
    assert [(answer['step'], answer['position'], answer['bytes'][1:]) for answer in answers] == [(2, 2, [0, 0])] * 4
    assert not [request.key for request in bucket.proxy.clear() if '/target.' in request.key]
    job.run('tiers_close')
    job.run('tiers', url, leaves, options, each=[f'{disk}-new' for disk in disks])
    assert [answer['step'] for answer in job.run('tiers_restore')] == [2] * 4
    job.run('tiers_close')


@pytest.mark.parametrize('lost', [0, 1])
def test_one_lost_disk_reads_no_chunk_of_the_bucket(job_and_bucket, tmp_path, lost):
    """Although the bucket has the step, its chunks come from the replicas."""
    job, bucket = job_and_bucket
    url, disks = bucket.url(), [str(tmp_path / f'disk{index}') for index in range(4)]
    leaves = [name for name in scenarios.LEAVES if name not in ('target/both', 'target/odd')]
    job.run('tiers', url, leaves, {'persist': [1]}, each=disks)
    assert job.run('tiers_save', 1) == [1] * 4
    assert job.run('tiers_wait', 1) == [None] * 4
    job.run('tiers_close')
    shutil.rmtree(disks[lost])
    job.run('tiers', url, leaves, {'persist': []}, each=disks)
    bucket.proxy.clear()
    answers = job.run('tiers_restore')
    assert [(answer['step'], answer['position'], answer['bytes'][2]) for answer in answers] == [(1, 1, 0)] * 4
    assert [answer['bytes'][1] > 0 for answer in answers] == [index == lost for index in range(4)]
    requests = bucket.proxy.clear()
    assert requests, 'the list of steps is read there'
    assert not [each.key for each in requests if '/target.' in each.key or 'train_ds' in each.key]
    job.run('tiers_close')


def test_an_upload_that_failed_in_the_middle_begins_again(job_and_bucket, tmp_path):
    """The files of process 1 are missing in the first attempts."""
    job, bucket = job_and_bucket
    url, trouble = bucket.url(), tmp_path / 'trouble'
    trouble.write_text('torn')
    disks = [str(tmp_path / f'disk{index}') for index in range(4)]
    job.run('tiers', url, list(scenarios.LEAVES), {'persist': [1], 'trouble': str(trouble)}, each=disks)
    assert job.run('tiers_save', 1) == [1] * 4
    assert all('torn' in text for text in job.run('tiers_wait', 1))
    assert t5ckpt.all_steps(url) == []
    trouble.unlink()
    deadline = time.monotonic() + 90
    while job.run('tiers_wait', 1) != [None] * 4:
        assert time.monotonic() < deadline
    job.run('tiers_close')
    assert t5ckpt.verify(url, full=True).ok
    loaded = t5ckpt.load_t5x_checkpoint(url)
    for name, values in scenarios.expected(1).items():
        group, leaf = name.split('/')
        assert np.asarray(loaded[group][leaf]).tobytes() == values.tobytes()
