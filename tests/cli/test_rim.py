"""The rim of the command line: closed and full streams, signals, exit codes, steps by name. All verbs, one design."""

import json
import os
import pty
import re
import shutil
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import click
import numpy as np
import pytest
from click.testing import CliRunner
from support.cli import ROOT, t5ckpt_cli

import t5ckpt
from t5ckpt.cli import VERBS
from t5ckpt.cli.activity import Activity
from t5ckpt.cli.app import app, run as run_verb
from t5ckpt.cli.paths import CHECKPOINT, LATER, RUN, TIERS
from t5ckpt.cli.streams import OutputError
from t5ckpt.cli.verb import Exit, Verb
from t5ckpt.storage import open_storage

ENVIRON = {**os.environ, 'PYTHONPATH': str(ROOT)}


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    """Steps 100 and 200; the first has the lower loss."""
    place = tmp_path_factory.mktemp('rim') / 'run'
    state = {'target': {'w': np.arange(24, dtype=np.float32).reshape(4, 6)}}
    keep = t5ckpt.KeepLatest(5) | t5ckpt.KeepBest(1, 'eval/loss', 'min')
    with t5ckpt.Checkpointer(state, checkpoints_dir=place, keep_policy=keep) as checkpointer:
        checkpointer.save(state, step=100, metrics={'eval/loss': 1.0})
        checkpointer.save({'target': {'w': state['target']['w'] + 1}}, step=200, metrics={'eval/loss': 2.0})
    return place


def commands():
    return [(name, app.get_command(click.Context(app), name)) for name in VERBS]


def said(words, capsys):
    """The exit code, what was printed, and what was complained of."""
    with pytest.raises(SystemExit) as ended:
        run_verb([str(word) for word in words])
    shown = capsys.readouterr()
    return ended.value.code, shown.out, shown.err


# --- one design --------------------------------------------------------------------------------------------------------

# By verb: words around a step, with {} in its place. Every verb that takes a checkpoint is here.
WITH_A_STEP = {
    'cat': ['cat', '{}', 'target/w'],
    'convert': ['convert', 'to-orbax', '{}', 'OUT', '--dry-run'],
    'cp': ['cp', '{}', 'OUT', '--dry-run'],
    'diff': ['diff', '{}', '{}'],
    'pin': ['pin', '{}'],
    'report': ['report', '{}', '-o', 'OUT', '--force'],
    'rm': ['rm', '{}', '--dry-run'],
    'show': ['show', '{}'],
    'stats': ['stats', '{}'],
    'unpin': ['unpin', '{}'],
    'verify': ['verify', '{}'],
}
OF_A_RUN = {'ls': ['ls', '{}'], 'best': ['best', '{}'], 'prune': ['prune', '{}', '--keep', '1', '--dry-run']}
WRITERS = {
    'convert': ['convert', 'orbax', 'RUN', '{}'],
    'cp': ['cp', 'RUN', '{}'],
}


def test_every_verb_is_one_of_the_design():
    for name, command in commands():
        assert isinstance(command, Verb), name
        options = {option for param in command.params for option in param.opts}
        assert {'--json', '--storage-option'} <= options, name
        kinds = {id(param.type) for param in command.params}
        assert bool(kinds & {id(CHECKPOINT), id(LATER)}) == (name in WITH_A_STEP), name
        assert bool(kinds & {id(RUN), id(TIERS)}) == (name in OF_A_RUN or name in WRITERS), name


@pytest.mark.slow
@pytest.mark.parametrize('verb', [*WITH_A_STEP])
def test_every_verb_names_steps_in_the_same_way(verb, run, tmp_path, capsys):
    t5ckpt.pin_checkpoint(run / 'checkpoint_100')
    t5ckpt.pin_checkpoint(run / 'checkpoint_200')

    def shown(name):
        words = [word.replace('{}', f'{name}').replace('OUT', str(tmp_path / 'out')) for word in WITH_A_STEP[verb]]
        code, out, err = said([*words, '--json'], capsys)
        t5ckpt.pin_checkpoint(run / 'checkpoint_100')
        t5ckpt.pin_checkpoint(run / 'checkpoint_200')
        written = (tmp_path / 'out').read_bytes() if (tmp_path / 'out').exists() else b''
        return code, re.sub(r'"seconds": [0-9.e-]+', '', out), err, written

    one, two = shown(run / 'checkpoint_100'), shown(run / 'checkpoint_200')
    assert one[0] in (0, 1)
    assert one != two
    for name in ('@100', '@best', '@best:eval/loss', '@best:eval/loss:min'):
        assert shown(f'{run}{name}') == one, name
    for name in ('@200', '@latest', '@best:eval/loss:max'):
        assert shown(f'{run}{name}') == two, name
    assert shown(f'{run}@7')[0] == Exit.UNREADABLE


