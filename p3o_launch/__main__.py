"""``python -m p3o_launch``."""

from p3o_launch.cli import main

if __name__ == "__main__":
    main()
