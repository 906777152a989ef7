"""`python -m tritonattn`."""

import sys

from tritonattn.cli import main

sys.exit(main())
