"""How each row of ``intent_table.py`` that claims a message is provoked: what has no effect, and what is said then.

A case is ``(owner, names, said, text, call)``. ``call(scene, name)`` is the smallest use of the parameter in which it has no
effect. ``said`` is what ``text`` is the pattern of: a class of errors or warnings, ``LOG`` for a log line, ``SHOWN`` for the
text that the call returns. A case of the command line returns the words instead, and ``said`` is the exit code.
"""

import dataclasses
import errno
import inspect
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import t5ckpt
from support.facts import put_facts
from support.options import with_options
from t5ckpt import (
    Checkpointer,
    CheckpointerOptions,
    ConvertOptions,
    LocalTier,
    WarmStart,
    errors,
)
from t5ckpt.convert import seqax
from t5ckpt.datasets import as_dataset_iterator
from t5ckpt.errors import NoEffectWarning
from t5ckpt.storage import open_storage
from t5ckpt.testing import FaultyStorage
from t5ckpt.training import MetricWriter, ProfilerWindow, Watchdog, peak_flops, write_hlo

from . import partitioner, t5

LOG, SHOWN = 'log', 'shown'
KERNEL = np.arange(48, dtype=np.float32).reshape(6, 8)
# The weights are where Flax NNX and axlearn have them, so that no cast is meant for a leaf by default.
STATE = {
    'model': {'dense': {'kernel': KERNEL}, 'ids': np.arange(3)},
    'optimizer': {'mu': KERNEL, 'count': np.int32(1)},
    'step': np.int32(1),
}


@dataclasses.dataclass(frozen=True)
class Scene:
    """Directories that the cases share and do not change, and one of their own.

    Attributes:
      root: holds ``run`` with step 1, saved with the metric loss; ``t5`` with a T5; ``x.safetensors`` and
        ``x.flax``, the same state; ``tf``, a TensorFlow checkpoint.
      out: does not exist yet.
    """

    root: pathlib.Path
    out: pathlib.Path

    @property
    def run(self) -> pathlib.Path:
        return self.root / 'run'

    @property
    def local(self) -> pathlib.Path:
        """A local directory, which does not exist yet."""
        return self.out.parent / 'local'

    @property
    def memory(self) -> str:
        """The run on a storage without links."""
        place = f'memory://intent-{id(self.root)}'
        if not t5ckpt.all_steps(place):
            t5ckpt.copy_checkpoint(self.run, place)
        return place

    @property
    def tensorflow(self) -> Any:
        """A state that the TensorFlow checkpoint fits."""
        place = self.root / 'from_tf'
        if not place.exists():
            t5ckpt.convert_checkpoint('tf', self.root / 'tf', place)
        return t5ckpt.load_t5x_checkpoint(place)

    @property
    def model(self) -> Any:
        """A state of T5X's names that the TensorFlow checkpoint does not fit."""
        return {'target': {'w': KERNEL}, 'state': {'step': np.int32(1)}}

    def checkpointer(self, **options: Any) -> Checkpointer:
        """One of the run, whose writes go elsewhere."""
        return Checkpointer(STATE, checkpoints_dir=self.out, **with_options(**options))

    def reader(self, template: Any = STATE, place: Any = None, **options: Any) -> Checkpointer:
        return Checkpointer(template, checkpoints_dir=self.run if place is None else place, **with_options(**options))

    def restored(self, options: Any = None, place: Any = None, **arguments: Any) -> Any:
        return self.reader(place=place, **(options or {})).restore(**arguments)


def make(root: pathlib.Path, tensorflow: pathlib.Path) -> None:
    """Makes what the cases share."""
    from flax import serialization

    with Checkpointer(STATE, checkpoints_dir=root / 'run', options=CheckpointerOptions(inline_bytes=0)) as checkpointer:
        checkpointer.save(STATE, metrics={'loss': 0.5})
    t5_state = {'target': t5.init(t5.Config(gated=True, tied=False)), 'state': {'step': np.int32(1)}}
    with Checkpointer(t5_state, checkpoints_dir=root / 't5') as checkpointer:
        checkpointer.save(t5_state)
    t5ckpt.convert_checkpoint('to-safetensors', root / 'run', root / 'x.safetensors')
    (root / 'x.flax').write_bytes(serialization.to_bytes(STATE))
    (root / 'tf').symlink_to(tensorflow)


def saved(scene: Scene, *, times: int = 1, metrics: Any = None, **options: Any) -> None:
    with scene.checkpointer(**options) as checkpointer:
        for number in range(times):
            checkpointer.save(STATE | {'step': np.int32(number)}, metrics=metrics)


def asked(scene: Scene, times: int, metrics: Any, **options: Any) -> None:
    with scene.checkpointer(**options) as checkpointer:
        for step in range(times):
            checkpointer.maybe_save(step, STATE | {'step': np.int32(step)}, metrics=metrics)


def broken(scene: Scene, victim: str = 'checkpoint_1/model.dense.kernel/0.0') -> pathlib.Path:
    """A copy of the run with a damaged chunk."""
    shutil.copytree(scene.run, scene.out)
    path = scene.out / victim
    path.write_bytes(b'\xff' * path.stat().st_size)
    return scene.out / 'checkpoint_1'


def unsummed(scene: Scene) -> pathlib.Path:
    """A copy of the step without facts and checksums, as T5X writes one."""
    shutil.copytree(scene.run, scene.out, ignore=shutil.ignore_patterns('integrity.*'))
    put_facts(scene.out / 'checkpoint_1', None)
    return scene.out / 'checkpoint_1'


def noted(scene: Scene) -> pathlib.Path:
    """A run with a leaf of text."""
    state = STATE | {'note': 'text'}
    with Checkpointer(state, checkpoints_dir=scene.out) as checkpointer:
        checkpointer.save(state)
    return scene.out


def started(scene: Scene, warm: WarmStart) -> Any:
    with scene.checkpointer() as checkpointer:
        return t5ckpt.restore_or_init(checkpointer, lambda: STATE, initial_checkpoint=warm)


def wrong(state_dict: Any, *_: Any) -> Any:
    """A transform whose result fits no template."""
    return {'other': state_dict}


def nothing(*_: Any) -> Any:
    """A translator without a rule."""
    return t5ckpt.CheckpointTranslator()


def compiled() -> Any:
    return jax.jit(lambda x: x + 1).lower(1.0).compile()


def pinned(scene: Scene) -> None:
    """A pin keeps a step that the policy means to drop."""
    with scene.checkpointer(keep_policy=t5ckpt.KeepLatest(1)) as checkpointer:
        checkpointer.save(STATE, step=1)
        t5ckpt.pin_checkpoint(scene.out / 'checkpoint_1')
        checkpointer.save(STATE | {'step': np.int32(2)}, step=2)


Case = tuple[str, str, Any, str, Callable[[Scene, str], Any]]

MISSING = (errors.CheckpointNotFoundError, FileNotFoundError)

