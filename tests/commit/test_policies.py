"""What to keep and when to save: tables, and plans that hold for any run."""

import json
import math

import pytest
from hypothesis import given, strategies as st

from t5ckpt.format.keep_policy import fields_of, policy_of
from t5ckpt.policies import (
    Decision,
    KeepAll,
    KeepAny,
    KeepBest,
    KeepEvery,
    KeepEveryHours,
    KeepLatest,
    KeepPolicy,
    KeepSteps,
    StepInfo,
    retention_plan,
)
from t5ckpt.save_policies import (
    Moment,
    SaveAt,
    SaveEvery,
    SaveEverySeconds,
    SaveFirst,
    SaveLast,
    SaveOnImprovement,
    SaveOnPreemption,
    SaveWhenIdle,
)

NAN = math.nan
HOUR = 3600.0


def infos(steps, values=None, *, pinned=(), held=(), hours=None):
    """Facts of steps: metric 'm' from `values` by step, saved `hours` after the start."""
    values, hours = values or {}, hours or {}
    return [
        StepInfo(
            step,
            step in pinned,
            step in held,
            hours[step] * HOUR if step in hours else None,
            {'m': values[step]} if step in values else {},
        )
        for step in steps
    ]


def kept(policy, facts, just_saved=None):
    return [decision.step for decision in retention_plan(policy, facts, just_saved) if decision.keep]


@pytest.mark.parametrize(
    ('policy', 'facts', 'expected'),
    [
        (KeepAll(), infos([1, 2, 3]), [1, 2, 3]),
        (KeepLatest(2), infos([1, 2, 3]), [2, 3]),
        (KeepLatest(2), infos([3, 1, 2]), [2, 3]),
        (KeepLatest(2), infos([1, 2, 3, 4], pinned=[1, 3]), [1, 2, 3, 4]),
        (KeepLatest(9), infos([1, 2, 3]), [1, 2, 3]),
        (KeepLatest(1), infos([]), []),
        # Best: the latest besides, ties to the newer, NaN worst, pins and period take no slot.
        (KeepBest(1, 'm'), infos([1, 2, 3, 4], {1: 5.0, 2: 9.0, 3: 1.0}), [2, 4]),
        (KeepBest(1, 'm', 'min'), infos([1, 2, 3, 4], {1: 5.0, 2: 9.0, 3: 1.0}), [3, 4]),
        (KeepBest(2, 'm'), infos([1, 2, 3, 4], {1: 5.0, 2: 5.0, 3: 5.0, 4: 5.0}), [2, 3, 4]),
        (KeepBest(2, 'm', 'min'), infos([1, 2, 3, 4], {1: 5.0, 2: 5.0, 3: 5.0, 4: 5.0}), [2, 3, 4]),
        (KeepBest(1, 'm'), infos([1, 2, 3, 4], {1: -math.inf, 2: NAN, 3: NAN}), [1, 4]),
        (KeepBest(1, 'm', 'min'), infos([1, 2, 3, 4], {1: math.inf, 2: NAN, 3: NAN}), [1, 4]),
        (KeepBest(1, 'm'), infos([1, 2, 3, 4], {1: 1.0, 2: math.inf, 3: 0.5}), [1, 4]),
        (KeepBest(1, 'm', 'min'), infos([1, 2, 3, 4], {1: 1.0, 2: -math.inf, 3: 2.0}), [1, 4]),
        (KeepBest(1, 'm', 'min'), infos([1, 2, 3, 4], {1: 2**60, 2: 2**60 + 1, 3: 2**60 - 1}), [3, 4]),
        (KeepBest(1, 'm'), infos([1, 2, 3, 4], {1: 1.0, 2: 2.0}), [2, 3, 4]),
        (KeepBest(1, 'm', keep_without_metric=False), infos([1, 2, 3, 4], {1: 1.0, 2: 2.0}), [2, 4]),
        (KeepBest(1, 'm', keep_without_metric=False), infos([1, 2, 3, 4]), [3, 4]),
        (KeepBest(1, 'm'), infos([1, 2, 3, 4], {1: 9.0, 2: 2.0, 3: 3.0}, pinned=[1]), [1, 3, 4]),
        (KeepBest(1, 'm', period=2), infos([1, 2, 3, 4], {1: 9.0, 2: 10.0, 3: 3.0}), [1, 2, 4]),
        (KeepBest(1, 'm', period=2), infos([1, 2, 3, 4, 5], {1: 9.0, 3: 10.0, 5: 11.0}), [2, 3, 4, 5]),
        (KeepEvery(10), infos([0, 5, 10, 15]), [0, 10, 15]),
        (KeepSteps({5, 7}), infos([0, 5, 10, 15]), [5, 15]),
        (KeepEveryHours(2), infos([1, 2, 3, 4], hours={1: 0, 2: 1.9, 3: 2, 4: 3}), [1, 3, 4]),
        (KeepEveryHours(2), infos([1, 2, 3], hours={1: 0, 3: 1}), [1, 2, 3]),
        (KeepLatest(1) | KeepEvery(10), infos([0, 5, 10, 15]), [0, 10, 15]),
        # What KeepBest cannot judge the others decide on; asked to, it keeps that for ever.
        (KeepLatest(2) | KeepBest(1, 'm'), infos([1, 2, 3, 4, 5], {1: 9.0}), [1, 4, 5]),
        (KeepLatest(2) | KeepBest(2, 'm'), infos([1, 2, 3, 4, 5, 6]), [4, 5, 6]),
        (
            KeepLatest(2) | KeepBest(1, 'm', keep_without_metric=True),
            infos([1, 2, 3, 4, 5], {1: 9.0}),
            [1, 2, 3, 4, 5],
        ),
        (KeepLatest(1) | KeepBest(1, 'm') | KeepSteps({1}), infos([1, 2, 3, 4], {1: 1, 2: 3, 3: 2}), [1, 2, 4]),
        # Rules that no policy can break.
        (KeepSteps(()), infos([1, 2, 3]), [3]),
        (KeepSteps(()), infos([1, 2, 3], pinned=[1], held=[2]), [1, 2, 3]),
    ],
)
def test_what_is_kept(policy, facts, expected):
    assert kept(policy, facts) == expected


