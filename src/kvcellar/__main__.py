"""`python -m kvcellar`: the same as `kvcellar`, for where the script is not on the path."""

import sys

from kvcellar.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
