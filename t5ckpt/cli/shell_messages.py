"""Translates the library's messages to terms of the command line: ``--force`` instead of ``overwrite=True``.

The library's errors have a cure for Python. Each rule here replaces one by a cure for the shell. The names of a verb's options
are taken from the verb itself, so a new option needs no rule.
"""

from __future__ import annotations

import ast
import functools
import re
import shlex
from collections.abc import Mapping

import click

from t5ckpt.core.text import Lines

# From a pattern for Python's terms to the command line's, in order.
_RULES = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r'\b(overwrite|force)=True', '--force'),
        (r'\bin_place=True', '--in-place'),
        (r'\bfull=True', '--full'),
        (r'Pass one of them, or None for the latest', 'Name one of them, or run@latest'),
        (r'(complete steps are: [\d, ]+)\. Pass one of them', r'\1. Name one of them'),
        (r'\btrust_files=True', '--trust-files'),
        (r'Changes\(drop=\.\.\.\)', 't5ckpt cp --drop'),
        (r'ConvertOptions\(step=\.\.\.\)', '--as-step'),
        (r'output="[^"]*"', 'OUTPUT'),
        (r'\boptimizer=False', '--no-optimizer'),
        (r"storage_options=\{'retry_seconds': \.\.\.\} sets the wait", '--timeout sets the wait'),
        (r"storage_options=\{'(\w+)': ([^}]*)\}", r'--storage-option \1=\2'),
        (r'\bstorage_options:', '--storage-option:'),
        (r'\banonymous=True', '--anonymous'),
        (
            r'keep fewer checkpoints \(keep= of Checkpointer and of LocalTier\)',
            'delete steps (t5ckpt rm, t5ckpt prune)',
        ),
        (r'pass smaller chunk_bytes', 'write elsewhere'),
        (r"such as jnp\.bfloat16 or 'bfloat16'", 'such as bfloat16'),
        (r'Pass jnp\.bfloat16, say', 'Pass bfloat16, say'),
        (r'checkpoints_dir is empty: this checkpointer .*directory of the run', 'the path is empty'),
        (
            r'a safetensors model, of which restore\(path=\.\.\.\) takes a file',
            'a safetensors model: t5ckpt show takes a file',
        ),
        (
            r'restore\(path=\.\.\.\) and open_checkpoint read it, t5ckpt show lists it',
            't5ckpt show, stats, cat and diff read it',
        ),
        (r'rule of translator=', 'rule in --rules FILE.py'),
        (r', or Checkpointer\.convert_from_tf_checkpoint', ' SRC DST'),
        (
            r"\(t5ckpt\.convert_checkpoint\('(\w+)', path, directory\)\)",
            r'(t5ckpt convert \1 SRC DST)',
        ),
        (r'import_seqax of t5ckpt\.convert\.seqax converts them', 't5ckpt convert seqax converts them'),
        (
            r'\(open_checkpoint\(path\)\[name\]\[:100\]\), map it \(mmap=True\), or restore it sharded',
            "(t5ckpt cat PATH 'LEAF[:100]')",
        ),
        (r'or read the copy in checkpoints_dir', 'or pass the path of the run to which its steps are uploaded'),
        (r'pass several checkpoints or ema=', 'pass --average or --ema'),
        (r" Checkpointer, open_checkpoint and load_t5x_checkpoint read it with verify='quick'\.", ''),
        (r'\brestore\(path=\.\.\.\)', 't5ckpt show'),
    )
)
# The repr of a str.
_TEXT = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""


def in_shell_terms(text: str, command: click.Command | None) -> str:
    """A message of the library in terms of a verb; ``Lines`` stay ``Lines``."""
    options = _options_of(command)
    links = 'pass --follow-links' if '--follow-links' in options.values() else 'copy it with t5ckpt cp --follow-links'
    result = text.replace('pass follow_links=True', links)
    for pattern, words in _RULES:
        result = pattern.sub(words, result)
    for name, option in options.items():
        result = re.sub(
            rf'(?<![\w.-]){name}=(\[{_TEXT}(?:, {_TEXT})*\])', functools.partial(_once_each, option), result
        )
        # 'workers=0: ...' and 'drop: ...' and 'save_dtype must be ...'; other words of the text are not replaced.
        result = re.sub(rf'(?<![\w.-]){name}=(?=\S)', f'{option} ', result)
        result = re.sub(rf'(?<![\w.-]){name}=', option, result)
        result = re.sub(rf'\A{name}(?=:| must | is one of | has no effect)', option, result)
    return Lines(result) if isinstance(text, Lines) else result


def _once_each(option: str, match: re.Match[str]) -> str:
    """A list of texts as arguments in a shell: the option is repeated for each."""
    return ' '.join(f'{option} {_quoted(text)}' for text in ast.literal_eval(match[1]))


def _quoted(text: str) -> str:
    if not text.isprintable():
        # With bash's escapes, since a name may contain control characters of the terminal.
        return f"$'{''.join(map(_escaped, text))}'"
    quoted = shlex.quote(text)
    return f"'{text}'" if quoted == text else quoted


def _escaped(character: str) -> str:
    if character in "\\'":
        return f'\\{character}'
    return character if character.isprintable() else character.encode('unicode_escape').decode()


def _options_of(command: click.Command | None) -> Mapping[str, str]:
    if command is None:
        return {}
    options = {
        param.name: max(param.opts, key=len)
        for param in command.params
        if isinstance(param, click.Option) and param.name
    }
    of_library = {option.removeprefix('--').replace('-', '_'): option for option in options.values()}
    return {name: option for name, option in {**of_library, **options}.items() if len(name) > 1}
