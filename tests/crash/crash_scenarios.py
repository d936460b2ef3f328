"""What a trainer does to its directory, each small enough to be broken at every file-system call.

A scenario prepares a run, and acts on it. `adds` are the steps that the act makes, `removes` those that it may take away,
`replaces` those that are there all the time, the old ones or the new; every other step that is there before must be there
afterwards, byte for byte. What comes from another run lies in its directory `source`. With two tiers, all that is of the local
directory `local`; the uploads go to the directory `bucket`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import shutil
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from support.options import with_options

import t5ckpt
from t5ckpt.commit.deletion import delete_step
from t5ckpt.commit.markers import Marker
from t5ckpt.commit.retention import Retention
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import T5CkptError
from t5ckpt.planning.save_plan import SaveOptions
from t5ckpt.save.prepare import write_stream
from t5ckpt.save.request import STREAM_BYTES, SaveContext, SaveRequest
from t5ckpt.storage import open_storage
from t5ckpt.testing import FakeClock

#: The step that every trainer saves after the fault.
NEXT = 90
#: A run from which another one takes a step.
SOURCE = 'source'
#: The directories of a trainer with two tiers.
LOCAL, BUCKET = 'local', 'bucket'


def state(step: int) -> dict[str, Any]:
    """Two chunks that change with the step, two that do not, and leaves that lie in the manifest."""
    rng, frozen = np.random.default_rng(step), np.random.default_rng(0)
    return {
        'params': {'w': rng.standard_normal((64, 64), dtype=np.float32)},
        'frozen': {'w': frozen.standard_normal((64, 64), dtype=np.float32)},
        'small': rng.standard_normal(3, dtype=np.float32),
        'step': np.int32(step),
    }


class Position:
    """A data iterator: how many batches were taken."""

    def __init__(self) -> None:
        self.taken = 0

    def save(self, filename: str) -> None:
        """Writes the number."""
        pathlib.Path(f'{filename}.position').write_text(str(self.taken), encoding='ascii')

    def load(self, filename: str) -> None:
        """Reads it."""
        self.taken = int(pathlib.Path(f'{filename}.position').read_text(encoding='ascii'))


def promises_of(root: pathlib.Path) -> pathlib.Path:
    """The file beside a run with what has returned to its trainer."""
    return root.with_name('promises')


class Trainer:
    """A checkpointer of the state above on a directory."""

    def __init__(self, root: pathlib.Path, **options: Any) -> None:
        """Touches nothing on disk."""
        self.root = root
        options = {'inline_bytes': 64, 'chunk_bytes': 2**13, 'clock': FakeClock()} | options
        self.is_persisted, self.has_tiers = False, 'local' in options
        if self.has_tiers:
            options['local'] = dataclasses.replace(options['local'], directory=root / LOCAL)
        run = root / BUCKET if self.has_tiers else root
        self.checkpointer = t5ckpt.Checkpointer(state(0), checkpoints_dir=run, **with_options(**options))

    def save(self, step: int, **options: Any) -> Any:
        """A blocking save; what it prunes is gone when this returns."""
        saved = self.checkpointer.save(state(step), step=step, **options)
        self._promise(f'saved {step}')
        return saved

    def _promise(self, text: str) -> None:
        """With two tiers, records what has returned, for the judge of a trainer that is killed."""
        if self.has_tiers:
            with promises_of(self.root).open('a', encoding='ascii') as file:
                file.write(f'{text}\n')

    def close(self) -> None:
        """With two tiers, ends the uploads and releases the local directory."""
        if self.has_tiers:
            self.checkpointer.close()

    def persist(self, attempts: int = 1) -> None:
        """With two tiers, waits for the uploads; a failed one is not an error of the save, and is repeated."""
        for _ in range(attempts if self.has_tiers else 0):
            with contextlib.suppress(T5CkptError):
                self.checkpointer.wait_until_persisted()
                self.is_persisted = True
                self._promise('uploaded')
                return


@dataclasses.dataclass(frozen=True)
class Scenario:
    """See the top of this file."""

    prepare: Callable[[pathlib.Path], None]
    act: Callable[[Trainer], Any]
    adds: frozenset[int] = frozenset()
    removes: frozenset[int] = frozenset()
    replaces: frozenset[int] = frozenset()
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def has_tiers(self) -> bool:
        """Whether the trainer has two tiers."""
        return 'local' in self.options

    def run(self, root: pathlib.Path) -> pathlib.Path:
        """Where the trainer saves."""
        return root / LOCAL if self.has_tiers else root

    def trainer(self, root: pathlib.Path) -> Trainer:
        """As the scenario's options have it; a data iterator is never shared."""
        options = dict(self.options)
        if 'dataset_iterator' in options:
            options['dataset_iterator'] = options['dataset_iterator']()
        return Trainer(root, **options)


