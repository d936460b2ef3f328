"""Options of two tiers that the processes of a job pass differently."""

import time

import pytest

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


@pytest.mark.parametrize('action', ['save', 'restore', 'start'])
@pytest.mark.parametrize('given', [0, 1])
def test_a_local_directory_in_one_process_alone(two, tmp_path, action, given):
    """All processes raise the error at once, long before their time-out of five minutes."""
    locals_ = [str(tmp_path / 'disk') if index == given else None for index in range(2)]
    if action == 'restore':
        two.run('save', tmp_path / 'run')
    started = time.monotonic()
    errors = two.errors('tiers_in_some', tmp_path / 'run', action, each=locals_)
    assert time.monotonic() - started < 100
    for kind, text in errors:
        assert kind == 'DisagreementError', text
        assert 'DisagreementError' not in text
        texts = ['None in process', 'None in process']
        texts[given] = 'a LocalTier in process'
        assert f'local is {texts[0]} 0, and {texts[1]} 1' in text
