"""Writes errors.md: makes each of the commonest mistakes and notes exactly what t5ckpt says.

    python docs/make_errors.py            rewrites the page
    python docs/make_errors.py --print    prints it

Each function below is one mistake. Its docstring is the heading, its body what the page shows, and it has to raise. They
run in order, each in a directory of its own, in which `run` holds step 3 of STATE. A server on the loopback takes the place of
S3: it has no bucket, and forbids the access to `private`.
"""

from __future__ import annotations

import http.server
import inspect
import logging
import os
import pathlib
import re
import sys
import tempfile
import textwrap
import threading

import jax
import jax.numpy as jnp

import t5ckpt

PAGE = pathlib.Path(__file__).with_name('errors.md')
MISTAKES = []

HEAD = """\
# Errors

Common error messages, each with code that causes it and the page that has the fix. Each error of t5ckpt is a
`t5ckpt.errors.T5CkptError` and a builtin exception; the [list of classes](api.md#errors) has both. Invalid arguments
raise `ValueError` or `KeyError`. [Many hosts](many-hosts.md#errors) lists the errors of several processes, and
[the command line](looking.md#the-exit-code-of-a-verb) the exit codes. `docs/make_errors.py` writes this page.

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


def mistake(cure=''):
    """Lists a mistake, with links to the pages on its cure, unless the message names one."""

    def listed(function):
        MISTAKES.append((function, cure))
        return function

    return listed


def restore(model, **options):
    return t5ckpt.Checkpointer(model, checkpoints_dir='run').restore(**options)


# --- nothing there --------------------------------------------------------------------------------------------------------


@mistake('[Which steps a run has](concepts.md#which-steps-a-run-has)')
def no_run():
    """A run without checkpoints"""
    t5ckpt.Checkpointer(state(), checkpoints_dir='runs').restore()


@mistake(
    '[Migration](migration.md), [other trainers](other-trainers.md), [safetensors](changed-models.md#weights-from-safetensors)'
)
def another_tool():
    """Another program's directory"""
    pathlib.Path('llama').mkdir()
    pathlib.Path('llama/pytorch_model.bin').touch()
    t5ckpt.open_checkpoint('llama')


@mistake('[Names and patterns](looking.md#names-and-patterns)')
def no_leaf():
    """A misspelt name of a leaf"""
    t5ckpt.open_checkpoint('run')['params/dense/kernels']


# --- another model --------------------------------------------------------------------------------------------------------


@mistake()
def wider():
    """A leaf of another shape"""
    restore({'params': {'dense': {'kernel': jnp.ones((256, 512)), 'bias': jnp.zeros(512)}}, 'step': 0})


@mistake()
def renamed():
    """A renamed layer"""
    restore({'params': {'proj': state()['params']['dense']}, 'step': 0})


@mistake()
def new_leaf():
    """A leaf that the checkpoint does not have"""
    restore({**state(), 'ema_decay': 0.999})


@mistake()
def weights_only():
    """A restore of the weights alone"""
    restore({'params': state()['params']})


@mistake()
def another_kind():
    """A leaf of another kind of dtype"""
    restore({**state(), 'step': 0.0})


# --- what is saved --------------------------------------------------------------------------------------------------------


@mistake('[Save and restore](start.md#save-and-restore-in-a-training-loop)')
def stepless():
    """A state without a step"""
    params = state()['params']
    t5ckpt.Checkpointer(params, checkpoints_dir='run').save(params)


@mistake('[Equinox](frameworks.md#equinox), whose modules have functions as leaves')
def function_leaf():
    """A leaf that is not an array"""
    bad = {**state(), 'apply_fn': jnp.tanh}
    t5ckpt.Checkpointer(bad, checkpoints_dir='run').save(bad, step=4)


@mistake('[What JAX does not protect](concepts.md#what-jax-does-not-protect)')
def donated():
    """A state that was donated before the save"""
    old = jax.tree.map(jnp.asarray, state())
    new = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)(old)
    t5ckpt.Checkpointer(new, checkpoints_dir='run').save(old, step=4)


@mistake('[The loop](cookbook.md#the-loop)')
def closed():
    """A save after the `with` block"""
    with t5ckpt.Checkpointer(state(), checkpoints_dir='run') as checkpointer:
        pass
    checkpointer.save_async(state(), step=4)


# --- storage --------------------------------------------------------------------------------------------------------------


@mistake('[NFS, Lustre and other file systems](storage.md#nfs-lustre-and-other-file-systems)')
def not_writable():
    """A directory that cannot be created"""
    t5ckpt.Checkpointer(state(), checkpoints_dir='/proc/run').save(state())


