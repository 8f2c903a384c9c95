"""`python -m sagetrain`, the same as `sagetrain`."""

from sagetrain.cli import main

if __name__ == "__main__":
    main()
