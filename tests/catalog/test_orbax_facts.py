"""Metrics, times and custom metadata of steps that Orbax saved: in listings, views, the best step and retention."""

import json
import re

import numpy as np
import orbax.checkpoint as ocp
import pytest
from click.testing import CliRunner
from orbax.checkpoint.experimental import v1
from support.options import with_options

import t5ckpt
from t5ckpt import errors
from t5ckpt.cli.app import app
from t5ckpt.format.orbax import orbax_facts, orbax_object
from t5ckpt.metrics import TensorBoardMetrics

LOSSES = {1: 0.5, 2: 0.2, 3: 0.4}


def tree(step):
    return {'params': {'w': np.full((4, 4), step, np.float32)}, 'step': step}


def save_run(place, losses=LOSSES, **options):
    """A run of Orbax's CheckpointManager with metrics and metadata."""
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics['loss'], **options)
    with ocp.CheckpointManager(place, options=options, metadata={'project': 'x', 'of': 'run'}) as manager:
        for step, loss in losses.items():
            manager.save(
                step,
                args=ocp.args.StandardSave(tree(step)),
                metrics={'loss': loss, 'eval': {'acc': 0.5, 'name': 'text'}},
                custom_metadata={'of': 'step', 'at': step},
            )
        manager.wait_until_finished()
        return manager.metadata(3)


@pytest.fixture
def run(tmp_path):
    save_run(tmp_path / 'run')
    return tmp_path / 'run'


def test_views_and_runs_have_what_orbax_recorded(tmp_path):
    known = save_run(tmp_path / 'run')
    view = t5ckpt.open_checkpoint(tmp_path / 'run', 3)
    assert view.metrics == {'loss': 0.4, 'eval/acc': 0.5}
    assert view.custom_metadata == {'project': 'x', 'of': 'step', 'at': 3}
    item = t5ckpt.open_checkpoint(tmp_path / 'run/3/default')
    assert (item.metrics, item.custom_metadata) == (view.metrics, {'of': 'step', 'at': 3})
    found = t5ckpt.open_run(tmp_path / 'run')
    assert {each.step: each.metrics['loss'] for each in found.summaries()} == LOSSES
    assert found.summaries()[-1].created == round(known.commit_timestamp_nsecs / 10**9, 3)
    assert found.metrics(2) == {'loss': 0.2, 'eval/acc': 0.5}
    assert found.to_pandas()['loss'].to_dict() == LOSSES


def test_what_the_first_version_of_the_new_interface_writes(tmp_path):
    with v1.training.Checkpointer(tmp_path / 'run', custom_metadata={'project': 'x'}) as checkpointer:
        checkpointer.save(7, tree(7), metrics={'loss': 0.25}, custom_metadata={'at': 7})
    view = t5ckpt.open_checkpoint(tmp_path / 'run')
    assert view.metrics == {'loss': 0.25}
    assert view.custom_metadata == {'project': 'x', 'at': 7}
    (tmp_path / 'run/7/state').rename(tmp_path / 'run/7/pytree')
    assert set(t5ckpt.open_checkpoint(tmp_path / 'run')) == {'params/w', 'step'}


def test_what_versions_without_metadata_of_steps_wrote(tmp_path):
    save_run(tmp_path / 'run')
    for step in LOSSES:
        (tmp_path / f'run/{step}/_CHECKPOINT_METADATA').unlink()
    (tmp_path / 'run/metadata/_ROOT_METADATA').unlink()
    view = t5ckpt.open_checkpoint(tmp_path / 'run')
    assert (view.metrics, view.custom_metadata) == ({'loss': 0.4, 'eval/acc': 0.5}, {})
    assert t5ckpt.open_run(tmp_path / 'run').best_step('loss', 'min') == 2


