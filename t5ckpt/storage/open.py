"""Opens the storage of a path or URL."""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from t5ckpt.core.text import shown
from t5ckpt.errors import InvalidPathError, UnsupportedFormatError
from t5ckpt.storage.base import PathOrStorage, Storage
from t5ckpt.storage.options import BY_SCHEME, parse_options, storage_defaults, unknown_options, value_of_text

# The modules of the backends that do not have the name of their scheme.
_MODULES = {'az': 'azure', 'gs': 'gcs'}
# How a program gets the keys of a backend that has keys.
_CREDENTIALS = {
    'az': 'pass the storage option account, and set AZURE_STORAGE_KEY, or AZURE_STORAGE_SAS_TOKEN to the query',
    'gs': 'set GOOGLE_APPLICATION_CREDENTIALS',
    's3': 'set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE',
}
# The schemes of Hadoop, adlfs and other tools.
_SPELLINGS = {'gcs': 'gs', 's3a': 's3', 's3n': 's3', **dict.fromkeys(('abfs', 'abfss', 'azure', 'wasb', 'wasbs'), 'az')}
_BUCKETS = sorted(BY_SCHEME.keys() - {'file'})
_URL = re.compile(r'([A-Za-z][A-Za-z0-9+.\-]+)://(.*)', re.DOTALL)
# 'gs:x' and 'gs:/x': the user forgot a slash, or pathlib removed one. A directory of that name is './gs:x'.
_HALF_URL = re.compile(rf'({"|".join(_BUCKETS)}):(?!//)/*(.*)', re.DOTALL | re.IGNORECASE)
# Linux refuses longer paths, and buckets longer keys.
_MAX_PATH = 4095
# A variable of the environment that no shell has expanded, and the rest of its component.
_VARIABLE = re.compile(r'[^/]*\$([A-Za-z_]|\{[^/}]+\})[^/]*')
_ANY_URL = re.compile(r'[a-z][a-z0-9+.\-]*:/', re.IGNORECASE)
# The parameters of a signed URL of Azure, Amazon or Google. Such a query gives access to all who read it.
_SIGNATURE = re.compile('[?&](sig|signature|x-(?:amz|goog)-(?:signature|credential|security-token))=', re.IGNORECASE)
# 's3://KEY:SECRET@bucket', as old tools write it.
_KEYS = re.compile(rf'({"|".join(_CREDENTIALS)})://[^/?]*:.*@', re.DOTALL | re.IGNORECASE)
_PASSWORD = re.compile('.*:.*@', re.DOTALL)


def _parse(path: str | bytes | os.PathLike[str]) -> tuple[str, str, str]:
    """Parses a path or URL. Creates no file and sends no request.

    Returns:
      The scheme of the URL, in lower case, 'file' for a path; the first component after it, '' for 'file'; and the absolute path
      of a file or the prefix in the bucket, without slashes around it.

    Raises:
      InvalidPathError: it is malformed or ambiguous.
    """
    try:
        given = os.fspath(path)
    except TypeError:
        order = ' The path comes before the step.' if hasattr(path, '__index__') else ''
        raise InvalidPathError(f'A path is text or a pathlib.Path, got {shown(path)}.{order}') from None
    text = os.fsdecode(given) if isinstance(given, bytes) else given
    _refuse_credentials(text)
    _check_text(text)
    if text.lower().startswith('file:'):
        raise InvalidPathError(f'{text}: write the path alone, without file: and with no escapes such as %20.')
    half = _HALF_URL.fullmatch(text)
    if half is not None:
        raise InvalidPathError(f'{text}: write {half.group(1)}://{half.group(2)}, with two slashes.')
    match = _URL.fullmatch(text)
    if match is None:
        return 'file', '', _absolute(_with_home(text))
    scheme, rest = match.group(1).lower(), match.group(2)
    bucket, _, prefix = rest.partition('/')
    if scheme in _BUCKETS:
        _check_key(text, scheme, bucket, prefix.rstrip('/'))
    return scheme, bucket, prefix.strip('/')