def _saved(*steps: int, **options: Any) -> Callable[[pathlib.Path], None]:
    def prepare(root: pathlib.Path) -> None:
        for step in steps:
            Scenario(_nothing, _nothing, options=options).trainer(root).save(step)

    return prepare


def _nothing(_: Any) -> None:
    pass


def _uploaded(root: pathlib.Path) -> None:
    """Two steps in the bucket, and the second one on the local disk."""
    trainer = Trainer(root, **_TIERS)
    for step in (1, 2):
        trainer.save(step)
        trainer.persist()
    trainer.close()


def _save_and_upload(trainer: Trainer) -> None:
    """Then the retention of both tiers."""
    trainer.save(3)
    trainer.persist()


def _broken_second(root: pathlib.Path) -> None:
    _saved(1, 2)(root)
    manifest = root / 'checkpoint_2' / 'checkpoint'
    # As after a power cut on the disk of another program. One that is cut off is listed.
    manifest.write_bytes(bytes(40))


def _leftovers(root: pathlib.Path) -> None:
    """Of a writer that died, of a deletion that was cut, and a temporary directory without anything in it."""
    _saved(1)(root)
    whole, run = root / 'checkpoint_1', open_storage(root)
    writer, deleter, beginner = (Marker(run, step, time.time) for step in (2, 0, 3))
    shutil.copytree(whole, root / writer.directory, ignore=shutil.ignore_patterns('checkpoint'))
    shutil.copytree(whole, root / deleter.aside, ignore=shutil.ignore_patterns('checkpoint'))
    (root / beginner.directory).mkdir()
    for marker in (writer, deleter, beginner):
        marker.release()


def _source(root: pathlib.Path) -> None:
    _saved(1)(root)
    _saved(2)(root / SOURCE)


def delete(root: pathlib.Path, step: int, clock: Clock) -> None:
    """What pruning does with a step."""
    delete_step(open_storage(root), step, clock)


def _convert(trainer: Trainer, *, overwrite: bool) -> None:
    """What every converter ends in: leaves of any origin, written one after another."""
    leaves = {('params', 'w'): state(2)['params']['w'], ('frozen', 'w'): state(2)['frozen']['w']}
    table = leaves | {(name,): state(2)[name] for name in ('small', 'step')}
    options = SaveOptions(inline_bytes=64, chunk_bytes=2**13)
    context = SaveContext(open_storage(trainer.root), options, clock=FakeClock())
    write_stream(table, SaveRequest(context, 2, STREAM_BYTES, overwrite))


def _prune(trainer: Trainer) -> None:
    """What the verb does."""
    retention = Retention(open_storage(trainer.root), t5ckpt.KeepLatest(1), FakeClock(), None)
    retention.carry_out()


def _save_async(trainer: Trainer) -> None:
    pending = trainer.checkpointer.save_async(state(2), step=2)
    pending.result()
    trainer.checkpointer.wait_until_finished()
    trainer.checkpointer.check_for_errors()


def _pin(trainer: Trainer) -> None:
    t5ckpt.pin_checkpoint(trainer.root / 'checkpoint_1', 'the best so far')
    t5ckpt.unpin_checkpoint(trainer.root / 'checkpoint_2')


