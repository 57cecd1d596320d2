"""`python -m server`: the command `paceline`, for when it isn't installed."""

from server.cli import main

if __name__ == "__main__":
    main(prog_name="paceline")
