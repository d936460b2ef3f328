"""Maps errors of TensorStore and the operating system to those of t5ckpt.

TensorStore raises ValueError with the absl status code as the first word ('NOT_FOUND: ...'). The operating system raises OSError
with an errno. Both are mapped by table; any other error becomes a StorageError with the original text.
"""

from __future__ import annotations

import errno
import re
from contextlib import AbstractContextManager

from t5ckpt.errors import (
    AccessDeniedError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatError,
    InvalidPathError,
    NoSpaceError,
    NotADirectoryStorageError,
    StorageError,
    T5CkptError,
    UnsupportedFormatError,
)

_DAMAGED = {'DATA_LOSS', 'FAILED_PRECONDITION', 'INVALID_ARGUMENT', 'NOT_FOUND', 'OUT_OF_RANGE'}


# What TensorStore says of metadata that it does not know, when it opens an array.
_UNSUPPORTED = re.compile(
    r'Error opening .*(is not registered|[Ss]upported|does not match dtype in schema|Expected (one of |").*but received: ")'
)

# The errors of TensorStore's futures: NotImplementedError for UNIMPLEMENTED, such as an HTTP 501.
TENSORSTORE_ERRORS = (ValueError, NotImplementedError)

UNMET_CONDITION = (
    'ABORTED: the server answered that a condition is not met (HTTP 304 or 412), but the request has no condition. Check the '
    'policies of the bucket and of its organization, and any proxy in between.'
)
"""The text of a ValueError for such an answer, which TensorStore does not report as a failure."""

_OS_CODE = re.compile(r" ?\[os_error_code='(\d+)'\]")
_FEWER = 'keep fewer checkpoints (keep= of Checkpointer and of LocalTier, t5ckpt rm)'
_NO_SPACE = f'Free space there (or inodes, df -i), {_FEWER}, or write elsewhere; existing files were not changed.'
_REFUSED = (
    'Check that the credentials permit {action} there (docs/storage.md has the permissions). Without credentials, requests are '
    'anonymous.'
)
# Internal details in TensorStore's messages; the answer of the server follows them.
_SPEC = re.compile(r" \[(tensorstore_spec|http_response_body)='(?:[^'\\]|\\.)*'\]")
_REFUSALS = ('PERMISSION_DENIED', 'UNAUTHENTICATED')
EXPIRED = re.compile(r'\b(ExpiredToken|InvalidToken|TokenRefreshRequired)(: |</Code>)')
"""In an answer of S3 with HTTP 400: the keys of a role have expired."""
_SKEWED = re.compile(r'\bRequestTimeTooSkewed\b')
_CLOCK = 'The clock of this machine or of the server is wrong: correct it.'
_RENEW = 'The credentials have expired or are not valid: renew them.'
_DENIED = 'Check the permissions and the mount; existing files were not changed.'
_NOT_HERE = 'Nothing can be created there: pass a directory on a mounted and writable disk.'
_RETRIED = 'retry attempts failed'
_LAST_ATTEMPT = re.compile(rf'{_RETRIED}: (?:Unknown ?)?(.*)', re.DOTALL)
# The HTTP codes that describe the key. All others do not depend on its contents.
_OF_THE_KEY = {'404', '416'}
_HTTP_CODE = re.compile(r" ?\[(?:http_response_code='|HTTP code )(\d+)'?\]")
# The query of Azure's signed URLs. It must not be in an error, because it gives access to all readers of it.
_SIGNATURE = re.compile(r'\?[^\s"\'\]]*\bsig=[^\s"\'\]:]*')
_BUCKET_NAME = re.compile(r'Invalid \w+ bucket name: (".*")')
_NO_BUCKET = (
    "The bucket was not found, or the server is not an object store: check the bucket's name, the endpoint and the "
    'network.'
)
# The answer to a HEAD has no text.
_OR_RENEW = 'Where the credentials may have expired, renew them.'
_OTHER = 'The disk or the file system failed (see dmesg); try again, or use another directory.'

