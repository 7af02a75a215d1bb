"""`python -m delayer`: the command line."""

from delayer.cli.main import main

if __name__ == "__main__":
    main()