def test_the_step_just_saved_stays_after_a_rollback():
    assert kept(KeepLatest(2), infos([5, 20, 30]), just_saved=5) == [5, 20, 30]
    assert kept(KeepLatest(2), infos([5, 20, 30])) == [20, 30]


def test_reasons_say_why():
    facts = infos([1, 2, 3, 4, 5], {1: 0.5, 2: 0.25, 3: NAN}, pinned=[4])
    plan = retention_plan(KeepBest(1, 'm') | KeepEvery(100), facts)
    assert {decision.step: decision.reason for decision in plan} == {
        1: 'm 0.5, among the best 1 (max)',
        2: 'm 0.25, not among the best 1 (max); not a multiple of 100',
        3: 'm nan, not among the best 1 (max); not a multiple of 100',
        4: 'pinned',
        5: 'latest',
    }


def test_a_step_behind_the_latest_is_not_called_the_best():
    facts = infos([1, 2, 3], {1: 2.0, 2: NAN, 3: 1.0})
    plan = retention_plan(KeepBest(1, 'm', 'min'), facts)
    assert [decision.reason for decision in plan] == [
        'm 2, among the best 1 of the others (min)',
        'm nan, not among the best 1 (min)',
        'latest',
    ]
    plan = retention_plan(KeepBest(2, 'm', 'min'), infos([1, 2, 3], {1: NAN, 2: -math.inf}))
    assert [decision.reason for decision in plan][:2] == [
        'm nan, ranked last of 2 (min)',
        'm -inf, ranked last of 2 (min)',
    ]


class Forgetful(KeepPolicy):
    """A user's policy with bugs: it forgets steps, and decides on one that is not there."""

    def choose(self, infos):
        return [Decision(infos[0].step, False, 'go'), Decision(10**9, False, 'who?')]


def test_a_step_the_policy_says_nothing_of_stays():
    assert kept(Forgetful(), infos([1, 2, 3])) == [2, 3]
    assert kept(KeepAny((Forgetful(),)), infos([1, 2, 3])) == [3], 'a policy that keeps nothing of it'