_CONFUSED = 'A file is in the place of a directory, or a directory in the place of a file.'
_QUOTA = f'The quota is used up: raise it, {_FEWER}, or write elsewhere; existing files were not changed.'
_READ_ONLY = (
    'The file system is mounted read-only: mount it for writing, or write elsewhere; existing files were not changed.'
)
# The error of t5ckpt and the cure by errno. All other numbers are failures of the disk or the file system.
_SYSTEM: dict[int, tuple[type[StorageError], str]] = {
    errno.ENOENT: (StorageError, _NOT_HERE),
    errno.ENOSPC: (NoSpaceError, _NO_SPACE),
    errno.EDQUOT: (NoSpaceError, _QUOTA),
    errno.EROFS: (AccessDeniedError, _READ_ONLY),
    **dict.fromkeys((errno.EACCES, errno.EPERM), (AccessDeniedError, _DENIED)),
    **dict.fromkeys((errno.ENOTDIR, errno.EISDIR, errno.EEXIST), (NotADirectoryStorageError, _CONFUSED)),
    errno.EMFILE: (StorageError, 'This process has too many open files: raise `ulimit -n`, or close some.'),
    errno.ENFILE: (
        StorageError,
        'This machine has too many open files: raise the sysctl fs.file-max, or end programs.',
    ),
    errno.EFBIG: (
        StorageError,
        'The file would be larger than `ulimit -f` or the file system allows: raise the limit, or pass smaller chunk_bytes.',
    ),
    errno.ENAMETOOLONG: (StorageError, 'The file system does not take names of this length: use a shorter path.'),
    errno.ELOOP: (StorageError, 'Symbolic links lead in a circle: replace one of them.'),
    errno.ESTALE: (StorageError, 'The directory was replaced on the file server: mount it again, then try again.'),
    errno.ENOTCONN: (StorageError, 'The file system is no longer mounted: mount it again.'),
    errno.ENOMEM: (StorageError, 'The machine has no memory left: end other programs, or lower concurrent_gb.'),
    errno.EBUSY: (StorageError, 'Another program uses the file or directory: end it, then try again.'),
    errno.EIO: (StorageError, _OTHER),
}
# Errors of the disk or of the file system's structures on it. All others are of the process, the machine, a mount or the rights.
_OF_THE_DISK = {errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ENODATA}
# The meaning of these depends on the operation.
_OF_THE_FILE = {errno.ENOENT, errno.EEXIST}


def is_disk_error(error: Exception) -> bool:
    """Whether a read of a local file failed because of the disk, such as in a bad sector."""
    return isinstance(error, StorageError) and error.errno in _OF_THE_DISK


def means_damage(error: Exception) -> bool:
    """Whether an error of a read of local files means that a file is damaged, and not that the process cannot read now."""
    return not isinstance(error, StorageError) or isinstance(error, NotADirectoryStorageError) or is_disk_error(error)


def map_os_error(error: OSError, where: str, *, writing: bool = False) -> T5CkptError:
    """The error of t5ckpt for an OSError at ``where``."""
    text = error.strerror or str(error)
    if error.errno == errno.ENOENT and not writing:
        return CheckpointNotFoundError(f'{where}: {text}')
    number = error.errno or errno.EIO
    kind, cure = _SYSTEM.get(number, (StorageError, _OTHER))
    return kind(number, f'{where}: {text}. {cure}')


def map_tensorstore_error(error: Exception, where: str, *, writing: bool = False, action: str = '') -> T5CkptError:
    """The error of t5ckpt for an error of TensorStore in a read or, with ``writing``, a write of ``where``.

    ``action`` is the operation that the credentials must permit, 'reading' or 'writing' by default.
    """
    text = _SIGNATURE.sub('', _SPEC.sub('', str(error)))
    system = _OS_CODE.search(text)
    if system is not None and int(system.group(1)) in _SYSTEM.keys() - _OF_THE_FILE:
        return map_os_error(OSError(int(system.group(1)), _OS_CODE.sub('', text)), where, writing=writing)
    if 'quota exceeded' in text.lower():
        return NoSpaceError(errno.ENOSPC, f'{where}: {text}. {_NO_SPACE}')
    is_expired = EXPIRED.search(text) is not None
    if is_expired or text.startswith(_REFUSALS):
        cure = _cure_of_refusal(text, action or ('writing' if writing else 'reading'))
        return AccessDeniedError(errno.EACCES, f'{where}: {text}. {cure}')
    return (None if writing else _error_of_bytes(text, where)) or StorageError(errno.EIO, f'{where}: {text}')


