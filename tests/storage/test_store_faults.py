"""What a network and a server can do to requests, done to every kind of them: no checkpoint is lost, none half-visible.

The proxy of ``support/proxy.py`` sits between TensorStore and a real server. A fault hits the n-th request of a kind, once
or from then on. Whatever the save said, what is listed afterwards is whole, what was there before still is, and once the
faults are over the next saves leave nothing behind but checkpoints.
"""

import itertools
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from support.options import with_options
from support.proxy import FAULTS

import t5ckpt
from t5ckpt import errors
from t5ckpt.cli.app import run
from t5ckpt.storage import open_storage
from t5ckpt.testing import FakeClock

OPTIONS = {'retry_seconds': 5.0}
# Longer than two of the horizons of commit/markers.py.
AFTER_TWO_HORIZONS = 7300


def state(seed):
    rng = np.random.default_rng(seed)
    return {'w': rng.standard_normal((64, 96), dtype=np.float32), 'v': rng.standard_normal(500), 'seed': np.int32(seed)}


def checkpointer(url, clock, **options):
    options = {'chunk_bytes': 2**13, 'inline_bytes': 64, 'storage_options': OPTIONS} | options
    return t5ckpt.Checkpointer(state(0), checkpoints_dir=url, **with_options(clock=clock, **options))


def check(url, must=(), may=()):
    """What is listed is whole, is what was saved, and is what may be there."""
    steps = t5ckpt.all_steps(url)
    assert set(must) <= set(steps) <= set(must) | set(may)
    for step in steps:
        loaded = t5ckpt.load_t5x_checkpoint(url, step)
        for name, values in state(step).items():
            assert np.array_equal(loaded[name], values), (step, name)


class Injector:
    """Says which requests get which fault, and counts them."""

    def __init__(self, choose):
        self.choose = choose
        self.hits = 0

    def __call__(self, kind, key):
        fault = self.choose(kind, key)
        self.hits += fault is not None
        return fault


def attempt(bucket, url, clock, step, choose, **options):
    """A save under faults: what came of it, and how many there were."""
    injector = Injector(choose)
    ck = checkpointer(url, clock, **options)
    bucket.proxy.choose = injector
    try:
        return ck.save(state(step), step=step), injector.hits
    except errors.T5CkptError:
        return None, injector.hits
    finally:
        bucket.proxy.choose = lambda kind, key: None


def leaves_nothing_behind(url, clock):
    """Saves two horizons later remove what faults left, and what has arrived since."""
    clock.advance(AFTER_TWO_HORIZONS)
    ck = checkpointer(url, clock, keep=2)
    ck.save(state(97), step=97)
    ck.save(state(98), step=98)
    # Retention removes in the background.
    ck.close()
    check(url, must=(97, 98))
    # The markers of what retention has removed.
    clock.advance(AFTER_TWO_HORIZONS)
    checkpointer(url, clock).save(state(99), step=99)
    keys = [key for key, _ in open_storage(url).walk('')]
    assert {key.partition('/')[0] for key in keys} == {'checkpoint_97', 'checkpoint_98', 'checkpoint_99'}


@pytest.mark.slow
@pytest.mark.parametrize(
    ('bucket', 'rate'), [('gs', 0.1), ('gs', 0.25), ('s3', 0.25), ('az', 0.1)], indirect=['bucket']
)
def test_faults_at_random(bucket, rate):
    """More than five hundred in all four runs of this test, of all kinds, at requests of all kinds."""
    rng = random.Random(rate)
    url, clock, hits = bucket.url(), FakeClock(), 0
    committed, tried = set(), set()
    transient = [fault for fault in FAULTS if fault != '403']
    for step in itertools.count(1):
        weights = [*transient, '403'] if step % 3 == 0 else transient
        done, injected = attempt(
            bucket,
            url,
            clock,
            step,
            lambda kind, key, faults=weights: rng.choice(faults) if rng.random() < rate else None,
            keep=3,
        )
        hits += injected
        tried.add(step)
        committed |= set() if done is None else {step}
        listed = set(t5ckpt.all_steps(url))
        # Retention may have failed or have been done twice over, but what it must keep is there.
        assert set(sorted(committed)[-3:]) <= listed <= tried
        check(url, must=listed)
        if hits > 130 and len(committed) > 3:
            break
    assert hits > 130
    leaves_nothing_behind(url, clock)


