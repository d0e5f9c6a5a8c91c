"""`python -m lightning_ft` is `lightning-ft`."""

from lightning_ft.cli import main

if __name__ == "__main__":
    main()
