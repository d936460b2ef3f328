"""tf.data and t5ckpt, both ways, and TensorBoard's events: python tf_data.py <unpacked golden case 7> <empty directory>."""

import os
import pathlib
import sys

os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'

import numpy as np
import pytest
import tensorflow as tf

import t5ckpt
from t5ckpt.errors import DatasetStateError, UnsupportedLeafError
from t5ckpt.training import MetricWriter

GOLDEN, WORK = map(pathlib.Path, sys.argv[1:])
STATE = {'w': np.ones(3, np.float32)}


def squares() -> tf.data.Dataset:
    """The pipeline of golden case 7."""
    return tf.data.Dataset.range(100).map(lambda x: x * x).batch(4)


def checkpointer(run: pathlib.Path, iterator: object) -> t5ckpt.Checkpointer:
    """Of a run with this iterator."""
    return t5ckpt.Checkpointer(STATE, checkpoints_dir=run, dataset_iterator=iterator)


def what_t5x_wrote_is_read() -> None:
    """After the checkpoint of step 6 the next batch is [400, 441, 484, 529] (README.txt of the case)."""
    template = t5ckpt.load_t5x_checkpoint(GOLDEN, step=6)
    for step in (5, 6):
        iterator = iter(squares())
        with t5ckpt.Checkpointer(template, checkpoints_dir=GOLDEN, dataset_iterator=iterator) as ck:
            ck.restore(step=step)
        np.testing.assert_array_equal(next(iterator), [400, 441, 484, 529])


def what_is_written_t5x_reads() -> None:
    """T5X reads with tf.train.Checkpoint(ds=iterator).read(prefix).assert_consumed()."""
    iterator = iter(squares())
    for _ in range(3):
        next(iterator)
    with checkpointer(WORK / 't5x', iterator) as ck:
        ck.save(STATE, step=1)
    prefix = str(WORK / 't5x' / 'checkpoint_1' / 'train_ds-000-of-001')
    golden = str(GOLDEN / 'checkpoint_6' / 'train_ds-000-of-001')
    # The names; the state's shape depends on what runs ahead.
    assert dict(tf.train.list_variables(prefix)).keys() == dict(tf.train.list_variables(golden)).keys()
    again = iter(squares())
    tf.train.Checkpoint(ds=again).read(prefix).assert_consumed()
    np.testing.assert_array_equal(next(again), next(iterator))


def shuffled_pipelines_go_on() -> None:
    """A shuffle buffer and prefetching are in the state, too; numpy iterators count."""
    pipeline = tf.data.Dataset.range(1000).shuffle(100, seed=1).repeat().batch(7).prefetch(2)
    for kind in (iter, tf.data.Dataset.as_numpy_iterator):
        run = WORK / f'shuffle-{kind.__name__}'
        iterator = kind(pipeline)
        for _ in range(5):
            next(iterator)
        with checkpointer(run, iterator) as ck:
            pending = ck.save_async(STATE, step=1)
            expected = [np.asarray(next(iterator)) for _ in range(300)]
            pending.result()
        again = kind(pipeline)
        with checkpointer(run, again) as ck:
            ck.restore()
        for batch in expected:
            np.testing.assert_array_equal(next(again), batch)


def several_iterators_go_on_together() -> None:
    """Those of a tf.train.Checkpoint, each at its own position; a pipeline that differs is named."""

    def make(size: int) -> tf.train.Checkpoint:
        pipeline = tf.data.Dataset.range(1000).shuffle(size, seed=1).repeat()
        return tf.train.Checkpoint(train=iter(pipeline), eval=iter(pipeline.batch(3)))

    both = make(100)
    with checkpointer(WORK / 'several', both) as ck:
        for step in (1, 2):
            for _ in range(5 * step):
                next(both.train)
            next(both.eval)
            ck.save(STATE, step=step)
    expected = [(np.asarray(next(both.train)), np.asarray(next(both.eval))) for _ in range(20)]
    again = make(100)
    with checkpointer(WORK / 'several', again) as ck:
        ck.restore()
    for train, held_out in expected:
        np.testing.assert_array_equal(next(again.train), train)
        np.testing.assert_array_equal(next(again.eval), held_out)
    alone = tf.train.Checkpoint(train=iter(squares()))
    with checkpointer(WORK / 'several', alone) as ck, pytest.raises(DatasetStateError, match='same pipeline'):
        ck.restore()
    with pytest.raises(UnsupportedLeafError, match=r'tf\.train\.Checkpoint\(train=\.\.\., eval=\.\.\.\)'):
        checkpointer(WORK / 'dict', {'train': both.train, 'eval': both.eval})


def what_cannot_be_saved_gets_advice() -> None:
    """A stateful pipeline, as T5X says it; another pipeline; a dataset; none of them leaves anything behind."""
    iterator = iter(tf.data.Dataset.range(10).map(lambda _: tf.random.uniform([])))
    with checkpointer(WORK / 'stateful', iterator) as ck, pytest.raises(DatasetStateError) as caught:
        ck.save(STATE, step=1)
    for words in ('Input pipeline must be stateless', 'Cache stateful steps offline', 'RandomUniform'):
        assert words in str(caught.value)
    assert t5ckpt.all_steps(WORK / 'stateful') == []
    for iterator in (iter(tf.data.Dataset.range(3).shuffle(2)), iter(squares().cache())):
        with checkpointer(WORK / 't5x', iterator) as ck, pytest.raises(DatasetStateError, match='same pipeline'):
            ck.restore()
    with pytest.raises(UnsupportedLeafError, match=r'iter\(dataset\)'):
        checkpointer(WORK / 'dataset', squares())


def events_are_read() -> None:
    """What MetricWriter writes, with its framing, checksums and values, by the library that the format is of."""
    with MetricWriter(WORK / 'events') as writer:
        for step in range(3):
            writer.write(step, {'loss': step / 2, 'weights': np.arange(4.0)})
    (path,) = tf.io.gfile.glob(str(WORK / 'events' / '*'))
    events = [tf.compat.v1.Event.FromString(record.numpy()) for record in tf.data.TFRecordDataset(path)]
    values = [(event.step, value) for event in events for value in event.summary.value]
    assert [(step, value.simple_value) for step, value in values if value.tag == 'loss'] == [(0, 0), (1, 0.5), (2, 1)]
    assert [value.histo.sum for _, value in values if value.tag == 'weights'] == [6, 6, 6]


what_t5x_wrote_is_read()
what_is_written_t5x_reads()
shuffled_pipelines_go_on()
several_iterators_go_on_together()
what_cannot_be_saved_gets_advice()
events_are_read()
