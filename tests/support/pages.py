"""Programs in Markdown pages."""

from __future__ import annotations


def blocks_of(page: str) -> list[tuple[str, int, list[str]]]:
    """(language, number of the first line, lines) of each block; the opening fence is not among the lines."""
    blocks: list[tuple[str, int, list[str]]] = []
    inside = False
    for number, line in enumerate(page.splitlines(), 1):
        marker = line.strip()
        if not inside and marker.startswith('```'):
            inside = True
            blocks.append((marker.removeprefix('```'), number + 1, []))
        elif marker == '```':
            inside = False
        elif inside:
            blocks[-1][2].append(line)
    assert not inside, 'a block is never closed'
    return blocks


def python_of(page: str) -> str:
    """The page with all but its code blanked, so that a traceback names the page's own lines; a shell block is a call."""
    program = [''] * len(page.splitlines())
    for language, first, lines in blocks_of(page):
        if language == 'python':
            program[first - 1 : first - 1 + len(lines)] = lines
        elif language == 'bash':
            command = ['bash', '-euo', 'pipefail', '-c', '\n'.join(lines)]
            program[first - 2] = f'__import__("subprocess").run({command!r}, check=True)'
    return '\n'.join(program) + '\n'