COMMON: list[Case] = [
    (
        'COMMON',
        'target',
        errors.CheckpointExistsError,
        'already',
        lambda s, name: [t5ckpt.copy_checkpoint(s.run, s.out), t5ckpt.copy_checkpoint(s.run, s.out)],
    ),
    (
        'COMMON',
        'path_or_dir',
        MISSING,
        'nowhere',
        lambda s, name: s.reader(s.model).restore_from_tf_checkpoint(s.root / 'nowhere'),
    ),
    ('COMMON', 'step', ValueError, 'step', lambda s, name: t5ckpt.open_checkpoint(s.run / 'checkpoint_1', step=7)),
    (
        'COMMON',
        'train_state state state_dict',
        errors.UnsupportedLeafError,
        'object',
        lambda s, name: t5ckpt.Checkpointer({'w': np.ones(3)}, checkpoints_dir=s.out).save({'w': object()}, step=1),
    ),
    (
        'COMMON',
        'options',
        TypeError,
        'keep_all',
        lambda s, name: t5ckpt.ConvertOptions(keep_all=1),
    ),
]


def written(scene: Scene, **options: Any) -> Any:
    return t5ckpt.copy_checkpoint(scene.run, scene.out, ConvertOptions(**options))


def restored_t5(scene: Scene, **options: Any) -> Any:
    return t5ckpt.convert_checkpoint('hf', exported_t5(scene), scene.out, ConvertOptions(**options))


def exported_t5(scene: Scene) -> pathlib.Path:
    place = scene.root / 'hf'
    if not place.exists():
        t5ckpt.convert_checkpoint('to-hf', scene.root / 't5', place)
    return place


def mapped(scene: Scene, name: str) -> Any:
    held, model = {'params': {'a': KERNEL}}, {'params': {'b': KERNEL}}
    rules = {
        'ckpt_optimizer_state': [('params/b', 'params/c')],
        'optimizer_state': [('params/b', 'params/c')],
        'assignment_map': [('parms/.*', None)],
        'require_all_rules_match': [('parms/.*', None)],
    }[name]
    return t5ckpt.apply_assignment_map(held, model, rules)


def traced(scene: Scene) -> None:
    with ProfilerWindow(scene.out, start=10) as window:
        window.before(9)


def with_donate(scene: Scene, name: str) -> Any:
    return t5ckpt.restore_or_init(scene.reader(), lambda: STATE, donate=True)


def notice(*_: Any) -> Any:
    asked_twice = t5ckpt.PreemptionNotice()
    return [asked_twice() for _ in range(2)]


class Meshed(partitioner.Partitioner):
    """A partitioner that gives every leaf an axis."""


def lazily(scene: Scene, name: str) -> Any:
    state = partitioner.T5XState({'target': {'w': np.zeros((4, 4), np.float32)}, 'state': {'step': np.int32(1)}})
    parts = partitioner.Partitioner(partitioner.mesh(), partitioner.t5x_rules)
    with Checkpointer(state, parts, scene.out) as checkpointer:
        checkpointer.save(state)
        return checkpointer.restore(lazy_parameters=True)


def with_pin(scene: 'Scene') -> Checkpointer:
    """A checkpointer of a run whose step is pinned."""
    checkpointer = Checkpointer(STATE, checkpoints_dir=scene.out)
    checkpointer.save(STATE)
    t5ckpt.pin_checkpoint(scene.out / 'checkpoint_1')
    return checkpointer


class Position:
    """A data iterator that says where it stands."""

    def get_state(self) -> dict[str, int]:
        return {'position': 0}

    def set_state(self, state: dict[str, int]) -> None:
        raise AssertionError(state)


def on_two_devices(scene: Scene) -> None:
    """A state that was saved from two devices, with a template that does not say so."""
    sharding = jax.sharding.NamedSharding(
        jax.make_mesh((2,), ('x',), devices=jax.devices()[:2]), jax.sharding.PartitionSpec('x')
    )
    state = {'w': jax.device_put(KERNEL, sharding)}
    with Checkpointer(
        {'w': jax.ShapeDtypeStruct(KERNEL.shape, KERNEL.dtype)}, checkpoints_dir=scene.out
    ) as checkpointer:
        checkpointer.save(state, step=1)
        checkpointer.restore()


def without_rights(scene: Scene) -> Any:
    """A run that may be listed and not be written."""
    looks = FaultyStorage(open_storage(scene.run))
    next(t5ckpt.checkpoints_iterator(looks))
    denied = errors.AccessDeniedError(errno.EACCES, 'a read-only mount')
    storage = FaultyStorage(open_storage(scene.run), len(looks.operations), error=denied)
    return next(t5ckpt.checkpoints_iterator(storage, hold_seconds=60))


DTYPE = dict.fromkeys(('dtype', 'save_dtype', 'restore_dtype'), 'bfloat16')


def cast(owner: str, name: str, call: Callable[..., Any], dtype: str, has_dtype: str = '') -> list[Case]:
    """A dtype without a leaf that it is meant for, and a pattern without a dtype."""
    return [
        (
            has_dtype or owner,
            dtype,
            errors.UnmatchedPattern,
            'model/, optimizer/',
            lambda s, _: call(s, **{dtype: 'bfloat16'}),
        ),
        (owner, name, ValueError, 'cast_leaves=.x. has no effect without', lambda s, _: call(s, cast_leaves='x')),
        (
            owner,
            name,
            errors.UnmatchedPattern,
            "cast_leaves='modell/",
            lambda s, _: call(s, **{dtype: 'bfloat16'}, cast_leaves='modell/.*'),
        ),
    ]


def exported(scene: Scene, **options: Any) -> Any:
    return t5ckpt.convert_checkpoint('to-safetensors', scene.run, scene.out, ConvertOptions(**options))


def imported(scene: Scene, **options: Any) -> Any:
    return t5ckpt.convert_checkpoint('safetensors', scene.root / 'x.safetensors', scene.out, ConvertOptions(**options))


