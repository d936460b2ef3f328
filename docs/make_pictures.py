"""Makes the pictures of docs/looking.md and docs/report.md from real output: of commands on a terminal, and of a browser.

    python docs/make_pictures.py RUN_DIR      a run of examples/train_t5.py; needs Chromium

Also executes the notebooks and stores what they show.
"""

import argparse
import io
import os
import pty
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import nbclient
import nbformat
from rich.console import Console
from rich.text import Text

import t5ckpt

HERE = Path(__file__).resolve().parent
WIDTH = 126


def on_a_terminal(words: list[str], cwd: Path) -> str:
    """What a command writes to a terminal, colors included."""
    parent, child = pty.openpty()
    env = {**os.environ, 'COLUMNS': str(WIDTH), 'TERM': 'xterm-256color', 'PYTHONPATH': str(HERE.parent)}
    with subprocess.Popen([sys.executable, '-m', *words], stdout=child, cwd=cwd, env=env) as process:
        os.close(child)
        text = b''
        try:
            while piece := os.read(parent, 4096):
                text += piece
        except OSError:
            pass  # Linux says so when the other end is closed.
        process.wait()
    os.close(parent)
    return text.decode().replace('\r\n', '\n')


def terminal_picture(name: str, words: list[str], cwd: Path) -> None:
    """One command and its output as an SVG, without the fonts that rich would fetch from the network."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text(f'$ {" ".join(words)}', style='bold'))
    console.print(Text.from_ansi(on_a_terminal(words, cwd).replace(f'{cwd}{os.sep}', '').rstrip()))
    svg = console.export_svg(title='t5ckpt')
    (HERE / 'pictures' / f'{name}.svg').write_text(re.sub(r'@font-face \{.*?\}\s*', '', svg, flags=re.DOTALL))


def view_picture(name: str, html: str) -> None:
    """A piece of HTML as Chromium shows it."""
    with tempfile.TemporaryDirectory() as scratch:
        page = Path(scratch) / 'page.html'
        page.write_text(f'<!doctype html><meta charset="utf-8"><body>{html}</body>')
        # Narrow and with large pixels, so that a phone shows it legibly.
        browser_picture(name, page, '480,310', '--force-device-scale-factor=1.6')


def report_picture(name: str, run: Path) -> None:
    """The report of a run, with its default steps."""
    with tempfile.TemporaryDirectory() as scratch:
        page = t5ckpt.open_run(run).report(f'{scratch}/run.html')
        browser_picture(name, Path(page), '1280,1720')


def browser_picture(name: str, page: Path, size: str, *more: str) -> None:
    """A page as Chromium shows it; ``more`` are its options."""
    with tempfile.TemporaryDirectory() as scratch:
        options = ['--headless', '--no-sandbox', '--disable-gpu', '--hide-scrollbars', f'--user-data-dir={scratch}/p']
        picture = HERE / 'pictures' / f'{name}.png'
        options += ['--virtual-time-budget=20000', f'--window-size={size}', f'--screenshot={picture}']
        command = ['chromium', *options, *more, page.as_uri()]
        subprocess.run(command, check=True, capture_output=True)


def main() -> None:
    """Makes everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('run_dir', type=Path)
    run = parser.parse_args().run_dir.resolve()
    first, last = (t5ckpt.all_steps(run)[index] for index in (0, -1))
    steps = [f'{run.name}/checkpoint_{step}' for step in (first, last)]
    terminal_picture('ls', ['t5ckpt', 'ls', run.name], run.parent)
    terminal_picture('show', ['t5ckpt', 'show', run.name, '--depth', '3'], run.parent)
    terminal_picture('diff', ['t5ckpt', 'diff', *steps, 'params', '--top', '8'], run.parent)
    os.chdir(run.parent)
    view = t5ckpt.open_checkpoint(run.name)
    tree = view['params']._repr_html_().replace(f'{run.parent}{os.sep}', '')
    view_picture('tree', tree)
    report_picture('report', Path(run.name))
    for path in sorted((HERE / 'notebooks').glob('*.ipynb')):
        book = nbformat.read(path, as_version=4)
        nbclient.NotebookClient(book, timeout=300, resources={'metadata': {'path': str(run.parent)}}).execute()
        for cell in book.cells:
            cell.metadata.pop('execution', None)  # times of one machine
        text = nbformat.writes(book).replace(f'{run.parent}{os.sep}', '')
        path.write_text(text + '\n')


if __name__ == '__main__':
    main()
