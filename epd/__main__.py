"""`python -m epd`: the same as the `epd` command."""

from epd.cli.main import main

if __name__ == "__main__":
    main()