def _refuse_credentials(text: str) -> None:
    """Refuses a URL that contains a key or a signature, without showing it."""
    keys = _KEYS.match(text)
    signature = _SIGNATURE.search(text) if _ANY_URL.match(text) else None
    if keys is not None:
        scheme, url = keys[1].lower(), f'{keys[1]}://...'
    elif signature is not None:
        url, name = re.split('[?&]', text, maxsplit=1)[0], signature[1].lower()
        is_google = url.lower().startswith('gs:') or 'goog' in f'{url}{name}'.lower()
        scheme = 'az' if name == 'sig' else 'gs' if is_google else 's3'
    else:
        return
    raise InvalidPathError(
        f'{url}: a key or a signature is not part of a path. Write {scheme}://bucket/directory, and {_CREDENTIALS[scheme]}.'
    )


def _check_text(text: str, *, is_file: bool = False) -> None:
    if not text:
        raise InvalidPathError("The path is empty. Write '.' for the current directory.")
    if len(text) > _MAX_PATH:
        raise InvalidPathError(f'{shown(text)}: no storage has paths of more than {_MAX_PATH:,} characters.')
    if '\0' in text:
        raise InvalidPathError(f'{text!a}: a path has no NUL character in it. Remove it.')
    try:
        text.encode()
        if is_file:
            os.fsencode(text)
    except UnicodeEncodeError:
        encoding = sys.getfilesystemencoding()
        raise InvalidPathError(
            f'{text!a}: the path is not UTF-8, and TensorStore accepts no other. Rename the directory, or make a '
            'symbolic link to it.'
            if encoding == 'utf-8'
            else f'{text!a}: the locale of this process has only {encoding} in names of files. Set PYTHONUTF8=1, or '
            'LC_ALL=C.UTF-8.'
        ) from None


def _absolute(path: str) -> str:
    try:
        absolute = os.path.abspath(path)
    except FileNotFoundError:
        raise InvalidPathError(
            f'{path}: the current directory was deleted, so no path relative to it names anything. Change to another '
            'directory, or write an absolute path.'
        ) from None
    _check_text(absolute, is_file=True)
    if '\\' in absolute:
        raise InvalidPathError(
            f'{absolute}: the path has a backslash in it, which TensorStore reads as a slash: it would write to another '
            'directory. Rename the directory, or make a symbolic link to it.'
        )
    variable = _VARIABLE.search(absolute)
    if variable is not None and not os.path.lexists(absolute[: variable.end()]):
        raise InvalidPathError(
            f'{path}: there is no {absolute[: variable.end()]}, and variables are not expanded here. Set the variable, and pass '
            'os.path.expandvars(path). For a directory of that name, make it first.'
        )
    return absolute


def _with_home(text: str) -> str:
    """The path with ``~`` or ``~user`` at its beginning expanded, as in a shell."""
    expanded = os.path.expanduser(text)
    if expanded.startswith('~'):
        name = expanded.partition('/')[0]
        raise InvalidPathError(
            f'{text}: there is no home directory for {name}. Write ./{text} for a directory of that name.'
        )
    return expanded


def _check_key(text: str, scheme: str, bucket: str, prefix: str) -> None:
    """Checks the components of a key: stores do not resolve '..', and 'a//b' and 'a/b' are different directories."""
    if not bucket:
        raise InvalidPathError(f'{text}: no bucket in it; write {scheme}://bucket/directory.')
    parts = prefix.split('/') if prefix else []
    if bucket in ('.', '..') or not {'', '.', '..'}.isdisjoint(parts):
        clean = os.path.normpath('/' + '/'.join(parts)).strip('/')
        raise InvalidPathError(
            f"{text}: a bucket has no '.', '..' or empty components. Write {scheme}://{'/'.join(filter(None, (bucket, clean)))}"
        )


