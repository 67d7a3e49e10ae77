"""`python -m dnsproxy` is the command `dnsproxy`."""

from dnsproxy.cli import main

if __name__ == "__main__":
    main()
