# The reads of a start, for remote.sh and scale.sh: a module `boot` for Python (Debian's: its libnbd has a module
# for it). Expects WORK.
PYTHON=/usr/bin/python3
export PYTHONPATH=$WORK
cat >"$WORK/boot.py" <<'END'
# Like a boot: small files, each with its tables, in twelve places, and three large ones; each read in its order.
import random
def reads(blocks, files, longest, pieces):
    """Block and count of each read of an image of so many blocks of 4 KiB."""
    choose = random.Random(5)
    places = [choose.randrange(blocks - 4096) for _ in range(12)]
    yield from [(0, 1), (256, 1)]
    for _ in range(files):
        directory = choose.choice(places)
        yield directory + choose.randrange(64), 1
        at = directory + 64 + choose.randrange(3000)
        yield from [(at, 1), (at + 1, choose.randrange(1, longest))]
    for large in range(3):
        at = (blocks // 4) * large + blocks // 8
        yield from [(at + piece * 32, 32) for piece in range(pieces)]
def needed(reads):
    """How many bytes they read, each once."""
    return len({block for at, count in reads for block in range(at, at + count)}) * 4096
END
