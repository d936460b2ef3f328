"""The life of one step in a bucket, as a model: every interleaving of its writers, deleters, readers and collectors.

    PYTHONPATH=tests python -m simulation.step_model                 # all scenarios; the shortest trace of a broken invariant
    PYTHONPATH=tests python -m simulation.step_model --break RULE    # without a rule: shows what it is for

One request to the store is one transition. An actor may die before any request, and a request may arrive once more later. Time
passes in units. The owner of a marker acts while the marker is at most ``ACTS`` units old, and its requests arrive at most
``LATE`` units later. Others collect after ``COLLECTED``. The rules:

- ``monotone``: a save is published at most once and unpublished at most once. Nothing is put back.
- ``announce``: a marker that names the save precedes its first file, and the deletion or replacement of its manifest. A deleter
  looks for holds after its marker; a reader looks for markers after its hold.
- ``horizon``: the owner of a marker acts only within its horizon, by its own clock.
- ``condition``: a manifest is created only if none is there, and deleted or replaced only in the version that was read.
- ``leave``: only the garbage collector removes the marker of work that deleted files. The requests of that work may arrive late.
- ``age``: the processes of a job count the horizon from the marker of process 0, not from the moment when they learn of it.
- ``gone``: the garbage collector deletes a manifest whose files were removed. The request that created it arrived late.
- ``before``: a reader counts its hold from before the request that writes it.

The invariants, in every state:

- A listed step has its files. The exception is a manifest that arrived after they were removed, until it is collected.
- At most one saver of an absent step is told that it saved.
- A save that returned stays until an actor that has read it ends it.
- A step stays while a reader, which was told so, holds it.

At the end, after the last collection, there are no files without a manifest, no manifest without files, and no markers.
"""

from __future__ import annotations

import argparse
import collections
import sys
import typing
from collections.abc import Iterator

ACTS, LATE, COLLECTED = 1, 1, 3
# How long a hold lasts, by the clock of the reader; deleters wait one unit longer, by the clock of the store.
HELD = 1
RULES = ('monotone', 'announce', 'horizon', 'condition', 'leave', 'age', 'gone', 'before')


class Marker(typing.NamedTuple):
    owner: str
    saves: tuple[str, ...]
    deletes: bool
    age: int = 0


class Actor(typing.NamedTuple):
    """A program.

    Attributes:
      stage: its next request, or '' at its end.
      read: the manifest that it has read, or the marker that it collects.
      born: the time of its marker, or of its hold, by its own clock.
    """

    kind: str
    stage: str
    read: object = None
    born: int | None = None
    alive: bool = True


class Bucket(typing.NamedTuple):
    """All that there is.

    Attributes:
      manifest: a save and its version.
      files: the saves and the processes that wrote them.
      holds: the readers that wrote them, and their age.
      late: requests under way: what they do, for which save, and their age.
      told: what actors have reported, to the user or to each other.
    """

    manifest: tuple[str, int] | None
    files: frozenset[tuple[str, int]]
    actors: tuple[Actor, ...]
    markers: frozenset[Marker] = frozenset()
    holds: frozenset[tuple[str, int]] = frozenset()
    late: frozenset[tuple[str, str, int]] = frozenset()
    told: frozenset[tuple[str, str]] = frozenset()
    versions: int = 1
    now: int = 0
    crashes: int = 0
    lates: int = 0


def mark(s: Bucket, owner: str, *saves: str, deletes: bool = False) -> Bucket:
    return s._replace(markers=s.markers | {Marker(owner, saves, deletes)})


def unmark(s: Bucket, owner: str) -> Bucket:
    return s._replace(markers=frozenset(m for m in s.markers if m.owner != owner))


def write(s: Bucket, save: str, process: int = 0) -> Bucket:
    return s._replace(files=s.files | {(save, process)})


def remove(s: Bucket, save: str) -> Bucket:
    return s._replace(files=frozenset(file for file in s.files if file[0] != save))