@mistake('[The loop](cookbook.md#the-loop)')
def unseen():
    """A failed save in the background"""
    pathlib.Path('file').touch()
    with t5ckpt.Checkpointer(state(), checkpoints_dir='file/run') as checkpointer:
        checkpointer.save_async(state())


@mistake('[Damaged checkpoints](damage.md)')
def truncated():
    """A truncated manifest"""
    os.truncate('run/checkpoint_3/checkpoint', 100)
    restore(state())


@mistake('[Damaged checkpoints](damage.md)')
def chunk_gone():
    """A missing chunk"""
    os.remove('run/checkpoint_3/params.dense.kernel/0.0')
    restore(state())


@mistake('[S3 and compatible services](storage.md#s3-and-compatible-services)')
def no_bucket():
    """A bucket that does not exist"""
    t5ckpt.open_checkpoint('s3://wieghts/run')


@mistake('[S3 and compatible services](storage.md#s3-and-compatible-services)')
def forbidden():
    """A bucket without permission"""
    t5ckpt.open_checkpoint('s3://private/run')


@mistake('[When a server fails](storage.md#when-a-server-fails)')
def no_server():
    """A server that cannot be reached"""
    t5ckpt.latest_step('s3://weights/run', storage_options={'endpoint': 'http://127.0.0.1:9', 'retry_seconds': 2})


# --- the page -------------------------------------------------------------------------------------------------------------


def shown(function) -> str:
    """A function's body, without its docstring, as a reader would type it."""
    lines = inspect.getsource(function).splitlines()
    body = lines[next(n for n, line in enumerate(lines) if line.lstrip().startswith('"""')) + 1 :]
    text = textwrap.dedent('\n'.join(body))
    return re.sub(r'(?<![.\w])restore\((.*)\)$', _spelt_out, text, flags=re.MULTILINE)


class _Server(http.server.BaseHTTPRequestHandler):
    """Answers as S3 does for a bucket that does not exist, and for one without permission."""

    def do_GET(self):
        status, code = (403, 'AccessDenied') if self.path.startswith('/private') else (404, 'NoSuchBucket')
        body = f'<Error><Code>{code}</Code><Message>{code}</Message></Error>'.encode()
        self.send_response(status)
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815 - the server calls it by this name

    def log_message(self, *_):
        """Is silent."""


def _spelt_out(call: re.Match) -> str:
    model, _, options = call[1].rpartition(', ') if re.search(r', \w+=', call[1]) else (call[1], '', '')
    return f"t5ckpt.Checkpointer({model}, checkpoints_dir='run').restore({options})"


def said(function, work: pathlib.Path) -> str:
    """What a mistake raises, with the directory it ran in as /data."""
    try:
        function()
    except Exception as error:  # noqa: BLE001 - whatever it is
        text = error.args[0] if isinstance(error, KeyError) else str(error)
        text = re.sub(r'after \d+ ms', 'after 0 ms', text)
        text = re.sub(r'failed for \d+ s;', 'failed for 2 s;', text)
        return f'{type(error).__name__}: {text}'.replace(str(work), '/data')
    raise AssertionError(f'{function.__name__} is no longer a mistake')


def page() -> str:
    logging.getLogger('t5ckpt').setLevel(logging.CRITICAL)
    setup_code = inspect.getsource(state) + '\n' + shown(setup) + '\n'
    parts = [HEAD.format(setup=setup_code)]
    home = pathlib.Path.cwd()
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), _Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ['AWS_ENDPOINT_URL_S3'] = f'http://127.0.0.1:{server.server_port}'
    os.environ |= {'AWS_ACCESS_KEY_ID': 'key', 'AWS_SECRET_ACCESS_KEY': 'secret'}
    for number, (function, cure) in enumerate(MISTAKES, 1):
        with tempfile.TemporaryDirectory() as directory:
            work = pathlib.Path(directory).resolve()
            os.chdir(work)
            try:
                setup()
                text = said(function, work)
            finally:
                os.chdir(home)
        see = f'\nSee {cure}.\n' if cure else ''
        parts.append(f'## {number}. {function.__doc__}\n\n```py\n{shown(function)}\n```\n\n```text\n{text}\n```\n{see}')
    return '\n'.join(parts)


if __name__ == '__main__':
    if sys.argv[1:] == ['--print']:
        sys.stdout.write(page())
    else:
        PAGE.write_text(page(), encoding='utf-8')
