"""Opens the storage of a path or URL."""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import sys
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

from t5ckpt.core.text import shown
from t5ckpt.errors import InvalidPathError, UnsupportedFormatError
from t5ckpt.storage.base import Storage

# The module of each scheme's backend. Its ``open_at`` makes the storage. It is imported when a path of the scheme is opened,
# because TensorStore's import takes most of the time of `t5ckpt ls`.
_BACKENDS = {
    'az': 't5ckpt.storage.azure',
    'file': 't5ckpt.storage.file',
    'gs': 't5ckpt.storage.gcs',
    'memory': 't5ckpt.storage.memory',
    's3': 't5ckpt.storage.s3',
}
# How a program gets the keys of a backend that has keys.
_CREDENTIALS = {
    'az': 'set AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN',
    'gs': 'set GOOGLE_APPLICATION_CREDENTIALS',
    's3': 'set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE',
}
# The scheme of Azure, and its names in Hadoop, adlfs and other tools.
_AZURE = ('az', 'abfs', 'abfss', 'azure', 'wasb', 'wasbs')
_BUCKETS = sorted(_BACKENDS.keys() - {'file'})
_URL = re.compile(r'([A-Za-z][A-Za-z0-9+.\-]+)://(.*)', re.DOTALL)
# 'gs:x' and 'gs:/x': the user forgot a slash, or pathlib removed one. A directory of that name is './gs:x'.
_HALF_URL = re.compile(rf'({"|".join(_BUCKETS)}):(?!//)/*(.*)', re.DOTALL | re.IGNORECASE)
_FILE_URL = re.compile(r'file:(//(?P<host>[^/]*))?(?P<path>/.*)?', re.DOTALL | re.IGNORECASE)
# Linux refuses longer paths, and buckets longer keys.
_MAX_PATH = 4095
# A variable of the environment that no shell has expanded, and the rest of its component.
_VARIABLE = re.compile(r'[^/]*\$([A-Za-z_]|\{[^/}]+\})[^/]*')
_BAD_ESCAPE = re.compile('%(?![0-9A-Fa-f]{2})')
_ANY_URL = re.compile(r'[a-z][a-z0-9+.\-]*:/', re.IGNORECASE)
# The parameters of a signed URL of Azure, Amazon or Google. Such a query gives access to all who read it.
_SIGNATURE = re.compile('[?&](sig|signature|x-(?:amz|goog)-(?:signature|credential|security-token))=', re.IGNORECASE)
# 's3://KEY:SECRET@bucket', as old tools write it.
_KEYS = re.compile(rf'({"|".join(_CREDENTIALS)})://[^/?]*:.*@', re.DOTALL | re.IGNORECASE)
_PASSWORD = re.compile('.*:.*@', re.DOTALL)


@dataclasses.dataclass(frozen=True)
class _Location:
    """A parsed path or URL.

    Attributes:
      scheme: of the URL, in lower case; 'file' for a path.
      bucket: the first component after it; '' for 'file'.
      path: absolute for 'file', else the prefix in the bucket, without slashes around it.
    """

    scheme: str
    bucket: str
    path: str


