"""Parses ``storage_options=``. The module of each backend reads the environment variables that replace missing options."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import json
from collections.abc import Collection, Generator, Mapping, Sequence
from typing import Any

from t5ckpt.core.arguments import check_kind
from t5ckpt.core.text import did_you_mean, shown

_DEFAULTS: contextvars.ContextVar[Mapping[str, Any]] = contextvars.ContextVar('t5ckpt.storage_defaults')


@dataclasses.dataclass(frozen=True)
class FileOptions:
    """The options of a directory.

    Attributes:
      direct_bytes: the smallest chunk file that is written without the page cache (O_DIRECT), if the file system supports it;
        None writes all files through it.
    """

    direct_bytes: int | None = 2**20


@dataclasses.dataclass(frozen=True)
class MemoryOptions:
    """The memory of this process, which has no options."""


@dataclasses.dataclass(frozen=True)
class BucketOptions:
    """The options of all buckets, and those of Google Cloud Storage.

    Attributes:
      retry_seconds: the time for retries of a failed request, and the longest wait for a server that does not answer.
    """

    retry_seconds: float = 50.0


@dataclasses.dataclass(frozen=True)
class S3Options(BucketOptions):
    """The options of S3 and compatible stores.

    Attributes:
      endpoint: another server than Amazon's, ``http://host:port``.
      anonymous: True sends requests without credentials. None does so if no credentials are found.
      region: of the bucket; None takes that of the environment, or else TensorStore requests it from the bucket.
      profile: a profile of the AWS configuration files.
    """

    endpoint: str | None = None
    anonymous: bool | None = None
    region: str | None = None
    profile: str | None = None


@dataclasses.dataclass(frozen=True)
class AzureOptions(BucketOptions):
    """The options of Azure Blob Storage.

    Attributes:
      account: the storage account.
      endpoint: the address of its blob service.
      anonymous: True sends requests without credentials.
    """

    account: str | None = None
    endpoint: str | None = None
    anonymous: bool | None = None


BY_SCHEME: Mapping[str, type[Any]] = {
    'az': AzureOptions,
    'file': FileOptions,
    'gs': BucketOptions,
    'memory': MemoryOptions,
    's3': S3Options,
}


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
    return ValueError(f'storage options: {path} has no option {", ".join(names)}.{meant} {can}')


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
        _check(name, value)
    if given.get('anonymous') and given.get('profile') is not None:
        raise ValueError(
            f'storage options: {path}: profile={shown(given["profile"])} has no effect with anonymous=True. Leave one out.'
        )
    return cls(**given)


def value_of_text(name: str, text: str) -> Any:
    """The value of an option from text; the text itself if it is not a value, which :func:`parse_options` refuses."""
    if name in ('anonymous', 'direct_bytes', 'retry_seconds'):
        with contextlib.suppress(ValueError):
            return json.loads(text.lower())
    return text


def _check(name: str, value: Any) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    match name:
        case 'direct_bytes':
            good, wanted = (
                value is None or (is_number and isinstance(value, int) and value > 0),
                'an integer above 0, or None',
            )
        case 'retry_seconds':
            good, wanted = is_number and 1 <= value < float('inf'), 'a number of seconds, at least 1'
        case 'anonymous':
            good, wanted = value is None or isinstance(value, bool), 'True or False'
        case _:
            good, wanted = value is None or isinstance(value, str), 'a string'
    if not good:
        raise ValueError(f'storage option: {name}={shown(value)} is not {wanted}.')


def stall_seconds(retry_seconds: float) -> int:
    """The seconds after which an attempt in which no byte moves has failed.

    They must not be short: a store that has many chunks to make durable is silent between the last byte of a PUT and its answer,
    and each repetition adds to its load.
    """
    return max(1, int(retry_seconds / 2))


def retry_context(retry_seconds: float) -> dict[str, Any]:
    """TensorStore's context resource for retries that fit into some seconds if each attempt is refused at once.

    With 50 s: nine attempts, the first delay half a second, the last 8 s; TensorStore adds up to the first delay to each. A
    server that is silent in each attempt takes longer; ``BucketStorage.wait`` ends the wait for one that never answers.
    """
    return {'max_retries': 8, 'initial_delay': f'{retry_seconds / 100}s', 'max_delay': f'{retry_seconds / 6}s'}
