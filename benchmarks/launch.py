"""From the start of a command to the first training step: `titanplug train` against torchrun alone.

    python -m benchmarks.launch [--rounds 5] [--processes 2]

In turns, on this machine:

- ``titanplug``: ``titanplug train ...``, which composes and checks the configuration and starts the ranks;
- ``sweep``: a job of ``titanplug train -m ...``, from the launcher's start of it;
- ``torchrun``: ``torchrun -m titanplug.launch titanplug.train:train config.yaml``, the ranks alone, with the
  configuration that the first has written.

The first step is when rank 0 writes a file at the end of it. Shown are medians over rounds, and ratios.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

OVERRIDES = [
    "model=debug",
    "tokenizer=byte",
    "data=text",
    "data.path=text.txt",
    "data.seq_len=32",
    "data.batch_size=2",
    "model.vocab_size=257",
    "parallelism=fsdp",
    "trainer.max_steps=1",
    "trainer.accelerator=cpu",
    "callbacks=none",
    "logger=none",
    "+callbacks.first._target_=first_step.FirstStep",
]
CALLBACK = """
import os, time
import lightning as L

class FirstStep(L.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.is_global_zero:
            with open(os.environ["FIRST_STEP"], "w") as file:
                file.write(str(time.time()))
"""


def seconds_to_first_step(command: list[str], folder: Path) -> float:
    mark = folder / "first_step"
    mark.unlink(missing_ok=True)
    environment = {**os.environ, "FIRST_STEP": str(mark), "PYTHONPATH": f"{os.getcwd()}:{folder}"}
    begin = time.time()
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    return float(mark.read_text()) - begin


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text("\n".join(f"line {n} of a text" for n in range(300)))
        (folder / "first_step.py").write_text(CALLBACK)
        train = [sys.executable, "-m", "titanplug.cli", "train"]
        overrides = [*OVERRIDES, f"trainer.devices={given.processes}"]
        seconds_to_first_step([*train, *overrides], folder)  # the files are in memory now
        config = yaml.safe_load(next(folder.glob("runs/*/*/config.yaml")).read_text())
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        torchrun += [str(given.processes), "-m", "titanplug.launch", "titanplug.train:train", "config.yaml"]
        commands = {
            "titanplug": [*train, *overrides],
            "sweep": [*train, "-m", *overrides, "seed=1"],
            "torchrun": torchrun,
        }
        found: dict[str, list[float]] = {what: [] for what in commands}
        for _ in range(given.rounds):
            for what, command in commands.items():
                found[what].append(seconds_to_first_step(command, folder))
    base = statistics.median(found["torchrun"])
    for what, times in found.items():
        ratios = [time / other for time, other in zip(times, found["torchrun"], strict=True)]
        print(f"{what:<10} {statistics.median(times):6.2f} s  {statistics.median(ratios):5.2f} of torchrun")
    print(f"(at most 1.3 is asked for; torchrun alone takes {base:.2f} s)")


if __name__ == "__main__":
    main()
