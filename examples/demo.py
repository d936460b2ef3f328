"""Kills a training run, resumes it, and shows that nothing was lost. `make demo` runs this program.

    python examples/demo.py [RUN_DIR] [--steps 100] [--save-every 20] [--kill-at 75]

Exits with 1 if the resumed run differs from the killed one in a single bit of a single loss.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import t5ckpt

TRAINER = Path(__file__).with_name('train_t5.py')
WEIGHT = 'params/token_embedder/embedding'
LETTERS = slice(ord('a') + 3, ord('z') + 4)  # rows of the embedding; 3 rows come before byte 0
PATIENCE = 300.0  # seconds that the trainer may take to reach the step at which it is killed


def read_losses(run_dir: Path) -> list[tuple[int, str]]:
    """(step, loss as a hexadecimal float) in the order written, without an incomplete last line."""
    log = run_dir / 'losses.jsonl'
    text = log.read_text(encoding='utf-8') if log.exists() else ''
    records = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith('\n')]
    return [(record['step'], record['loss']) for record in records]


def train(args: argparse.Namespace, kill_at: int | None = None) -> None:
    """Runs the trainer to its end, or until it has logged step `kill_at`."""
    options = ['--steps', str(args.steps), '--save-every', str(args.save_every), '--eval-every', str(args.save_every)]
    with subprocess.Popen([sys.executable, str(TRAINER), str(args.run_dir), *options]) as trainer:
        deadline = time.monotonic() + PATIENCE
        while kill_at is not None and trainer.poll() is None and time.monotonic() < deadline:
            losses = read_losses(args.run_dir)
            if losses and losses[-1][0] >= kill_at:
                trainer.send_signal(signal.SIGKILL)
                break
            time.sleep(0.02)
        code = trainer.wait(PATIENCE)
    expected = 0 if kill_at is None else -signal.SIGKILL
    if code != expected:
        raise SystemExit(f'the trainer ended with {code}, not {expected}')


def compare(before: list[tuple[int, str]], after: list[tuple[int, str]]) -> None:
    """Prints the losses of the steps that were trained twice; exits if two of them differ."""
    again = dict(after)
    twice = [(step, loss, again[step]) for step, loss in before if step in again]
    if not twice:
        raise SystemExit('no step was trained twice: nothing was compared')
    for step, first, second in twice:
        print(f'  step {step:3}   {float.fromhex(first):.9f}   {float.fromhex(second):.9f}', end='')
        print('' if first == second else '   DIFFERENT')
    if any(first != second for _, first, second in twice):
        raise SystemExit('the resumed run is not the run that was killed')
    print(f'  {len(twice)} steps trained twice, every loss equal to the last bit')


def list_checkpoints(run_dir: Path) -> None:
    """Prints one line for each checkpoint."""
    for step in t5ckpt.all_steps(run_dir):
        files = [path for path in Path(t5ckpt.find_checkpoint(run_dir, step)).parent.rglob('*') if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        print(f'  step {step:4}   {size / 1e6:6.2f} MB in {len(files)} files')


def plot(run_dir: Path, before: list[tuple[int, str]], after: list[tuple[int, str]]) -> Path:
    """Draws the losses before and after the kill, and how the embeddings of a to z moved; reads only their chunks."""
    import matplotlib as mpl

    mpl.use('Agg')  # a file, no window
    from matplotlib import pyplot as plt

    figure, (curves, weight) = plt.subplots(1, 2, figsize=(15, 6.5), layout='constrained', width_ratios=(1, 1.2))
    for label, losses, style in (
        ('killed run', before, {'color': '#f4a261', 'linewidth': 6}),
        ('resumed run', after, {'color': '#1d3557', 'linewidth': 1.5}),
    ):
        curves.plot([step for step, _ in losses], [float.fromhex(loss) for _, loss in losses], label=label, **style)
    curves.axvline(before[-1][0], color='#c1121f', linestyle='--', label='SIGKILL')
    curves.axvline(after[0][0], color='#6c757d', linestyle=':', label='restored checkpoint')
    curves.set(title='Loss of the killed and of the resumed run', xlabel='step', ylabel='loss in nats per token')
    curves.legend()

    first, *_, last = t5ckpt.all_steps(run_dir)
    old, new = (t5ckpt.open_checkpoint(run_dir, step)[WEIGHT][LETTERS] for step in (first, last))
    change = new - old
    limit = abs(change).max()
    image = weight.imshow(change, cmap='RdBu_r', vmin=-limit, vmax=limit, aspect='auto', interpolation='nearest')
    weight.set(title=f'{WEIGHT}: change from step {first} to {last}', xlabel='dimension', ylabel='byte')
    weight.set_yticks(range(len(change)), 'abcdefghijklmnopqrstuvwxyz', fontsize=11, family='monospace')
    figure.colorbar(image, label='change of the weight')
    path = run_dir / 'demo.png'
    figure.savefig(path, dpi=100)
    return path


def suggest(run_dir: Path) -> None:
    """Prints commands that inspect the run of the demo, and one that continues it."""
    python, command = (os.path.relpath(Path(sys.executable).with_name(name)) for name in ('python', 't5ckpt'))
    first, *_, last = (os.path.join(run_dir, f'checkpoint_{step}') for step in t5ckpt.all_steps(run_dir))
    steps = t5ckpt.latest_step(run_dir) + 50
    for words in (
        [command, 'ls', str(run_dir)],
        [command, 'diff', first, last, '--top', '5'],
        [python, os.path.relpath(TRAINER), str(run_dir), '--steps', str(steps)],
    ):
        print(f'   {shlex.join(words)}')


def main() -> None:
    """Trains, kills, resumes, compares, lists, plots, reports, suggests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('run_dir', type=Path, nargs='?', default=Path('demo_run'))
    parser.add_argument('--steps', type=int, default=100)
    parser.add_argument('--save-every', type=int, default=20)
    parser.add_argument('--kill-at', type=int, default=75)
    args = parser.parse_args()
    shutil.rmtree(args.run_dir, ignore_errors=True)
    sys.stdout.reconfigure(line_buffering=True)  # in a pipe, the trainer's lines would otherwise come before these

    print(f'1. Training a tiny T5 on 4 devices, saving each {args.save_every} steps; SIGKILL at step {args.kill_at}')
    train(args, kill_at=args.kill_at)
    before = read_losses(args.run_dir)
    print(f'   killed; last step trained: {before[-1][0]}, last step saved: {t5ckpt.latest_step(args.run_dir)}')

    print('2. The same command again')
    train(args)

    print('3. Losses before the kill and after it')
    after = read_losses(args.run_dir)[len(before) :]
    compare(before, after)

    print(f'4. Checkpoints in {args.run_dir}')
    list_checkpoints(args.run_dir)

    print('5. A picture of both loss curves, and of one weight')
    print(f'   {plot(args.run_dir, before, after)}')

    print('6. A report on the run, one page for a browser')
    print(f'   {t5ckpt.open_run(args.run_dir).report(args.run_dir / "report.html")}')

    print('7. What to try next: list the checkpoints, compare two of them, train on')
    suggest(args.run_dir)


if __name__ == '__main__':
    main()