def split_path(path: str | os.PathLike[str]) -> tuple[str, str]:
    """Splits a path or URL into its parent and the last component, ``('gs://bucket/run', 'checkpoint_5')``.

    A bucket has no parent; its last component is ''.
    """
    scheme, bucket, prefix = _parse(path)
    if scheme == 'file':
        return os.path.split(prefix)
    parent, _, name = prefix.rpartition('/')
    return f'{scheme}://{bucket}/{parent}'.rstrip('/'), name


def is_same_kind(path: str, storage: Storage) -> bool:
    """Whether a path or URL is on the same kind of storage; always True for an ``AbsentStorage``."""
    return storage.is_absent or _parse(path)[0] == _parse(storage.url())[0]


def open_in_memory(files: Mapping[str, bytes]) -> Storage:
    """Opens a new storage in memory, with these files."""
    storage = open_storage(f'memory://t5ckpt-{secrets.token_hex(8)}')
    for name, data in files.items():
        storage.write(name, data)
    return storage


def open_storage(path: PathOrStorage, storage_options: Mapping[str, Any] | None = None) -> Storage:
    """Opens the storage whose root is ``path``, without creating anything or sending a request.

    Args:
      path: a directory, ``gs://bucket/prefix``, ``s3://bucket/prefix``, ``az://container/prefix`` or
        ``memory://name/...``; a Storage is returned unchanged.
      storage_options: see docs/storage.md; not for a Storage.

    Raises:
      InvalidPathError: the path or URL is malformed or ambiguous.
      UnsupportedFormatError: this version does not support the scheme.
      ValueError: this kind of storage does not have one of the options.
    """
    if isinstance(path, Storage):
        if storage_options:
            raise ValueError('storage_options: a Storage was opened with its own.')
        return path
    scheme, bucket, prefix = _parse(path)
    if scheme in BY_SCHEME:
        where = f'{scheme}://{bucket}/{prefix}' if bucket else prefix
        options = parse_options(BY_SCHEME[scheme], storage_options, where)
        # Imported now, because TensorStore's import takes most of the time of `t5ckpt ls`.
        module = importlib.import_module(f't5ckpt.storage.{_MODULES.get(scheme, scheme)}')
        return module.open_at(bucket, prefix, options)
    # Neither a password nor a query is shown.
    bucket, prefix = _PASSWORD.sub('', bucket), prefix.partition('?')[0]
    url = f'{scheme}://{bucket}/{prefix}'
    if scheme in _SPELLINGS:
        # Hadoop's URLs of Azure name the account, too.
        container, _, host = bucket.partition('@')
        account = f', with the storage option account={host.partition(".")[0]}' if host else ''
        raise UnsupportedFormatError(f'{url}: write {_SPELLINGS[scheme]}://{container}/{prefix}{account}.')
    raise UnsupportedFormatError(
        f'{url}: {scheme!r} is not supported, only paths, and URLs of {_BUCKETS}. Copy the checkpoint to a disk first.'
    )


def option_values(texts: Mapping[str, str], paths: Sequence[str]) -> dict[str, Any]:
    """Options of storages from text, such as ``{'anonymous': 'true'}``.

    Args:
      texts: by the options' names.
      paths: of the storages.

    Raises:
      ValueError: none of these storages has such an option, or the text is not a valid value.
    """
    path_by_scheme = {scheme: path for path in paths if (scheme := _parse(path)[0]) in BY_SCHEME} if texts else {}
    known = {field.name for scheme in path_by_scheme for field in dataclasses.fields(BY_SCHEME[scheme])}
    unknown = [name for name in texts if name not in known]
    if unknown:
        raise unknown_options(', '.join(paths), unknown, known)
    values = {name: value_of_text(name, text) for name, text in texts.items()}
    with storage_defaults(values):
        for scheme, path in path_by_scheme.items():
            parse_options(BY_SCHEME[scheme], None, path)
    return values
