"""`python -m headway VERB …`: the command line, where `headway` is not on the PATH."""

import sys

from headway.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