@pytest.mark.slow
@pytest.mark.parametrize('fault', ['403', 'lost', '500'])
def test_a_kind_of_request_fails_from_some_time_on(bucket, fault):
    """A save says that it failed, and step 1 stays; or it did not fail, and both are there."""
    for kinds in ({'write'}, {'read', 'head'}, {'list'}, {'delete'}):
        for first in (0, 4) if fault == '500' else (2,):
            url, clock, seen = bucket.url(), FakeClock(), itertools.count()
            checkpointer(url, clock).save(state(1), step=1)
            done, _ = attempt(
                bucket,
                url,
                clock,
                2,
                lambda kind, key, kinds=kinds, seen=seen, first=first: (
                    fault if kind in kinds and next(seen) >= first else None
                ),
                storage_options={'retry_seconds': 1.0},
            )
            check(url, must=(1,) if done is None else (1, 2))
            leaves_nothing_behind(url, clock)


@pytest.mark.slow
@pytest.mark.parametrize('fault', ['dropped', 'lost', '500', '403', '412', 'lost and 403'])
def test_the_manifest_is_not_written_or_its_reply_is_lost(bucket, fault):
    """Nothing is assumed: it is read again, or its arrays stay, for the case that it is there or arrives."""
    url, clock = bucket.url(), FakeClock()
    checkpointer(url, clock).save(state(1), step=1)

    def choose(kind, key):
        return faults[min(next(sent), 1)] if kind == 'write' and key.endswith('checkpoint_2/checkpoint') else None

    first, _, second = fault.partition(' and ')
    faults, sent = (first, second or first), itertools.count()
    done, hits = attempt(bucket, url, clock, 2, choose, storage_options={'retry_seconds': 1.0})
    assert hits
    assert (done is not None) == (fault == 'lost')
    # A request that is sent again may arrive after the save has failed: then it finds its arrays, and is a checkpoint.
    may_arrive = fault in ('dropped', '500', '403', 'lost and 403')
    check(url, must=(1,) if done is None else (1, 2), may=(2,) if may_arrive else ())
    if may_arrive:
        storage = open_storage(url)
        assert storage.names('checkpoint_2', 't5ckpt-')
        assert storage.names('.t5ckpt/busy', '2.')
    leaves_nothing_behind(url, clock)


def test_a_manifest_whose_reply_is_lost_and_that_cannot_be_read_then_is_not_called_that_of_another_writer(bucket):
    """Its files would be deleted."""
    url, clock, sent = bucket.url(), FakeClock(), []

    def choose(kind, key):
        if not key.endswith('checkpoint_1/checkpoint'):
            return None
        if kind == 'write':
            sent.append(time.monotonic())
            return 'lost' if len(sent) == 1 else None
        return '500' if sent and time.monotonic() < sent[-1] + 1.5 else None

    attempt(bucket, url, clock, 1, choose, storage_options={'retry_seconds': 1.0})
    assert sent
    check(url, must=(1,))


def test_a_lost_reply_to_the_first_marker_does_not_make_the_manifest_be_written_twice(bucket):
    """A manifest that is written twice may come back after another program has deleted the step."""
    url, clock, lost = bucket.url(), FakeClock(), iter(['lost'])

    def choose(kind, key):
        return next(lost, None) if kind == 'write' and '/busy/' in key else None

    done, hits = attempt(bucket, url, clock, 1, choose)
    assert hits == 1
    assert done is not None
    assert [each.kind for each in bucket.proxy.requests if each.key.endswith('checkpoint_1/checkpoint')].count(
        'write'
    ) == 1


