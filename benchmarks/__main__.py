"""`python -m benchmarks NAME [flags]`."""

import sys

from benchmarks.run import main

sys.exit(main())
