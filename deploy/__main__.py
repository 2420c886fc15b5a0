"""``python -m deploy``: the ``ridealong`` command of this very interpreter."""

import sys

from deploy.cli import main

sys.exit(main())
