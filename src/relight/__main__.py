"""``python -m relight``."""

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if sys.path[0] == os.getcwd() != home:
        del sys.path[0]  # python -m has put the working directory first: later imports would come from there

from relight.cli import main

if __name__ == "__main__":
    main()
