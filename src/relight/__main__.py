"""``python -m relight``."""

from relight.cli import main

if __name__ == "__main__":
    main()