def test_a_manifest_that_arrives_late_makes_a_whole_checkpoint(bucket):
    url, clock = bucket.url(), FakeClock()
    sent = []

    def choose(kind, key):
        return 'dropped' if kind == 'write' and key.endswith('checkpoint_2/checkpoint') else None

    def keep_manifest(manifest):
        sent.append(manifest)

    bucket.proxy.watch = lambda kind, key, body: keep_manifest(body) if choose(kind, key) else None
    done, _ = attempt(bucket, url, clock, 2, choose, storage_options={'retry_seconds': 1.0})
    assert done is None
    assert t5ckpt.all_steps(url) == []
    open_storage(url).write('checkpoint_2/checkpoint', sent[0])
    check(url, must=(2,))
    clock.advance(AFTER_TWO_HORIZONS)
    checkpointer(url, clock).save(state(3), step=3)
    check(url, must=(2, 3))
    assert not open_storage(url).names('.t5ckpt/busy', '')


def test_the_files_of_another_machine_that_saves_a_step_stay(bucket):
    """As of a pod that was killed: it is saved at once by the next one, and its files go after two horizons."""
    url, clock = bucket.url(), FakeClock()
    storage = open_storage(url)
    nonce = '0' * 16
    owner = {'host': 'other', 'place': 'elsewhere', 'pid': 7, 'born': '1'}
    record = {'action': 'save', 'directories': [f't5ckpt-{nonce}'], 'seconds': 3600, 'owner': owner}
    storage.write(f'.t5ckpt/busy/5.{int(clock()) + 7201}.{nonce}', json.dumps(record).encode())
    key = f'checkpoint_5/t5ckpt-{nonce}/w/0.0'
    storage.write(key, b'chunk')
    ck = checkpointer(url, clock)
    assert ck.save(state(5), step=5) is not None
    clock.advance(7100)
    ck.save(state(1), step=1)
    assert storage.is_file(key)
    clock.advance(200)
    ck.save(state(2), step=2)
    assert not storage.is_file(key)
    assert not storage.names('.t5ckpt/busy', '')
    check(url, must=(1, 2, 5))


@pytest.mark.slow
def test_a_silent_server_is_given_up(bucket):
    """One that accepts connections and says nothing, and one that does not even accept them."""
    for backlog in (64, 0):
        with socket.socket() as silent:
            silent.bind(('127.0.0.1', 0))
            silent.listen(backlog)
            held = [socket.socket() for _ in range(4 if backlog == 0 else 0)]
            for one in held:
                one.setblocking(False)
                one.connect_ex(silent.getsockname())
            address = f'http://127.0.0.1:{silent.getsockname()[1]}'
            with bucket.served_by(address):
                started = time.monotonic()
                with pytest.raises(errors.StorageError, match=f'{bucket.scheme}://test-bucket'):
                    t5ckpt.all_steps(bucket.url(), storage_options={'retry_seconds': 2})
                assert time.monotonic() - started < 20
            for one in held:
                one.close()


@pytest.mark.slow
def test_the_first_save_after_an_outage_is_committed(bucket):
    """A server that was silent is asked again by every operation, the first one after its return included."""
    url, over = bucket.url(), threading.Event()
    ck = checkpointer(url, FakeClock(), storage_options={'retry_seconds': 2})
    ck.save(state(1), step=1)
    bucket.proxy.choose = lambda kind, key: over.wait(30) and None
    started = time.monotonic()
    with pytest.raises(errors.StorageError, match='has not replied for'):
        ck.save(state(2), step=2)
    for _ in range(2):
        with pytest.raises(errors.StorageError, match=r'has not replied for \d+ s'):
            ck.all_steps()
    # Only the first of many requests waits for the whole time.
    assert time.monotonic() - started < 10
    bucket.proxy.choose = lambda kind, key: None
    over.set()
    assert ck.save(state(3), step=3) is not None
    check(url, must=(1, 3), may=(2,))


@pytest.mark.slow
def test_a_server_that_fails_each_request_is_not_called_silent(bucket):
    """Each attempt takes so long that the requests are still being repeated when half of the wait is over."""
    url = bucket.url()
    bucket.proxy.choose = lambda kind, key: time.sleep(0.85) or '503'
    storage = open_storage(url, {'retry_seconds': 4})
    for _ in range(2):
        with pytest.raises(errors.StorageError, match=r'all requests have failed for \d+ s.* HTTP 503'):
            storage.entries()


