"""`python -m hfpatch`: the command line of `hfpatch.cli`."""

from hfpatch.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
