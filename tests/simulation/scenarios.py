"""The scenarios: the programs that use one run at the same time, and their faults."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from simulation.disk import Disk
from simulation.jobs import job, jobs, preempted, stopped_job
from simulation.programs import (
    after,
    finisher,
    in_turn,
    lister,
    pinner,
    reader,
    remover,
    saver,
    viewer,
)
from simulation.tasks import Task
from simulation.tiers import tier_finisher, tiers, tiers_apart, tiers_before
from simulation.verbs import copier, holder, pruner, put_aside, restarter, stripper
from simulation.world import World
from t5ckpt.format.names import step_dir
from t5ckpt.storage import Storage

_BUCKET_FAULTS = ('crash', 'crash', 'pause', 'delay', 'error', 'lost', 'late')
_STOPS = ('pause', 'delay')
_DISK_FAULTS = ('crash', 'pause', 'delay', 'error', 'lost', 'power')


def _nothing(world: World) -> Sequence[Task]:
    del world
    return ()


def _no_check(world: World) -> str | None:
    del world
    return None


@dataclasses.dataclass(frozen=True)
class Scenario:
    """Some processes on one run.

    Attributes:
      start: starts the processes whose schedule is explored.
      prepare: starts the processes that run before, without faults; each schedule begins with the storage as they leave it.
      finish: the program that runs last, without faults, two hours later: a save of a new step. After it, there are no leftovers.
      check: checks further invariants at the end of a schedule without faults; returns a violation.
      checked_after: faults after which ``check`` must hold as well, unless a program got an error.
      kind: that of ``World``.
      faults: the actions of ``Decision`` that may happen, except for 'run'.
    """

    start: Callable[[World], Sequence[Task]]
    prepare: Callable[[World], Sequence[Task]] = _nothing
    finish: Callable[[World], Callable[[], object]] = finisher
    check: Callable[[World], str | None] = _no_check
    checked_after: Sequence[str] = ()
    kind: str | Callable[[], Storage] = 'bucket'
    faults: Sequence[str] = ()


def _one_step(world: World) -> Sequence[Task]:
    return [world.start('before', saver(world, 5, [1]))]


def _two_steps(world: World) -> Sequence[Task]:
    return [world.start('before', saver(world, 5, [1, 2]))]


def _is_one(step: int) -> bool:
    return step == 1


def _two_savers(world: World) -> Sequence[Task]:
    """Two processes save one step; the clocks of their machines differ."""
    return [
        world.start('one', saver(world, 1, [7]), machine='a', ahead=250.0),
        world.start('two', saver(world, 2, [7]), machine='b', ahead=-250.0),
    ]


def _local_locks(world: World) -> Sequence[Task]:
    """Savers on machines that do not see each other's locks."""
    assert isinstance(world.server, Disk)
    world.server.has_local_locks = True
    return [*_two_savers(world), world.start('three', saver(world, 3, [8, 9]), machine='c')]


def _take_over(world: World) -> Sequence[Task]:
    """The second saver of a step begins when the horizon of the first is over, if that one was stopped."""
    return [
        world.start('one', saver(world, 1, [7]), machine='a'),
        world.start('two', after(650.0, saver(world, 2, [7])), machine='b'),
        world.start('three', after(4400.0, saver(world, 3, [8])), machine='c'),
    ]


def _late(world: World) -> Sequence[Task]:
    """A saver was stopped before its manifest, and goes on while another collects its files and saves the step."""
    return [
        world.start('one', saver(world, 1, [7], how='late'), machine='a'),
        world.start('two', after(8000.0, saver(world, 2, [7])), machine='b'),
    ]


def _is_saved(world: World) -> str | None:
    return None if 7 in world.observer.saved else 'neither of two savers has saved the step'


def _prune(world: World) -> Sequence[Task]:
    """A trainer with retention, and an evaluator that a reader holds of the step that goes."""
    return [
        world.start(
            'trainer', saver(world, 1, [3], keep=1), machine='a', ahead=250.0, may_delete=lambda step: step < 3
        ),
        world.start('reader', reader(world, 2), machine='b', ahead=-250.0),
    ]


def _remove(world: World) -> Sequence[Task]:
    """One program deletes a step, another pins it, a third reads it."""
    return [
        world.start('rm', remover(world, 1), machine='a', may_delete=_is_one),
        world.start('pin', pinner(world, 1), machine='b'),
        world.start('reader', reader(world, 1), machine='c'),
    ]


def _remove_twice(world: World) -> Sequence[Task]:
    """Two people delete a step, and a trainer saves it again."""
    return [
        world.start('rm', remover(world, 1), machine='a', may_delete=_is_one),
        world.start('rm2', remover(world, 1), machine='b', may_delete=_is_one),
        world.start('trainer', saver(world, 1, [1]), machine='c'),
    ]


