"""Retired words stay out of docstrings, comments, messages and pages, so that each thing keeps one name.

The rules are for all prose of the project: subject, verb, object; the field's term; no clause without a head. A pattern cannot
check these rules. The list has the words and phrases that were replaced everywhere, and that return most easily.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# The rooms of t5ckpt/ to which the patterns are applied, and '.' for its public modules.
ROOMS = (
    '.',
    'catalog',
    'cli',
    'commit',
    'convert',
    'core',
    'datasets',
    'distributed',
    'format',
    'inspection',
    'integrity',
    'metrics',
    'planning',
    'reading',
    'restore',
    'save',
    'storage',
    'testing',
    'tiers',
    'training',
    'tree',
)
PAGES = (
    'README.md',
    'CHANGELOG.md',
    'CONTRIBUTING.md',
    *(f'docs/{path.name}' for path in sorted((ROOT / 'docs').glob('*.md'))),
)
# A pattern of a retired word, and the word or the form to use.
RETIRED = {
    r'besides': 'in addition, also',
    r'(?<!there\s)is no (?!longer|more|such)[a-z-]+': 'is not a, is not',
    r'(nobody|somebody)(?!\w)': 'no process, another process, a user',
    r'(read|write) leases?': 'a hold, a marker',
    r'told to end': 'is preempted',
    r'(swept|sweep\w*)': 'removed, garbage collection',
    r'vouch\w*': 'verified by',
    r'so many times as': 'times as ... as',
    r'hopeless': 'unrecoverable',
    r'(lender|borrow\w*)': 'source checkpoint, linked array',
    r'ledger': 'file checksums',
    r'(the|these|any|its) books': 'file checksums, recovery records',
    r'dealt out': 'assigned',
    r'hears? of': 'receives',
    r'(come|comes|came) along': 'is copied',
    r'what (is left|lies|waits|the directory has)': 'the leftovers, the files in, the waiting steps',
    r'who (writes|sweeps|reads|holds|waits)': 'the writer, the reader',
    r'(file|list|checksum|manifest|directory)s? (believes?|knows?|speaks?|tells?|claims?)': 'a program reads, compares, fails',
    r'(is|are|was|were) told (of|that|to)': 'receives, gets an error',
    r'anew': 'again',
    r'at hand': 'available',
    r'all the same': 'also',
    r'for people': 'for messages',
    r"of one's own": "a user's",
}
# A phrase may continue on the next line.
PATTERNS = {
    re.compile(rf'\b({pattern})\b'.replace(' ', r'\s+'), re.IGNORECASE): say for pattern, say in RETIRED.items()
}


def prose_of_module(text: str) -> Iterator[tuple[int, str]]:
    """Line and text of each string and each comment."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def retired_words(parts: Iterable[tuple[int, str]]) -> list[str]:
    """``line: the words -> the words to use`` for each retired phrase, by line."""
    found = [
        (line + text.count('\n', 0, match.start()), f'{match[0]!r} -> {say}')
        for line, text in parts
        for pattern, say in PATTERNS.items()
        for match in pattern.finditer(text)
    ]
    return [f'{line}: {words}' for line, words in sorted(found)]


def headless_docstrings(text: str) -> list[str]:
    """``line: the first words`` for each docstring that begins as a question instead of with a noun or a verb."""
    return [
        f'{node.lineno}: {node.value.value[:40]}'
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if re.match(r'(What|How|Who|Where|When|Which|Why)\b', node.value.value)
    ]


def modules() -> list[Path]:
    found = []
    for room in ROOMS:
        folder = ROOT / 't5ckpt' / room
        found += sorted(folder.glob('*.py') if room == '.' else folder.rglob('*.py'))
    return found


def test_modules_use_no_retired_words():
    used = {
        path.relative_to(ROOT): retired_words(prose_of_module(path.read_text(encoding='utf-8'))) for path in modules()
    }
    assert len(used) > 100, 'the rooms were not found'
    assert [f'{path}:{words}' for path, each in used.items() for words in each] == []


def test_pages_use_no_retired_words():
    pages = [(ROOT / page) for page in PAGES]
    found = {page.relative_to(ROOT): retired_words([(1, page.read_text(encoding='utf-8'))]) for page in pages}
    assert [f'{page}:{words}' for page, each in found.items() for words in each] == []


def test_docstrings_begin_with_a_noun_or_a_verb():
    headless = {path: headless_docstrings(path.read_text(encoding='utf-8')) for path in modules()}
    assert [f'{path.relative_to(ROOT)}:{words}' for path, each in headless.items() for words in each] == []
    assert headless_docstrings('x = 1\n"""Which of them."""\ndef f(): """How."""') == ['2: Which of them.', '3: How.']


@pytest.mark.parametrize(
    ('text', 'lines'),
    [
        ('"""A step, and\n\nwhat\nis left of it."""', [3]),
        ('x = 1  # a read lease', [1]),
        ('raise ValueError(\n    f"{x} is no dtype"\n)', [2]),
        ('"""Nobody reads it, and somebody sweeps."""', [1, 1, 1]),
        ('"""There is no step. It is no longer listed."""', []),
        ('ledger = besides = 1', []),
    ],
)
def test_retired_words_are_found_in_strings_and_comments_with_their_lines(text, lines):
    assert [int(found.partition(':')[0]) for found in retired_words(prose_of_module(text))] == lines