def _pinned_second(root: pathlib.Path) -> None:
    _saved(1, 2)(root)
    t5ckpt.pin_checkpoint(root / 'checkpoint_2')


def _save_twice(trainer: Trainer) -> None:
    """The second save links what the first one wrote without a look at it: the arrays are the same objects."""
    import jax

    device = {key: jax.device_put(value) for key, value in state(2)['params'].items()}
    for step in (2, 3):
        fresh = state(step)
        fresh['params'] = device if step == 2 else {'w': jax.device_put(fresh['params']['w'])}
        fresh['frozen'] = {'w': getattr(trainer, 'frozen', None)} if step == 3 else fresh['frozen']
        if step == 2:
            trainer.frozen = fresh['frozen']['w'] = jax.device_put(fresh['frozen']['w'])
        trainer.checkpointer.save(fresh, step=step)


_ONE, _TWO = frozenset({1}), frozenset({2})
_PLAIN = {'reuse_unchanged': False}
_TIERS = {'local': t5ckpt.LocalTier(LOCAL, keep=1), 'keep': 2}

SCENARIOS = {
    'first save': Scenario(_nothing, lambda t: t.save(1), adds=_ONE),
    'save': Scenario(_saved(1), lambda t: t.save(2), adds=_TWO, options=_PLAIN),
    'save, linking': Scenario(_saved(1), lambda t: t.save(2), adds=_TWO),
    'two saves, linking arrays on devices': Scenario(_saved(1), _save_twice, adds=frozenset({2, 3})),
    'save, zstd': Scenario(_saved(1), lambda t: t.save(2), adds=_TWO, options={'compression': 'zstd'} | _PLAIN),
    'save in the background': Scenario(_saved(1), _save_async, adds=_TWO),
    'save past the page cache': Scenario(
        _saved(1), _save_async, adds=_TWO, options={'storage_options': {'direct_bytes': 1}} | _PLAIN
    ),
    'save with a data iterator': Scenario(
        _saved(1, 2, dataset_iterator=Position),
        lambda t: t.save(3),
        adds=frozenset({3}),
        options={'dataset_iterator': Position, 'keep_dataset_checkpoints': 1},
    ),
    'save and prune': Scenario(
        _saved(1, 2, 3), lambda t: t.save(4), adds=frozenset({4}), removes=_ONE | _TWO, options={'keep': 2}
    ),
    'overwrite a broken step': Scenario(_broken_second, lambda t: t.save(2), adds=_TWO),
    'convert': Scenario(_saved(1), lambda t: _convert(t, overwrite=False), adds=_TWO),
    'convert, overwriting': Scenario(_saved(1, 2), lambda t: _convert(t, overwrite=True), replaces=_TWO),
    'copy': Scenario(_source, lambda t: t5ckpt.copy_checkpoint(t.root / SOURCE, t.root), adds=_TWO),
    'prune': Scenario(_saved(1, 2, 3), _prune, removes=_ONE | _TWO),
    'delete': Scenario(_saved(1, 2), lambda t: delete(t.root, 1, FakeClock()), removes=_ONE),
    'delete with the checkpointer': Scenario(_saved(1, 2), lambda t: t.checkpointer.delete(2), removes=_TWO),
    'replace a step': Scenario(_saved(1, 2), lambda t: t.save(2, overwrite=True), replaces=_TWO, options=_PLAIN),
    'replace a step, linking and pruning': Scenario(
        _saved(1, 2), lambda t: t.save(2, overwrite=True), removes=_ONE, replaces=_TWO, options={'keep': 1}
    ),
    'save and sweep': Scenario(_leftovers, lambda t: t.save(2), adds=_TWO),
    'pin and unpin': Scenario(_pinned_second, _pin),
    'save, upload and prune both tiers': Scenario(
        _uploaded, _save_and_upload, adds=frozenset({3}), removes=_TWO, options=_TIERS
    ),
}
