"""Parses ``storage_options=``, and for S3 the environment variables that replace missing options.

The variables are those that users of each service already set. Here those of S3 are read: ``AWS_ENDPOINT_URL_S3``,
``AWS_ENDPOINT_URL``, ``AWS_REGION``, ``AWS_DEFAULT_REGION``, ``AWS_PROFILE`` and the keys. ``storage/azure_account.py`` reads
those of Azure, ``storage/gcs.py`` and ``storage/gcs_requests.py`` those of Google Cloud Storage.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import os
from collections.abc import Collection, Generator, Mapping, Sequence
from typing import Any

from t5ckpt.core.arguments import check_kind
from t5ckpt.core.text import did_you_mean, shown
from t5ckpt.storage.file_cache import FileCache

__all__ = [
    'BY_SCHEME',
    'AzureOptions',
    'FileOptions',
    'GcsOptions',
    'MemoryOptions',
    'Retries',
    'S3Options',
    'parse_options',
    'retries_within',
    'storage_defaults',
    'unknown_options',
    'value_of_text',
]

LOCKING = ('os', 'lockfile', 'none')
DIRECT_IO = ('auto', 'always', 'never')
_MIN_STALL_SECONDS = 1
_DEFAULTS: contextvars.ContextVar[Mapping[str, Any]] = contextvars.ContextVar('t5ckpt.storage_defaults')


@dataclasses.dataclass(frozen=True)
class FileOptions:
    """The options of a directory.

    Attributes:
      locking: how TensorStore locks a chunk file while it writes it: 'os' (POSIX locks), 'lockfile' (a file made with
        O_EXCL, for file systems without them) or 'none'.
      direct_io: which saves write chunk files without the page cache (O_DIRECT): 'auto', those in the background; 'always' or
        'never'. If the file system refuses O_DIRECT, the page cache is used.
      direct_bytes: the smallest chunk file that is written with O_DIRECT.
    """

    locking: str = 'os'
    direct_io: str = 'auto'
    direct_bytes: int = 2**20


@dataclasses.dataclass(frozen=True)
class MemoryOptions:
    """The memory of this process, which has no options."""


@dataclasses.dataclass(frozen=True)
class _BucketOptions:
    """The options of all object stores.

    Attributes:
      endpoint: another server than that of the service, ``http://host:port``.
      anonymous: True sends requests without credentials. None, for s3, does so if no credentials are found.
      concurrency: the largest number of concurrent requests.
      retry_seconds: the time for retries of a failed request, and the longest wait for a server that does not answer.
      cache_dir: a directory on this machine in which chunks that were read are cached.
      cache_gb: the size limit of the cache in gigabytes (10^9 bytes); the least recently used files are removed.
    """

    endpoint: str | None = None
    anonymous: bool | None = None
    concurrency: int = 32
    retry_seconds: float = 50.0
    cache_dir: str | None = None
    cache_gb: float = 10.0


@dataclasses.dataclass(frozen=True)
class GcsOptions(_BucketOptions):
    """The options of Google Cloud Storage.

    Attributes:
      user_project: the project that pays for requests to a requester-pays bucket.
    """

    user_project: str | None = None


@dataclasses.dataclass(frozen=True)
class S3Options(_BucketOptions):
    """The options of S3 and compatible stores.

    Attributes:
      region: of the bucket; None takes that of the environment, or else TensorStore requests it from the bucket.
      profile: a profile of the AWS configuration files.
      requester_pays: agrees to pay for the requests.
    """

    region: str | None = None
    profile: str | None = None
    requester_pays: bool = False


@dataclasses.dataclass(frozen=True)
class AzureOptions(_BucketOptions):
    """The options of Azure Blob Storage.

    Attributes:
      account: the storage account.
    """

    account: str | None = None


BY_SCHEME: Mapping[str, type[Any]] = {
    'az': AzureOptions,
    'file': FileOptions,
    'gs': GcsOptions,
    'memory': MemoryOptions,
    's3': S3Options,
}


@dataclasses.dataclass(frozen=True)
class Retries:
    """The retries of a failed request in TensorStore.

    Attributes:
      count: attempts after the first.
      stall_seconds: an attempt in which no byte moves for this time has failed.
      first_delay: before the second attempt; it doubles from one attempt to the next.
      last_delay: the largest delay.
    """

    count: int
    stall_seconds: int
    first_delay: float
    last_delay: float


@contextlib.contextmanager
def storage_defaults(options: Mapping[str, Any]) -> Generator[None]:
    """Sets default options of the storages that this thread opens in the block, as far as their kind has them.

    For a program whose user passes the options once for all paths. Options passed to ``open_storage`` take precedence.
    """
    token = _DEFAULTS.set(options)
    try:
        yield
    finally:
        _DEFAULTS.reset(token)


def unknown_options(path: str, names: Sequence[str], known: Collection[str]) -> ValueError:
    """The error for options that a storage does not have."""
    can = f'Its options are {", ".join(sorted(known))}.' if known else 'It has none.'
    meant = did_you_mean(names[0], known)
    return ValueError(f'storage_options: {path} has no option {", ".join(names)}.{meant} {can}')


def parse_options(cls: type[Any], options: Mapping[str, Any] | None, path: str) -> Any:
    """The options of one kind of storage.

    Raises:
      ValueError: an unknown name, or a value of the wrong type; the message lists the options.
    """
    check_kind('storage_options', options, Mapping, "{'anonymous': True}")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    given = {name: value for name, value in _DEFAULTS.get({}).items() if name in fields} | dict(options or {})
    unknown = sorted(set(given) - set(fields))
    if unknown:
        raise unknown_options(path, unknown, fields)
    for name, value in given.items():
        _check(name, value, fields[name].default)
    _refuse_idle(given, path)
    return cls(**given)


def value_of_text(name: str, kind: str, text: str) -> Any:
    """The value of an option from text; ``kind`` is its annotation.

    Raises:
      ValueError: the text is not a value of this type.
    """
    lowered = text.lower()
    if 'bool' in kind:
        if lowered not in ('true', 'false'):
            raise ValueError(f'storage_options: {name}={shown(text)} is not true or false.')
        return lowered == 'true'
    for word, number in (('int', int), ('float', float)):
        if word in kind:
            try:
                return number(text)
            except ValueError:
                raise ValueError(f'storage_options: {name}={shown(text)} is not a number.') from None
    return text


def _refuse_idle(given: Mapping[str, Any], path: str) -> None:
    """Refuses an option that has no effect because of another option, or because another one is missing."""
    idle = {
        'cache_gb': (given.get('cache_dir') is None, 'without cache_dir. Pass both, or neither'),
        'direct_bytes': (given.get('direct_io') == 'never', "with direct_io='never'. Leave one of them out"),
        'profile': (given.get('anonymous') is True, 'with anonymous=True. Leave one of them out'),
    }
    for name, (is_idle, why) in idle.items():
        if is_idle and given.get(name) is not None:
            raise ValueError(f'storage_options: {path}: {name}={shown(given[name])} has no effect {why}.')


def _check(name: str, value: Any, default: Any) -> None:
    match name:
        case 'locking':
            good, wanted = value in LOCKING, f'one of {list(LOCKING)}'
        case 'direct_io':
            good, wanted = value in DIRECT_IO, f'one of {list(DIRECT_IO)}'
        case 'concurrency' | 'direct_bytes':
            good, wanted = isinstance(value, int) and not isinstance(value, bool) and value > 0, 'an integer above 0'
        case 'retry_seconds':
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            good, wanted = is_number and 1 <= value < float('inf'), 'a number of seconds, at least 1'
        case 'cache_gb':
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            good, wanted = is_number and 0 < value < 10**9, 'a number of gigabytes above 0'
        case 'cache_dir':
            text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else ''
            good, wanted = value is None or (bool(text) and '\0' not in text), 'the path of a directory'
        case 'anonymous' | 'requester_pays':
            good, wanted = isinstance(value, bool) or value is default, 'True or False'
        case _:
            good, wanted = isinstance(value, str) or value is None, 'a string'
    if not good:
        raise ValueError(f'storage_options: {name}={shown(value)} is not {wanted}.')


def file_cache(options: _BucketOptions) -> FileCache | None:
    """The cache of chunks, if the options have a directory for it."""
    if options.cache_dir is None:
        return None
    return FileCache(os.fspath(options.cache_dir), int(options.cache_gb * 10**9))


def retries_within(seconds: float) -> Retries:
    """Returns the retries that fit into ``seconds`` if each attempt is refused at once, as by a throttling server.

    With 50 s: nine attempts, the first delay half a second, the last 8 s, and an attempt ends after 25 s without a byte.
    TensorStore adds up to ``first_delay`` to each delay. A server that is silent in each attempt takes longer; if it is silent
    to every request, ``Connection.wait`` ends the wait after ``seconds``. A stall must not be short: a store that has many
    chunks to make durable is silent between the last byte of a PUT and its answer, and each repetition adds to its load.
    """
    stall = max(_MIN_STALL_SECONDS, int(seconds / 2))
    first, last = seconds / 100, seconds / 6
    count, spent, delay = 0, 0.0, first
    while spent + delay + first <= seconds:
        spent += delay + first
        delay = min(2 * delay, last)
        count += 1
    return Retries(count, stall, first, last)


def retry_context(retries: Retries) -> dict[str, Any]:
    """TensorStore's context resource for these retries."""
    return {
        'max_retries': retries.count,
        'initial_delay': f'{retries.first_delay}s',
        'max_delay': f'{retries.last_delay}s',
    }