def _cure_of_refusal(text: str, action: str) -> str:
    if EXPIRED.search(text):
        return _RENEW
    if _SKEWED.search(text):
        return _CLOCK
    return _REFUSED.format(action=action) if _HTTP_CODE.search(text) else _DENIED


def _error_of_bytes(text: str, where: str) -> FormatError | None:
    """The error of a read if the bytes are damaged or of an unsupported format; None if the storage failed."""
    if _UNSUPPORTED.search(text):
        return UnsupportedFormatError(f'{where}: {text}. It is not damaged: read it with the program that wrote it.')
    status = _HTTP_CODE.search(text)
    # An invalid argument has no code; here it always means that the metadata contradicts the request.
    code = re.match(r'([A-Z_]+): ', text)
    if (status is not None and status[1] not in _OF_THE_KEY) or (code is not None and code[1] not in _DAMAGED):
        return None
    return CorruptCheckpointError(
        f'{where}: {text}. A part of the checkpoint is missing or damaged; restore an older step, or copy it again.'
    )


def map_bucket_error(error: Exception, where: str, action: str = 'reading') -> T5CkptError:
    """The error of t5ckpt for an error of TensorStore in reading, writing, listing or deleting keys of a bucket.

    These operations do not decode bytes, so no answer of a server means that a checkpoint is damaged.
    """
    name = _BUCKET_NAME.search(str(error))
    if name is not None:
        return InvalidPathError(f'{where}: a bucket cannot have the name {name[1]}. Check the URL.')
    mapped = map_tensorstore_error(error, where, writing=True, action=action)
    if type(mapped) is not StorageError or _RETRIED in str(error) or str(error) == UNMET_CONDITION:
        return mapped
    status = _HTTP_CODE.search(str(error))
    renew = f' {_OR_RENEW}' if status is not None and status[1] == '400' else ''
    return StorageError(errno.EIO, f'{mapped.strerror}. {_NO_BUCKET}{renew}')


def transient_answer(error: Exception) -> str | None:
    """The server's answer to the last attempt at a request; None if another attempt would not help."""
    text = _SIGNATURE.sub('', _SPEC.sub('', f' {error}'))
    match = _LAST_ATTEMPT.search(text)
    if match is None:
        return None
    code, message = _HTTP_CODE.search(text), _HTTP_CODE.sub('', match[1]).strip()
    return ' '.join(part for part in (f'HTTP {code[1]}' if code else '', message.rstrip('.')) if part)


class _MappedErrors:
    """Maps the errors inside the block.

    In Python 3.13 an error that a generator of contextlib maps holds a cycle of frames, and all that their callers hold.
    """

    def __init__(self, where: str, *, writing: bool, action: str = '') -> None:
        self._where, self._writing, self._action = where, writing, action

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, T5CkptError):
            return
        if isinstance(error, OSError):
            raise map_os_error(error, self._where, writing=self._writing) from error
        if isinstance(error, TENSORSTORE_ERRORS):
            # The cause is for tracebacks, unless it has a signature in it.
            cause = None if _SIGNATURE.search(str(error)) else error
            if self._action:
                raise map_bucket_error(error, self._where, self._action) from cause
            raise map_tensorstore_error(error, self._where, writing=self._writing) from cause


def bucket_errors(where: str, action: str = 'reading') -> AbstractContextManager[None]:
    """Maps the errors of TensorStore inside the block, for requests to a bucket; ``action`` is their operation on a key."""
    return _MappedErrors(where, writing=True, action=action)


def foreign_errors(where: str, *, writing: bool = False) -> AbstractContextManager[None]:
    """Maps the errors of the operating system and of TensorStore inside the block."""
    return _MappedErrors(where, writing=writing)