def _parse(path: str | bytes | os.PathLike[str]) -> _Location:
    """Parses a path or URL. Creates no file and sends no request.

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
        return _Location('file', '', _path_of_url(text))
    half = _HALF_URL.fullmatch(text)
    if half is not None:
        raise InvalidPathError(f'{text}: write {half.group(1)}://{half.group(2)}, with two slashes.')
    match = _URL.fullmatch(text)
    if match is None:
        return _Location('file', '', _absolute(_with_home(text)))
    scheme, rest = match.group(1).lower(), match.group(2)
    bucket, _, prefix = rest.partition('/')
    if scheme in _BUCKETS:
        _check_key(text, scheme, bucket, prefix.rstrip('/'))
    return _Location(scheme, bucket, prefix.strip('/'))


def _refuse_credentials(text: str) -> None:
    """Refuses a URL that contains a key or a signature, without showing it."""
    keys = _KEYS.match(text)
    if keys is not None:
        scheme = keys[1].lower()
        raise InvalidPathError(
            f'{scheme}://...: the URL contains a key. Write {scheme}://bucket/directory, and {_CREDENTIALS[scheme]}.'
        )
    signature = _SIGNATURE.search(text) if _ANY_URL.match(text) else None
    if signature is None:
        return
    url = re.split('[?&]', text, maxsplit=1)[0]
    if signature[1].lower() == 'sig':
        written = _azure_spelling(url, '...') or "az://container/directory, with storage_options={'account': ...}"
        cure = 'set AZURE_STORAGE_SAS_TOKEN to the query'
    else:
        scheme = 'gs' if url.lower().startswith('gs:') or 'goog' in f'{url}{signature[1]}'.lower() else 's3'
        written, cure = f'{scheme}://bucket/directory', _CREDENTIALS[scheme]
    raise InvalidPathError(f'{url}: a signature is not part of a path. Write {written}, and {cure}.')


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


def _path_of_url(text: str) -> str:
    """The path in a ``file:`` URL (RFC 8089)."""
    match = _FILE_URL.fullmatch(text)
    path = None if match is None else match.group('path')
    if match is None or path is None:
        raise InvalidPathError(f'{text}: a file: URL has an absolute path. Write file:///directory, or the path alone.')
    host = match.group('host')
    if host and host.lower() != 'localhost':
        raise InvalidPathError(
            f'{text}: {host!r} is another host, and its files are not here. Write file:///{path.lstrip("/")} for a directory '
            'of this machine.'
        )
    for character, code in (('?', '%3F'), ('#', '%23')):
        if character in path:
            raise InvalidPathError(
                f'{text}: {character!r} ends the path of a URL. Write {code}, or the path without file:.'
            )
    if _BAD_ESCAPE.search(path):
        raise InvalidPathError(f"{text}: '%' begins an escape such as %20. Write %25, or the path without file:.")
    decoded = os.fsdecode(urllib.parse.unquote_to_bytes(path))
    _check_text(decoded)
    return _absolute(decoded)


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
    parsed = _parse(path)
    if parsed.scheme == 'file':
        return os.path.split(parsed.path)
    root = f'{parsed.scheme}://{parsed.bucket}'
    parent, _, name = parsed.path.rpartition('/')
    return f'{root}/{parent}'.rstrip('/'), name


def is_same_kind(path: str, storage: Storage) -> bool:
    """Whether a path or URL is on the same kind of storage; always True for an ``AbsentStorage``."""
    return storage.is_absent or _parse(path).scheme == _parse(storage.url()).scheme


def open_storage(path: str | os.PathLike[str] | Storage, storage_options: Mapping[str, Any] | None = None) -> Storage:
    """Opens the storage whose root is ``path``, without creating anything or sending a request.

    Args:
      path: a directory, a ``file:`` URL, ``gs://bucket/prefix``, ``s3://bucket/prefix``, ``az://container/prefix`` or
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
    parsed = _parse(path)
    if parsed.scheme not in _BACKENDS:
        # Neither a password nor a query is shown.
        url = f'{parsed.scheme}://{_PASSWORD.sub("", parsed.bucket)}/{parsed.path.partition("?")[0]}'
        scheme = {'gcs': 'gs', 's3a': 's3', 's3n': 's3'}.get(parsed.scheme)
        below = f'://{parsed.bucket}/{parsed.path}'
        written = f'{scheme}{below}' if scheme else _azure_spelling(f'{parsed.scheme}{below}')
        if written is not None:
            raise UnsupportedFormatError(f'{url}: write {written}.')
        raise UnsupportedFormatError(
            f'{url}: {parsed.scheme!r} is not supported, only {sorted(_BACKENDS)}. Copy the checkpoint to a disk first.'
        )
    return importlib.import_module(_BACKENDS[parsed.scheme]).open_at(parsed.bucket, parsed.path, storage_options)


def _azure_spelling(url: str, account: str = '') -> str | None:
    """The URL of t5ckpt for another tool's URL of an Azure container; None for other URLs.

    Args:
      url: of any scheme.
      account: a placeholder for the account if the URL does not name it.
    """
    scheme, rest = re.split(':/*', url, maxsplit=1)
    bucket, _, path = rest.partition('?')[0].partition('/')
    container, _, host = bucket.partition('@')
    if scheme.lower() in ('http', 'https') and '.blob.' in bucket:
        host = bucket
        container, _, path = path.partition('/')
    elif scheme.lower() not in _AZURE:
        return None
    account = repr(host.partition('.')[0]) if host else account
    return f'az://{container}/{path}' + (f", with storage_options={{'account': {account}}}" if account else '')


def option_values(texts: Mapping[str, str], paths: Sequence[str]) -> dict[str, Any]:
    """Options of storages from text, such as ``{'anonymous': 'true'}``.

    Args:
      texts: by the options' names.
      paths: of the storages.

    Raises:
      ValueError: none of these storages has such an option, or the text is not a valid value.
    """
    from t5ckpt.storage.options import BY_SCHEME, parse_options, unknown_options, value_of_text

    path_by_scheme = {_parse(path).scheme: path for path in paths} if texts else {}
    kinds = {
        scheme: {field.name: str(field.type) for field in dataclasses.fields(BY_SCHEME[scheme])}
        for scheme in path_by_scheme
        if scheme in BY_SCHEME
    }
    kinds_by_name = {name: kind for fields in kinds.values() for name, kind in fields.items()}
    unknown = [name for name in texts if name not in kinds_by_name]
    if unknown:
        raise unknown_options(', '.join(path_by_scheme.values()), unknown, kinds_by_name)
    values = {name: value_of_text(name, kinds_by_name[name], text) for name, text in texts.items()}
    for scheme, fields in kinds.items():
        own_values = {name: value for name, value in values.items() if name in fields}
        parse_options(BY_SCHEME[scheme], own_values, path_by_scheme[scheme])
    return values
