"""Breaks scenarios at file-system calls. Started by campaign.py with faultshim.so in LD_PRELOAD; orders come as JSON lines.

Two processes: this one never starts a thread, so that it may fork a victim for each fault that kills; its first child does
everything else: it copies the prepared run, fails calls in its own process, and judges what is left.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import pathlib
import re
import shutil
import sys
import tempfile
import time
import traceback
from typing import Any, TextIO

_HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(_HERE.parent), str(_HERE)]

# Everything is imported before the first fork; none of it starts a thread that a child would miss.
import flax.serialization  # noqa: F401
import jax  # noqa: F401
import tensorstore  # noqa: F401
from crash_checks import check_whole, fingerprint, listed, open_files
from crash_scenarios import BUCKET, LOCAL, NEXT, SCENARIOS, SOURCE, Trainer, promises_of
from support import faultshim, loopfs, powercut
from support.faultshim import LOSE, SHORT, SHUTDOWN, Shim

import t5ckpt
import t5ckpt.checkpointer
import t5ckpt.save.execute
import t5ckpt.testing
import t5ckpt.tiers.restore
import t5ckpt.tiers.tier
from t5ckpt.errors import SaveFailedError, T5CkptError

SHIM = Shim()
#: Where a file system is mounted whose power is to be cut.
MOUNT = pathlib.Path(os.environ['T5CKPT_CRASH_MOUNT']) if 'T5CKPT_CRASH_MOUNT' in os.environ else None


class Log(logging.Handler):
    """Keeps what t5ckpt says."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps it."""
        self.lines.append(record.getMessage())


