"""``python -m specinfer``: the command line."""

from specinfer.cli import main

if __name__ == "__main__":
    main()
