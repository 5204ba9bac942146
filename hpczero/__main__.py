"""Run the command line: `python -m hpczero`."""

from hpczero.cli import main

if __name__ == "__main__":
    main()
