"""Settings, told and checked: of each its value and where that was said; of a file every mistake at once, with its line.

Always holds: what is secret is never told; a value is judged by the code that uses it. May import all that has settings; torch never.
"""

from relight.config.check import Mistake, check_file, check_variables
from relight.config.show import ShownSetting, effective_settings

__all__ = ["Mistake", "ShownSetting", "check_file", "check_variables", "effective_settings"]
