"""A process that was forked from the trainer, such as a worker of a data loader, reads both tiers, and writes to none."""

import json

import pytest
from support import forked

import t5ckpt

_PROGRAM = """
import json, logging, os, sys, warnings
warnings.simplefilter('ignore')
import t5ckpt
logging.basicConfig(format='%(levelname)s %(message)s')
run, local = sys.argv[1:]
ck = t5ckpt.Checkpointer({'a': 1}, None, run, local=t5ckpt.LocalTier(local))
ck.save({'a': 1}, step=1)
ck.wait_until_persisted()
ck.save({'a': 2}, step=2)
ck.wait_until_persisted()


def error_of(call):
    try:
        return str(call())
    except t5ckpt.errors.T5CkptError as error:
        return type(error).__name__, str(error)


child = os.fork()
if child == 0:
    answers = [ck.latest_step(), ck.all_steps(), repr(ck).endswith('latest_step=2)'), dict(ck.metrics(1))]
    answers.append(ck.wait_until_persisted(2))
    answers += [error_of(lambda: ck.save({'a': 3}, step=3)), error_of(lambda: ck.delete(1)), ck.all_steps()]
    ck.close()
    print(json.dumps(answers), flush=True)
    os._exit(0)
os.waitpid(child, 0)
ck.save({'a': 3}, step=3)
ck.close()
"""


def test_a_forked_process_lists_the_steps_and_saves_nothing(tmp_path):
    done = forked.run(_PROGRAM, tmp_path / 'run', tmp_path / 'local')
    assert done.returncode == 0, done.stderr
    assert 'ERROR' not in done.stderr
    assert 'was removed' not in done.stderr
    latest, steps, has_latest, metrics, waited, save, delete, after = json.loads(done.stdout)
    assert (latest, steps, has_latest, metrics, waited, after) == (2, [1, 2], True, {}, None, [1, 2])
    for kind, text in (save, delete):
        assert kind == 'LocalDirError'
        assert 'this process was forked' in text
    assert t5ckpt.all_steps(tmp_path / 'run') == [1, 2, 3]


_DURING_RETENTION = """
import json, os, sys, threading, warnings
warnings.simplefilter('ignore')
import t5ckpt


class Slow(t5ckpt.KeepPolicy):
    is_asked, may_answer = threading.Event(), threading.Event()

    def choose(self, infos):
        self.is_asked.set()
        self.may_answer.wait(60)
        return t5ckpt.KeepAll().choose(infos)


run, local = sys.argv[1:]
ck = t5ckpt.Checkpointer({'a': 1}, None, run, keep_policy=Slow(), local=t5ckpt.LocalTier(local))
ck.save({'a': 1}, step=1, metrics={'loss': 2.0})
Slow.is_asked.wait(60)
child = os.fork()
if child == 0:
    print(json.dumps([ck.all_steps(), ck.metrics(1), ck.best_step('loss', 'min'), ck.wait_until_persisted(1)]), flush=True)
    os._exit(0)
os.waitpid(child, 0)
Slow.may_answer.set()
ck.close()
"""


def test_a_process_that_is_forked_at_the_end_of_an_upload_reads(tmp_path):
    """Locks of the thread that uploads are held in it for ever."""
    done = forked.run(_DURING_RETENTION, tmp_path / 'run', tmp_path / 'local')
    assert done.stdout, done.stderr
    assert json.loads(done.stdout) == [[1], {'loss': 2.0}, 1, None]


_IN_CHILD = """
import json, os, sys, time, warnings
warnings.simplefilter('ignore')
import t5ckpt
from t5ckpt.storage import open_storage
from t5ckpt.testing import FaultyStorage


class Slow(FaultyStorage):
    def before_operation(self, name, key):
        super().before_operation(name, key)
        if name == 'write':
            time.sleep(0.5)


ck = t5ckpt.Checkpointer({'a': 1}, None, Slow(open_storage(sys.argv[1])), local=t5ckpt.LocalTier(sys.argv[2]))
child = os.fork()
if child == 0:
    ck.save({'a': 1}, step=1)
    ck.wait_until_persisted(1)
    ck.save({'a': 2}, step=2)
    ck.close()
    print(json.dumps(t5ckpt.all_steps(sys.argv[1])), flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""


@pytest.mark.slow
def test_a_forked_process_that_alone_uses_a_checkpointer_waits_for_its_uploads(tmp_path):
    done = forked.run(_IN_CHILD, tmp_path / 'run', tmp_path / 'local')
    assert done.stdout, done.stderr
    assert json.loads(done.stdout) == [1, 2]