@pytest.mark.slow
@pytest.mark.parametrize('fault', ['429', 'SlowDown', 'html 500'])
def test_a_server_that_throttles_for_half_of_the_time_delays_a_save(bucket, fault):
    url, until = bucket.url(), time.monotonic() + 1.5
    bucket.proxy.choose = lambda kind, key: fault if time.monotonic() < until else None
    ck = checkpointer(url, FakeClock(), storage_options={'retry_seconds': 3})
    assert ck.save(state(1), step=1) is not None
    assert time.monotonic() > until
    check(url, must=(1,))


@pytest.mark.slow
def test_a_server_with_a_limit_of_requests_a_second_delays_a_save(bucket):
    """Of all requests in flight, those above the limit are refused; the save takes longer and loses nothing."""
    url, guard, recent, refused = bucket.url(), threading.Lock(), [], []

    def choose(kind, key):
        with guard:
            now = time.monotonic()
            recent[:] = [each for each in recent if each > now - 0.1]
            if len(recent) < 4:
                recent.append(now)
                return None
            refused.append(key)
            return 'SlowDown'

    tree = {'w': np.arange(2**14, dtype=np.float32), 'step': np.int32(1)}
    options = {'chunk_bytes': 2**12, 'compression': None, 'inline_bytes': 64, 'storage_options': {'retry_seconds': 10}}
    with t5ckpt.Checkpointer(tree, checkpoints_dir=url, **with_options(**options)) as ck:
        bucket.proxy.choose = choose
        ck.save(tree)
        assert np.array_equal(ck.restore()['w'], tree['w'])
    assert refused


