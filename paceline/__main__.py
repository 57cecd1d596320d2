"""`python -m paceline` is the command `paceline`, where that isn't on the path."""

from paceline.server.__main__ import main

main()