def stall_environment(retries: Retries) -> dict[str, str]:
    """The variables that let TensorStore's HTTP client end a silent connection; it reads them once per process."""
    return {
        'TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS': str(retries.stall_seconds),
        'TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES': '1',
    }


def s3_endpoint(options: S3Options, environ: Mapping[str, str]) -> str | None:
    """The address of the server; None for Amazon's servers."""
    given = options.endpoint or environ.get('AWS_ENDPOINT_URL_S3') or environ.get('AWS_ENDPOINT_URL')
    return given.rstrip('/') if given else None


def s3_region(options: S3Options, environ: Mapping[str, str]) -> str | None:
    """The region in signatures; None if TensorStore requests it from the bucket, which works with Amazon's servers only."""
    given = options.region or environ.get('AWS_REGION') or environ.get('AWS_DEFAULT_REGION')
    return given or ('us-east-1' if s3_endpoint(options, environ) is not None else None)


def s3_credentials(options: S3Options, environ: Mapping[str, str]) -> dict[str, Any]:
    """The spec of TensorStore's credentials provider.

    TensorStore's default chain ends with a request to the metadata service, which takes seconds if there is none. So the default
    chain is used only if there is a sign of a role.
    """
    if options.anonymous:
        return {'type': 'anonymous'}
    if options.profile is not None:
        return {'type': 'profile', 'profile': options.profile}
    if options.anonymous is False:
        return {'type': 'default'}
    if environ.get('AWS_ACCESS_KEY_ID') and environ.get('AWS_SECRET_ACCESS_KEY'):
        return {'type': 'environment'}
    if environ.get('AWS_PROFILE'):
        return {'type': 'profile', 'profile': environ['AWS_PROFILE']}
    return {'type': 'default'} if _has_role(environ) else {'type': 'anonymous'}


def _has_role(environ: Mapping[str, str]) -> bool:
    home = environ.get('HOME', '')
    files = (
        environ.get('AWS_SHARED_CREDENTIALS_FILE') or os.path.join(home, '.aws', 'credentials'),
        environ.get('AWS_CONFIG_FILE') or os.path.join(home, '.aws', 'config'),
    )
    names = (
        'AWS_CONTAINER_CREDENTIALS_RELATIVE_URI',
        'AWS_CONTAINER_CREDENTIALS_FULL_URI',
        'AWS_WEB_IDENTITY_TOKEN_FILE',
    )
    return any(environ.get(name) for name in names) or any(map(os.path.isfile, files)) or _is_ec2(environ)


def _is_ec2(environ: Mapping[str, str]) -> bool:
    """Whether this is a machine of Amazon EC2, according to its firmware."""
    if environ.get('AWS_EC2_METADATA_DISABLED', '').lower() == 'true':
        return False
    try:
        with open('/sys/class/dmi/id/sys_vendor', encoding='utf-8') as file:
            return 'Amazon EC2' in file.read()
    except OSError:
        return False
