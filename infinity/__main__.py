"""``python -m infinity``, which ``torchrun -m infinity`` runs on every rank."""

import sys

from infinity.cli import main

if __name__ == "__main__":
    sys.exit(main())
