"""Runs the grid command, and sends itself signals at a chosen moment.

    driver.py PHASE:COUNT:DELAY:SIGNALS ARGUMENTS...

The signals go out DELAY seconds after the command has entered PHASE for the COUNT-th time, half a second apart. Phases:
start, compile, train, evaluate, save (while Orbax writes in the background), replace (a file is written but not yet in
its place), tables. "pause" among the signals stops the process until it is killed from outside.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

phase, count, delay, signals = sys.argv[1].split(":")
left = int(count)


def send():
    for name in signals.split(","):
        if name == "pause":
            print("paused", flush=True)
            time.sleep(600)
        os.kill(os.getpid(), getattr(signal, name))
        time.sleep(0.5)


def reached(place):
    global left
    if place == phase:
        left -= 1
        if left == 0 and float(delay):
            threading.Timer(float(delay), send).start()
        elif left == 0:
            send()


def watched(function, place, after=False):
    def call(*arguments, **options):
        if not after:
            reached(place)
        result = function(*arguments, **options)
        if after:
            reached(place)
        return result

    return call


reached("start")
from qkgeom_jax import checkpoint, cli, group, progress  # noqa: E402

PLACES = {"training": "train", "measuring": "evaluate", "writing tables and figures": "tables"}
say = progress.LineProgress.phase


def phase_and_say(self, text):
    if text in PLACES:
        reached(PLACES[text])
    return say(self, text)


progress.LineProgress.phase = phase_and_say
group.compile_training = watched(group.compile_training, "compile")
checkpoint.Checkpoints.save = watched(checkpoint.Checkpoints.save, "save", after=True)
os.replace = watched(os.replace, "replace")
status = cli.grid(sys.argv[2:])
print(f"not reached: {sys.argv[1]}" if left > 0 else "ended", flush=True)
sys.exit(status)
