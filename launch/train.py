"""The command `sagetrain train` as a file, for launchers and job scripts that name a file: `deepspeed launch/train.py
my.yaml`."""

import sys

from sagetrain.__main__ import program

if __name__ == "__main__":
    sys.argv.insert(1, "train")
    program()