def test_the_best_step_in_python_and_on_the_command_line(run):
    assert t5ckpt.open_run(run).best_step('loss', 'min') == 2
    with t5ckpt.Checkpointer(tree(0), checkpoints_dir=run) as ck:
        assert ck.best_step('loss', 'min') == 2
        assert ck.metrics() == {'loss': 0.4, 'eval/acc': 0.5}
        ck.save(tree(4), step=4, metrics={'loss': 0.1})
        assert ck.best_step('loss', 'min') == 4
        with pytest.raises(ValueError, match="no step has the metric 'accuracy'; there are: eval/acc, loss"):
            ck.best_step('accuracy', 'max')
    assert CliRunner().invoke(app, ['best', str(run), 'loss', '--mode', 'max']).output == '1\n'
    listed = CliRunner().invoke(app, ['ls', str(run)]).output
    assert re.search(r'^ +2 .* orbax .* 0\.2\b', listed, re.MULTILINE)
    shown = json.loads(CliRunner().invoke(app, ['show', f'{run}@best:loss:max', '--json']).output)
    assert '/1' in shown['path']


def test_a_save_on_improvement_starts_from_the_best_of_orbax(run):
    policy = t5ckpt.SaveOnImprovement('loss', 'min')
    with t5ckpt.Checkpointer(tree(0), checkpoints_dir=run, save_policy=policy) as ck:
        assert ck.maybe_save(4, tree(4), metrics={'loss': 0.3}) is None
        assert ck.maybe_save(5, tree(5), metrics={'loss': 0.19}) is not None


def test_a_step_whose_metrics_do_not_decode_stays_and_is_restored(run, caplog):
    (run / '1/metrics/metrics').write_text('{"loss": ')
    assert t5ckpt.open_run(run).best_step('loss', 'max') == 3
    assert 'its metrics are not read' in caplog.text
    (summary, *_) = t5ckpt.open_run(run).summaries()
    assert (summary.state, summary.metrics) == ('complete', {})
    assert 'metrics/metrics does not decode' in summary.reason
    assert t5ckpt.open_checkpoint(run, 1)['params/w'][0, 0] == 1


def test_metrics_of_tensorboard_count_for_steps_of_orbax(tmp_path):
    tensorboard = pytest.importorskip('tensorboardX', reason='writes the events')
    with ocp.CheckpointManager(tmp_path / 'run') as manager:
        for step in (1, 2):
            manager.save(step, args=ocp.args.StandardSave(tree(step)))
    with tensorboard.SummaryWriter(str(tmp_path / 'run/train')) as writer:
        for step, value in ((1, 0.5), (2, 0.7)):
            writer.add_scalar('loss', value, step)
    assert t5ckpt.open_run(tmp_path / 'run').best_step('train/loss', 'min') == 1
    source = TensorBoardMetrics(tmp_path / 'run')
    keep = {'keep_policy': t5ckpt.KeepBest(1, 'train/loss', 'max'), 'metric_source': source}
    with t5ckpt.Checkpointer(tree(0), checkpoints_dir=tmp_path / 'run', **with_options(**keep)) as ck:
        assert ck.best_step() == 2
        assert ck.metrics(1) == {'train/loss': 0.5}


@pytest.mark.parametrize('text', ['[1]', '{"a": ', '"' + 'x' * 10, '[' * 100_000, '\xff'])
def test_files_that_are_not_objects(text):
    with pytest.raises(errors.CorruptCheckpointError, match='here does not decode'):
        orbax_object(text.encode('latin-1'), 'here')


def test_values_that_are_no_numbers_are_left_out():
    nested = {'a': 1}
    for _ in range(100):
        nested = {'b': nested}
    metrics = {'loss': float('nan'), 'big': 10**400, 'list': [1], 'none': None, 'deep': nested, 'flag': True}
    found = orbax_facts({'commit_timestamp_nsecs': 'soon', 'custom_metadata': [1]}, metrics, {})
    assert set(found.metrics) == {'loss', 'flag', f'deep/{"b/" * 100}a'}
    assert (found.created_unix, found.custom_metadata, found.knows_tree) == (None, {}, False)


def test_prune_refuses_a_metric_that_only_steps_of_orbax_have(run):
    """It would rank the steps that it may delete by a metric that none of them has."""
    state = {'params': {'w': np.ones((4, 4), np.float32)}}
    with t5ckpt.Checkpointer(state, checkpoints_dir=run) as ck:
        for step in (4, 5, 6):
            ck.save(state, step=step, metrics={'acc': 0.5})
    words = ['prune', str(run), '--best', 'loss', '--mode', 'min', '--keep', '1', '--yes']
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert "no step has the metric 'loss'" in done.output
    assert t5ckpt.all_steps(run) == [1, 2, 3, 4, 5, 6]
