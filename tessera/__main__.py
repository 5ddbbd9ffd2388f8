"""`python -m tessera COMMAND`: one record per command, its module imported only when it is run."""

from __future__ import annotations

import argparse
import importlib
import sys

import tessera
from tessera.errors import ArgumentError, TesseraError, did_you_mean
from tessera.lazy_dataclass import dataclass

COMMANDS: dict[str, Command] = {}


@dataclass(frozen=True)
class Command:
    """A sub-command. Its module has `add_arguments(parser)` and `run(args)`, the exit code; and
    INTERMIXED, where options may stand between positional arguments."""

    name: str
    doc: str
    module: str

    def __post_init__(self) -> None:
        if self.name in COMMANDS:
            raise ArgumentError(f"command {self.name!r} is declared twice")
        COMMANDS[self.name] = self


Command("doctor", "what is installed, what works, what to install for the rest", "tessera.doctor")
Command("compare", "two files of measurements; fails when one is slower",
        "tessera.debug.regressions")
Command("inspect", "all levels of a kernel, and what it takes: FILE::KERNEL",
        "tessera.debug.inspect_command")
Command("profile", "runs a program, and shows where the time went: every launch, copy and call",
        "tessera.debug.profile_command")
Command("bench", "speed of training steps, beside torch.compile", "tessera.bench.command")
Command("tune", "choices of blocks, measured on this GPU and kept where they beat the model's",
        "tessera.tune.command")
Command("plan", "memory, collectives and time of a step on a mesh that need not be here",
        "tessera.debug.planning")
Command("cache", "what the cache folder holds: compiled code, tuned schedules",
        "tessera.debug.cache_command")
Command("fabric", "measures what joins the ranks that run it, as a file for plans",
        "tessera.debug.fabric_command")


def usage() -> str:
    lines = ["usage: python -m tessera COMMAND [options]   (COMMAND --help lists them)", ""]
    lines += [f"  {c.name:10s} {c.doc}" for c in COMMANDS.values()]
    return "\n".join([*lines, "", "  --version  the version and nothing else"])


def run_command(command: Command, argv: list[str]) -> int:
    """Parses the command's own options and runs it; a TesseraError is printed, not a traceback."""
    module = importlib.import_module(command.module)
    parser = argparse.ArgumentParser(f"python -m tessera {command.name}", description=command.doc)
    module.add_arguments(parser)
    mixed = getattr(module, "INTERMIXED", False)
    try:
        return int(module.run(parser.parse_intermixed_args(argv) if mixed
                              else parser.parse_args(argv)))
    except TesseraError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def main(argv: list[str]) -> int:
    """Exit code 0: it worked; 1: it ran and did not; 2: there is no such command."""
    match argv:
        case ["--version"]:
            print(tessera.__version__)
        case ["-h" | "--help" | "help"]:
            print(usage())
        case [name, *rest] if name in COMMANDS:
            return run_command(COMMANDS[name], rest)
        case [name, *_]:
            hint = did_you_mean(name, sorted(COMMANDS))
            print(f"error: no command {name!r}; {hint}\n\n{usage()}", file=sys.stderr)
            return 2
        case _:
            print(f"error: no command given\n\n{usage()}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