def _overwrite(world: World) -> Sequence[Task]:
    """Two trainers overwrite a step while an evaluator reads it."""
    return [
        world.start('one', saver(world, 1, [1], how='overwrite'), machine='a', may_delete=_is_one, replaces=True),
        world.start('two', saver(world, 2, [1], how='overwrite'), machine='b', may_delete=_is_one, replaces=True),
        world.start('reader', reader(world, 1), machine='c'),
    ]


def _list(world: World) -> Sequence[Task]:
    """A trainer saves two steps in the background, one of them as another trainer, and a third program lists them."""
    return [
        world.start('one', saver(world, 1, [3, 4], how='async'), machine='a'),
        world.start('two', saver(world, 2, [4]), machine='a'),
        world.start('list', lister(world), machine='b'),
    ]


def _keep(world: World) -> Sequence[Task]:
    """A trainer that keeps two steps, while another saves a later one."""
    world.observer.least = 2
    return [
        world.start('trainer', saver(world, 1, [3], keep=2), machine='a', may_delete=lambda step: step < 3),
        world.start('other', saver(world, 2, [4]), machine='b'),
    ]


def _link(world: World) -> Sequence[Task]:
    """A trainer links unchanged chunks from a step that another program deletes; both follow a restart on the same machine."""
    return [
        world.start('trainer', saver(world, 1, [3, 4], reuse_unchanged=True)),
        world.start('rm', in_turn(remover(world, 1), remover(world, 3)), may_delete=lambda step: step in (1, 3)),
    ]


def _source(world: World) -> Sequence[Task]:
    """A run with a step, and another one to copy from."""
    return [world.start('before', in_turn(saver(world, 5, [1]), saver(world, 4, [7], run='source')))]


def _copy(world: World) -> Sequence[Task]:
    """A step is copied twice at once, and a third time after an hour; a trainer saves meanwhile."""
    return [
        world.start('cp', copier(world, 7, 4), machine='a'),
        world.start('cp2', copier(world, 7, 4), machine='b'),
        world.start('trainer', saver(world, 1, [6, 8]), machine='c'),
        world.start('cp3', after(4400.0, copier(world, 7, 4)), machine='d'),
    ]


def _copy_or_save(world: World) -> Sequence[Task]:
    """A step is copied while a trainer saves the same one."""
    return [
        world.start('cp', copier(world, 7, 4), machine='a'),
        world.start('trainer', saver(world, 1, [7]), machine='c'),
    ]


def _damaged(world: World) -> Sequence[Task]:
    """Of the latest step a file is lost."""

    begin = in_turn(saver(world, 5, [1, 2]), lambda: world.lose(2, '0'))
    return [world.start('before', begin)]


def _damaged_start(world: World) -> Sequence[Task]:
    """The latest step is damaged; a trainer starts, which may rename it."""
    return [
        world.start('trainer', saver(world, 1, [3]), machine='a'),
        world.start('start', restarter(world), machine='b', may_delete=lambda number: number in world.observer.damaged),
        world.start('rm', remover(world, 2), machine='c', may_delete=lambda number: number == 2),
    ]


def _verbs(world: World) -> Sequence[Task]:
    """One program prunes a run, another deletes a step, and a trainer starts with ``restore_or_init`` and one saves."""
    return [
        world.start('prune', pruner(world, 1), machine='a', may_delete=lambda step: step < 3),
        world.start('rm', remover(world, 1), machine='b', may_delete=_is_one),
        world.start('start', restarter(world), machine='c'),
        world.start('trainer', saver(world, 1, [3], keep=2), machine='d', may_delete=lambda step: step < 3),
    ]


def _far_clocks(world: World) -> Sequence[Task]:
    """A step is deleted, read and saved again by machines whose clocks differ: by hours on disks, by 500 s in buckets."""
    ahead = 7200.0 if world.kind == 'disk' else 250.0
    return [
        world.start('rm', remover(world, 1), machine='a', ahead=ahead, may_delete=_is_one),
        world.start('reader', reader(world, 1), machine='b', ahead=-ahead),
        world.start('trainer', saver(world, 1, [1], how='overwrite'), machine='c', may_delete=_is_one),
    ]


def _stopped_remover(world: World) -> Sequence[Task]:
    """A step is deleted, and saved again when the horizon of the deleter is over, if that one was stopped."""

    def is_first(step: int) -> bool:
        return world.observer.visible.get(step) == 5

    return [
        world.start('rm', remover(world, 1), machine='a', may_delete=is_first),
        world.start('trainer', after(650.0, saver(world, 2, [1])), machine='b'),
    ]


def _overwrite_upload(world: World) -> Sequence[Task]:
    """A step that was uploaded, whose files have fixed names, is overwritten while an evaluator reads it."""
    return [
        world.start('one', saver(world, 1, [1], how='overwrite'), machine='c', may_delete=_is_one),
        world.start('reader', reader(world, 1), machine='b'),
    ]


def _again(world: World) -> Sequence[Task]:
    """A program deletes a step and saves it again, while another pins it."""
    again = in_turn(remover(world, 1), saver(world, 1, [1]))
    return [
        world.start('again', again, machine='a', may_delete=_is_one),
        world.start('pin', pinner(world, 1), machine='b'),
    ]


