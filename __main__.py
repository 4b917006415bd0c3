"""``python -m branchkv``: the command line."""

from branchkv.cli import main

if __name__ == "__main__":
    main()