class Runner:
    """Prepares runs, breaks them in this process, and judges them."""

    def __init__(self) -> None:
        """Its directory is in memory where there is such a place, unless a disk's fsync is what is tested."""
        memory = pathlib.Path('/dev/shm')  # noqa: S108 - mkdtemp below
        place = MOUNT or (memory if os.access(memory, os.W_OK) else None)
        self._home = tempfile.TemporaryDirectory(prefix='t5ckpt-crash-', dir=place)
        self.home = pathlib.Path(self._home.name)
        self.root = self.home / 'run'
        self._before: dict[str, dict[int, dict[str, str]]] = {}
        self._log = Log()
        logging.getLogger('t5ckpt').addHandler(self._log)
        logging.getLogger('t5ckpt').propagate = False

    def prepare(self, name: str) -> str:
        """A fresh copy of the scenario's run; its path."""
        template = self.home / 'templates' / name.replace(' ', '_')
        if name not in self._before:
            template.mkdir(parents=True)
            # At its place, which a local directory records.
            if self.root.exists():
                shutil.rmtree(self.root)
            SCENARIOS[name].prepare(self.root)
            run = SCENARIOS[name].run(self.root)
            self._before[name] = {step: fingerprint(run / f'checkpoint_{step}') for step in self._good(run)}
            if self.root.exists():
                _copy(self.root, template / 'run')
        if self.root.exists():
            shutil.rmtree(self.root)
        if (template / 'run').exists():
            _copy(template / 'run', self.root)
        promises_of(self.root).unlink(missing_ok=True)
        self._log.lines.clear()
        return str(self.root)

    @staticmethod
    def _good(root: pathlib.Path) -> list[int]:
        """The steps that are there whole; a scenario may have broken one."""
        return t5ckpt.all_steps(root) if root.exists() else []

    def calls(self, name: str) -> list[list[Any]]:
        """The calls of the act when nothing is broken."""
        self.prepare(name)
        trainer = SCENARIOS[name].trainer(self.root)
        SHIM.arm(self.root)
        with contextlib.closing(trainer):
            SCENARIOS[name].act(trainer)
            SHIM.disarm()
        return [[call.kind, call.name, call.path] for call in SHIM.calls()]

    def run(self, name: str, at: int, mode: int, error: int, classes: int, sticky: int) -> dict[str, Any]:
        """One fault in this process; what came of it. Raises AssertionError where a promise is broken."""
        self.prepare(name)
        raised: Exception | None = None
        with contextlib.closing(SCENARIOS[name].trainer(self.root)) as trainer:
            SHIM.arm(self.root, at, mode, error, classes, sticky)
            try:
                SCENARIOS[name].act(trainer)
            except Exception as caught:  # noqa: BLE001 - judged below
                raised = caught
            finally:
                SHIM.disarm()
            if not SHIM.fired:
                return {'outcome': 'not reached'}
            call = SHIM.hit()
            # The upload of the failed attempt begins again, and must not move what is judged.
            trainer.persist(attempts=5)
            self._judge(name, raised, persisted=trainer.is_persisted)
            if raised is not None:
                self._check_error(raised, call, mode, error)
            self._check_next(name, trainer, is_new=False)
        _wait_until_closed(self.root)
        outcome = 'completed' if raised is None else type(raised).__name__
        return {'outcome': outcome, 'call': call.name, 'path': call.path}

    def cut_power(self, name: str, randoms: int, seed: int, fsync: bool) -> dict[str, Any]:
        """Records the act, and judges every disk that a power cut during or after it may leave."""
        self.prepare(name)
        before, links = powercut.read_tree(self.root)
        trainer = SCENARIOS[name].trainer(self.root)
        SHIM.arm(self.root, record=True)
        SCENARIOS[name].act(trainer)
        SHIM.mark()
        trainer.close()
        SHIM.disarm()
        operations = [operation for operation in SHIM.operations() if fsync or operation.kind != 's']
        recording = powercut.Recording(before, links, operations)
        # The model and the disk agree on what is there when nothing was lost.
        assert recording.tree(recording.length, lambda change: change) == powercut.read_tree(self.root)[0]
        broken, count = [], 0
        for cut, tree in powercut.trees(recording, randoms, seed):
            count += 1
            shutil.rmtree(self.root)
            powercut.write_tree(self.root, tree)
            try:
                has_returned = cut > recording.returned
                self._judge(name, None if has_returned else InterruptedError(), persisted=has_returned)
                self._check_next(name, SCENARIOS[name].trainer(self.root))
            except Exception as error:  # noqa: BLE001 - the campaign reports it
                text = ''.join(traceback.format_exception(error))
                broken.append({'cut': cut, 'error': text[-3000:], 'tree': sorted(tree)})
        return {'disks': count, 'operations': recording.length, 'broken': broken[:5], 'number': len(broken)}

    def judge_killed(self, name: str) -> dict[str, Any]:
        """After a victim was killed."""
        if SHIM.fired:
            call = SHIM.hit()
            self._judge(name, InterruptedError())
            self._check_promises(name)
            self._check_next(name, SCENARIOS[name].trainer(self.root))
            return {'outcome': 'killed', 'call': call.name, 'path': call.path}
        return {'outcome': 'not reached'}

    def sync(self) -> bool:
        """What was prepared is on the disk."""
        os.sync()
        return True

    def judge_cut(self, name: str, returned: bool) -> dict[str, Any]:
        """After the power was cut, and the file system was mounted again."""
        loopfs.remount(MOUNT)
        if not returned and not SHIM.fired:
            return {'outcome': 'not reached'}
        self._judge(name, None if returned else InterruptedError())
        self._check_next(name, SCENARIOS[name].trainer(self.root))
        return {'outcome': 'power cut'}

    def _judge(self, name: str, raised: Exception | None, *, persisted: bool = False) -> None:
        """What was there is there; what is listed is whole; a call that returned has done what it says."""
        scenario, before = SCENARIOS[name], self._before[name]
        run = scenario.run(self.root)
        if scenario.has_tiers:
            uploaded = listed(self.root / BUCKET)
            for step in uploaded:
                check_whole(self.root / BUCKET / f'checkpoint_{step}')
            assert 2 in uploaded, f'of the uploaded steps, only {uploaded} are left'
            assert not persisted or raised is not None or scenario.adds <= set(uploaded), (
                f'only {uploaded} are uploaded'
            )
        now = set(listed(run))
        broken = now - set(t5ckpt.all_steps(run))
        assert broken <= scenario.adds - set(before), f'steps {broken} are broken'
        now -= broken
        assert set(before) - scenario.removes <= now, f'steps {set(before) - now} are gone'
        assert now <= set(before) | scenario.adds, f'steps {now} are listed'
        for step in now:
            directory = run / f'checkpoint_{step}'
            check_whole(directory)
            report = t5ckpt.verify(directory, full=True)
            assert report.ok, f'verify finds damage: {report}'
            if step in set(before) - scenario.replaces:
                assert fingerprint(directory) == before[step], f'step {step} has changed'
        if raised is not None and not isinstance(raised, InterruptedError) and len(scenario.adds) == 1:
            visible = 'the rename is visible' in str(raised)
            assert visible or not scenario.adds & now, f'the save failed, and {scenario.adds & now} is there: {raised}'
        if raised is None:
            assert scenario.adds <= now, f'the save returned, but {scenario.adds - now} is not there'
            still = scenario.removes & now
            assert not still or self._log.lines, f'{still} were to be deleted, and nobody said why they are there'

    def _check_error(self, raised: Exception, call: faultshim.Call, mode: int, error: int) -> None:
        """The error is ours, and names the cause."""
        if isinstance(raised, SaveFailedError) and isinstance(raised.__cause__, T5CkptError):
            raised = raised.__cause__
        assert isinstance(raised, T5CkptError), f'{type(raised).__name__} is none of ours: {raised}'
        if mode not in (LOSE, SHORT) and error:
            assert os.strerror(error) in str(raised), f'the error does not say {os.strerror(error)!r}: {raised}'
        assert str(self.root) in str(raised), f'the error does not say where: {raised}'

    def _check_promises(self, name: str) -> None:
        """What has returned to a trainer that was killed is there."""
        file, run = promises_of(self.root), SCENARIOS[name].run(self.root)
        for promise in file.read_text(encoding='ascii').splitlines() if file.exists() else []:
            verb, _, step = promise.partition(' ')
            where, steps = (run, {int(step)}) if verb == 'saved' else (self.root / BUCKET, SCENARIOS[name].adds)
            assert steps <= set(listed(where)), f'{promise}, and {where} has the steps {listed(where)}'

    def _check_next(self, name: str, trainer: Trainer, *, is_new: bool = True) -> None:
        """The next save works, also with the checkpointer that failed, and sweeps what was left."""
        run = SCENARIOS[name].run(self.root)
        with contextlib.closing(trainer):
            if trainer.has_tiers:
                self._check_restart(trainer, is_new=is_new)
            saved = trainer.save(NEXT)
        assert saved is not None
        if trainer.has_tiers:
            left = [
                name for name in os.listdir(self.root / LOCAL / '.t5ckpt/to_persist') if name.endswith('.__partial')
            ]
            assert not left, f'not swept: {left}'
        check_whole(run / f'checkpoint_{NEXT}')
        for each in [run, self.root / BUCKET] if trainer.has_tiers else [run]:
            # What was written in part stays for an hour.
            left = {path.name for path in each.iterdir() if not re.fullmatch(r'(busy|held)_.*\.__partial', path.name)}
            good = {f'checkpoint_{step}' for step in t5ckpt.all_steps(each)}
            broken = {f'checkpoint_{step}' for step in SCENARIOS[name].adds} if name.startswith('overwrite') else set()
            assert left - broken - {SOURCE, '.t5ckpt'} <= good, f'not swept: {sorted(left - good)}'

    def _check_restart(self, trainer: Trainer, *, is_new: bool) -> None:
        """The newest step of both tiers is restored, and uploaded if it was not."""
        local, bucket = self.root / LOCAL, self.root / BUCKET
        newest = max(t5ckpt.all_steps(local) + t5ckpt.all_steps(bucket))
        found = trainer.checkpointer.restore()
        assert int(found['step']) == newest, f'step {found["step"]} was restored, and step {newest} is there'
        trainer.persist(attempts=5)
        assert t5ckpt.latest_step(bucket) == newest, f'{newest} is not uploaded'
        check_whole(bucket / f'checkpoint_{newest}')
        # The next start removes a record that the disk refused to remove.
        said = '' if is_new else ' '.join(self._log.lines)
        names = os.listdir(local / '.t5ckpt/to_persist')
        # A file of a write on the failed disk goes with the next save.
        records = [name for name in names if is_new or not name.endswith('.__partial')]
        waiting = [name for name in records if f'to_persist/{name} could not be removed' not in said]
        assert not waiting, f'{waiting} wait for their upload'

    def close(self) -> None:
        """Removes everything."""
        self._home.cleanup()