@pytest.mark.parametrize(
    'make',
    [
        lambda: KeepLatest(0),
        lambda: KeepBest(0, 'm'),
        lambda: KeepBest(1, 'm', 'best'),
        lambda: KeepBest(1, 'm', period=0),
        lambda: KeepEvery(0),
        lambda: KeepEveryHours(0),
        lambda: KeepEveryHours(NAN),
        lambda: KeepAny(()),
        lambda: KeepAny((None,)),
        lambda: SaveEvery(0),
        lambda: SaveEverySeconds(-1),
        lambda: SaveOnImprovement('m', 'up'),
    ],
)
def test_nonsense_is_refused(make):
    with pytest.raises(
        ValueError, match=r'at least|above 0|one policy|max|joins policies of type KeepPolicy, got None'
    ):
        make()


policies = st.recursive(
    st.one_of(
        st.builds(KeepLatest, st.integers(1, 4)),
        st.builds(KeepBest, st.integers(1, 4), st.just('m'), st.sampled_from(['min', 'max']), st.booleans()),
        st.builds(lambda n, p: KeepBest(n, 'm', period=p), st.integers(1, 3), st.integers(1, 5)),
        st.builds(KeepEvery, st.integers(1, 9)),
        st.builds(KeepEveryHours, st.floats(0.1, 10)),
        st.builds(lambda steps: KeepSteps(frozenset(steps)), st.sets(st.integers(0, 30))),
    ),
    lambda inner: st.lists(inner, min_size=1, max_size=3).map(lambda some: KeepAny(tuple(some))),
    max_leaves=4,
)
runs = st.dictionaries(
    st.integers(0, 30),
    st.tuples(
        st.booleans(),
        st.booleans(),
        st.none() | st.floats(0, 30 * HOUR),
        st.none() | st.sampled_from([NAN, math.inf, -math.inf, 0.0, -0.0]) | st.floats(allow_nan=True),
    ),
    max_size=20,
).map(
    lambda facts: [
        StepInfo(step, pinned, held, created, {} if value is None else {'m': value})
        for step, (pinned, held, created, value) in facts.items()
    ]
)


@given(policies, runs, st.integers(0, 30))
def test_any_plan_spares_what_must_stay_and_is_idempotent(policy, facts, just_saved):
    plan = retention_plan(policy, facts, just_saved)
    assert [decision.step for decision in plan] == sorted(info.step for info in facts)
    assert all(decision.reason for decision in plan)
    stays = {decision.step for decision in plan if decision.keep}
    must = {info.step for info in facts if info.pinned or info.held or info.step == just_saved}
    must |= {max((info.step for info in facts), default=just_saved)} & {info.step for info in facts}
    assert must & {info.step for info in facts} <= stays
    assert kept(policy, [info for info in facts if info.step in stays], just_saved) == sorted(stays)


@given(policies, runs)
def test_a_newer_step_never_brings_a_deletion_forward_of_the_only_one(policy, facts):
    if facts:
        assert kept(policy, facts), 'a run with a checkpoint keeps one'


# --- when to save -----------------------------------------------------------------------------------------------------


def moments(policy, calls):
    """The steps at which a policy would save in a loop of (step, seconds) calls."""
    saved, previous, last, last_unix = [], None, None, 0.0
    for step, now in calls:
        reason = policy.reason(Moment(step, previous, last, now - last_unix))
        if reason is not None and step != last:
            saved.append(step)
            last, last_unix = step, now
        previous = step
    return saved


@pytest.mark.parametrize(
    ('policy', 'calls', 'expected'),
    [
        (SaveEvery(10), [(step, 0) for step in range(35)], [0, 10, 20, 30]),
        (SaveEvery(10), [(step, 0) for step in range(7, 60, 7)], [14, 21, 35, 42, 56]),
        (SaveEvery(10), [(step, 0) for step in range(11, 20)], []),
        (SaveAt({3, 5}), [(step, 0) for step in range(9)], [3, 5]),
        (SaveEverySeconds(10), [(step, 3.0 * step) for step in range(1, 14)], [4, 8, 12]),
        (SaveFirst(), [(step, 0) for step in range(5, 9)], [5]),
        (SaveLast(8), [(step, 0) for step in range(9)], [8]),
        (SaveLast(8), [(step, 0) for step in range(0, 20, 3)], [9]),
        (SaveEvery(10) | SaveAt({3}), [(step, 0) for step in range(1, 12)], [3, 10]),
        (SaveEvery(2) & SaveAt({3, 4}), [(step, 0) for step in range(9)], [4]),
    ],
)
def test_when_is_saved(policy, calls, expected):
    assert moments(policy, calls) == expected