CHECKPOINTER: list[Case] = [
    (
        'Checkpointer',
        'train_state',
        errors.UnshardedTemplateWarning,
        '^w: the template names no sharding',
        lambda s, _: on_two_devices(s),
    ),
    (
        'Checkpointer',
        'dataset_iterator',
        TypeError,
        'iterator',
        lambda s, _: s.restored({'dataset_iterator': iter([1])}),
    ),
    (
        'Checkpointer',
        'dataset_iterator',
        LOG,
        'has no data-iterator state',
        lambda s, _: s.restored({'dataset_iterator': Position()}),
    ),
    (
        'CheckpointerOptions',
        'map_positions',
        ValueError,
        'no effect without dataset_iterator',
        lambda s, _: s.checkpointer(map_positions=lambda positions: None),
    ),
    (
        'Checkpointer',
        'keep',
        ValueError,
        'keep and keep_policy',
        lambda s, _: s.checkpointer(keep=1, keep_policy=t5ckpt.KeepAll()),
    ),
    (
        'Checkpointer',
        'keep_policy',
        LOG,
        'step 1 is kept regardless of the keep policy: pinned',
        lambda s, _: pinned(s),
    ),
    *cast('CheckpointerOptions', 'cast_leaves', saved, 'save_dtype', 'Checkpointer'),
    *cast(
        'CheckpointerOptions',
        'cast_leaves',
        lambda s, **options: s.reader(**options).restore(),
        'restore_dtype',
        'Checkpointer',
    ),
    (
        'Checkpointer',
        'keep_dataset_checkpoints',
        NoEffectWarning,
        '^keep_dataset_checkpoints has no effect',
        lambda s, _: s.checkpointer(keep_dataset_checkpoints=2),
    ),
    *(
        (
            owner,
            name,
            ValueError,
            'must not contain each other',
            lambda s, _: s.checkpointer(local=LocalTier(s.out / 'local')),
        )
        for owner, name in (('Checkpointer', 'local'), ('LocalTier', 'directory'))
    ),
    (
        'LocalTier',
        'persist',
        t5ckpt.errors.MissingMetricWarning,
        "without the metric 'acc', which persist=",
        lambda s, _: saved(
            s, metrics={'loss': 1.0}, local=LocalTier(s.local, persist=t5ckpt.SaveOnImprovement('acc', 'max'))
        ),
    ),
    (
        'LocalTier',
        'persist',
        ValueError,
        'SaveOnPreemption never uploads without preempted=',
        lambda s, _: s.checkpointer(local=LocalTier(s.local, persist=t5ckpt.SaveOnPreemption())),
    ),
    (
        'Checkpointer',
        'save_policy',
        ValueError,
        'SaveOnPreemption never saves without preempted=',
        lambda s, _: s.checkpointer(save_policy=t5ckpt.SaveOnPreemption()),
    ),
    *(
        (
            'Checkpointer',
            'metric_source',
            NoEffectWarning,
            '^metric_source has no effect',
            lambda s, _, keep=keep: s.checkpointer(metric_source=t5ckpt.TensorBoardMetrics(s.run), keep=keep),
        )
        for keep in (None, 2)
    ),
    (
        'Checkpointer',
        'save_policy',
        NoEffectWarning,
        '^save_policy had no effect',
        lambda s, _: saved(s, save_policy=t5ckpt.SaveEvery(5)),
    ),
    (
        'Checkpointer',
        'preempted',
        NoEffectWarning,
        '^preempted had no effect',
        lambda s, _: saved(s, preempted=lambda: False),
    ),
    (
        'Checkpointer',
        'save_policy preempted',
        NoEffectWarning,
        '^save_policy and preempted had no effect',
        lambda s, _: saved(s, save_policy=t5ckpt.SaveOnPreemption(), preempted=lambda: False),
    ),
    ('CheckpointerOptions', 'compression', ValueError, 'zzz', lambda s, _: s.checkpointer(compression='zzz')),
    (
        'CheckpointerOptions',
        'mmap follow_links',
        NoEffectWarning,
        'not on a local file system',
        lambda s, name: s.restored({name: True}, place=s.memory),
    ),
    ('CheckpointerOptions', 'verify', ValueError, 'ful', lambda s, _: s.checkpointer(verify='ful')),
    (
        'Checkpointer',
        'use_gda',
        errors.NoEffectWarning,
        'use_gda=True has no effect',
        lambda s, _: s.checkpointer(use_gda=True),
    ),
    ('Checkpointer.best_step', 'metric', ValueError, 'metric', lambda s, _: s.reader().best_step()),
    ('Checkpointer.best_step', 'metric', ValueError, 'loss', lambda s, _: s.reader().best_step('acc', 'max')),
    ('Checkpointer.best_step', 'mode', ValueError, 'mode', lambda s, _: s.reader().best_step('loss')),
    (
        'Checkpointer.convert_from_tf_checkpoint',
        'state_transformation_fns',
        errors.UnsupportedLeafError,
        'must return the new state dict',
        lambda s, _: Checkpointer(s.tensorflow, checkpoints_dir=s.out).convert_from_tf_checkpoint(
            s.root / 'tf', state_transformation_fns=[wrong]
        ),
    ),
    (
        'Checkpointer.convert_from_tf_checkpoint',
        'translator',
        errors.T5CkptError,
        'rule',
        lambda s, _: s.checkpointer().convert_from_tf_checkpoint(s.root / 'tf', translator=nothing()),
    ),
    (
        'Checkpointer.restore_from_tf_checkpoint',
        'strict',
        errors.T5CkptError,
        'target/w: not in the checkpoint',
        lambda s, _: s.reader(s.model).restore_from_tf_checkpoint(s.root / 'tf'),
    ),
    (
        'Checkpointer.restore_from_tf_checkpoint',
        'translator',
        errors.T5CkptError,
        'rule',
        lambda s, _: s.reader().restore_from_tf_checkpoint(s.root / 'tf', translator=nothing()),
    ),
    (
        'Checkpointer.maybe_save',
        'step',
        errors.StepMismatchWarning,
        'saved as step 30, but holds step 1',
        lambda s, _: s.checkpointer(save_policy=t5ckpt.SaveEvery(10)).maybe_save(30, STATE).result(),
    ),
    (
        'Checkpointer.maybe_save',
        'metrics',
        errors.MissingMetricWarning,
        "without the metric 'acc'",
        lambda s, _: asked(s, 1, {'accuracy': 1}, save_policy=t5ckpt.SaveOnImprovement('acc')),
    ),
    ('Checkpointer.restore', 'step', MISSING, '7', lambda s, _: s.restored(step=7)),
    (
        'Checkpointer.restore',
        'step path',
        ValueError,
        'exclude each other',
        lambda s, _: s.restored(step=1, path=s.run / 'checkpoint_1'),
    ),
    ('Checkpointer.restore', 'path', MISSING, 'nowhere', lambda s, _: s.restored(path=s.root / 'nowhere')),
    (
        'Checkpointer.restore',
        'state_transformation_fns',
        errors.TreeMismatchError,
        'model/dense/kernel',
        lambda s, _: s.restored(state_transformation_fns=[wrong]),
    ),
    (
        'Checkpointer.restore',
        'fallback_state',
        NoEffectWarning,
        '^fallback_state holds leaves that the template lacks: modell/w',
        lambda s, _: s.restored(fallback_state={'modell': {'w': KERNEL}}),
    ),
    ('Checkpointer.restore', 'lazy_parameters', ValueError, 'lazy_parameters', lazily),
    ('Checkpointer.restore', 'strict', ValueError, 'strict', lambda s, _: s.restored(strict='vey')),
    (
        'Checkpointer.restore',
        'strict',
        LOG,
        'that the template does not have: optimizer/',
        lambda s, _: s.reader({'model': STATE['model']}).restore(strict='contains'),
    ),
    (
        'Checkpointer.restore',
        'resize',
        LOG,
        r'padded with zeros or truncated: model/dense/kernel: \(6, 8\) to \(2, 8\)',
        lambda s, _: s.reader(STATE | {'model': {'dense': {'kernel': KERNEL[:2]}, 'ids': np.arange(3)}}).restore(
            resize='.*/kernel'
        ),
    ),
    ('Checkpointer.restore', 'donate', NoEffectWarning, '^donate has no effect', lambda s, _: s.restored(donate=True)),
    (
        'Checkpointer.restore',
        'resize',
        ValueError,
        "resize='emb' matches no leaf",
        lambda s, _: s.restored(resize='emb'),
    ),
    *(
        (
            'Checkpointer.restore',
            option,
            ValueError,
            "='emb' matches no leaf",
            lambda s, name: s.restored(**{name: 'emb'}),
        )
        for option in ('take', 'leave')
    ),
    (
        'Checkpointer.restore',
        'rename',
        errors.TreeMismatchError,
        'of rename= match no leaf',
        lambda s, _: s.restored(rename=[('emb', 'a')]),
    ),
    ('Checkpointer.restore', 'missing', ValueError, "'error', 'init'", lambda s, _: s.restored(missing='keep')),
    *(
        (f'Checkpointer.{method}', *case)
        for method, save in (
            ('save', lambda c, *args, **more: c.save(*args, **more)),
            ('save_async', lambda c, *args, **more: c.save_async(*args, **more).result()),
        )
        for case in (
            (
                'state_transformation_fns',
                errors.UnsupportedLeafError,
                'must return the new state dict',
                lambda s, _, save=save: save(s.checkpointer(), STATE, [wrong]),
            ),
            (
                'step',
                errors.StepMismatchWarning,
                'saved as step 30, but holds step 1',
                lambda s, _, save=save: save(s.checkpointer(), STATE, step=30),
            ),
            (
                'metrics',
                errors.MissingMetricWarning,
                "no metric 'acc'.*it has: accuracy",
                lambda s, _, save=save: save(
                    s.checkpointer(keep_policy=t5ckpt.KeepBest(1, 'acc')), STATE, metrics={'accuracy': 1}
                ),
            ),
            (
                'overwrite',
                errors.StepKeptError,
                'is pinned, so it was not replaced',
                lambda s, _, save=save: save(with_pin(s), STATE, overwrite=True),
            ),
            (
                'custom_metadata',
                LOG,
                'Skipping save checkpoint for step 1',
                lambda s, _, save=save: save(
                    Checkpointer(STATE, checkpoints_dir=s.run), STATE, custom_metadata={'a': 1}
                ),
            ),
        )
    ),
    (
        'Checkpointer.should_save',
        'step metrics',
        ValueError,
        'save_policy=',
        lambda s, _: s.checkpointer().should_save(1, metrics={'a': 1}),
    ),
]

