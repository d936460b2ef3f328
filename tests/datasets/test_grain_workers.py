"""Iterators of Grain whose batches come from worker processes continue after SIGKILL."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys
import grain.python as grain, jax.numpy as jnp, numpy as np, t5ckpt
from absl import app

def loader():
    sampler = grain.IndexSampler(num_records=200, shard_options=grain.NoSharding(), shuffle=True, num_epochs=1, seed=3)
    batch = [grain.Batch(4)]
    return iter(grain.DataLoader(data_source=range(200), sampler=sampler, operations=batch, worker_count=2))

def dataset():
    batches = grain.MapDataset.source(np.arange(200)).seed(1).shuffle().batch(4).to_iter_dataset()
    return iter(batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=2)))

def main(argv):
    iterator, init = {'loader': loader, 'dataset': dataset}[argv[1]](), lambda: {'step': jnp.int32(0)}
    with t5ckpt.Checkpointer(init(), checkpoints_dir=argv[2], dataset_iterator=iterator, keep=2) as checkpointer:
        begin = int(t5ckpt.restore_or_init(checkpointer, init)['step'])
        for step in range(begin + 1, 11):
            print(step, np.asarray(next(iterator)).tolist(), flush=True)
            checkpointer.save({'step': jnp.int32(step)})
            if len(argv) > 3 and step == 5:
                os.kill(os.getpid(), signal.SIGKILL)

if __name__ == '__main__':
    app.run(main)
"""


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['loader', 'dataset'])
def test_a_run_with_workers_continues_after_sigkill(tmp_path, kind):
    program = tmp_path / 'program.py'
    program.write_text(PROGRAM)

    def printed(run, *words):
        command = [sys.executable, str(program), kind, str(tmp_path / run), *words]
        environment = os.environ | {'JAX_PLATFORMS': 'cpu'}
        # The workers outlive a killed program, and a pipe would stay open.
        with (tmp_path / 'printed').open('w+') as out:
            process = subprocess.Popen(command, env=environment, stdout=out, start_new_session=True)
            process.wait(300)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            out.seek(0)
            return out.read()

    whole = printed('whole')
    assert len(whole.splitlines()) == 10
    assert printed('broken', 'kill') + printed('broken') == whole
