"""The memory that saves and restores take stays within the byte budget, as the kernel measures it in a process of its own."""

import json
import textwrap

import pytest
from support import forked

MB = 10**6
BUDGET = 16 * MB
#: Threads, modules and connections; the state is 128 MB.
SLACK = 40 * MB

PROGRAM = """
    import json, pathlib, sys
    import jax, numpy as np
    import t5ckpt

    run, compression, budget_gb = sys.argv[1], sys.argv[2] or None, float(sys.argv[3])
    rng = np.random.default_rng(0)

    def resident(resets=False):
        "The largest resident size in bytes; resets it first."
        if resets:
            pathlib.Path('/proc/self/clear_refs').write_text('5')
        [line] = [line for line in pathlib.Path('/proc/self/status').read_text().splitlines() if line.startswith('VmHWM')]
        return int(line.split()[1]) * 1024

    def grown(call):
        before = resident(resets=True)
        result = call()
        return resident() - before, result

    def state_of(scale):
        return {str(number): rng.standard_normal(2**21, dtype=np.float32) * scale for number in range(16)}

    options = t5ckpt.CheckpointerOptions(compression=compression, chunk_bytes=2**21, restore_concurrent_gb=budget_gb)
    # What is loaded once.
    small = {'w': rng.standard_normal(2**19, dtype=np.float32), 'x': jax.numpy.arange(2**18)}
    with t5ckpt.Checkpointer(small, checkpoints_dir=run + '-small', options=options) as ck:
        ck.save(small, step=0)
        ck.save_async(small, step=1).result()
        ck.restore()
    state, found = state_of(1), {}
    with t5ckpt.Checkpointer(state, checkpoints_dir=run, options=options) as ck:
        found['save'], _ = grown(lambda: ck.save(state, step=0, concurrent_gb=budget_gb))
        found['save_async'], _ = grown(lambda: ck.save_async(state, step=1, concurrent_gb=budget_gb).result())
    template = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in state.items()}
    nbytes = sum(leaf.nbytes for leaf in state.values())
    del state
    with t5ckpt.Checkpointer(template, checkpoints_dir=run, options=options) as ck:
        taken, restored = grown(ck.restore)
        found['restore'] = taken - nbytes
        del restored
    view = t5ckpt.open_checkpoint(run)
    found['slices'], _ = grown(lambda: [view[name][5:9] for name in template])
    found['verify'], _ = grown(lambda: t5ckpt.verify(run, full=True))
    print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize('compression', ['', 'lz4'])
@pytest.mark.parametrize('place', ['disk', 's3', 'gs'])
def test_what_a_call_takes_stays_within_the_budget(tmp_path, request, place, compression):
    bucket = None if place == 'disk' else request.getfixturevalue(place)
    run = str(tmp_path / 'run') if bucket is None else bucket.url()
    done = forked.run(textwrap.dedent(PROGRAM), run, compression, BUDGET / 10**9)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert {call: taken // MB for call, taken in found.items() if taken > BUDGET + SLACK} == {}, found
