"""The command line, as `python -m dropbayes`."""

import sys

from dropbayes.app.cli import main

if __name__ == "__main__":
    sys.exit(main())
