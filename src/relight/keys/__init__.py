"""Key-encryption keys: where they come from, and what they wrap with them.

A key is named by a *spec*, never written out: ``file:``, ``env:``, ``passphrase:``, ``keyring:``, ``kms:``, ``vault:``, or one that a
plug-in knows (entry points ``relight.keys``). Always holds: what a spec leads to is in no message, log, or list of arguments. May import:
``errors``, ``format``. Torch-free; libraries are imported when a spec needs them.
"""

from relight.keys.chain import Keychain, keychain_from_settings, resolve
from relight.keys.files import write_key_file
from relight.keys.guard import StoreSecurity
from relight.keys.providers import Provider

__all__ = ["Keychain", "Provider", "StoreSecurity", "keychain_from_settings", "resolve", "write_key_file"]
