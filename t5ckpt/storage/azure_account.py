"""Finds the storage account of ``az://`` and the credentials for it: in options, in the environment, or by azure-identity.

The variables are those of Azure's command line (``AZURE_STORAGE_ACCOUNT``, ``AZURE_STORAGE_KEY``, ``AZURE_STORAGE_SAS_TOKEN``,
``AZURE_STORAGE_CONNECTION_STRING``), and their names in adlfs and obstore.
"""

from __future__ import annotations

import dataclasses
import importlib
import urllib.parse
from collections.abc import Mapping
from typing import Any

from t5ckpt.storage.options import AzureOptions

# learn.microsoft.com/azure/storage/common/storage-use-azurite: the account of Azurite, and its key, which is public.
_DEVELOPMENT = {
    'AccountName': 'devstoreaccount1',
    'AccountKey': 'Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==',
    'BlobEndpoint': 'http://127.0.0.1:10000/devstoreaccount1',
}
_NAMES = ('AZURE_STORAGE_ACCOUNT', 'AZURE_STORAGE_ACCOUNT_NAME')
_KEYS = ('AZURE_STORAGE_KEY', 'AZURE_STORAGE_ACCOUNT_KEY')


@dataclasses.dataclass(frozen=True)
class AzureAccount:
    """A storage account.

    Attributes:
      name: of the account.
      url: of its blob service.
      key: its key, in base64.
      signature: a shared access signature, the query of a URL.
      tokens: a credential of azure-identity.
    """

    name: str
    url: str
    key: str | None = dataclasses.field(default=None, repr=False)
    signature: str | None = dataclasses.field(default=None, repr=False)
    tokens: Any = None

    @property
    def credential(self) -> Any:
        """The credential for azure-storage-blob; None for anonymous requests."""
        if self.key is not None:
            return {'account_name': self.name, 'account_key': self.key}
        return self.signature if self.tokens is None else self.tokens


def azure_account(options: AzureOptions, environ: Mapping[str, str], url: str) -> AzureAccount:
    """The account of the options or the environment; ``url`` is the user's URL, for errors.

    Raises:
      ValueError: neither names an account, the connection string is malformed, or the endpoint has a query.
    """
    stated = _connection_string(environ.get('AZURE_STORAGE_CONNECTION_STRING', ''))
    if options.account not in (None, stated.get('AccountName')):
        # The connection string is for another account.
        stated = {}
    endpoint = options.endpoint or environ.get('AZURE_STORAGE_ENDPOINT') or stated.get('BlobEndpoint')
    if endpoint and '?' in endpoint:
        raise ValueError(
            f'storage_options: {url}: endpoint={endpoint.partition("?")[0]!r} is followed by a query. Leave it out; if it is a '
            'shared access signature, set AZURE_STORAGE_SAS_TOKEN to it.'
        )
    name = options.account or stated.get('AccountName') or _first(environ, _NAMES) or _name_in(endpoint)
    if not name:
        raise ValueError(
            f"storage_options: {url}: no storage account. Pass storage_options={{'account': ...}}, or set "
            'AZURE_STORAGE_ACCOUNT or AZURE_STORAGE_CONNECTION_STRING.'
        )
    if not endpoint:
        protocol = stated.get('DefaultEndpointsProtocol', 'https')
        endpoint = f'{protocol}://{name}.blob.{stated.get("EndpointSuffix", "core.windows.net")}'
    account = AzureAccount(name, endpoint.rstrip('/'))
    return account if options.anonymous else _with_credentials(account, stated, environ)


def _with_credentials(account: AzureAccount, stated: Mapping[str, str], environ: Mapping[str, str]) -> AzureAccount:
    signature = stated.get('SharedAccessSignature') or environ.get('AZURE_STORAGE_SAS_TOKEN')
    key = stated.get('AccountKey') or (None if signature else _first(environ, _KEYS))
    if key:
        return dataclasses.replace(account, key=key)
    if signature:
        return dataclasses.replace(account, signature=signature.lstrip('?'))
    try:
        identity: Any = importlib.import_module('azure.identity')
    except ImportError:
        return account
    return dataclasses.replace(account, tokens=identity.DefaultAzureCredential())


def _connection_string(text: str) -> dict[str, str]:
    parts = [part.partition('=') for part in text.strip().strip(';').split(';') if part]
    if not all(equals for _, equals, _ in parts):
        raise ValueError(
            'AZURE_STORAGE_CONNECTION_STRING is not of the form AccountName=...;AccountKey=...: copy it again.'
        )
    stated = {name.strip(): value.strip() for name, _, value in parts}
    return _DEVELOPMENT if stated.get('UseDevelopmentStorage', '').lower() == 'true' else stated


def _name_in(endpoint: str | None) -> str | None:
    """The account in the address of its blob service: the first label of the host, or the path if it is an emulator's."""
    if not endpoint:
        return None
    parts = urllib.parse.urlsplit(endpoint)
    host = parts.hostname or ''
    return parts.path.strip('/') or (host.partition('.')[0] if '.blob.' in host else None)


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((environ[name] for name in names if environ.get(name)), None)
