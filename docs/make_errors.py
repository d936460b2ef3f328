"""Writes errors.md: makes each of the commonest mistakes and notes exactly what t5ckpt says.

    python docs/make_errors.py            rewrites the page
    python docs/make_errors.py --print    prints it

Each function below is one mistake. Its docstring is the heading, its body what the page shows, and it has to raise. They
run in order, each in a directory of its own, in which `run` holds step 3 of STATE.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import pathlib
import re
import sys
import tempfile
import textwrap

import jax
import jax.numpy as jnp

import t5ckpt

PAGE = pathlib.Path(__file__).with_name('errors.md')
MISTAKES = []

HEAD = """\
# Errors

Common mistakes, and the error message of each. An error of t5ckpt is a `t5ckpt.errors.T5CkptError`, and also the builtin that
callers of T5X catch ([the tree](api.md#errors)). Invalid arguments raise Python's own `ValueError` and `KeyError`.
[Changed models](changed-models.md) describes what to do if checkpoint and template differ, and [many hosts](many-hosts.md) has
the errors of jobs of several processes. `docs/make_errors.py` makes these mistakes and writes this page.

All examples use this run in `/data`:

```py
{setup}```
"""


def state():
    return {'params': {'dense': {'kernel': jnp.ones((256, 256)), 'bias': jnp.zeros(256)}}, 'step': 3}


def setup():
    """The run that all mistakes have."""
    with t5ckpt.Checkpointer(state(), checkpoints_dir='run') as checkpointer:
        checkpointer.save(state())


def mistake(function):
    MISTAKES.append(function)
    return function


def restore(model, **options):
    return t5ckpt.Checkpointer(model, checkpoints_dir='run').restore(**options)


# --- nothing there --------------------------------------------------------------------------------------------------------


@mistake
def no_run():
    """Restore where nothing has been saved"""
    t5ckpt.Checkpointer(state(), checkpoints_dir='runs').restore()


@mistake
def no_step():
    """A step that is not there"""
    restore(state(), step=30)


@mistake
def another_tool():
    """A directory of something else"""
    pathlib.Path('llama').mkdir()
    pathlib.Path('llama/pytorch_model.bin').touch()
    t5ckpt.open_checkpoint('llama')


@mistake
def no_leaf():
    """A leaf's name is misspelt"""
    t5ckpt.open_checkpoint('run')['params/dense/kernels']


@mistake
def unserved():
    """A storage that is not served"""
    t5ckpt.open_checkpoint('ftp://host/run')


# --- another model --------------------------------------------------------------------------------------------------------


@mistake
def wider():
    """The model is wider than the one that was saved"""
    restore({'params': {'dense': {'kernel': jnp.ones((256, 512)), 'bias': jnp.zeros(512)}}, 'step': 0})


@mistake
def renamed():
    """A layer was renamed"""
    restore({'params': {'proj': state()['params']['dense']}, 'step': 0})


@mistake
def new_leaf():
    """The model has a leaf that the checkpoint lacks"""
    restore({**state(), 'ema_decay': 0.999})


@mistake
def weights_only():
    """Only the weights are wanted"""
    restore({'params': state()['params']})


@mistake
def another_kind():
    """A leaf has another kind of dtype"""
    restore({**state(), 'step': 0.0})


@mistake
def no_rule():
    """A rule of the assignment map matches nothing"""
    rename = functools.partial(t5ckpt.apply_assignment_map, assignment_map=[('params/proj/(.*)', r'params/dense/\1')])
    restore(state(), state_transformation_fns=[rename])


@mistake
def wrong_rule():
    """A rule leads to a leaf that the checkpoint lacks"""
    rename = functools.partial(t5ckpt.apply_assignment_map, assignment_map=[('params/dense/(.*)', r'dense/\1')])
    restore(state(), state_transformation_fns=[rename])


# --- what is saved --------------------------------------------------------------------------------------------------------


@mistake
def stepless():
    """The state names no step"""
    params = state()['params']
    t5ckpt.Checkpointer(params, checkpoints_dir='run').save(params)


@mistake
def function_leaf():
    """Something in the state is no array"""
    bad = {**state(), 'apply_fn': jnp.tanh}
    t5ckpt.Checkpointer(bad, checkpoints_dir='run').save(bad, step=4)


@mistake
def donated():
    """The state was donated before it was saved"""
    old = jax.tree.map(jnp.asarray, state())
    new = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)(old)
    t5ckpt.Checkpointer(new, checkpoints_dir='run').save(old, step=4)


@mistake
def two_names():
    """Two keys that are the same as text"""
    bad = {'layers': {1: jnp.ones(2), '1': jnp.ones(2)}}
    t5ckpt.Checkpointer(bad, checkpoints_dir='run').save(bad, step=4)


@mistake
def closed():
    """A save after the end of the with block"""
    with t5ckpt.Checkpointer(state(), checkpoints_dir='run') as checkpointer:
        pass
    checkpointer.save_async(state(), step=4)


# --- options --------------------------------------------------------------------------------------------------------------


@mistake
def positional_directory():
    """The directory is given in the place of the partitioner"""
    t5ckpt.Checkpointer(state(), 'run')


@mistake
def keep_none():
    """`keep=0`"""
    t5ckpt.Checkpointer(state(), checkpoints_dir='run', keep=0)


@mistake
def integer_weights():
    """A cast to integers"""
    t5ckpt.Checkpointer(state(), checkpoints_dir='run', restore_dtype=jnp.int8)


# --- storage --------------------------------------------------------------------------------------------------------------


@mistake
def not_writable():
    """A place where nothing can be written"""
    t5ckpt.Checkpointer(state(), checkpoints_dir='/proc/run').save(state())


@mistake
def unseen():
    """A save in the background failed, and nobody asked"""
    pathlib.Path('file').touch()
    with t5ckpt.Checkpointer(state(), checkpoints_dir='file/run') as checkpointer:
        checkpointer.save_async(state())


@mistake
def truncated():
    """The manifest was cut off when it was copied"""
    os.truncate('run/checkpoint_3/checkpoint', 100)
    restore(state())


@mistake
def chunk_gone():
    """A chunk file is missing"""
    os.remove('run/checkpoint_3/params.dense.kernel/0.0')
    restore(state())


@mistake
def chunk_short():
    """A chunk file was cut off"""
    os.truncate('run/checkpoint_3/params.dense.kernel/0.0', 1000)
    restore(state())


# --- the page -------------------------------------------------------------------------------------------------------------


def shown(function) -> str:
    """A function's body, without its docstring, as a reader would type it."""
    lines = inspect.getsource(function).splitlines()
    body = lines[next(n for n, line in enumerate(lines) if line.lstrip().startswith('"""')) + 1 :]
    text = textwrap.dedent('\n'.join(body))
    return re.sub(r'(?<![.\w])restore\((.*)\)$', _spelt_out, text, flags=re.MULTILINE)


def _spelt_out(call: re.Match) -> str:
    model, _, options = call[1].rpartition(', ') if re.search(r', \w+=', call[1]) else (call[1], '', '')
    return f"t5ckpt.Checkpointer({model}, checkpoints_dir='run').restore({options})"


def said(function, work: pathlib.Path) -> str:
    """What a mistake raises, with the directory it ran in as /data."""
    try:
        function()
    except Exception as error:  # noqa: BLE001 - whatever it is
        text = error.args[0] if isinstance(error, KeyError) else str(error)
        return f'{type(error).__name__}: {text}'.replace(str(work), '/data')
    raise AssertionError(f'{function.__name__} is no mistake any more')


def page() -> str:
    logging.getLogger('t5ckpt').setLevel(logging.CRITICAL)
    setup_code = inspect.getsource(state) + '\n' + shown(setup) + '\n'
    parts = [HEAD.format(setup=setup_code)]
    home = pathlib.Path.cwd()
    for number, function in enumerate(MISTAKES, 1):
        with tempfile.TemporaryDirectory() as directory:
            work = pathlib.Path(directory).resolve()
            os.chdir(work)
            try:
                setup()
                text = said(function, work)
            finally:
                os.chdir(home)
        parts.append(f'## {number}. {function.__doc__}\n\n```py\n{shown(function)}\n```\n\n```text\n{text}\n```\n')
    return '\n'.join(parts)


if __name__ == '__main__':
    if sys.argv[1:] == ['--print']:
        sys.stdout.write(page())
    else:
        PAGE.write_text(page(), encoding='utf-8')
