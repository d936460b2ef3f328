"""What keeps the package small to read: rooms, short bodies, sorted names, a bare import.

Everything here is read from the syntax tree, so a rule holds for code that no test runs, too. A rule that gets in the
way is changed here, in the open, with the reason in docs/decisions.md.
"""

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / 't5ckpt'

# A body fits a screen.
MAX_BODY_LINES = 50
# Of code in the whole package, which has one budget. It may fall; a change that raises it says what it buys.
MAX_TOKENS = 210_504

# Installed by an extra, so absent for most: imported inside a function, and only in these places.
OPTIONAL = {
    'click',
    'grain',
    'matplotlib',
    'orbax',
    'pandas',
    'plotly',
    'rich',
    'safetensors',
    'tensorboard',
    'tensorboardX',
    'tensorflow',
    'torch',
}
OPTIONAL_HOMES = {'inspection', 'reading', 'metrics', 'datasets', 'convert', 'training', 'cli', 'testing'}
# The verbs are loaded by cli/__init__.py after it has looked for these.
CLI_LIBRARIES = {'click', 'rich'}

# What unpickling a checkpoint from a stranger would run is the stranger's choice.
CODE_LOADERS = {'cloudpickle', 'dill', 'joblib', 'marshal', 'pickle', 'shelve'}

SCHEME = re.compile(r'\b(file|gcs|gs|http|https|memory|s3)://')
SCHEME_HOMES = {'convert', 'storage'}

# Modules of rooms whose names users or other modules import from them, though another module defines some of them.
PUBLIC_IN_ROOMS = {
    'convert.seqax',
}

HEAVY = ('flax', 'jax', 'jaxlib', 'optax', 'orbax', 'tensorboard', 'tensorflow', 'tensorstore', 'torch')


class Module:
    """One source file, parsed: `name` is dotted below the package, `top` its first part."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = path.read_text(encoding='utf-8')
        self.tree = ast.parse(self.text, str(path))
        parts = path.relative_to(PACKAGE).with_suffix('').parts
        self.parts = parts[:-1] if len(parts) > 1 and parts[-1] == '__init__' else parts
        self.name = '.'.join(self.parts)
        self.top = self.parts[0]
        # The package that a relative import with one dot starts from.
        self.package = ('t5ckpt', *parts[:-1])

    def imports(self) -> Iterator[tuple[int, str]]:
        """Line and absolute dotted name of everything imported anywhere in the file, types included."""
        for node in ast.walk(self.tree):
            match node:
                case ast.Import():
                    yield from ((node.lineno, alias.name) for alias in node.names)
                case ast.ImportFrom(level=0, module=str(module)):
                    yield from ((node.lineno, f'{module}.{alias.name}') for alias in node.names)
                case ast.ImportFrom():
                    base = self.package[: len(self.package) - node.level + 1]
                    base += tuple(node.module.split('.')) if node.module is not None else ()
                    yield from ((node.lineno, '.'.join((*base, alias.name))) for alias in node.names)

    def functions(self) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        """Every function with its dotted name, nested ones and methods included."""
        stack: list[tuple[str, ast.AST]] = [(self.name, self.tree)]
        while stack:
            prefix, parent = stack.pop()
            for node in ast.iter_child_nodes(parent):
                name = f'{prefix}.{node.name}' if hasattr(node, 'name') else prefix
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield name, node
                stack.append((name, node))

    def docstrings(self) -> set[int]:
        """Identities of the constants that are documentation, where any word may stand."""
        bodies = (node.body for node in ast.walk(self.tree) if isinstance(getattr(node, 'body', None), list))
        firsts = (body[0] for body in bodies if body and isinstance(body[0], ast.Expr))
        return {id(first.value) for first in firsts}


MODULES = [Module(path) for path in sorted(PACKAGE.rglob('*.py'))]
TESTS = sorted((ROOT / 'tests').rglob('*.py'))


def _body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from the first statement after the docstring to the last."""
    body = function.body
    if ast.get_docstring(function, clean=False) is not None:
        body = body[1:]
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def _tokens(module: Module) -> int:
    """Tokens without comments, docstrings and layout; an f-string is one token, as before Python 3.12."""
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    start, end = getattr(tokenize, 'FSTRING_START', None), getattr(tokenize, 'FSTRING_END', None)
    docstrings = module.docstrings()
    documented = {
        line
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Constant) and id(node) in docstrings
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    count = depth = 0
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        depth -= token.type == end
        is_code = token.type not in layout and token.type != end and token.start[0] not in documented
        count += is_code and depth == 0
        depth += token.type == start
    return count


def _sorted_names(names: list[str]) -> list[str]:
    """CONSTANTS, then Classes, then the rest, each in order and once: what ruff's RUF022 sorts to."""

    def rank(name: str) -> tuple[int, str]:
        return (0 if name.isupper() else 1 if name[0].isupper() else 2), name

    return sorted(set(names), key=rank)