def _aside(world: World) -> Sequence[Task]:
    """A step is put aside as damaged while a program reads it, and another trainer saves it."""
    return [
        world.start('aside', put_aside(world, 1), machine='a', may_delete=_is_one),
        world.start('reader', holder(world, 1), machine='b'),
        world.start('trainer', saver(world, 1, [1]), machine='c'),
    ]


def _with_positions(world: World) -> Sequence[Task]:
    """Two steps with the position of a data iterator."""

    def write() -> None:
        for step in (1, 2):
            world.storage().write(f'{step_dir(step)}/train_ds-000-of-001', b'x')

    return [world.start('before', in_turn(saver(world, 5, [1, 2]), write))]


def _strip(world: World) -> Sequence[Task]:
    """Positions of data iterators are removed from a step that a program reads and another deletes."""
    return [
        world.start('strip', stripper(world), machine='a'),
        world.start('reader', holder(world, 1), machine='b'),
        world.start('rm', remover(world, 1), machine='c', may_delete=_is_one),
    ]


def _view(world: World) -> Sequence[Task]:
    """A program reads a step without a hold while it is deleted and saved again, and overwritten by another trainer."""
    again = in_turn(remover(world, 1), saver(world, 1, [1]))
    return [
        world.start('again', again, machine='a', may_delete=_is_one),
        world.start('two', saver(world, 2, [1], how='overwrite'), machine='b', may_delete=_is_one),
        world.start('view', viewer(world, 1), machine='c'),
    ]


def _is_copied(world: World) -> str | None:
    return None if 7 in world.observer.visible else 'the step was not copied'


def _of(name: str, scenario: Scenario) -> dict[str, Scenario]:
    """A scenario on both storages, without and with faults."""
    on_disk = dataclasses.replace(scenario, kind='disk')
    return {
        name: scenario,
        f'{name}-faults': dataclasses.replace(scenario, faults=_BUCKET_FAULTS),
        f'disk-{name}': on_disk,
        f'disk-{name}-faults': dataclasses.replace(on_disk, faults=_DISK_FAULTS),
    }


def _of_tiers(name: str, scenario: Scenario) -> dict[str, Scenario]:
    faults = ('crash', 'crash', 'pause', 'delay', 'error', 'lost', 'late', 'power')
    return {name: scenario, f'{name}-faults': dataclasses.replace(scenario, faults=faults)}


SCENARIOS = {
    **_of('first-save', Scenario(_two_savers, check=_is_saved, checked_after=_STOPS)),
    **_of('save', Scenario(_two_savers, _one_step, check=_is_saved, checked_after=_STOPS)),
    'late': Scenario(_late, _one_step),
    'late-faults': Scenario(_late, _one_step, faults=_STOPS),
    **_of('take-over', Scenario(_take_over, _one_step, check=_is_saved)),
    **_of('prune', Scenario(_prune, _two_steps)),
    **_of('remove', Scenario(_remove, _one_step)),
    **_of('remove-twice', Scenario(_remove_twice, _one_step)),
    **_of('overwrite', Scenario(_overwrite, _one_step)),
    **_of('list', Scenario(_list, _two_steps)),
    **_of('keep', Scenario(_keep, _two_steps)),
    **_of('link', Scenario(_link, _one_step)),
    **_of('job', Scenario(job, _one_step)),
    **_of('jobs', Scenario(jobs, _one_step)),
    # A process that is killed after such a stop leaves its files.
    'stopped-job-faults': Scenario(stopped_job, _one_step, faults=_STOPS),
    **_of('copy', Scenario(_copy, _source, check=_is_copied)),
    **_of('copy-or-save', Scenario(_copy_or_save, _source, check=_is_copied)),
    **_of('damaged-start', Scenario(_damaged_start, _damaged)),
    **_of('verbs', Scenario(_verbs, _two_steps)),
    **_of('preempted', Scenario(preempted, _two_steps)),
    **_of('far-clocks', Scenario(_far_clocks, _one_step)),
    **_of('stopped-remover', Scenario(_stopped_remover, _one_step)),
    **_of_tiers('overwrite-upload', Scenario(_overwrite_upload, tiers_before, kind='tiers')),
    **_of('again', Scenario(_again, _one_step)),
    'disk-local-locks': Scenario(_local_locks, _one_step, check=_is_saved, kind='disk'),
    'disk-local-locks-faults': Scenario(_local_locks, _one_step, kind='disk', faults=_DISK_FAULTS),
    'disk-aside': Scenario(_aside, _one_step, kind='disk'),
    'disk-aside-faults': Scenario(_aside, _one_step, kind='disk', faults=_DISK_FAULTS),
    **_of('strip', Scenario(_strip, _with_positions)),
    **_of('view', Scenario(_view, _one_step)),
    **_of_tiers('tiers', Scenario(tiers, tiers_before, tier_finisher, kind='tiers')),
    **_of_tiers('tiers-apart', Scenario(tiers_apart, tiers_before, tier_finisher, kind='tiers')),
}
