"""In an environment made from nothing, in a copy of the checkout: what the first pages tell a newcomer to type works."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from support.pages import blocks_of, python_of

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = ('docs/start.md', 'README.md', 'docs/concepts.md', 'docs/changed-models.md')
LEFT_OUT = shutil.ignore_patterns('.*', 'build', '*.egg-info', '__pycache__', 'demo_run')

pytestmark = pytest.mark.slow


def run(command: list[str], environment: pathlib.Path, directory: pathlib.Path) -> None:
    hidden = {'PYTHONPATH', 'PYTHONHOME', 'VIRTUAL_ENV', 'XLA_FLAGS', 'JAX_PLATFORMS'}
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    env['PATH'] = f'{environment / "bin"}:/usr/local/bin:/usr/bin:/bin'
    pins = ROOT / 'constraints' / 'py{}{}.txt'.format(*sys.version_info)
    env |= {'PIP_CONSTRAINT': str(pins), 'PIP_DISABLE_PIP_VERSION_CHECK': '1', 'MPLBACKEND': 'Agg'}
    # What is never imported need not be compiled.
    env['PIP_NO_COMPILE'] = '1'
    done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope='module')
def checkout(tmp_path_factory) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(ROOT, tmp_path_factory.mktemp('newcomer') / 't5ckpt', ignore=LEFT_OUT))


@pytest.fixture(scope='module')
def environment(checkout) -> pathlib.Path:
    """With nothing in it but what the start page says to install."""
    environment = checkout.parent / 'environment'
    made = subprocess.run([sys.executable, '-m', 'venv', str(environment)], capture_output=True, check=False)
    if made.returncode != 0:
        # A distribution may ship Python without ensurepip; this environment's pip then fills the new one.
        subprocess.run([sys.executable, '-m', 'venv', '--clear', '--without-pip', str(environment)], check=True)
        pip = [sys.executable, '-m', 'pip', '--python', str(environment / 'bin' / 'python'), 'install', '-q', 'pip']
        subprocess.run(pip, check=True)
    page = (checkout / 'docs' / 'start.md').read_text(encoding='utf-8')
    (install,) = ['\n'.join(lines) for language, _, lines in blocks_of(page) if language == 'sh']
    assert install.startswith('pip install')
    run(['bash', '-euo', 'pipefail', '-c', install], environment, checkout)
    return environment


@pytest.mark.parametrize('name', PAGES)
def test_page(environment, checkout, tmp_path, name):
    program = tmp_path / 'page.py'
    program.write_text(python_of((checkout / name).read_text(encoding='utf-8')), encoding='utf-8')
    (tmp_path / 'testdata').symlink_to(checkout / 'testdata')
    run([str(environment / 'bin' / 'python'), str(program)], environment, tmp_path)


def test_it_is_the_installed_package_that_runs(environment, tmp_path):
    code = 'import t5ckpt, sys; assert "site-packages" in t5ckpt.__file__, t5ckpt.__file__; t5ckpt.Checkpointer'
    run([str(environment / 'bin' / 'python'), '-c', code], environment, tmp_path)
    run(['t5ckpt', '--help'], environment, tmp_path)
