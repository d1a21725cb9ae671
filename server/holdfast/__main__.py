"""`python -m holdfast`: the same as the `holdfast` command."""

from holdfast.cli import main

if __name__ == "__main__":
    main()