@pytest.mark.parametrize('verb', [*OF_A_RUN, *(f'{name} writes' for name in WRITERS)])
def test_a_step_is_not_a_run(verb, run, tmp_path, capsys):
    words = OF_A_RUN.get(verb) or WRITERS[verb.removesuffix(' writes')]
    words = [word.replace('{}', f'{run}@100').replace('RUN', str(run)) for word in words]
    code, _, err = said(words, capsys)
    assert code == Exit.USAGE
    assert f'To write as another step, pass --as-step. Pass the run: {run}' in err
    assert not os.path.lexists(f'{run}@100')


def test_a_directory_of_this_very_name_is_that_directory(run, tmp_path, capsys):
    (tmp_path / 'me@200').symlink_to(run)
    assert json.loads(said(['show', tmp_path / 'me@200', '--step', 100, '--json'], capsys)[1])['step'] == 100
    assert said(['show', f'{run}@100', '--step', 200], capsys)[0] == Exit.USAGE


def test_rm_takes_several_steps_by_any_name(run, capsys):
    code, out, _ = said(['rm', run / 'checkpoint_100', f'{run}@latest', '--pinned', '--dry-run', '--json'], capsys)
    assert (code, [each['step'] for each in json.loads(out)['plan']]) == (0, [100, 200])
    (run.parent / 'other').mkdir()
    assert said(['rm', run, run.parent / 'other' / 'checkpoint_1', '--dry-run'], capsys)[0] == Exit.USAGE


# --- exit codes --------------------------------------------------------------------------------------------------------

EXIT_CODES = [
    (Exit.NO, 'cat RUN nothing'),
    (Exit.NO, 'stats RUN nothing*'),
    (Exit.NO, 'show RUN --grep nothing'),
    (Exit.NO, 'convert to-safetensors RUN OUT --take nothing'),
    (Exit.NO, 'cp RUN OUT --leave nothing'),
    (Exit.NO, 'cp RUN OUT --take nothing'),
    (Exit.NO, 'cp RUN RUN'),
    (Exit.NO, 'cp RUN RUN --compression zstd'),
    (Exit.NO, 'diff RUN@100 RUN@200'),
    (Exit.NO, 'report RUN -o FILE'),
    (Exit.NO, 'rm RUN 100 --yes'),
    (Exit.USAGE, 'show RUN --grep ('),
    (Exit.USAGE, 'cp RUN OUT --leave ('),
    (Exit.USAGE, 'cp RUN OUT --as-step -1'),
    (Exit.USAGE, 'cp RUN OUT --save-dtype int7'),
    (Exit.USAGE, 'cp RUN OUT --compression lz5'),
    (Exit.USAGE, 'prune RUN'),
    (Exit.USAGE, 'report RUN'),
    (Exit.USAGE, 'report RUN -o OUT --sample many'),
    (Exit.USAGE, 'report RUN -o OUT --step 100 --step 200 --step 300'),
    (Exit.USAGE, 'rm RUN'),
    (Exit.USAGE, 'convert safetensors NOWHERE '),
    (Exit.UNREADABLE, 'ls NOWHERE'),
    (Exit.UNREADABLE, 'show NOWHERE'),
    (Exit.UNREADABLE, 'show RUN@7'),
    (Exit.UNREADABLE, 'report RUN -o OUT --step 7'),
    (Exit.UNREADABLE, 'rm RUN 7 --yes'),
    (Exit.UNREADABLE, 'diff RUN NOWHERE'),
    (Exit.STORAGE, 'convert to-safetensors RUN FILE/x.safetensors'),
    (Exit.STORAGE, 'cp RUN FILE'),
]


