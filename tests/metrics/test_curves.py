"""All scalars of a run's event files, as TensorBoard's own writers leave them."""

import numpy as np
import tensorboardX

from t5ckpt.metrics.curves import curves
from t5ckpt.metrics.tensorboard import TensorBoardMetrics
from t5ckpt.storage import open_storage


def write(directory, values, tag='loss'):
    with tensorboardX.SummaryWriter(str(directory)) as writer:
        for step, value in values.items():
            writer.add_scalar(tag, value, step, walltime=1.7e9 + step)


def test_curves_are_named_as_metrics_are(tmp_path):
    write(tmp_path, {1: 0.5}, 'alone')
    write(tmp_path / 'train', {2: 0.25, 1: 0.5})
    write(tmp_path / 'eval/glue', {2: 0.125}, 'accuracy')
    write(tmp_path / 'checkpoint_2', {2: 0.125}, 'in_a_step')
    found = {each.name: each for each in curves(open_storage(tmp_path))}
    assert set(found) == {'alone', 'train/loss', 'eval/glue/accuracy'}
    assert found['train/loss'].points == ((1, 1.7e9 + 1, 0.5), (2, 1.7e9 + 2, 0.25))
    for name in ('train/loss', 'eval/glue/accuracy'):
        assert TensorBoardMetrics(tmp_path).by_step(name, [2]) == {2: found[name].points[-1][2]}


def test_long_curves_are_thinned_and_keep_their_last_point(tmp_path):
    write(tmp_path / 'train', {step: step / 4 for step in range(2345)})
    (curve,) = curves(open_storage(tmp_path))
    assert curve.count == 2345
    assert len(curve.points) <= 1000
    assert curve.points[-1] == (2344, 1.7e9 + 2344, 586.0)


def test_images_and_damage_are_left_out(tmp_path):
    with tensorboardX.SummaryWriter(str(tmp_path / 'train')) as writer:
        writer.add_image('picture', np.random.default_rng(0).integers(0, 255, (3, 200, 200), np.uint8), 1)
        writer.add_scalar('loss', 0.5, 1)
    (tmp_path / 'train/events.out.tfevents.2.x').write_bytes(b'not events at all, but long enough for a header')
    assert [each.name for each in curves(open_storage(tmp_path))] == ['train/loss']


def test_a_run_without_events_and_one_elsewhere(tmp_path):
    assert curves(open_storage(tmp_path)) == []
    assert curves(open_storage('memory://curves/run')) == []
