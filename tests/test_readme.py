"""Every python block of README.md and docs/ runs as it stands: the blocks of one page one after another, in one program."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))]


def python_of(page: str) -> str:
    """The page with all but its python blocks blanked, so that a traceback names the page's own lines."""
    lines: list[str] = []
    fence = None
    for line in page.splitlines():
        marker = line.strip()
        if fence is None and marker.startswith('```'):
            fence = marker
        elif marker == '```':
            fence = None
        elif fence == '```python':
            lines.append(line)
            continue
        lines.append('')
    assert fence is None, 'a block is never closed'
    return '\n'.join(lines) + '\n'


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.name)
def test_page_runs(page: Path, tmp_path: Path):
    code = python_of(page.read_text(encoding='utf-8'))
    if not code.strip():
        return
    program = tmp_path / f'{page.stem}.py'
    program.write_text(code, encoding='utf-8')
    work = tmp_path / 'work'
    work.mkdir()
    env = {**os.environ, 'PYTHONPATH': str(ROOT), 'MPLBACKEND': 'Agg'}
    done = subprocess.run(
        [sys.executable, '-W', 'error', str(program)], cwd=work, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_readme_has_both_examples():
    code = python_of((ROOT / 'README.md').read_text(encoding='utf-8'))
    assert 't5ckpt.Checkpointer(' in code
    assert 't5ckpt.open_checkpoint(' in code


def test_only_python_blocks_are_taken_and_lines_stay():
    page = 'a\n```bash\nrm x\n```\n```python\nb = 1\n```\nc\n```python\nd = b\n```\n'
    assert python_of(page).splitlines() == ['', '', '', '', '', 'b = 1', '', '', '', 'd = b', '']
