"""`python -m pgqueue`: the same program as `pgqueue`."""

import sys

from pgqueue.cli import main

sys.exit(main())