@pytest.mark.parametrize(('code', 'words'), EXIT_CODES, ids=[words for _, words in EXIT_CODES])
def test_an_exit_code_has_one_meaning(code, words, run, tmp_path, capsys):
    t5ckpt.pin_checkpoint(run / 'checkpoint_100')
    (tmp_path / 'file').write_text('')
    places = {'RUN': run, 'OUT': tmp_path / 'out', 'NOWHERE': tmp_path / 'nowhere', 'FILE': tmp_path / 'file'}
    found, _, err = said([_placed(word, places) for word in words.split(' ')], capsys)
    assert found == code, err
    # The cure is one that the command line has.
    assert ('=True' in err) <= bool(re.search(r't5ckpt \w|--\w', err.partition('Try')[2] or err)), err


def _placed(word, places):
    for name, path in places.items():
        word = word.replace(name, str(path))
    return word


def test_the_exit_codes_are_those_of_the_page():
    page = (ROOT / 'docs' / 'looking.md').read_text()
    assert [int(code) for code in re.findall(r'^\| (\d+) \|', page, re.MULTILINE)] == [*map(int, Exit)]


# --- slips -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('word', ['bset', 'BEST', 'bets:eval/loss:min'])
def test_a_misspelt_name_of_a_step_is_refused(word, run, capsys):
    code, _, err = said(['show', f'{run}@{word}'], capsys)
    assert code == Exit.USAGE
    assert 'Write the number of a step, latest, best, best:METRIC, or best:METRIC:min after @.' in err
    assert said(['show', f'{run}no@{word}'], capsys)[0] == Exit.UNREADABLE


def test_a_step_that_is_not_there_is_answered_with_the_steps(run, capsys):
    code, _, err = said(['rm', f'{run}@7'], capsys)
    assert code == Exit.UNREADABLE
    assert 'complete steps are: 100, 200. Pass one of them.' in err


@pytest.mark.slow
@pytest.mark.parametrize('answer', ['n', ''])
@pytest.mark.parametrize('words', [['rm', 'RUN@200', '--pinned'], ['prune', 'RUN', '--keep', '1']])
def test_no_to_the_question(words, answer, run, tmp_path):
    place = shutil.copytree(run, tmp_path / 'run')
    for pin in place.glob('*/PINNED'):
        pin.unlink()
    terminal, end = pty.openpty()
    os.write(terminal, f'{answer}\n'.encode())
    words = [sys.executable, '-m', 't5ckpt', *(word.replace('RUN', str(place)) for word in words)]
    done = subprocess.run(words, stdin=end, capture_output=True, text=True, env=ENVIRON, check=False)
    assert done.returncode == Exit.USAGE
    assert done.stderr.endswith('t5ckpt: nothing was deleted.\n')
    assert 'Usage' not in done.stderr
    assert t5ckpt.all_steps(place) == [100, 200]


def test_a_run_that_is_nowhere_in_a_bucket_is_said(capsys, tmp_path):
    """As on a disk. A bucket has no directories, so no key is no run."""
    for words in (['ls'], ['prune', '--keep', '1'], ['best', 'loss', '--mode', 'min']):
        for place in (f'memory://{tmp_path.name}/nowhere', tmp_path / 'nowhere'):
            code, out, err = said([words[0], place, *words[1:]], capsys)
            assert (code, out) == (Exit.UNREADABLE, ''), words
            assert str(place) in err
    open_storage(f'memory://{tmp_path.name}/other').write('notes.txt', b'')
    assert said(['ls', f'memory://{tmp_path.name}/other'], capsys)[0] == Exit.UNREADABLE


def test_verify_says_what_it_has_not_compared(run, tmp_path, capsys):
    quick, full = said(['verify', run], capsys)[1], said(['verify', run, '--full'], capsys)[1]
    assert 'full=True (--full) reads every byte' in quick
    assert '--full' not in full
    with t5ckpt.Checkpointer({'w': np.ones(3)}, checkpoints_dir=tmp_path / 'small') as checkpointer:
        checkpointer.save({'w': np.ones(3)}, step=1)
    shown = str(t5ckpt.verify(tmp_path / 'small'))
    assert '(presence and sizes; all leaves in the manifest, ' in shown, 'an intact checkpoint seems to be empty'


def test_a_copy_of_another_programs_step_is_a_checkpoint(tmp_path, capsys):
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(tmp_path / 'orbax') as manager:
        manager.save(5, args=ocp.args.StandardSave({'w': np.zeros(3)}))
    for words in (['cp'], ['convert', 'orbax']):
        assert said([*words, tmp_path / 'orbax', tmp_path / words[0]], capsys)[0] == Exit.DONE
        assert t5ckpt.all_steps(tmp_path / words[0]) == [5]
        assert np.array_equal(t5ckpt.load_t5x_checkpoint(tmp_path / words[0])['w'], np.zeros(3))


