"""Show and check settings: each value with its source, and every mistake of a file at once, with its line.

Invariants: a secret is never shown; a value is checked by the code that uses it. May import every package with
settings, but not torch.
"""

from relight.config.check import Mistake, check_file, check_variables
from relight.config.show import ShownSetting, effective_settings

__all__ = ["Mistake", "ShownSetting", "check_file", "check_variables", "effective_settings"]
