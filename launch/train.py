"""What a launcher starts on every rank: `deepspeed launch/train.py configs/x.yaml [key=value ...]`.

torchrun works too. The same as `sagetrain train`, with a file that launchers can name.
"""

import sys

from sagetrain.__main__ import program

if __name__ == "__main__":
    sys.argv.insert(1, "train")
    program()