def publish(s: Bucket, save: str) -> Bucket:
    return s._replace(manifest=(save, s.versions), versions=s.versions + 1)


def tell(s: Bucket, who: str, what: str) -> Bucket:
    return s._replace(told=s.told | {(who, what)})


def needed(save: str) -> set[tuple[str, int]]:
    """The files of a save; a job has two processes."""
    return {(save, 0), (save, 1)} if save[0] == 'J' else {(save, 0)}


class Model:
    """The requests of each kind of actor, the passing of time, and the invariants."""

    def __init__(self, broken: str = '') -> None:
        self.rules = frozenset(RULES) - {broken}
        self._requests = {
            'W': self._saver,
            'J': self._leader,
            'j': self._follower,
            'O': self._overwriter,
            'D': self._deleter,
            'R': self._reader,
            'G': self._collector,
        }

    def request(self, s: Bucket, i: int) -> Iterator[tuple[Bucket, str, object]]:
        """What one request of actor ``i`` leads to: the bucket, the next stage, and what the actor remembers."""
        actor, me = s.actors[i], f'{s.actors[i].kind}{i}'
        out_of_time = actor.born is not None and s.now - actor.born > ACTS
        if actor.kind in 'WJjOD' and out_of_time and 'horizon' in self.rules:
            yield s, '', actor.read  # Stops. Garbage collection removes the rest.
            return
        yield from self._requests[actor.kind](s, me, actor)

    def _same(self, s: Bucket, read: object) -> bool:
        if 'condition' in self.rules:
            return s.manifest == read
        return s.manifest is not None

    def _saver(self, s: Bucket, me: str, actor: Actor) -> Iterator[tuple[Bucket, str, object]]:
        """Saves a step that is absent."""
        match actor.stage:
            case 'look':
                yield (s, 'mark', None) if s.manifest is None else (tell(s, me, 'exists'), '', None)
            case 'mark':
                yield (mark(s, me, me) if 'announce' in self.rules else s), 'write', None
            case 'write':
                yield write(s, me), 'create', None
            case 'create':
                if s.manifest is None:
                    yield tell(publish(s, me), me, 'saved'), 'unmark', None
                else:
                    yield tell(s, me, 'exists'), 'clean', None
            case 'clean':
                yield remove(s, me), ('' if 'leave' in self.rules else 'unmark'), None
            case 'unmark':
                yield unmark(s, me), '', None

    def _leader(self, s: Bucket, me: str, actor: Actor) -> Iterator[tuple[Bucket, str, object]]:
        """Process 0 of a job of two: its marker opens the writes, and it commits when both have written."""
        other = f'j{int(me[1:]) + 1}'
        match actor.stage:
            case 'look':
                yield (s, 'mark', None) if s.manifest is None else (tell(tell(s, me, 'exists'), me, 'closed'), '', None)
            case 'mark':
                yield mark(s, me, me), 'open', None
            case 'open':
                yield tell(s, me, 'open'), 'write', None
            case 'write':
                yield write(s, me), 'wait', None
            case 'wait':
                if (other, 'done') in s.told:
                    yield s, 'create', None
                yield s, 'clean', None  # The follower has died, or is slower than the time-out.
            case 'create':
                if s.manifest is None:
                    yield tell(publish(s, me), me, 'saved'), 'unmark', None
                else:
                    yield tell(s, me, 'exists'), 'clean', None
            case 'clean':
                yield remove(s, me), ('' if 'leave' in self.rules else 'unmark'), None
            case 'unmark':
                yield unmark(s, me), '', None

    def _follower(self, s: Bucket, me: str, actor: Actor) -> Iterator[tuple[Bucket, str, object]]:
        """Process 1 of the job."""
        leader = f'J{int(me[1:]) - 1}'
        match actor.stage:
            case 'look':  # Waits until process 0 has opened the writes, which tells the age of the marker.
                if (leader, 'open') in s.told:
                    yield s, 'write', None
            case 'write':
                yield write(s, leader, 1), 'done', None
            case 'done':
                yield tell(s, me, 'done'), '', None

    def _overwriter(self, s: Bucket, me: str, actor: Actor) -> Iterator[tuple[Bucket, str, object]]:
        """Overwrites the step that is there."""
        match actor.stage:
            case 'look':
                yield s, ('mark' if s.manifest else ''), s.manifest
            case 'mark':
                yield mark(s, me, me, actor.read[0], deletes=True), 'holds', actor.read
            case 'holds':
                yield s, ('unmark' if self._held(s) else 'write'), actor.read
            case 'write':
                yield write(s, me), 'replace', actor.read
            case 'replace':
                if self._same(s, actor.read):
                    yield tell(tell(publish(s, me), me, 'saved'), me, f'ended {actor.read[0]}'), 'remove', actor.read
                else:
                    yield tell(s, me, 'changed'), 'clean', actor.read
            case 'remove':
                yield remove(s, actor.read[0]), ('' if 'leave' in self.rules else 'unmark'), None
            case 'clean':
                yield remove(s, me), ('' if 'leave' in self.rules else 'unmark'), None
            case 'unmark':
                yield unmark(s, me), '', None

    def _deleter(self, s: Bucket, me: str, actor: Actor) -> Iterator[tuple[Bucket, str, object]]:
        """Deletes the step, unless a reader holds it."""
        match actor.stage:
            case 'look':
                yield s, ('mark' if s.manifest else ''), s.manifest
            case 'mark':
                marked = mark(s, me, actor.read[0], deletes=True) if 'announce' in self.rules else s
                yield marked, 'holds', actor.read
            case 'holds':
                yield s, ('unmark' if self._held(s) else 'delete'), actor.read
            case 'delete':
                if self._same(s, actor.read):
                    yield (
                        tell(s._replace(manifest=None), me, f'ended {actor.read[0]}'),
                        'remove',
                        actor.read,
                    )
                else:
                    yield s, 'unmark', actor.read
            case 'remove':
                if 'monotone' not in self.rules and self._held(s) and s.manifest is None:
                    yield publish(s, actor.read[0]), 'unmark', None
                else:
                    yield remove(s, actor.read[0]), ('' if 'leave' in self.rules else 'unmark'), None
            case 'unmark':
                yield unmark(s, me), '', None

    def _held(self, s: Bucket) -> bool:
        return any(age <= HELD + 1 for _, age in s.holds)

    def _reader(self, s: Bucket, me: str, actor: Actor) -> Iterator[tuple[Bucket, str, object]]:
        """A reader that must not lose the step while its hold lasts."""
        match actor.stage:
            case 'hold':
                yield s._replace(holds=s.holds | {(me, 0)}), 'markers', None
            case 'markers':
                named = frozenset(save for m in s.markers if m.deletes for save in m.saves)
                yield s, 'read', named
            case 'read':
                if s.manifest is None or s.manifest[0] in actor.read:
                    yield s, 'release', None
                else:
                    yield tell(s, me, s.manifest[0]), '', None
            case 'release':
                yield s._replace(holds=frozenset(h for h in s.holds if h[0] != me)), '', None

    def _collector(self, s: Bucket, me: str, actor: Actor) -> Iterator[tuple[Bucket, str, object]]:
        """Collects what markers name that are old enough, and expired holds."""
        match actor.stage:
            case 'look':
                old = sorted((m for m in s.markers if m.age >= COLLECTED), key=lambda m: m.owner)
                yield (s, 'read', (old[0], old[0].saves, None)) if old else (s, '', None)
            case 'read':  # The manifest, and then the files of the first save that the marker names.
                marker, saves, _ = actor.read
                yield s, ('collect' if saves else 'unmark'), (marker, saves, s.manifest)
            case 'collect':
                marker, saves, manifest = actor.read
                left = (marker, saves[1:], None)
                if manifest is None or manifest[0] != saves[0]:
                    yield remove(s, saves[0]), 'read', left
                elif needed(saves[0]) <= s.files or 'gone' not in self.rules:
                    yield s, 'read', left
                else:
                    gone = s._replace(manifest=None) if self._same(s, manifest) else s
                    yield gone, 'read', (marker, saves, None)
            case 'unmark':
                yield unmark(s, actor.read[0].owner), 'look', None

    def steps(self, s: Bucket, units: int, crashes: int, lates: int) -> Iterator[tuple[str, Bucket]]:
        """Every next state, with the name of what happened."""
        for i, actor in enumerate(s.actors):
            if not actor.stage or not actor.alive:
                continue
            name = f'{actor.kind}{i}.{actor.stage}'
            for requested, stage, read in self.request(s, i):
                born = self._born(s, i)
                changed = actor._replace(stage=stage, read=read, born=born)
                after = requested._replace(actors=(*s.actors[:i], changed, *s.actors[i + 1 :]))
                yield name, after
                sent = {'write': 'write', 'create': 'create'}.get(actor.stage)
                if sent and after != s and s.lates < lates and stage != '':
                    save = name.partition('.')[0] if actor.kind != 'j' else f'J{i - 1}'
                    process = int(actor.kind == 'j')
                    late = after.late | {(f'{sent}{process}', save, 0)}
                    yield f'{name}, and once more later', after._replace(late=late, lates=s.lates + 1)
            if s.crashes < crashes:
                dead = actor._replace(alive=False)
                actors = (*s.actors[:i], dead, *s.actors[i + 1 :])
                yield f'{actor.kind}{i} dies', s._replace(crashes=s.crashes + 1, actors=actors)
        for request in s.late:
            what, save, _ = request
            n = s._replace(late=s.late - {request})
            if what[:-1] == 'write':
                n = write(n, save, int(what[-1]))
            elif s.manifest is None:
                n = publish(n, save)
            yield f'{what[:-1]} of {save} arrives', n
        if s.now < units:
            yield (
                'a unit passes',
                s._replace(
                    now=s.now + 1,
                    markers=frozenset(m._replace(age=min(COLLECTED, m.age + 1)) for m in s.markers),
                    holds=frozenset((who, min(HELD + 2, age + 1)) for who, age in s.holds),
                    late=frozenset((what, save, age + 1) for what, save, age in s.late if age < LATE),
                ),
            )

    def _born(self, s: Bucket, i: int) -> int | None:
        actor = s.actors[i]
        if actor.stage == (
            'read' if actor.kind == 'R' and 'before' not in self.rules else 'hold' if actor.kind == 'R' else 'mark'
        ):
            return s.now
        if actor.kind == 'j' and actor.stage == 'look':
            return s.actors[i - 1].born if 'age' in self.rules else s.now
        return actor.born

    def broken(self, s: Bucket) -> str:
        """The invariant that does not hold, if any."""
        if s.manifest is not None:
            save = s.manifest[0]
            removed = any(save in m.saves and (m.deletes or (m.owner, 'exists') in s.told) for m in s.markers)
            if not needed(save) <= s.files and not removed:
                return f'listed without files: {save}'
        may_vanish = any(actor.kind == 'D' for actor in s.actors)
        if sum(what == 'saved' and who[0] in 'WJ' for who, what in s.told) > 1 and not may_vanish:
            return 'two savers were told that they saved'
        ended = {what for _, what in s.told if what.startswith('ended ')}
        for who, what in s.told:
            is_listed = s.manifest is not None and s.manifest[0] == who
            if what == 'saved' and not is_listed and f'ended {who}' not in ended:
                return f'{who} is gone, although nobody has read it to end it'
        for i, actor in enumerate(s.actors):
            who = f'{actor.kind}{i}'
            if actor.kind == 'R' and actor.born is not None and s.now - actor.born <= HELD:
                for save in (what for reader, what in s.told if reader == who):
                    if s.manifest is None or s.manifest[0] != save or not needed(save) <= s.files:
                        return f'{who} holds {save}, which is gone'
        return ''

    def at_the_end(self, s: Bucket) -> str:
        """What is left when all have ended, all requests have arrived, and one more collector has run alone."""
        markers = frozenset(m._replace(age=COLLECTED) for m in s.markers)
        n = s._replace(markers=markers, late=frozenset(), actors=(Actor('G', 'look'),), told=frozenset())
        while n.actors[0].stage:
            after, stage, read = next(self.request(n, 0))
            n = after._replace(actors=(Actor('G', stage, read),))
        if n.markers:
            return f'markers stay: {sorted(m.owner for m in n.markers)}'
        garbage = n.files - (needed(n.manifest[0]) if n.manifest else set())
        if garbage:
            return f'garbage stays: {sorted(garbage)} beside {n.manifest}'
        return self.broken(n._replace(actors=s.actors, told=s.told))


