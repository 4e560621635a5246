"""Key-encryption keys: read them from their sources, and wrap and unwrap ring keys with them.

A setting names a key by a *spec*, and never has its value: ``file:``, ``env:``, ``passphrase:``, ``keyring:``, ``kms:``, ``vault:``,
``gcpkms:``, ``azurekeyvault:``, or a kind of a plug-in (entry points ``relight.keys``). Invariant: no message, log or argument list has the
value of a key. May import: ``errors``, ``format``. Torch-free; libraries are imported when a spec needs them.
"""

from relight.keys.chain import Keychain, keychain_from_settings, resolve
from relight.keys.files import write_key_file
from relight.keys.guard import StoreSecurity
from relight.keys.providers import Provider

__all__ = ["Keychain", "Provider", "StoreSecurity", "keychain_from_settings", "resolve", "write_key_file"]