# --- streams -----------------------------------------------------------------------------------------------------------


def in_a_shell(text, **options):
    """A process that bash starts, which can close a stream."""
    text = text.replace('T5CKPT', f'{sys.executable} -m t5ckpt')
    return subprocess.run(['bash', '-c', text], capture_output=True, text=True, env=ENVIRON, check=False, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('words', 'stream', 'code'),
    [
        ('ls RUN', '>/dev/full', 4),
        ('ls RUN', '>&-', 4),
        ('ls RUN', '2>&-', 0),
        ('ls RUN', '2>/dev/full', 0),
        ('ls RUN', '<&-', 0),
        ('--version', '>/dev/full', 4),
        ('cat RUN target/w --npy', '>/dev/full', 4),
        ('cat RUN target/w --npy', '| true; exit ${PIPESTATUS[0]}', 141),
        ('stats RUN', '2>&-', 0),
    ],
)
def test_a_stream_that_takes_nothing(words, stream, code, run):
    done = in_a_shell(f'T5CKPT {words.replace("RUN", str(run))} {stream}')
    assert done.returncode == code, done.stderr
    assert ('t5ckpt: standard output: ' in done.stderr) == (code == 4)
    assert 'Traceback' not in done.stderr


def test_no_terminal_to_ask_and_no_input_at_all(run):
    done = in_a_shell(f'T5CKPT rm {run} 200 --pinned <&-')
    assert (done.returncode, 'pass --yes' in done.stderr) == (2, True)


def test_a_file_never_gets_the_number_of_standard_error():
    """What a library writes to standard error would land in a chunk file."""
    code = 'import os; from t5ckpt.cli.streams import open_streams; open_streams(); print(os.open(os.devnull, os.O_RDONLY))'
    assert int(in_a_shell(f"{sys.executable} -c '{code}' 2>&- <&-").stdout) > 2


def test_an_error_of_the_output_is_not_an_error_of_a_file():
    assert not issubclass(OutputError, OSError)


def test_the_current_directory_was_deleted(tmp_path):
    gone = tmp_path / 'gone'
    gone.mkdir()
    done = in_a_shell(f'rmdir {gone}; T5CKPT ls .', cwd=gone)
    assert (done.returncode, 'the current directory was deleted' in done.stderr) == (2, True)


@pytest.mark.parametrize('columns', ['0', '1'])
def test_a_terminal_without_room_shows_the_table_all_the_same(columns, run):
    done = subprocess.run(
        ['script', '-qec', f'{sys.executable} -m t5ckpt ls {run}', os.devnull],
        capture_output=True,
        text=True,
        env={**ENVIRON, 'COLUMNS': columns, 'TERM': 'xterm'},
        check=False,
    )
    assert 'complete' in done.stdout


# --- signals and silence -----------------------------------------------------------------------------------------------


@pytest.mark.multiprocess
@pytest.mark.parametrize('module', ['click', 'numpy', 't5ckpt.cli.show'])
def test_ctrl_c_while_a_module_is_imported(module, run):
    """The signal comes at one point of the program's start, and not at a time."""
    code = (
        'import sys, os, signal\n'
        'class Early:\n'
        '    def find_spec(self, name, path=None, target=None):\n'
        f'        if name == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n'
        # What runs the tests may ignore it, and its children then do, too.
        'signal.signal(signal.SIGINT, signal.default_int_handler)\n'
        'from t5ckpt.cli import main\n'
        'sys.meta_path.insert(0, Early())\n'
        f'sys.argv = ["t5ckpt", "stats", {str(run)!r}]\n'
        'main()'
    )
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, env=ENVIRON, check=False)
    assert (done.returncode, done.stderr.strip()) == (130, 't5ckpt: interrupted')


@pytest.mark.multiprocess
def test_ctrl_c_after_the_work_is_done_does_not_spoil_the_exit_code(run):
    code = (
        'import atexit, os, signal, sys\n'
        'signal.signal(signal.SIGINT, signal.default_int_handler)\n'
        'atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))\n'
        'from t5ckpt.cli import main\n'
        f'sys.argv = ["t5ckpt", "ls", {str(run)!r}]\n'
        'main()'
    )
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, env=ENVIRON, check=False)
    assert (done.returncode, done.stderr) == (0, '')