FIRST = {'W': 'look', 'J': 'look', 'j': 'look', 'O': 'look', 'D': 'look', 'R': 'hold', 'G': 'look'}


def explore(model: Model, kinds: str, units: int, crashes: int, lates: int) -> tuple[int, str, list[str]]:
    """Explores a scenario breadth first.

    Args:
      model: the rules.
      kinds: the actors; with a leading ``+`` the step is there at the beginning.
      units, crashes, lates: how many of each there may be.

    Returns:
      The number of states, the broken invariant or '', and the shortest trace that leads to it.
    """
    there = kinds.startswith('+')
    actors = tuple(Actor(kind, FIRST[kind]) for kind in kinds.removeprefix('+'))
    files = frozenset({('old', 0)}) if there else frozenset[tuple[str, int]]()
    start = Bucket(('old', 0) if there else None, files, actors)
    before: dict[Bucket, tuple[Bucket, str] | None] = {start: None}
    queue = collections.deque([start])
    while queue:
        s = queue.popleft()
        why = model.broken(s)
        if not why:
            ended = True
            for what, n in model.steps(s, units, crashes, lates):
                ended = ended and (what == 'a unit passes' or what.endswith('dies'))
                if n not in before:
                    before[n] = (s, what)
                    queue.append(n)
            why = model.at_the_end(s) if ended else ''
        if why:
            trace: list[str] = []
            while (step := before[s]) is not None:
                s, what = step
                trace.append(what)
            return len(before), why, trace[::-1]
    return len(before), '', []