EXISTS = (errors.CheckpointExistsError, errors.OutputExistsError)
# By function, a call whose output is there already.
OUTPUTS: dict[str, Callable[[Scene, str], Any]] = {
    'convert_checkpoint': lambda s, _: t5ckpt.convert_checkpoint(
        'flax', s.root / 'x.flax', s.run, ConvertOptions(step=1)
    ),
    'convert.seqax.write_seqax': lambda s, _: [seqax.write_seqax(s.out, 1, STATE) for _ in range(2)],
    'copy_checkpoint': lambda s, _: t5ckpt.copy_checkpoint(s.run, s.run),
}

_OF_S3 = [
    ('endpoint', {'endpoint': 1}),
    ('anonymous', {'anonymous': 'yes'}),
    ('region', {'region': 1}),
    ('profile', {'profile': 'p', 'anonymous': True}),
]
FUNCTIONS: list[Case] = [
    ('ConvertOptions', 'leave', errors.UnmatchedPattern, 'modell', lambda s, _: written(s, leave=('modell/.*',))),
    (
        'ConvertOptions',
        'trust_files',
        NoEffectWarning,
        '^trust_files has no effect',
        lambda s, _: written(s, trust_files=True),
    ),
    (
        'ConvertOptions',
        'rename',
        errors.UnmatchedPattern,
        'modell',
        lambda s, _: written(s, rename=(('modell/.*', 'a'),)),
    ),
    (
        'CheckpointTranslator.apply',
        'flatdict',
        errors.T5CkptError,
        'decoder/w',
        lambda s, _: nothing().apply({'decoder/w': KERNEL}),
    ),
    (
        'CheckpointTranslator.translate',
        'flatdict',
        errors.T5CkptError,
        'decoder/w',
        lambda s, _: nothing().translate({'decoder/w': KERNEL}),
    ),
    (
        'CheckpointView.select',
        'pattern',
        (KeyError, ValueError),
        'nowhere',
        lambda s, _: t5ckpt.open_checkpoint(s.run).select('nowhere'),
    ),
    *cast('ConvertOptions', 'cast_leaves', written, 'save_dtype'),
    *(
        (
            'ConvertOptions',
            name,
            ValueError,
            f'^{name}: no effect on {kind}',
            lambda s, name, kind=kind, value=value: t5ckpt.convert_checkpoint(
                kind, s.root / 't5', s.out, ConvertOptions(**{name: value})
            ),
        )
        for name, kind, value in (
            ('compression', 'to-orbax', 'zstd'),
            ('concurrent_gb', 'to-seqax', 1),
            ('max_shard_bytes', 'to-safetensors', 9),
            ('scanned', 'safetensors', True),
            ('split_heads', 'safetensors', True),
            ('translator', 'flax', nothing()),
            ('like', 'to-hf', {}),
            ('take', 'to-hf', 'x'),
            ('rename', 'orbax', (('x', 'y'),)),
        )
    ),
    (
        'ConvertOptions',
        'config',
        errors.T5CkptError,
        'd_model',
        lambda s, _: t5ckpt.convert_checkpoint('to-hf', s.root / 't5', s.out, ConvertOptions(config={'d_model': 7})),
    ),
    ('ConvertOptions', 'config', errors.T5CkptError, 'd_model', lambda s, _: restored_t5(s, config={'d_model': 7})),
    (
        'ConvertOptions',
        'like',
        errors.TreeMismatchError,
        'model/ids',
        lambda s, _: t5ckpt.convert_checkpoint('to-seqax', s.run, s.out, ConvertOptions(like={'weights': KERNEL})),
    ),
    ('ConvertOptions', 'take', errors.UnmatchedPattern, 'nowhere', lambda s, _: exported(s, take='nowhere')),
    (
        'ConvertOptions',
        'follow_links',
        NoEffectWarning,
        '^follow_links has no effect',
        lambda s, _: t5ckpt.copy_checkpoint(s.memory, s.out, ConvertOptions(follow_links=True)),
    ),
    *cast('ConvertOptions', 'cast_leaves', exported, 'save_dtype'),
    *cast('ConvertOptions', 'cast_leaves', imported, 'save_dtype'),
    ('KeepBest', 'count', ValueError, '0', lambda s, _: t5ckpt.KeepBest(0, 'acc')),
    ('KeepBest', 'metric', ValueError, 'metric', lambda s, _: t5ckpt.KeepBest(1, '')),
    ('KeepBest', 'mode', ValueError, 'least', lambda s, _: t5ckpt.KeepBest(1, 'acc', 'least')),
    ('KeepBest', 'mode', errors.MetricModeWarning, "mode='min'", lambda s, _: t5ckpt.KeepBest(1, 'loss')),
    (
        'SaveOnImprovement',
        'mode',
        errors.MetricModeWarning,
        "mode='min'",
        lambda s, _: t5ckpt.SaveOnImprovement('loss'),
    ),
    (
        'SaveBestCheckpointer',
        'metric_mode',
        errors.MetricModeWarning,
        "metric_mode='min'",
        lambda s, _: t5ckpt.SaveBestCheckpointer(STATE, None, s.out, metric_name_to_monitor='loss'),
    ),
    ('KeepBest', 'period', ValueError, '0', lambda s, _: t5ckpt.KeepBest(1, 'acc', period=0)),
    (
        'KeepBest',
        'metric',
        errors.MissingMetricWarning,
        "no metric 'acc'",
        lambda s, _: saved(s, metrics={'accuracy': 1}, keep_policy=t5ckpt.KeepBest(1, 'acc')),
    ),
    ('KeepEvery', 'steps', ValueError, '0', lambda s, _: t5ckpt.KeepEvery(0)),
    ('KeepEveryHours', 'hours', ValueError, '0', lambda s, _: t5ckpt.KeepEveryHours(0)),
    ('KeepLatest', 'count', ValueError, '0', lambda s, _: t5ckpt.KeepLatest(0)),
    ('PreemptionNotice', 'signals', ValueError, 'signals is empty', lambda s, _: t5ckpt.PreemptionNotice(())),
    ('PreemptionNotice', 'signals', NoEffectWarning, '^PreemptionNotice ', notice),
    (
        'CheckpointView.report',
        'output',
        errors.OutputExistsError,
        'exists',
        lambda s, _: t5ckpt.open_checkpoint(s.run).report(s.root / 'x.safetensors'),
    ),
    (
        'CheckpointView.report',
        'sample_bytes',
        ValueError,
        'sample_bytes',
        lambda s, _: t5ckpt.open_checkpoint(s.run).report('x', sample_bytes=0),
    ),
    ('Run.best_step', 'metric', ValueError, 'metric', lambda s, _: t5ckpt.open_run(s.run).best_step()),
    ('Run.best_step', 'mode', ValueError, 'mode', lambda s, _: t5ckpt.open_run(s.run).best_step('loss')),
    (
        'Run.report',
        'output',
        errors.OutputExistsError,
        'exists',
        lambda s, _: t5ckpt.open_run(s.run).report(s.root / 'x.safetensors'),
    ),
    (
        'Run.report',
        'steps',
        ValueError,
        'more than two',
        lambda s, _: t5ckpt.open_run(s.run).report('x', steps=(1, 2, 3)),
    ),
    (
        'Run.report',
        'sample_bytes',
        ValueError,
        'sample_bytes',
        lambda s, _: t5ckpt.open_run(s.run).report('x', sample_bytes=0),
    ),
    ('diff', 'sample_bytes', ValueError, 'sample_bytes', lambda s, _: t5ckpt.diff(s.run, s.run, sample_bytes=0)),
    ('Run.series', 'name fn', KeyError, 'nowhere', lambda s, _: t5ckpt.open_run(s.run).series('nowhere', np.mean)),
    (
        'SaveBestCheckpointer',
        'metric_name_to_monitor',
        errors.MissingMetricWarning,
        "no metric 'acc'",
        lambda s, _: best(s, {'accuracy': 1}, keep=1, metric_name_to_monitor='acc'),
    ),
    (
        'SaveBestCheckpointer',
        'keep_checkpoints_without_metrics force_keep_period',
        NoEffectWarning,
        '^keep_checkpoints_without_metrics and force_keep_period ',
        lambda s, _: t5ckpt.SaveBestCheckpointer(
            STATE, None, s.out, force_keep_period=5, keep_checkpoints_without_metrics=False
        ),
    ),
    *(
        (policy, name, ValueError, f'{name}|period', lambda s, _, call=call: call())
        for policy, name, call in (
            ('LocalTier', 'keep', lambda: LocalTier('a', keep=0)),
            ('LocalTier', 'upload_gbps', lambda: LocalTier('a', upload_gbps=0)),
            ('SaveEvery', 'steps', lambda: t5ckpt.SaveEvery(0)),
            ('SaveEvery', 'min_step', lambda: t5ckpt.SaveEvery(1, min_step=-1)),
            ('SaveEverySeconds', 'seconds', lambda: t5ckpt.SaveEverySeconds(0)),
            ('SaveEverySeconds', 'min_step', lambda: t5ckpt.SaveEverySeconds(1, min_step=-1)),
            ('SaveLast', 'step', lambda: t5ckpt.SaveLast(-1)),
            ('SaveOnImprovement', 'mode', lambda: t5ckpt.SaveOnImprovement('a', 'least')),
            ('SaveOnImprovement', 'least', lambda: t5ckpt.SaveOnImprovement('a', least=-1)),
            ('SaveOnImprovement', 'min_step', lambda: t5ckpt.SaveOnImprovement('a', min_step=-1)),
            ('SaveWhenIdle', 'min_step', lambda: t5ckpt.SaveWhenIdle(min_step=-1)),
            ('WarmStart', 'missing', lambda: WarmStart('a', missing='no')),
            (
                'restore_or_init',
                'fallback',
                lambda: t5ckpt.restore_or_init(t5ckpt.Checkpointer(STATE), dict, fallback='no'),
            ),
            ('training.Watchdog', 'seconds', lambda: Watchdog(0)),
            ('training.Watchdog', 'first_seconds', lambda: Watchdog(1, first_seconds=0)),
        )
    ),
    (
        'SaveOnImprovement',
        'metric',
        errors.MissingMetricWarning,
        "without the metric 'acc'",
        lambda s, _: asked(s, 1, {'accuracy': 1}, save_policy=t5ckpt.SaveOnImprovement('acc')),
    ),
    ('CheckpointDiff.only', 'what', ValueError, "got 'valeus'", lambda s, _: t5ckpt.diff(s.run, s.run).only('valeus')),
    (
        'TensorBoardMetrics',
        'directory',
        errors.MissingMetricWarning,
        "no metric 'acc'",
        lambda s, _: saved(
            s, times=4, keep_policy=t5ckpt.KeepBest(1, 'acc'), metric_source=t5ckpt.TensorBoardMetrics(s.root / 'tb')
        ),
    ),
    (
        'WarmStart',
        'take leave',
        ValueError,
        'matches no leaf',
        lambda s, n: started(s, WarmStart(s.run, **{n: 'modell'})),
    ),
    (
        'WarmStart',
        'take leave',
        ValueError,
        '(take|leave): .* is not a regular expression',
        lambda s, n: WarmStart(s.run, **{n: '('}),
    ),
    (
        'WarmStart',
        'rename',
        ValueError,
        'rename: .* is not a regular expression',
        lambda s, _: WarmStart(s.run, rename=[('(', 'a')]),
    ),
    (
        'WarmStart',
        'rename',
        errors.TreeMismatchError,
        r"\['modell'\] of rename= match no leaf",
        lambda s, _: started(s, WarmStart(s.run, rename=[('modell', 'a')])),
    ),
    (
        'WarmStart',
        'resize',
        ValueError,
        "resize='modell' matches no leaf",
        lambda s, _: started(s, WarmStart(s.run, resize='modell')),
    ),
    (
        'WarmStart',
        'restore_iterator',
        LOG,
        'the data continues at the position in .*run',
        lambda s, _: t5ckpt.restore_or_init(
            s.checkpointer(dataset_iterator=Position()),
            lambda: STATE,
            initial_checkpoint=WarmStart(s.run, take='model/.*', restore_iterator=True),
        ),
    ),
    (
        'WarmStart',
        'restore_iterator',
        ValueError,
        'restore_iterator=True: .* no dataset_iterator',
        lambda s, _: started(s, WarmStart(s.run, restore_iterator=True)),
    ),
    ('WarmStart', 'strict', ValueError, 'strict', lambda s, _: started(s, WarmStart(s.run, strict='vey'))),
    ('apply_assignment_map', 'ckpt_optimizer_state optimizer_state', errors.MissingLeaves, 'params/c', mapped),
    ('apply_assignment_map', 'assignment_map require_all_rules_match', errors.TreeMismatchError, 'parms', mapped),
    (
        'checkpoints_iterator',
        'timeout poll_seconds',
        ValueError,
        '-1',
        lambda s, name: t5ckpt.checkpoints_iterator(s.run, **{name: -1}),
    ),
    (
        'checkpoints_iterator',
        'hold_seconds',
        ValueError,
        '0',
        lambda s, _: t5ckpt.checkpoints_iterator(s.run, hold_seconds=0),
    ),
    (
        'checkpoints_iterator',
        'hold_seconds',
        errors.AccessDeniedError,
        'a read-only mount.*hold_seconds',
        lambda s, _: without_rights(s),
    ),
    *(
        (
            owner,
            'target' if owner in ('convert_checkpoint', 'copy_checkpoint') else 'directory',
            EXISTS,
            'already|exist',
            call,
        )
        for owner, call in OUTPUTS.items()
    ),
    (
        'unpin_checkpoint',
        'ckpt_dir',
        LOG,
        'checkpoint_1 is not pinned',
        lambda s, _: t5ckpt.unpin_checkpoint(s.run / 'checkpoint_1'),
    ),
    ('convert_checkpoint', 'kind', ValueError, 'flux', lambda s, _: t5ckpt.convert_checkpoint('flux', s.run, s.out)),
    (
        'intersect_state',
        'intersect_state_dict',
        LOG,
        'not in the template, so left out: a',
        lambda s, _: t5ckpt.intersect_state({'a': KERNEL}, {'b': KERNEL}),
    ),
    *cast(
        'CheckpointerOptions',
        'cast_leaves',
        lambda s, **options: t5ckpt.load_t5x_checkpoint(s.run, **with_options(**options)),
        'restore_dtype',
        'load_t5x_checkpoint',
    ),
    *(
        (
            'CheckpointerOptions',
            'follow_links',
            NoEffectWarning,
            '^follow_links has no effect',
            lambda s, _, f=function: f(s.memory, options=CheckpointerOptions(follow_links=True)),
        )
        for function in (t5ckpt.load_t5x_checkpoint, t5ckpt.open_checkpoint)
    ),
    (
        'load_t5x_checkpoint',
        'state_transformation_fns remap',
        NoEffectWarning,
        '^state_transformation_fns has no effect with remap=False',
        lambda s, _: t5ckpt.load_t5x_checkpoint(s.run, None, [wrong], remap=False),
    ),
    (
        'verify',
        'full',
        SHOWN,
        'every byte read, no checksums recorded',
        lambda s, _: str(t5ckpt.verify(unsummed(s), full=True)),
    ),
    (
        'verify',
        'follow_links',
        NoEffectWarning,
        '^follow_links has no effect',
        lambda s, _: t5ckpt.verify(s.memory, follow_links=True),
    ),
    (
        'restore_or_init',
        'initial_checkpoint',
        ValueError,
        'provides no leaf of the template',
        lambda s, _: started(s, WarmStart(s.root / 't5', missing='init', strict='contains')),
    ),
    ('restore_or_init', 'donate', NoEffectWarning, '^donate has no effect', with_donate),
    ('datasets.as_dataset_iterator', 'iterator', TypeError, 'iterator', lambda s, _: as_dataset_iterator(iter([1]))),
    (
        'storage.options.FileOptions',
        'direct_bytes',
        ValueError,
        'direct_bytes',
        lambda s, _: open_storage(s.out, {'direct_bytes': 0}),
    ),
    *(
        (
            f'storage.options.{owner}',
            name,
            ValueError,
            name,
            lambda s, _, url=url, o=options: open_storage(url, o),
        )
        for owner, url, own in (
            (
                'AzureOptions',
                'az://bucket/run',
                [('account', {'account': 1}), ('endpoint', {'endpoint': 1}), ('anonymous', {'anonymous': 'yes'})],
            ),
            ('BucketOptions', 'gs://bucket/run', []),
            ('S3Options', 's3://bucket/run', _OF_S3),
        )
        for name, options in (
            ('retry_seconds', {'retry_seconds': 0}),
            *own,
        )
    ),
    (
        'training.MetricWriter',
        'directory',
        errors.UnsupportedFormatError,
        'needs a local',
        lambda s, _: MetricWriter('gs://b/run'),
    ),
    ('training.ProfilerWindow', 'start count', LOG, 'none of the steps 10 to 12', lambda s, _: traced(s)),
    ('training.ProfilerWindow', 'count', ValueError, 'count', lambda s, _: ProfilerWindow(s.out, start=1, count=0)),
    ('training.write_hlo', 'name', ValueError, 'name', lambda s, _: write_hlo(s.out, '', compiled())),
    ('training.write_hlo', 'compiled', ValueError, 'compiled', lambda s, _: write_hlo(s.out, 'step', compiled)),
    (
        'training.write_hlo',
        'seconds',
        LOG,
        'step.svg is not written',
        lambda s, _: write_hlo(s.out, 'step', compiled(), seconds=0),
    ),
]