SLOW_WRITE = """
import sys
from t5ckpt.storage import open_storage
open_storage(sys.argv[1], {'retry_seconds': 16}).write('chunk', bytes(2**20))
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_server_that_answers_a_write_late_gets_it_once(bucket):
    """Such as one with many chunks to make durable. In a process of its own, which reads the limits once."""
    bucket.proxy.choose = lambda kind, key: time.sleep(9) if kind == 'write' else None
    command = [sys.executable, '-c', SLOW_WRITE, bucket.url()]
    # Not with the limits of this process, which has opened a bucket before.
    environ = {name: value for name, value in os.environ.items() if not name.startswith('TENSORSTORE_CURL_')}
    subprocess.run(command, env=environ | bucket.environment(), check=True, timeout=120)
    assert [request.kind for request in bucket.proxy.clear()].count('write') == 1


@pytest.mark.slow
@pytest.mark.parametrize('status', ['400', '501'])
def test_an_answer_that_says_nothing_of_a_key_is_the_storage_s_error(bucket, status):
    """Neither a raw error nor a damaged checkpoint, whether a manifest, a chunk or a listing is asked for."""
    url = bucket.url()
    checkpointer(url, FakeClock()).save(state(1), step=1)
    view = t5ckpt.open_checkpoint(url, storage_options={'retry_seconds': 1})
    bucket.proxy.choose = lambda kind, key: status
    for call in (
        lambda: np.asarray(view['w']),
        lambda: t5ckpt.load_t5x_checkpoint(url, 1, storage_options={'retry_seconds': 1}),
        lambda: t5ckpt.all_steps(url, storage_options={'retry_seconds': 1}),
        lambda: checkpointer(url, FakeClock(), storage_options={'retry_seconds': 1}).save(state(2), step=2),
    ):
        with pytest.raises(errors.StorageError, match=status) as caught:
            call()
        assert type(caught.value) is errors.StorageError


@pytest.mark.slow
@pytest.mark.parametrize('condition', ['create', 'change', 'both'])
@pytest.mark.parametrize('action', ['501', 'strip'])
def test_a_server_that_refuses_conditions_or_a_proxy_that_strips_them(bucket, action, condition, caplog):
    """Saves and deletions go through. An overwrite needs the comparison of versions."""
    url, clock = bucket.url(), FakeClock()
    met = set()

    def conditions(asked):
        met.add(asked)
        return action if condition in (asked, 'both') else None

    bucket.proxy.conditions = conditions
    if bucket.scheme == 'az' and action == 'strip':
        # Azure's signature contains the conditions.
        with checkpointer(url, clock) as ck, pytest.raises(errors.AccessDeniedError):
            _ = [ck.save(state(1), step=501, overwrite=overwrite) for overwrite in (False, True)]
        return
    with checkpointer(url, clock) as ck:
        ck.save(state(1), step=501)
        # That changes are not compared shows only where they are refused.
        replaces = (condition, action) == ('change', 'strip')
        if replaces:
            ck.save(state(2), step=501, overwrite=True)
        else:
            with pytest.raises(errors.UnsupportedFormatError, match='Delete the step first: t5ckpt rm'):
                ck.save(state(2), step=501, overwrite=True)
        seed = 2 if replaces else 1
        assert np.array_equal(np.asarray(t5ckpt.open_checkpoint(url)['w']), state(seed)['w'])
        ck.save(state(3), step=502)
        ck.delete(501)
        ck.save(state(4), step=501)
        assert ck.all_steps() == [501, 502]
        clock.advance(AFTER_TWO_HORIZONS)
        ck.save(state(5), step=503)
    assert 'create' in met
    assert ('does not check the conditions' in caplog.text) == (condition != 'change')
    assert t5ckpt.verify(url, 501, full=True).ok
    assert [key for key, _ in open_storage(url).walk('.t5ckpt') if '/busy/' in key] == []


def test_a_failure_of_a_key_with_501_in_its_name_is_not_a_refusal_of_conditions(bucket, caplog):
    url = bucket.url()
    with checkpointer(url, FakeClock(), storage_options={'retry_seconds': 1}) as ck:
        bucket.proxy.choose = lambda kind, key: '503' if kind == 'write' else None
        with pytest.raises(errors.StorageError):
            ck.save(state(1), step=501)
        bucket.proxy.choose = lambda kind, key: None
        assert ck.save(state(1), step=501) is not None
    assert 'does not check the conditions' not in caplog.text


def every_way_in(url):
    """The calls with which a run is opened, by name."""
    ck = checkpointer(url, FakeClock(), storage_options={'retry_seconds': 2})
    return {
        'all_steps': lambda: t5ckpt.all_steps(url),
        'latest_step': ck.latest_step,
        'save': lambda: ck.save(state(1), step=1),
        'restore': ck.restore,
        'restore_or_init': lambda: t5ckpt.restore_or_init(ck, lambda: state(0)),
        'open_checkpoint': lambda: t5ckpt.open_checkpoint(url),
        'open_checkpoint of a step': lambda: t5ckpt.open_checkpoint(f'{url}/checkpoint_5'),
        'open_run': lambda: t5ckpt.open_run(url).steps,
        'metrics': lambda: ck.metrics(5),
        'best_step': lambda: ck.best_step('loss', 'min'),
        'delete': lambda: ck.delete(5),
        'pin_checkpoint': lambda: t5ckpt.pin_checkpoint(f'{url}/checkpoint_5'),
        'unpin_checkpoint': lambda: t5ckpt.unpin_checkpoint(f'{url}/checkpoint_5'),
        'is_pinned_checkpoint': lambda: t5ckpt.is_pinned_checkpoint(f'{url}/checkpoint_5'),
    }


def refusals(url, ways):
    """The texts of the errors, all of which are the storage's."""
    texts = []
    for name, call in ways.items():
        with pytest.raises(errors.StorageError) as caught:
            call()
        assert type(caught.value) is errors.StorageError, name
        assert url.split('/')[2] in str(caught.value), name
        texts.append(str(caught.value))
    return texts


def test_a_bucket_that_is_not_there_is_not_a_new_run(bucket, capsys):
    bucket.proxy.clear()
    url = f'{bucket.scheme}://no-such-bucket/run'
    for text in refusals(url, every_way_in(url)):
        assert 'does not exist' in text
        assert '404' in text
        assert "check the bucket's name" in text
    assert not [request for request in bucket.proxy.clear() if request.kind == 'write']
    with pytest.raises(SystemExit) as ended:
        run(['ls', url])
    assert ended.value.code == 4
    assert 'does not exist' in capsys.readouterr().err