SCENARIOS = (
    *('W', 'WW', 'WG', 'WWG', 'WD', 'WDG', 'WR', 'WDR', 'WDW', 'Jj', 'JjG', 'JjW', 'JjD', 'JjDG'),
    *('+D', '+OD', '+OO', '+OG', '+DR', '+DG', '+DRG', '+DW', '+DWG', '+OR', '+ORG', '+DGG', '+DJj', '+DDR'),
)
# Where to see what a rule is for.
BROKEN_BY = {
    'monotone': 'WDRG',
    'announce': 'W',
    'horizon': 'WG',
    'condition': '+OD',
    'leave': 'WW',
    'age': 'JjG',
    'gone': 'WDG',
    'before': '+DR',
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--break', dest='broken', choices=RULES, default='', metavar='RULE')
    parser.add_argument('scenarios', nargs='*', default=SCENARIOS)
    given = parser.parse_args()
    model, failures = Model(given.broken), 0
    for kinds in given.scenarios:
        states, why, trace = explore(model, kinds, units=5, crashes=1, lates=1)
        sys.stdout.write(f'{kinds:6}{states:9,} states  {why or "holds"}\n')
        sys.stdout.write(f'       {"; ".join(trace)}\n' if why else '')
        sys.stdout.flush()
        failures += bool(why)
    return int(failures > 0)


if __name__ == '__main__':
    sys.exit(main())