def best(scene: Scene, metrics: Any, **options: Any) -> None:
    with t5ckpt.SaveBestCheckpointer(STATE, None, scene.out, **with_options(**options)) as checkpointer:
        for step in range(4):
            # Event files may be written after the save, so the step before is judged.
            checkpointer.save(STATE | {'step': np.int32(step)}, metrics=metrics)


# The names that COMMON answers for wherever they are taken: test_intent_table.py passes them to every function.
SOURCES = ('path', 'ckpt_dir', 'source', 'sources', 'a', 'b', 'directory')


def arguments(scene: Scene, owner: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Arguments with which a function of a module does something: all that it needs."""
    source = scene.root / 'x.flax' if owner == 'convert_checkpoint' else scene.run
    values = dict.fromkeys((*SOURCES, 'checkpoint_path'), source) | {
        'checkpoints_dir': scene.out,
        'kind': 'flax',
        'output': scene.out,
        'target': scene.out,
        'train_state': STATE,
    }
    wanted = inspect.signature(function).parameters
    given = {name for name, each in wanted.items() if each.default is each.empty} | {'output'} & wanted.keys()
    return {
        name: scene.out if name in ('file', 'directory') and source == scene.run else values[name] for name in given
    }


# They leave nothing behind where they refuse something.
WRITERS = {'ConvertOptions', 'convert_checkpoint'}

# Provoked by a test of its own, since the library that is needed takes seconds to load: kind, file, test.
ELSEWHERE = {
    ('training.MetricWriter.write', 'metrics'): (
        'error',
        'training/test_training.py',
        'test_values_that_are_not_numbers_are_named',
    ),
}

PYTHON = [*COMMON, *CHECKPOINTER, *FUNCTIONS]

# What a row without a word says, shown: the call returns whether it is so, and warns of nothing.
HINTS: list[tuple[str, str, Callable[[Scene], Any]]] = [
    ('Checkpointer.restore', 'restore_iterator', lambda s: same(s.restored(restore_iterator=False), STATE)),
    ('CheckpointerOptions', 'restore_concurrent_gb', lambda s: same(s.restored({'restore_concurrent_gb': 100}), STATE)),
    ('CheckpointerOptions', 'chunk_bytes', lambda s: saved(s, chunk_bytes=2**40) is None),
    ('CheckpointerOptions', 'inline_bytes', lambda s: saved(s, inline_bytes=2**40) is None),
    ('Checkpointer', 'checkpoints_dir', lambda s: s.checkpointer().all_steps() == []),
    ('CheckpointDiff.top', 'count', lambda s: len(t5ckpt.diff(s.run, s.root / 't5').top(10**6)) >= 0),
    ('CheckpointView.stats', 'bins', lambda s: not t5ckpt.open_checkpoint(noted(s)).select('note').stats(bins=9)),
    ('LazyArray.astype', 'dtype', lambda s: lazy(s).astype(np.float32).dtype == lazy(s).dtype),
    ('PendingSave.add_done_callback', 'callback', lambda s: called_back(s) == ['called']),
    ('PendingSave.result', 'timeout', lambda s: s.checkpointer().save_async(STATE).result(timeout=60).step == 1),
    ('get_checkpoint_dir', 'step', lambda s: t5ckpt.get_checkpoint_dir('r', 7) == 'r/checkpoint_7'),
    ('Run.series', 'since', lambda s: dict(t5ckpt.open_run(s.run).series('step', np.mean, since=9)) == {}),
    (
        'TensorBoardMetrics.by_step',
        'metric steps',
        lambda s: t5ckpt.TensorBoardMetrics(s.run).by_step('acc', [1]) == {},
    ),
    ('all_steps', 'checkpoints_dir', lambda s: t5ckpt.all_steps(s.out) == []),
    ('apply_assignment_map', 'is_resuming', lambda s: resumed() == {'params': {'a': 1}}),
    (
        'checkpoints_iterator',
        'after directory',
        lambda s: not [*t5ckpt.checkpoints_iterator(s.run, after=9, timeout=0)],
    ),
    ('checkpoints_iterator', 'directory', lambda s: not [*t5ckpt.checkpoints_iterator(s.out, timeout=0)]),
    ('convert.seqax.seqax_steps', 'directory', lambda s: seqax.seqax_steps(s.out) == []),
    ('diff', 'values', lambda s: not t5ckpt.diff(s.run, s.run, values=False)),
    (
        'get_checkpoint_dir',
        'step_format_fixed_length',
        lambda s: t5ckpt.get_checkpoint_dir('r', 123, 3) == 'r/checkpoint_123',
    ),
    ('is_pinned_checkpoint', 'ckpt_dir', lambda s: t5ckpt.is_pinned_checkpoint(s.out) is False),
    (
        'CheckpointerOptions',
        'mmap',
        lambda s: same(t5ckpt.load_t5x_checkpoint(s.memory, options=CheckpointerOptions(mmap=True)), STATE),
    ),
    (
        'load_t5x_checkpoint',
        'lazy_parameters',
        lambda s: t5ckpt.load_t5x_checkpoint(noted(s), lazy_parameters=True)['note'] == 'text',
    ),
    (
        'CheckpointerOptions',
        'mmap',
        lambda s: t5ckpt.open_checkpoint(s.memory, options=CheckpointerOptions(mmap=True))['step'][()] == 1,
    ),
    ('training.peak_flops', 'device', lambda s: peak_flops(jax.devices()[0]) is None),
    ('training.MetricWriter', 'resume_at', lambda s: MetricWriter(s.out, resume_at=5).close() is None),
]


def same(found: Any, wanted: Any) -> bool:
    return bool(jax.tree.all(jax.tree.map(np.array_equal, found, wanted)))


def lazy(scene: Scene) -> Any:
    return t5ckpt.open_checkpoint(scene.run)['model/dense/kernel']


def called_back(scene: Scene) -> list[str]:
    told: list[str] = []
    with scene.checkpointer() as checkpointer:
        pending = checkpointer.save_async(STATE)
        pending.result()
        pending.add_done_callback(lambda _: told.append('called'))
        return told


def resumed() -> Any:
    held = {'params': {'a': 1}}
    return t5ckpt.apply_assignment_map(held, {'params': {'b': 1}}, [('params/b', 'params/a')], is_resuming=True)


# What is typed, the exit code and what is said. {run}, {out}, {memory}, {root} and {hf} are of the scene.
COMMANDS: list[tuple[str, str, int, str, str]] = [
    ('OPTIONS', 'path', 3, 'nowhere', 'show {root}/nowhere'),
    ('OPTIONS', 'source', 3, 'nowhere', 'cp {root}/nowhere {out}'),
    ('OPTIONS', 'out', 1, 'exists', 'convert to-safetensors {run} {root}/x.safetensors'),
    ('OPTIONS', 'directory', 3, 'nowhere', 'convert flax {root}/nowhere {out}'),
    ('OPTIONS', 'target', 1, 'already', 'cp {run} {run} --cast-leaves .* --save-dtype bfloat16'),
    ('OPTIONS', 'a', 3, 'nowhere', 'diff {root}/nowhere {run}'),
    ('OPTIONS', 'b', 3, 'nowhere', 'diff {run} {root}/nowhere'),
    ('OPTIONS', '--step', 3, '7', 'show {run} --step 7'),
    ('OPTIONS', '--step', 2, '--as-step', 'convert safetensors {root}/x.safetensors {out} --step 1'),
    ('OPTIONS', '--as-step', 2, '--step', 'convert to-orbax {run} {out} --as-step 1'),
    ('OPTIONS', 'paths', 3, 'nowhere', 'pin {root}/nowhere'),
    ('OPTIONS', '--storage-option', 2, 'no option endpoint', 'ls {run} --storage-option endpoint=x'),
    ('OPTIONS', '--json', 2, '--npy and --json', 'cat {run} model/ids --json --npy'),
    ('OPTIONS', '--save-dtype', 1, 'model/, optimizer/', 'cp {run} {out} --save-dtype bfloat16'),
    *(
        ('OPTIONS', '--save-dtype', 1, 'model/, optimizer/', f'{words} {{out}} --save-dtype bfloat16')
        for words in (
            'convert to-safetensors {run}',
            'convert flax {root}/x.flax --as-step 1',
            'convert to-orbax {run}',
            'convert safetensors {root}/x.safetensors',
        )
    ),
    *(
        ('OPTIONS', '--cast-leaves', 2, 'has no effect without', f'{words} {{out}} --cast-leaves model/.*')
        for words in (
            'convert to-safetensors {run}',
            'convert flax {root}/x.flax',
            'convert safetensors {root}/x.safetensors',
        )
    ),
    (
        'OPTIONS',
        '--cast-leaves',
        1,
        "cast_leaves='modell",
        'cp {run} {out} --save-dtype bfloat16 --cast-leaves modell/.*',
    ),
    ('OPTIONS', '--cast-leaves', 2, 'has no effect without', 'cp {run} {out} --cast-leaves model/.*'),
    ('OPTIONS', '--leave', 1, 'matches no leaf', 'cp {run} {out} --leave OPTIMIZER'),
    ('OPTIONS', '--compression', 2, 'no effect', 'convert to-orbax {run} {out} --compression zstd'),
    ('OPTIONS', '--concurrent-gb', 2, 'must be', 'convert to-orbax {run} {out} --concurrent-gb 0'),
    ('best', 'metric', 2, 'acc', 'best {run} acc --mode max'),
    ('best', '--mode', 2, '--mode', 'best {run} loss'),
    ('cat', 'leaf', 1, 'nowhere', 'cat {run} nowhere'),
    ('cat', '--npy', 2, '--npy and --json', 'cat {run} model/ids --json --npy'),
    ('cat', '--npy', 2, 'not an array', 'cat {noted} note --npy'),
    ('convert', 'kind', 2, 'flux', 'convert flux {run} {out}'),
    ('convert', '--rules', 2, '--rules', 'convert flax {root}/x.flax {out} --rules rules.py'),
    ('cp', '--follow-links', 0, 'warning: follow_links has no effect', 'cp {memory} {out} --follow-links'),
    ('cp', '--rename', 1, 'modell', 'cp {run} {out} --rename modell model'),
    ('cp', '--trust-files', 0, 'warning: trust_files has no effect', 'cp {run} {out} --trust-files'),
    *(
        (verb, '--follow-links', 0, 'warning: follow_links has no effect', f'{verb} {{memory}} {more}--follow-links')
        for verb, more in (('cat', 'model/ids '), ('diff', '{memory} '), ('show', ''), ('stats', ''))
    ),
    ('diff', 'pattern', 1, 'nowhere', 'diff {run} {run} nowhere'),
    ('diff', '--top', 2, '--no-values', 'diff {run} {run} --top 1 --no-values'),
    ('diff', '--by-layer', 2, '--no-values', 'diff {run} {run} --by-layer --no-values'),
    ('convert', '--config', 3, 'd_model', 'convert to-hf {root}/t5 {out} --config {{"d_model":7}}'),
    ('OPTIONS', '--take', 1, 'nowhere', 'convert to-safetensors {run} {out} --take nowhere'),
    ('convert', '--max-shard-size', 2, 'no effect', 'convert flax {root}/x.flax {out} --max-shard-size 1GB'),
    ('convert', '--scanned', 2, 'no effect', 'convert flax {root}/x.flax {out} --scanned'),
    ('convert', '--split-heads', 2, 'no effect', 'convert flax {root}/x.flax {out} --split-heads'),
    ('convert', '--config', 3, 'd_model', 'convert hf {hf} {out} --config {{"d_model":7}}'),
    ('prune', '--best', 2, 'acc', 'prune {run} --best acc --mode max --dry-run'),
    ('prune', '--keep-best', 2, '--keep-best', 'prune {run} --keep 1 --keep-best 2 --dry-run'),
    ('prune', '--mode', 2, '--mode', 'prune {run} --keep 1 --mode min --dry-run'),
    ('prune', '--keep-step', 2, 'the run has no step 9', 'prune {run} --keep-step 9 --dry-run'),
    ('report', '--output', 1, 'exists', 'report {run} --output {root}/x.safetensors'),
    ('report', '--sample', 2, 'is not a size', 'report {run} -o {root}/x.html --sample many'),
    ('rm', 'others', 3, '9', 'rm {run} 9 --yes'),
    ('show', '--depth', 2, '--depth', 'show {run} --depth 1 --sort size'),
    ('show', '--depth', 2, '--depth', 'show {run} --depth 1 --json'),
    ('show', '--grep', 1, 'kernl', 'show {run} --grep kernl'),
    ('stats', 'leaves', 1, 'nowhere', 'stats {run} nowhere'),
    ('prune', '--keep', 0, '1 keep one of the latest 9', 'prune {run} --keep 9 --dry-run'),
    ('prune', '--every', 0, '1 keep a multiple of 1', 'prune {run} --every 1 --dry-run'),
    ('prune', '--every-hours', 0, '1 keep the first', 'prune {run} --every-hours 1 --dry-run'),
    ('verify', '--full', 0, 'no checksums recorded', 'verify {unsummed} --full'),
    ('verify', '--follow-links', 0, 'warning: follow_links has no effect', 'verify {memory} --follow-links'),
]

# By verb, words with which it does something; test_intent_table.py spoils each of them in turn.
WORDS = {
    'best': 'best {run} loss --mode min',
    'cat': 'cat {run} step',
    'convert': 'convert flax {root}/x.flax {out} --as-step 1',
    'cp': 'cp {run} {out}',
    'diff': 'diff {run} {run}',
    'ls': 'ls {run}',
    'pin': 'pin {run}',
    'prune': 'prune {run} --keep 1 --yes',
    'report': 'report {run} -o {out}',
    'rm': 'rm {run}@1 --dry-run',
    'show': 'show {run}',
    'stats': 'stats {run}',
    'unpin': 'unpin {run}',
    'verify': 'verify {run}',
}
