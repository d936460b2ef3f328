"""Pages and docstrings name files, modules and tests that exist, and the tables of dependencies agree with setup.py."""

import ast
import functools
import pkgutil
import re
from pathlib import Path

import pytest
from support.pages import blocks_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / 't5ckpt'
PAGES = [ROOT / 'README.md', ROOT / 'CONTRIBUTING.md', *sorted((ROOT / 'docs').glob('*.md'))]
SOURCES = [
    path for room in ('t5ckpt', 'tests', 'benchmarks', 'fuzz', 'examples') for path in (ROOT / room).rglob('*.py')
]
ROOMS = {path.parent.name for path in PACKAGE.glob('*/__init__.py')}
FOLDERS = ROOMS | {'t5ckpt', 'tests', 'benchmarks', 'docs', 'fuzz', 'examples', 'testdata', 'support'}
ELSEWHERE = {'docs/pytree-zarr-checkpoint.md', 'fuzz/crash-*'}  # of seqax; written when a fuzzer finds something


def texts_of(path: Path) -> list[str]:
    """The prose of a page, or the docstrings of a source."""
    text = path.read_text(encoding='utf-8')
    if path.suffix == '.md':
        blocks = {line for _, first, lines in blocks_of(text) for line in range(first, first + len(lines))}
        return ['\n'.join(line for number, line in enumerate(text.splitlines(), 1) if number not in blocks)]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    return [ast.get_docstring(node) or '' for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]


@functools.cache
def all_tests() -> frozenset[str]:
    """The names of all tests."""
    found = [re.findall(r'\bdef (test_\w+)', path.read_text(encoding='utf-8')) for path in SOURCES]
    return frozenset(name for names in found for name in names)


def is_there(name: str, page: Path) -> bool:
    """Whether what a page or docstring names exists; True for names that are not of a file, module or test of ours."""
    if name.startswith('test_') and name.isidentifier():
        return name in all_tests() or any(path.stem == name for path in SOURCES)
    path, _, test = name.partition('::')
    dotted = re.fullmatch(r'(?:t5ckpt\.)?((\w+)[./]\w+\.\w+)(?:\(\))?', path)
    if dotted and dotted[2] in ROOMS and not path.endswith(('.py', '.md')):
        return resolves(dotted[1].replace('/', '.'))
    if '/' in path and path.partition('/')[0] in FOLDERS and re.fullmatch(r'[\w./*-]+', path):
        roots = (ROOT, PACKAGE, ROOT / 'tests', page.parent, page.parent.parent)
        found = [root for root in roots for spelled in (path.rstrip('/'), f'{path}.py') if [*root.glob(spelled)]]
        return found != [] and (not test or test in all_tests())
    return True


def resolves(name: str) -> bool:
    """Whether a name in dots, below the package, is of a module or of something in one."""
    try:
        pkgutil.resolve_name(f't5ckpt.{name}')
    except (ImportError, AttributeError):
        return False
    return True


def named(text: str) -> list[str]:
    """What stands in backticks, without spaces, and the pages that are named without them."""
    return [*re.findall(r'(?<!`)``?([^`\s]+)``?(?!`)', text), *re.findall(r'(?<![\w/`])docs/[\w-]+\.\w+', text)]


def missing(page: Path) -> list[str]:
    names = [name for text in texts_of(page) for name in named(text)]
    return [name for name in names if name not in ELSEWHERE and not is_there(name, page)]


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page: Path):
    assert missing(page) == []


@pytest.mark.slow
def test_what_docstrings_name_exists():
    assert {str(path.relative_to(ROOT)): names for path in SOURCES if (names := missing(path))} == {}


@pytest.mark.parametrize(
    'name',
    [
        'storage/_direct_io.py',
        'convert/gone',
        'tests/gone/',
        'tests/pages/test_site.py::test_gone',
        'benchmarks/gone.py',
        'core.text.gone',
        'test_that_nobody_wrote',
        'docs/gone.md',
    ],
)
def test_a_name_of_nothing_is_found(name: str):
    assert not is_there(name, ROOT / 'README.md')


@pytest.mark.parametrize(
    'name', ['storage/direct_io.py', 'save/prepare', 'commit/', 'core.text.lines', 'test_a_name_of_nothing_is_found']
)
def test_a_name_of_something_is_not(name: str):
    assert is_there(name, ROOT / 'README.md')


def rows(header: str) -> dict[str, str]:
    """The first and second cells of the table in docs/decisions.md with this header; no row may be there twice."""
    page = (ROOT / 'docs' / 'decisions.md').read_text(encoding='utf-8')
    table = page.partition(f'{header}\n')[2].partition('\n\n')[0].splitlines()[1:]
    cells = [[cell.strip() for cell in row.split('|')[1:3]] for row in table]
    assert len({first for first, _ in cells}) == len(cells) > 0
    return {first.strip('`'): second for first, second in cells}


def test_tables_of_dependencies_agree_with_setup():
    tree = ast.parse((ROOT / 'setup.py').read_text(encoding='utf-8'))
    lists = {node.arg: node.value for node in ast.walk(tree) if isinstance(node, ast.keyword)}
    extras = {node.targets[0].id: node.value for node in tree.body if isinstance(node, ast.Assign)}['EXTRAS']

    def names(requirements: list[str]) -> list[str]:
        return sorted(re.match(r'[\w-]+', requirement)[0] for requirement in requirements)

    assert sorted(rows('| dependency | for | reason |')) == names(ast.literal_eval(lists['install_requires']))
    listed = {extra: sorted(cell.split(', ')) for extra, cell in rows('| extra | dependencies | for |').items()}
    assert listed == {extra: names(needs) for extra, needs in ast.literal_eval(extras).items()}