@pytest.mark.parametrize('name', ['Not_Valid!', 'a'])
def test_the_name_of_a_bucket_that_cannot_be(bucket, name):
    bucket.proxy.clear()
    url = f'{bucket.scheme}://{name}/run'
    calls = (t5ckpt.all_steps, t5ckpt.open_checkpoint, lambda url: t5ckpt.open_run(url).steps)
    for call in (*calls, lambda url: checkpointer(url, FakeClock()).save(state(1), step=1)):
        with pytest.raises(errors.InvalidPathError, match=f'a bucket cannot have the name "{name}"'):
            call(url)
    assert not bucket.proxy.clear()


def test_a_condition_that_no_request_has_is_not_met(bucket):
    """Such as of an organization's policy: TensorStore reports a write as done, and a read as of a missing key."""
    url = bucket.url()
    checkpointer(url, FakeClock()).save(state(1), step=1)
    view = t5ckpt.open_checkpoint(url)
    bucket.proxy.choose = lambda kind, key: '412'
    for call in (
        lambda: checkpointer(url, FakeClock()).save(state(2), step=2),
        lambda: checkpointer(url, FakeClock()).restore(step=1),
        lambda: view['w'][0],
        lambda: open_storage(url).delete_file('checkpoint_1/checkpoint'),
    ):
        with pytest.raises(errors.StorageError, match=r"HTTP 304 or 412\)|http_response_code='412'"):
            call()
    bucket.proxy.choose = lambda kind, key: None
    check(url, must=(1,))


def test_credentials_that_expire_during_a_save(s3):
    """S3 answers with 400. The error says what to renew, the step before is complete, and the next save is committed."""
    url, clock = s3.url(), FakeClock()
    ck = checkpointer(url, clock)
    ck.save(state(1), step=1)
    for last in ('busy/2', '/w/0.0', 'checkpoint_2/checkpoint'):
        expired = threading.Event()
        s3.proxy.choose = lambda kind, key, expired=expired, last=last: (
            'ExpiredToken' if expired.is_set() or (last in key and not expired.set()) else None
        )
        with pytest.raises(errors.AccessDeniedError, match=r'(?s)ExpiredToken.*renew them'):
            ck.save(state(2), step=2)
        s3.proxy.choose = lambda kind, key: None
        check(url, must=(1,))
    assert ck.save(state(2), step=2) is not None
    check(url, must=(1, 2))


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['list', 'read'])
@pytest.mark.parametrize('fault', ['401', '501', 'dropped'])
def test_verify_calls_no_checkpoint_damaged_where_the_server_fails(bucket, kind, fault):
    url = bucket.url()
    checkpointer(url, FakeClock()).save(state(1), step=1)
    bucket.proxy.choose = lambda one, key: fault if one == kind or key.endswith('.t5ckpt/probe') else None
    for full in (False, True):
        with pytest.raises(errors.StorageError, match='test-bucket'):
            t5ckpt.verify(f'{url}/checkpoint_1', full=full, storage_options={'retry_seconds': 1})


def test_a_page_in_the_place_of_an_answer(bucket):
    """Of a portal or a proxy: no checkpoint is called damaged for it, and none is new."""
    url = bucket.url()
    checkpointer(url, FakeClock()).save(state(1), step=1)
    ways = every_way_in(url)
    bucket.proxy.choose = lambda kind, key: 'html'
    for text in refusals(url, ways):
        assert "check the bucket's name, the endpoint and the network" in text
    bucket.proxy.choose = lambda kind, key: None
    check(url, must=(1,))


def test_a_new_run_in_a_bucket_costs_no_question_for_the_bucket(gs):
    """Google refuses a listing with a delimiter if the bucket does not exist, unlike TensorStore's listing."""
    url = gs.url()
    ck = checkpointer(url, FakeClock())
    gs.proxy.clear()
    assert ck.all_steps() == []
    assert ck.all_steps() == []
    ck.save(state(1), step=1)
    assert [request.kind for request in gs.proxy.clear()].count('bucket') == 0
