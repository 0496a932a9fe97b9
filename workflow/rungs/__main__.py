"""`python -m rungs <verb>`."""

from rungs.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
