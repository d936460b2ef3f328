"""Status codes of the coordination service: the texts are those that jaxlib 0.10 gave for real processes."""

import pytest

from t5ckpt.distributed.processes import parse_status
from t5ckpt.distributed.rounds import coordination_error

_GRPC = '\nAdditional GRPC error information from remote target coordination_service'
BARRIER_DIED = (
    'INTERNAL: Barrier failed because: task is set to ERROR: UNAVAILABLE: Task 1 heartbeat timeout. This indicates that the '
    'remote task has failed. Barrier Id: b1::0, Task: 1\n\nRPC: /xla.coordination.CoordinationService/Barrier'
)
BARRIER_AGAIN = 'INTERNAL: Barrier (b1::0) is invoked by the task, but the service thinks it is the 1-th instance.'
UNHEALTHY = (
    'UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):\n1\n3\nThe tasks have crashed.'
)
OLDER = 'ABORTED: /job:jax_worker/replica:0/task:12 heartbeat timeout.'
LOST = f'UNAVAILABLE: Socket closed{_GRPC}\n:UNKNOWN:Error received from peer'


@pytest.mark.parametrize(
    ('text', 'code', 'died'),
    [
        ('DEADLINE_EXCEEDED: GetKeyValue() timed out with key: a and duration: 300ms', 'DEADLINE_EXCEEDED', None),
        (f'ALREADY_EXISTS: key a/b already exists.{_GRPC}', 'ALREADY_EXISTS', None),
        ('INVALID_ARGUMENT: no such task 5', 'INVALID_ARGUMENT', None),
        ('RESOURCE_EXHAUSTED: Received message larger than max', 'RESOURCE_EXHAUSTED', None),
        ('NOT_FOUND: heartbeat timeout of task 3', 'NOT_FOUND', None),
        (BARRIER_DIED, 'INTERNAL', (1,)),
        (BARRIER_AGAIN, 'INTERNAL', None),
        (UNHEALTHY, 'UNAVAILABLE', (1, 3)),
        (OLDER, 'ABORTED', (12,)),
        (LOST, 'UNAVAILABLE', None),
        ('something else: 5', '', None),
        ('', '', None),
    ],
)
def test_the_code_and_the_dead_are_parsed(text, code, died):
    status = parse_status(text)
    assert (status.code, status.has_dead, status.died) == (code, died is not None, died or ())
    assert status.text == text.partition('\n')[0]


@pytest.mark.parametrize(
    ('text', 'words'),
    [
        (BARRIER_DIED, 'process 1 died. Look at its log'),
        (UNHEALTHY, 'processes 1, 3 died. Look at its log'),
        (LOST, "lost JAX's coordination service, which runs in process 0"),
        (BARRIER_AGAIN, 'failed: INTERNAL: Barrier (b1::0) is invoked'),
        ('nothing known', 'failed: nothing known'),
    ],
)
def test_the_error_says_what_happened(text, words):
    error = coordination_error('the save of step 5', 'write', parse_status(text))
    assert str(error).startswith("the save of step 5, in 'write': ")
    assert words in str(error)
    assert '\n' not in str(error)
    assert not isinstance(error, TimeoutError)
    assert (error.code, error.died) == (parse_status(text).code, parse_status(text).died)