@pytest.mark.parametrize(
    'policy',
    [
        SaveEvery(1, 3),
        SaveEverySeconds(1, 3),
        SaveWhenIdle(3),
        SaveOnImprovement('m', min_step=3),
    ],
)
def test_no_step_below_min_step_is_saved(policy):
    """Each of them is due at every step."""
    due = [Moment(step, step - 1, None, 1e9, metrics={'m': 1.0}) for step in range(1, 6)]
    assert [moment.step for moment in due if policy.reason(moment) is not None] == [3, 4, 5]


@pytest.mark.parametrize(
    ('value', 'best', 'mode', 'expected'),
    [
        (0.5, None, 'max', True),
        (NAN, None, 'max', False),
        (None, None, 'max', False),
        (0.5, (0.1, 0.4), 'max', True),
        (0.4, (0.1, 0.4), 'max', False),
        (NAN, (0.1, 0.4), 'max', False),
        (0.2, (0.1, 0.4), 'min', False),
        (0.05, (0.1, 0.4), 'min', True),
    ],
)
def test_improvement(value, best, mode, expected):
    moment = Moment(1, metrics={} if value is None else {'m': value}, best={} if best is None else {'m': best})
    assert (SaveOnImprovement('m', mode).reason(moment) is not None) == expected


def test_improvement_may_have_to_be_large():
    moment = Moment(1, metrics={'m': 0.5}, best={'m': (0.0, 0.45)})
    assert SaveOnImprovement('m', least=0.04).reason(moment) == 'm 0.5 is better than 0.45'
    assert SaveOnImprovement('m', least=0.06).reason(moment) is None


def test_preemption_and_joined_reasons():
    policy = SaveEvery(5) | SaveOnPreemption()
    assert policy.reason(Moment(5, preempted=True)) == 'every 5 steps; preempted'
    assert policy.reason(Moment(6)) is None
    assert (policy & SaveOnImprovement('m')).metric_names == ('m',)


POLICIES = [
    KeepAll(),
    KeepLatest(3),
    KeepBest(2, 'eval/accuracy', 'min', False, 10),
    KeepEvery(5),
    KeepEveryHours(0.5),
    KeepSteps((3, 9)),
    KeepLatest(1) | KeepBest(1, 'loss', 'min') | KeepSteps((2,)),
]


@pytest.mark.parametrize('policy', POLICIES, ids=lambda policy: type(policy).__name__)
def test_a_policy_is_recorded_in_json(policy):
    told = json.loads(json.dumps(fields_of(policy)))
    again = policy_of(told)
    facts = [StepInfo(step, created_unix=step * 1000.0, metrics={'loss': step % 4}) for step in range(12)]
    assert type(again) is type(policy)
    assert again.choose(facts) == policy.choose(facts)


def test_a_policy_of_another_package_is_not_recorded():
    class Mine(KeepPolicy):
        def choose(self, infos):
            return []

    assert fields_of(Mine()) is None
    assert fields_of(KeepLatest(1) | Mine()) is None
    mine = Mine()
    mine.keep = {1, 2}
    assert fields_of(mine) is None


@pytest.mark.parametrize(
    'told',
    [
        *(None, 3, [], {}, {'keep': 'KeepAny'}, {'keep': 'KeepAny', 'policies': []}, {'keep': 'KeepLatest'}),
        *({'keep': 'KeepLatest', 'count': '3'}, {'keep': 'KeepLatest', 'count': 0}, {'keep': 'KeepLatest', 'n': 3}),
        *({'keep': 'KeepBest', 'count': 1, 'metric': 5}, {'keep': 'KeepSteps', 'steps': None}, {'keep': 'Decision'}),
        {'keep': 'KeepAny', 'policies': [{'keep': 'KeepAll'}, {'keep': 'Unknown'}]},
    ],
)
def test_other_objects_than_policies(told):
    assert policy_of(told) is None


def test_a_policy_that_is_joined_too_deep():
    told = {'keep': 'KeepAll'}
    for _ in range(500):
        told = {'keep': 'KeepAny', 'policies': [told]}
    assert policy_of(told) is None