def test_a_silence_is_broken(capsys):
    with Activity(['memory://a/run', 'here'], 0.1):
        time.sleep(0.35)
    assert capsys.readouterr().err.startswith(
        't5ckpt: waiting for memory://a/run, 0 s so far; the storage option retry_seconds ends the wait'
    )
    with Activity([], 0.4) as activity:
        time.sleep(0.6)
        assert capsys.readouterr().err == 't5ckpt: still working, 0 s so far\n'
    del activity


class _Silent(BaseHTTPRequestHandler):
    def do_GET(self):
        time.sleep(20)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_time_out_ends_the_wait_for_a_server_that_is_silent():
    server = HTTPServer(('127.0.0.1', 0), _Silent)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    started = time.monotonic()
    words = [
        'ls',
        's3://bucket/run',
        '--storage-option',
        'anonymous=true',
        '--storage-option',
        'retry_seconds=2',
        '--storage-option',
        f'endpoint=http://127.0.0.1:{server.server_port}',
    ]
    text = t5ckpt_cli(*words, code=4)
    assert time.monotonic() - started < 10
    assert 'the storage option retry_seconds sets the wait' in text
    server.socket.close()


def test_progress_in_a_pipe_is_single_lines(capsys):
    now = [0.0]
    lines = Activity([], clock=lambda: now[0]).progress('copying')
    for second in range(25):
        now[0] = float(second)
        lines(second * 10**6, 100 * 10**6)
    shown = capsys.readouterr().err.splitlines()
    assert shown[0] == 'copying 2.0 MB of 100.0 MB (2 %), 2.0 s, 1.0 MB/s, 98 s left'
    assert len(shown) == 3, 'at 2, 11 and 20 s'


def test_the_users_rules_may_be_wrong(tmp_path):
    (tmp_path / 'rules.py').write_text('x = 1\ny = x / 0\n')
    done = CliRunner().invoke(
        app, ['convert', 'tf', str(tmp_path), str(tmp_path / 'o'), '--rules', str(tmp_path / 'rules.py')]
    )
    assert done.exit_code == Exit.USAGE
    assert 'rules.py, line 2: ZeroDivisionError: division by zero' in done.output


@pytest.mark.parametrize(
    'words',
    [
        'show',
        'stats',
        'cat w',
        'verify',
        'verify --json',
        'report -o out.html',
        'cp out',
        'convert orbax out',
        'convert to-safetensors out.safetensors',
        'prune --keep-step',
    ],
)
def test_a_negative_step_is_wrong_usage_in_every_verb(run, tmp_path, words, monkeypatch):
    monkeypatch.chdir(tmp_path)
    verb, *rest = words.split()
    words = [verb, run, *rest] if verb in ('cat', 'verify', 'cp', 'prune') else [verb, *rest[:1], run, *rest[1:]]
    words = [verb, run, *rest] if verb in ('show', 'stats', 'report') else words
    said = t5ckpt_cli(*words, *(['-1'] if rest[-1:] == ['--keep-step'] else ['--step', '-1']), code=2)
    assert '-1' in said.splitlines()[-1]
    assert 'Traceback' not in said
    assert not list(tmp_path.iterdir())


def test_a_step_that_is_named_twice_is_one(run, capsys):
    t5ckpt.pin_checkpoint(run / 'checkpoint_100')
    code, out, _ = said(['unpin', f'{run}@100', f'{run}@100', '--json'], capsys)
    assert (code, len(json.loads(out)['unpinned'])) == (0, 1)