def _wait_until_closed(root: pathlib.Path) -> None:
    """Nothing is left open; TensorStore closes a file a moment after it has reported that it could not be written."""
    deadline = time.monotonic() + 10
    while open_files(root):
        assert time.monotonic() < deadline, f'left open: {open_files(root)}'
        time.sleep(0.001)


def _copy(source: pathlib.Path, target: pathlib.Path) -> None:
    """A copy of a tree in which two names of one file stay that."""
    seen: dict[int, str] = {}

    def copy(one: str, other: str) -> None:
        inode = os.stat(one).st_ino
        if inode in seen:
            os.link(seen[inode], other)
        else:
            shutil.copyfile(one, other)
            seen[inode] = other

    shutil.copytree(source, target, copy_function=copy)


def act_and_die(name: str, root: str, at: int, mode: int, classes: int) -> None:
    """The victim's part; a new process, as a trainer is."""
    trainer = SCENARIOS[name].trainer(pathlib.Path(root))
    SHIM.arm(root, at, mode, errno.EIO, classes)
    with contextlib.suppress(T5CkptError):
        SCENARIOS[name].act(trainer)


def act_and_lose_power(name: str, root: str, at: int) -> None:
    """The power is cut at a call, or, below 0, when all is done."""
    trainer = SCENARIOS[name].trainer(pathlib.Path(root))
    if at >= 0:
        # One level up, since the run's own directory need not exist yet.
        SHIM.arm(pathlib.Path(root).parent, at, SHUTDOWN)
    with contextlib.suppress(T5CkptError):
        SCENARIOS[name].act(trainer)
    if at < 0:
        loopfs.cut_power(MOUNT)


