"""`python -m converter` is the command `converter`."""

from converter.commands import main

if __name__ == "__main__":
    main()