def test_diff_answers_whether_the_weights_are_equal(tmp_path, capsys):
    """Of a part of both; the list of --top is filled with what cannot be ranked."""
    kernel = np.ones((2, 3), np.float32)
    one = {'target': {'w': kernel, 'v': kernel}, 'opt': {'m': kernel, 'old': kernel, 'n': kernel}}
    two = {'target': {'w': kernel, 'v': kernel}, 'opt': {'m': kernel * 2, 'new': kernel, 'n': np.ones(4, np.float32)}}
    for step, state in ((1, one), (2, two)):
        with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path / 'run') as checkpointer:
            checkpointer.save(state, step=step)
    sides = [f'{tmp_path}/run@1', f'{tmp_path}/run@2']
    assert said(['diff', *sides, 'target'], capsys)[0] == Exit.DONE
    assert said(['diff', *sides, 'target/.*'], capsys)[0] == Exit.DONE
    assert said(['diff', *sides], capsys)[0] == Exit.NO
    code, out, _ = said(['diff', *sides, 'opt/old', '--json'], capsys)
    assert (code, [leaf['what'] for leaf in json.loads(out)['leaves']]) == (Exit.NO, ['removed'])
    code, _, err = said(['diff', *sides, 'nothing'], capsys)
    assert (code, 'no such leaf' in err) == (Exit.NO, True)
    _, out, _ = said(['diff', *sides, '--top', 3, '--json'], capsys)
    leaves = json.loads(out)['leaves']
    assert (leaves[0]['name'], len(leaves)) == ('opt/m', 3)
    assert said(['diff', *sides, '--step', 1], capsys)[0] == Exit.USAGE


def test_a_verb_that_names_follow_links_has_it(run, tmp_path, capsys):
    link = tmp_path / 'run' / 'checkpoint_100'
    link.parent.mkdir()
    link.mkdir()
    for path in (run / 'checkpoint_100').iterdir():
        (link / path.name).symlink_to(path)
    for words in (['show', link], ['cat', link, 'target/w'], ['stats', link], ['diff', link, run], ['verify', link]):
        code, out, err = said(words, capsys)
        assert 'or --follow-links' in out + err, words
        assert code == (Exit.NO if words[0] == 'verify' else Exit.UNREADABLE)
        assert said([*words, '--follow-links'], capsys)[0] in (Exit.DONE, Exit.NO)
    assert (
        't5ckpt cp makes a copy without links'
        in said(['convert', 'to-safetensors', link, tmp_path / 'x.safetensors'], capsys)[2]
    )


def test_the_same_thing_has_the_same_key(run, tmp_path, capsys):
    verbs = {
        'ls': ['ls', run],
        'verify': ['verify', run],
        'cp': ['cp', run, tmp_path / 'a', '--dry-run'],
        'cp with changes': ['cp', run, tmp_path / 'b', '--compression', 'zstd', '--dry-run'],
        'export': ['convert', 'to-safetensors', run, tmp_path / 'x.safetensors'],
        'import': ['convert', 'safetensors', tmp_path / 'x.safetensors', tmp_path / 'c'],
    }
    for name, words in verbs.items():
        found = json.loads(said([*words, '--json'], capsys)[1])
        fields = found[0] if isinstance(found, list) else found
        assert {'path', 'bytes'} <= fields.keys(), name
        assert not {'nbytes', 'output'} & fields.keys(), name


def test_the_error_of_a_time_out_names_the_time_that_was_asked_for(capsys):
    """A server that refuses connections: its answers come at once, and the wait is nevertheless as long as it was meant."""
    with HTTPServer(('127.0.0.1', 0), BaseHTTPRequestHandler) as closed:
        endpoint = f'endpoint=http://127.0.0.1:{closed.server_address[1]}'
    some = ('ls', 's3://some-bucket/run', '--storage-option')
    words = (*some, 'anonymous=true', '--storage-option', endpoint, '--storage-option', 'retry_seconds=3')
    code, _, text = said(words, capsys)
    assert (code, 'for 3 s' in text) == (Exit.STORAGE, True), text
    for wrong in ('nan', 'inf', '0'):
        code, _, text = said((*some, f'retry_seconds={wrong}'), capsys)
        assert (code, 'retry_seconds' in text) == (Exit.USAGE, True), text
    code, _, text = said((*some, 'endpont=http://a'), capsys)
    assert (code, "Did you mean 'endpoint'?" in text) == (Exit.USAGE, True), text


def test_the_cure_of_a_path_that_is_no_run_is_one_of_the_shell(tmp_path):
    with t5ckpt.Checkpointer({'w': np.ones(3)}, checkpoints_dir=tmp_path / 'run') as ck:
        ck.save({'w': np.ones(3)}, step=1)
    (tmp_path / 'run' / 'checkpoint_1').rename(tmp_path / 'base')
    assert 't5ckpt show read the checkpoint' in t5ckpt_cli('ls', tmp_path / 'base', code=3)
    assert 'w ' in t5ckpt_cli('show', tmp_path / 'base')