def serve(runner: Runner, order: list[Any]) -> Any:
    """One order to the runner."""
    try:
        return getattr(runner, order[0])(*order[1:])
    except BaseException as error:  # noqa: BLE001 - the campaign reports it
        SHIM.disarm()
        text = ''.join(traceback.format_exception(error))
        call = SHIM.hit() if SHIM.fired else None
        where = {} if call is None else {'call': call.name, 'path': call.path}
        return {'outcome': 'BROKEN', 'error': text[-4000:], **where}


def _send(stream: TextIO, message: Any) -> None:
    stream.write(json.dumps(message) + '\n')
    stream.flush()


def main() -> None:
    """Forks the runner, then does what standard input says."""
    # What a victim says before it dies is nothing to anybody.
    logging.getLogger('t5ckpt').addHandler(logging.NullHandler())
    to_read, to_write = os.pipe()
    back_read, back_write = os.pipe()
    if os.fork() == 0:
        os.close(to_write)
        runner = Runner()
        with os.fdopen(to_read) as orders, os.fdopen(back_write, 'w') as answers:
            for line in orders:
                _send(answers, serve(runner, json.loads(line)))
        runner.close()
        os._exit(0)
    os.close(to_read)
    os.close(back_write)
    orders, answers = os.fdopen(to_write, 'w'), os.fdopen(back_read)

    def ask(*order: Any) -> Any:
        _send(orders, order)
        return json.loads(answers.readline())

    for line in sys.stdin:
        order = json.loads(line)
        if order[0] == 'kill':
            _, name, *fault = order
            root = ask('prepare', name)
            if isinstance(root, str):
                victim = os.fork()
                if victim == 0:
                    act_and_die(name, root, *fault)
                    os._exit(0)
                os.waitpid(victim, 0)
                answer = ask('judge_killed', name)
            else:
                answer = root
        elif order[0] == 'power':
            _, name, at = order
            root = ask('prepare', name)
            ask('sync')
            victim = os.fork()
            if victim == 0:
                act_and_lose_power(name, root, at)
                os._exit(0)
            os.waitpid(victim, 0)
            answer = ask('judge_cut', name, at < 0)
        else:
            answer = ask(*order)
        _send(sys.stdout, answer)
    orders.close()
    os.wait()


if __name__ == '__main__':
    main()
