"""`tools/torch_matrix VERSION...`. Exit status: 0 all passed, 1 tests failed, 2 wrong arguments, 3 a release not installed."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from torch_matrix_run.environment import ROOT, InstallError, end_on_signals, throwaway
from torch_matrix_run.outcome import FAILED, NOT_INSTALLED, PASSED, Outcome, as_json, details, exit_code, read_report, table

TESTS: Final = ("worlds", "fsdp2", "execute", "faults", "models", "public_cases", "devices", "sight")
"""Folders under tests/ whose tests run the executor or meet FSDP2."""


def main() -> int:
    """Run one release after another, print a table at the end."""
    arguments = _parser().parse_args()
    tests = arguments.tests or [f"tests/{name}" for name in TESTS if (ROOT / "tests" / name).is_dir()]
    end_on_signals()
    outcomes: list[Outcome] = []
    begun = datetime.now(UTC)
    try:
        for version in arguments.versions:
            print(f"torch {version} ...", file=sys.stderr, flush=True)
            outcomes.append(_try(version, arguments, tests))
            print("\n".join(details(outcomes[-1])), file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        if outcomes:
            print("\n".join(table(outcomes)))
        if arguments.json:
            facts = {"date": begun.isoformat(timespec="seconds"), "machine": platform.platform(), "tests": tests}
            arguments.json.write_text(json.dumps(as_json(outcomes, facts), indent=2) + "\n")
    return exit_code(outcomes)


def _try(version: str, arguments: argparse.Namespace, tests: Sequence[str]) -> Outcome:
    outcome = Outcome(version, NOT_INSTALLED)
    with throwaway(arguments.python) as environment:
        begin_s = time.monotonic()
        try:
            environment.install(version, arguments.index_url)
            found = environment.look()
        except InstallError as error:
            outcome.problem = str(error)
            return outcome
        finally:
            outcome.install_s = time.monotonic() - begin_s
        outcome.torch, outcome.python, outcome.fingerprint = found.torch, found.python, found.fingerprint
        begin_s = time.monotonic()
        code, text, report = environment.test(tests, arguments.timeout_s)
        outcome.tests_s = time.monotonic() - begin_s
        outcome.result = PASSED if code == 0 else FAILED
        try:
            outcome.counts = read_report(report)
        except (OSError, ElementTree.ParseError) as error:
            outcome.result = FAILED
            text += f"\nno report of the tests: {error}"
        if outcome.result == FAILED:
            outcome.problem = text[-4000:]
    return outcome


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tools/torch_matrix",
        description="Run the tests of the executor under each of these torch releases, one at a time, in an environment "
        "that is deleted afterwards. A CUDA build of torch takes about 5 GB while its tests run.",
        epilog="exit status: 0 all passed, 1 tests of a release failed, 2 wrong arguments, 3 a release could not be installed",
    )
    parser.add_argument("versions", nargs="+", metavar="VERSION", help="as in torch==VERSION: 2.14.1")
    parser.add_argument("--index-url", metavar="URL", help="where pip finds torch, e.g. an index of CPU builds")
    parser.add_argument("--tests", nargs="+", metavar="PATH", help="tests to run instead of all that drive the executor")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcome here too")
    parser.add_argument("--python", default=sys.executable, metavar="PATH", help="the Python to make environments with")
    parser.add_argument("--timeout-s", type=float, default=7200, metavar="S", help="most seconds for one release (7200)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
