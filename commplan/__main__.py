"""`python -m commplan`."""

from commplan.cli import main

if __name__ == "__main__":
    main()