def _run(code: str) -> str:
    """Standard output of a fresh interpreter that runs `code`."""
    done = subprocess.run([sys.executable, '-W', 'error', '-c', code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_package_was_found():
    assert {'__init__', 'checkpointer', 'errors'} <= {module.name for module in MODULES}


def test_the_top_is_public():
    files = {path.stem for path in PACKAGE.glob('*.py')}
    assert [name for name in sorted(files) if name.startswith('_') and not name.endswith('__')] == ['_version']


def test_every_room_says_what_it_is_for():
    page = (ROOT / 'CONTRIBUTING.md').read_text(encoding='utf-8')
    rooms = {module.parts[0] for module in MODULES if len(module.parts) > 1}
    assert [name for name in sorted(rooms) if f'{name}/' not in page] == []
    silent = [
        module.name for module in MODULES if module.path.name == '__init__.py' and not ast.get_docstring(module.tree)
    ]
    assert silent == []


def test_rooms_import_only_rooms_below_them(tmp_path: Path):
    """The contracts are in pyproject.toml."""
    code = 'import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(cache_dir=sys.argv[1], no_logo=True))'
    run = [sys.executable, '-c', code, str(tmp_path)]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_functions_are_short():
    lengths = {name: _body_lines(function) for module in MODULES for name, function in module.functions()}
    assert {n: lines for n, lines in lengths.items() if lines > MAX_BODY_LINES} == {}


def test_the_package_does_not_grow():
    assert sum(map(_tokens, MODULES)) <= MAX_TOKENS


def test_only_public_modules_list_their_names():
    """A module of a room marks its own names by a leading underscore; a list would say it twice."""
    listed = {module.name for module in MODULES if '__all__ = [' in module.text and len(module.parts) > 1}
    rooms = {module.name for module in MODULES if module.path.name == '__init__.py'}
    assert listed - rooms == PUBLIC_IN_ROOMS


def test_public_names_are_sorted():
    unsorted = []
    for module in MODULES:
        for node in module.tree.body:
            match node:
                case (
                    ast.Assign(targets=[ast.Name(id='__all__')], value=value)
                    | ast.AnnAssign(target=ast.Name(id='__all__'), value=value)
                ) if isinstance(value, ast.List | ast.Tuple):
                    names = ast.literal_eval(value)
                    if list(names) != _sorted_names(names):
                        unsorted.append(module.name)
    assert unsorted == []


def test_optional_dependencies_are_imported_when_called():
    wrong = []
    for module in MODULES:
        inside = {
            line
            for _, function in module.functions()
            for node in ast.walk(function)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for line in [node.lineno]
        }
        wrong += [
            f'{module.name}:{line} imports {name}'
            for line, name in module.imports()
            if name.partition('.')[0] in OPTIONAL and (line not in inside or module.top not in OPTIONAL_HOMES)
            if not (name.partition('.')[0] in CLI_LIBRARIES and module.top == 'cli' and module.name != 'cli')
        ]
    assert wrong == []


def test_nothing_can_unpickle():
    loaders = [
        f'{module.name}:{line} imports {name}'
        for module in MODULES
        for line, name in module.imports()
        if name.partition('.')[0] in CODE_LOADERS
    ]
    allowed = [
        f'{module.name}:{node.value.lineno} allows pickle'
        for module in MODULES
        for node in ast.walk(module.tree)
        if isinstance(node, ast.keyword) and node.arg == 'allow_pickle'
        if not (isinstance(node.value, ast.Constant) and node.value.value is False)
    ]
    assert loaders + allowed == []


def test_only_storage_knows_schemes():
    wrong = []
    for module in MODULES:
        if module.top in SCHEME_HOMES:
            continue
        docs = module.docstrings()
        wrong += [
            f'{module.name}:{node.lineno} {node.value!r}'
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
            if id(node) not in docs and SCHEME.search(node.value)
        ]
    assert wrong == []


def test_import_loads_nothing_heavy():
    loaded = _run(f'import sys, t5ckpt; print(sorted(set({HEAVY!r}) & set(sys.modules)))')
    assert loaded.strip() == '[]'


def test_exported_names_are_sorted_and_resolve():
    code = 'import json, t5ckpt as t; print(json.dumps([t.__all__, dir(t)])); [getattr(t, name) for name in t.__all__]'
    names, listed = json.loads(_run(code))
    assert names == _sorted_names(names)
    assert set(names) <= set(listed), 'completion in a notebook needs them in dir()'


def test_an_unknown_name_is_an_attribute_error():
    import t5ckpt

    with pytest.raises(AttributeError, match='no_such_name'):
        _ = t5ckpt.no_such_name


def test_tests_use_no_mocks():
    wrong = []
    for path in TESTS:
        for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
            match node:
                case ast.Import(names=names) if any('mock' in alias.name for alias in names):
                    wrong.append(f'{path.name}:{node.lineno}')
                case ast.ImportFrom(module=str(module)) if 'mock' in module or module == 'unittest':
                    wrong.append(f'{path.name}:{node.lineno}')
                case ast.Attribute(value=ast.Name(id='monkeypatch'), attr='setattr'):
                    wrong.append(f'{path.name}:{node.lineno}')
                case _:
                    pass
    assert wrong == []


def test_no_test_imports_another_test_file():
    found: list[str] = []
    for path in sorted((ROOT / 'tests').rglob('*.py')):
        for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'), str(path))):
            names = [node.module or ''] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found += [
                f'{path.relative_to(ROOT)}: {name}' for name in names if name.rpartition('.')[2].startswith('test_')
            ]
    assert found == []
